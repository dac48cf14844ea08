"""The page of `aotc report` in headless Chromium: it draws, a click tells of a kernel, no network is needed."""

import re
import shutil
import subprocess

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.tools.page.build import page_of
from aotc.tools.page.facts import facts_of

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]
X = np.ones((64, 64), np.float32)
CHECK = """<script>
const last = cy.nodes(":parent").last(), before = cy.zoom();
last.emit("tap");
cy.zoom(before * 2);
document.body.dataset.chosen = last.data("kernel");
document.body.dataset.zoom = cy.zoom() / before;
document.body.dataset.nodes = cy.nodes().length;
document.body.dataset.edges = cy.edges().length;
</script></body>"""


def model(x):
    y = jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ x), x)
    return jax.nn.softmax(y, 1), jnp.sort(y, 1), jnp.cumsum(y, 0)


def browse(folder, *words):
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--window-size=1300,2400"]
    flags += [
        f"--user-data-dir={folder / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND",
        "--virtual-time-budget=4000",
    ]
    return subprocess.run([CHROMIUM, *flags, *words], capture_output=True, text=True, check=True, timeout=120)


@pytest.fixture(scope="module", params=["straight", "loop"])
def page(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    function = model if request.param == "loop" else lambda x: (jax.nn.softmax(x @ x, 1), jnp.sort(x, 1))
    facts = facts_of(aotc.compile(function, X), "m.vmfb")
    (folder / "r.html").write_text(page_of(facts).replace("</body>", CHECK))
    return folder, facts


def test_it_draws_and_answers_clicks(page):
    folder, facts = page
    done = browse(folder, "--dump-dom", f"file://{folder / 'r.html'}")
    assert not re.search(r"CONSOLE.*(Error|Refused|error)", done.stderr), done.stderr
    body = re.search(r"<body ([^>]*)>", done.stdout)[1]
    said = dict(re.findall(r'data-(\w+)="([^"]*)"', body))
    assert said["ready"] == "yes"
    assert float(said["zoom"]) == pytest.approx(2, rel=0.01)
    assert int(said["nodes"]) >= 2 * len(facts["steps"])
    assert int(said["edges"]) >= len(facts["steps"]) - 2
    panel = re.search(r'<aside id="panel">(.*?)</aside>', done.stdout, re.DOTALL)[1]
    kernel = facts["kernels"].get(said["chosen"])
    assert f"<h3>{said['chosen']}</h3>" in panel
    if kernel:
        assert "Loops" in panel
        assert "Assembly" in panel
        assert "StableHLO of these lines" in panel or not kernel["lines"]
    for place in ("timeline", "arena", "roof"):
        drawn = re.search(rf'id="{place}"><svg.*?</svg>', done.stdout, re.DOTALL)[0]
        assert len(re.findall("<(rect|circle)", drawn)) >= 1, place
    assert done.stdout.count('<tr class="link">') >= len(facts["kernels"])


def test_a_screenshot_is_no_blank_sheet(page):
    folder, _ = page
    browse(folder, f"--screenshot={folder / 'r.png'}", f"file://{folder / 'r.html'}")
    assert (folder / "r.png").stat().st_size > 60_000
