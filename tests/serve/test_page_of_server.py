"""The page at ``/``: what it is told, that nothing else runs on it, and what a browser makes of it."""

import shutil
import subprocess

import pytest
from support import tiny
from support.served import running

from aotc.serve.page import PAGE

ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture
def folder(tmp_path):
    """A folder with a bundle that is good and one that is not."""
    (tmp_path / "tiny.vmfb").write_bytes(tiny.bundle())
    (tmp_path / "broken.vmfb").write_bytes(b"<b>no bundle</b>")
    return tmp_path


def ask(server, count):
    for _ in range(count):
        assert server.json("/v2/models/tiny/infer", {"inputs": ROWS})[0] == 200


@pytest.mark.ir
def test_what_the_page_is_told(folder):
    with running(folder, max_batch=4) as server:
        ask(server, 3)
        _, state = server.json("/v2/state")
    (model,) = state["models"]
    assert (model["name"], model["version"], model["producer"]) == ("tiny", 1, "tests")
    functions = {f["name"]: f for f in model["functions"]}
    assert functions["main"]["signature"].startswith("main(x: f32[4], y: f32[4])")
    assert "symbolic dim" in functions["main"]["why_alone"]
    assert "at least 4" in functions["grow"]["why_alone"]
    assert model["stats"]["kernels"] == 4
    assert len(state["latencies"]["tiny"]) == 3
    assert {row["name"]: row["state"] for row in state["index"]} == {"tiny": "READY", "broken": "UNAVAILABLE"}


@pytest.mark.ir
def test_nothing_but_its_own_script_runs_on_the_page(folder):
    with running(folder, token="secret") as server:
        status, headers, body = server.ask("/")
        assert (status, body.decode()) == (200, PAGE)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert server.ask("/v2/state")[0] == 401
    assert "http" not in PAGE.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in PAGE


def dom(url, folder, *options):
    """What a browser has made of a page."""
    command = [CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += [f"--user-data-dir={folder}", "--virtual-time-budget=4000", *options, url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(folder, tmp_path_factory):
    profile = tmp_path_factory.mktemp("profile")
    with running(folder, max_batch=4) as server:
        ask(server, 60)
        text = dom(f"http://{server.address}/", profile, "--dump-dom")
        assert "<h2>tiny</h2>" in text
        assert "last 60 requests: median" in text
        assert text.count("<rect") == 60
        assert "not batched:" in text
        assert "<h2>broken</h2>" in text
        assert "<b>no bundle" not in text
        assert "ready, 0 of 256 requests" in text
        picture = tmp_path_factory.mktemp("picture") / "page.png"
        dom(f"http://{server.address}/", profile, f"--screenshot={picture}", "--window-size=1100,900")
        assert picture.stat().st_size > 10_000
    with running(folder, token="secret") as server:
        text = dom(f"http://{server.address}/", profile, "--dump-dom")
        assert '<form id="token">' in text
        assert "<h2>" not in text
