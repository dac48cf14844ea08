"""The page of `aotc report` in headless Chromium: layout, modes, search, layers, sizes; no network is needed."""

import json
import re
from html import unescape

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.browser import CHROMIUM, MEASURE, assert_layout, browse

import aotc
from aotc.tools.page.build import page_of
from aotc.tools.page.facts import facts_of

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt install chromium"),
]
X = np.ones((64, 64), np.float32)
CHECK = """<script>
{
  const overlaps = () => {  // pairs of nodes, neither inside the other, that share a place
    const nodes = cy.nodes().toArray(), boxOf = n => n.boundingBox({ includeLabels: false, includeOverlays: false });
    const apart = (a, b) => a.x2 <= b.x1 + 1 || b.x2 <= a.x1 + 1 || a.y2 <= b.y1 + 1 || b.y2 <= a.y1 + 1;
    const within = (a, b) => a.ancestors().contains(b) || b.ancestors().contains(a);
    return nodes.flatMap((a, n) => nodes.slice(n + 1).filter(b => !within(a, b) && !apart(boxOf(a), boxOf(b)))).length;
  };
  const column = (id, n) => [...document.querySelectorAll(`#${id} tr`)].slice(1).map(tr => tr.cells[n].textContent);
  const sortBy = (id, n) => document.querySelectorAll(`#${id} .sort`)[n].click();
  const found = {}, click = id => $(id).click(), rows = () => document.querySelectorAll("#table tr.link").length;
  const names = Object.keys(F.kernels), last = N.steps.findLast(s => F.kernels[s.kernel]).kernel;
  const inView = some => {
    const box = some.renderedBoundingBox();
    return box.x1 >= 0 && box.y1 >= 0 && box.x2 <= cy.width() && box.y2 <= cy.height();
  };
  found.zoom0 = cy.zoom();
  const drawn = cy.nodes().map(n => n.id()), firstLayer = cy.nodes(".layer[box = 0]")[0];
  found.closedLayers = cy.nodes(".layer[box = 0]").length;
  if (firstLayer) {
    const id = firstLayer.id();
    firstLayer.emit("tap");
    found.inside = cy.getElementById(id).children().length; found.heads = overlaps();
    cy.getElementById(id).emit("tap");
    found.sameAgain = JSON.stringify(cy.nodes().map(n => n.id())) === JSON.stringify(drawn);
  }
  if (!opened.size) click("groups"); else { click("groups"); click("groups"); }
  found.nodes = cy.nodes(".kernel").length; found.edges = cy.edges().length; found.overlaps = overlaps();
  click("fit");
  found.fits = inView(cy.elements());
  click("none"); found.closed = rows(); click("all"); found.open = rows();
  const layers = () => [...document.querySelectorAll("tr.scope")].map(e => e.dataset.path);
  found.layers = layers(); $("merge").click(); click("all"); found.merged = layers(); $("merge").click();
  click("none");
  found.sorts = {};
  for (const n of [3, 0]) {
    found.sorts[n] = [0, 1].map(() => { sortBy("table", n); return column("table", n); });
    found.focus = document.activeElement.className;
  }
  found.ariaSort = [...document.querySelectorAll("#table th")].map(th => th.ariaSort);
  sortBy("sizes", 0); found.names = column("sizes", 0);
  const before = cy.zoom(); click("closer"); found.zoom = cy.zoom() / before; click("fit");
  choose(last); found.chosen = last; found.marked = cy.nodes(".chosen").length;
  found.summaries = [...document.querySelectorAll("#panel summary")].map(e => e.textContent);
  found.heading = document.querySelector("#panel h3").textContent;
  $("search").value = "SORT"; $("search").dispatchEvent(new Event("input"));
  found.hits = $("hits").textContent; found.dimmed = cy.nodes(".unmatched").length;
  $("search").dispatchEvent(new KeyboardEvent("keydown", { key: "Enter" }));
  found.jumped = chosen.kernel; found.seen = inView(cy.nodes(".chosen")[0]);
  found.jumpZoom = cy.zoom(); found.match = $("hits").textContent;
  $("search").value = ""; $("search").dispatchEvent(new Event("input"));
  found.all = cy.nodes(".unmatched").length;
  found.time = $("tiles").textContent;
  if ($("size")) {
    $("size").value = "4"; $("size").dispatchEvent(new Event("change"));
    found.larger = $("tiles").textContent; found.sizes = N.sizes;
  }
  const look = () => [getComputedStyle(document.body).backgroundColor, cy.nodes()[0].style("color")];
  [found.mode, found.label] = look(); click("theme"); [found.other, found.relabel] = look();
  const labels = () => cy.nodes("[box = 0]").map(n => [n.style("color"), n.style("background-color")]);
  found.labels = labels(); click("theme"); found.labels.push(...labels());
  found.axes = [...document.querySelectorAll("text.axis")].map(e => e.textContent);
  document.body.dataset.found = JSON.stringify(found);
}
</script>"""


def looped(x):
    y = jax.lax.fori_loop(0, 3, lambda i, c: jnp.tanh(c @ x), x)
    return jax.nn.softmax(y, 1), jnp.sort(y, 1), jnp.cumsum(y, 0)


def layered(x):
    for n in range(3):
        with jax.named_scope(f"blocks/{n}"):
            x = jax.nn.softmax(jnp.sort(x @ X, -1) * (n + 1), -1)
    with jax.named_scope("head"):
        return jnp.cumsum(x, -1)


def key(text):
    """Return the natural order of a name: numbers by value."""
    return [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", text.lower())]


def contrast(first, second):
    """Return the contrast of two colours, as WCAG defines it."""
    values = []
    for text in (first, second):
        parts = [int(n) / 255 for n in re.findall(r"\d+", text)[:3]]
        linear = [v / 12.92 if v <= 0.04045 else ((v + 0.055) / 1.055) ** 2.4 for v in parts]
        values.append(sum(v * w for v, w in zip(linear, (0.2126, 0.7152, 0.0722), strict=True)))
    return (max(values) + 0.05) / (min(values) + 0.05)


@pytest.fixture(scope="module", params=["layers", "loop"])
def page(request, tmp_path_factory):
    file = tmp_path_factory.mktemp("browser") / "r.html"
    if request.param == "loop":
        facts = facts_of(aotc.compile(looped, X), "m.vmfb")
    else:
        (b,) = jax.export.symbolic_shape("b")
        facts = facts_of(aotc.compile(layered, jax.ShapeDtypeStruct((b, 64), jnp.float32)), "m.vmfb")
    file.write_text(page_of(facts).replace("</body>", CHECK + MEASURE + "</body>"))
    return file, facts


def test_every_control_of_the_page_acts(page):
    file, facts = page
    done = browse("--dump-dom", f"file://{file}")
    assert not re.search(r"CONSOLE.*(Error|Refused|error)", done.stderr), done.stderr
    found = json.loads(unescape(re.search(r'data-found="([^"]*)"', done.stdout)[1]))
    assert found["fits"]
    assert found["zoom0"] >= 0.85  # labels of 12 pixels are readable in the first view
    assert found["overlaps"] == 0
    if found["closedLayers"]:
        assert found["inside"] >= 2
        assert found["heads"] == 0
        assert found["sameAgain"]
    assert found["nodes"] == len(facts["steps"])
    assert found["edges"] >= len(facts["steps"]) - 2
    assert found["zoom"] == pytest.approx(1.4, rel=0.01)
    assert found["heading"] == found["chosen"]
    for values in (found["sorts"]["3"], [[key(v) for v in row] for row in found["sorts"]["0"]]):
        numbers = [[int(v.replace(",", "")) if isinstance(v, str) else v for v in row] for row in values]
        assert sorted(numbers[0]) in (numbers[0], numbers[0][::-1])
        assert numbers[1] == numbers[0][::-1] or len(set(map(str, numbers[0]))) < len(numbers[0])
    assert found["focus"] == "sort"
    assert found["ariaSort"][0] == "descending"
    assert found["names"] == sorted(found["names"], key=str.casefold)
    assert "sort" in json.dumps(facts["kernels"][found["jumped"]]).lower()
    assert found["seen"]
    assert found["jumpZoom"] >= 0.85
    assert found["match"].startswith("1 of ")
    assert found["marked"] == sum(s["kernel"] == found["chosen"] for s in facts["steps"])
    assert {"Loops", "Assembly", "Lines of the model"} <= set(found["summaries"])
    assert any(re.fullmatch(r"Fused ops \(\d+\)", text) for text in found["summaries"])
    sorts = sum("sort" in json.dumps([s, facts["kernels"].get(s["kernel"])]) for s in facts["steps"])
    assert found["hits"].startswith(f"{sorts} of ")
    assert found["dimmed"] > 0 == found["all"]
    assert found["mode"] != found["other"]
    assert found["label"] != found["relabel"]
    assert min(contrast(*pair) for pair in found["labels"]) >= 4.5
    for title in ("time since the call began", "offset in the reserved memory", "GFLOP/s", "command number"):
        assert any(text.startswith(title) for text in found["axes"]), title
    for place in ("timeline", "arena", "roof"):
        drawn = re.search(rf'id="{place}"><svg.*?</svg>', done.stdout, re.DOTALL)[0]
        assert len(re.findall("<(rect|circle)", drawn)) >= 1, place
    if facts["sizes"]:
        assert found["sizes"] == {"b": 256}
        assert found["larger"] != found["time"]
        assert found["open"] > found["closed"]
        assert {"blocks", "blocks/0", "blocks/1", "blocks/2", "head"} == set(found["layers"])
        assert {"blocks/0–2", "head"} == set(found["merged"])


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
def test_the_page_has_no_cut_or_faint_text(page, width, dark):
    file, _ = page
    assert_layout(f"file://{file}", file.parent / "r.png", width, dark)


@pytest.mark.parametrize(
    ("scaled", "words"),
    [
        ((False, False), "times measured on a CPU"),
        ((True, True), "times measured on a CPU at other sizes, and scaled to these"),
        ((False, True), "times of commands on a CPU: 1 measured, 1 scaled from other sizes"),
    ],
)
def test_times_are_labelled_measured_or_scaled(scaled, words, tmp_path):
    facts = facts_of(aotc.compile(lambda x: jnp.sort(x @ x), X), "m.vmfb")
    assert len(facts["steps"]) == 2
    facts["measured_on"] = "a CPU"
    for step, own in zip(facts["steps"], scaled, strict=True):
        step.update(measured=5000.0, ns=5000.0, scaled=own)
    (tmp_path / "r.html").write_text(page_of(facts))
    text = browse("--dump-dom", f"file://{tmp_path / 'r.html'}").stdout
    assert f" · {words} · " in re.search(r'id="summary">(.*?)<', text)[1]
    assert ("us measured, 1 launch" in text) == (not all(scaled))


def test_a_call_without_kernels_has_a_page(tmp_path):
    (tmp_path / "r.html").write_text(page_of(facts_of(aotc.compile(lambda x: x, X), "m.vmfb")))
    done = browse("--dump-dom", f"file://{tmp_path / 'r.html'}")
    assert not re.search(r"CONSOLE.*(Error|Refused|error)", done.stderr), done.stderr
    for words in ("This call has no intermediate values.", "No kernel has arithmetic.", "Select a layer or a kernel."):
        assert words in done.stdout


def test_a_kernel_above_its_roof_is_explained(tmp_path):
    facts = facts_of(aotc.compile(lambda x: jnp.sort(x @ x), X), "m.vmfb")
    product = max(facts["steps"], key=lambda s: s["flops"])
    for ns, explained in ((product["flops"] / facts["roof"]["flops"] * 2, False), (1.0, True)):
        product["ns"] = ns
        (tmp_path / "r.html").write_text(page_of(facts))
        text = browse("--dump-dom", f"file://{tmp_path / 'r.html'}").stdout
        assert ("kernel is above its own line too" in text) == explained
        assert text.count('<polyline points="') >= 3
        for name in ("L2 cache (", "L3 cache (", "memory ("):
            assert name in re.search(r'id="roof-legend">(.*?)</p>', text)[1]
