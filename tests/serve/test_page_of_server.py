"""The page at ``/``: what it is told, that nothing else runs on it, and what a browser makes of it."""

import json

import pytest
from support import tiny
from support.browser import CHROMIUM, MEASURE, assert_layout, browse
from support.served import running

from aotc.serve.metrics import HISTORY, Traffic
from aotc.serve.rest import PAGE

ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
NOW = 1.8e9


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
        assert server.json("/v2/models/tiny/infer", {"inputs": []})[0] == 400
        _, state = server.json("/v2/state")
    (model,) = state["models"]
    assert (model["name"], model["version"], model["producer"]) == ("tiny", 1, "tests")
    functions = {f["name"]: f for f in model["functions"]}
    assert functions["main"]["signature"].startswith("main(x: f32[4], y: f32[4])")
    assert "symbolic dim" in functions["main"]["why_alone"]
    assert "at least 4" in functions["grow"]["why_alone"]
    assert model["stats"]["kernels"] == 4
    assert len(state["latencies"]["tiny"]) == 4
    assert state["traffic"]["tiny"]["statuses"] == {"200": 3, "400": 1}
    assert sum(row[1] for row in state["traffic"]["tiny"]["seconds"]) == 4
    assert sum(row[2] for row in state["traffic"]["tiny"]["seconds"]) == 1
    assert all(state["now"] - 60 < row[0] <= state["now"] for row in state["traffic"]["tiny"]["seconds"])
    assert functions["main"]["calls"] == {"1": 3}
    assert functions["main"]["phases"]["compute_infer"] > 0
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


def test_traffic_is_counted_by_the_second():
    traffic = Traffic()
    for now, status in ((10.1, 200), (10.9, 503), (12.0, 200)):
        traffic.add(now, status)
    assert traffic.report() == {"statuses": {200: 2, 503: 1}, "seconds": [[10, 2, 1], [12, 1, 0]]}
    for now in range(1000):
        traffic.add(float(now), 200)
    assert len(traffic.seconds) == HISTORY


def state_of(count):
    """What the page is told of ``count`` models under load and of one that cannot be loaded."""
    models, index, latencies, traffic = [], [], {}, {}
    for n in range(count):
        name = f"a_model_with_quite_a_long_name_{n}" if n % 2 else f"m{n}"
        function = {
            "name": "main", "signature": f"main({'x: f32[b, 4096], ' * 8}) -> f32[b, 4096]", "batch": 32,
            "why_alone": "", "calls": {"1": 3, "8": 40, "32": 17}, "phases": {"queue": 0.002},
        }  # fmt: skip
        stats = {"target": "cpu:x86-64-v3", "threads": 4, "kernels": 12, "constants_bytes": 10**7, "memory": {}}
        models.append({
            "name": name, "version": 1, "path": "/models/" + "folder/" * 20 + name, "bytes": 10**7, "loaded_at": NOW,
            "generates": "", "producer": "aotc", "targets": ["cpu:x86-64-v3"], "functions": [function], "stats": stats,
        })  # fmt: skip
        index.append({"name": name, "version": "1", "state": "READY", "reason": ""})
        latencies[name] = [(NOW - k / 5, 0.001 * (1 + k * n % 40)) for k in range(500)]
        seconds = [[NOW - k, 5 + k % 7, int(k % 13 == n)] for k in range(100)]
        traffic[name] = {"statuses": {"200": 500, "503": n}, "seconds": seconds}
    if count:
        reason = "broken.vmfb: the file is not a bundle\n  hint: " + "compile it again " * 9
        index.append({"name": "broken", "version": "", "state": "UNAVAILABLE", "reason": reason})
    return {
        "in_flight": 3, "queue": 256, "ready": True, "models": models, "index": index, "trouble": "", "now": NOW,
        "latencies": latencies, "traffic": traffic,
    }  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_nothing_of_the_page_is_cut_or_faint(tmp_path, count, width, dark):
    told = json.dumps({"ok": True, "status": 200, "state": state_of(count)})
    stub = f"<script>const TOLD = {told}; TOLD.json = async () => TOLD.state; window.fetch = async () => TOLD;</script>"
    measure = MEASURE.replace("measure();\n</script>", "setTimeout(measure, 500);\n</script>")
    page = tmp_path / "page.html"
    page.write_text(PAGE.replace("<header>", stub + "<header>").replace("</body>", measure + "</body>"))
    assert_layout(f"file://{page}", tmp_path / "page.png", width, dark)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_in_a_browser(folder, tmp_path):
    with running(folder, max_batch=4) as server:
        ask(server, 60)
        text = browse("--dump-dom", f"http://{server.address}/").stdout
        assert '<h2 class="name">tiny<' in text
        assert "Last 60 requests: median" in text
        assert text.count("<circle") == 60
        for title in ("Requests per second", "Latency (log scale"):
            assert f"<h3>{title}" in text
        assert "<h3>Batch size" not in text  # its requests are not batched
        assert "not batched:" in text
        assert "<h2>broken<" in text
        assert "<b>no bundle" not in text
        assert "requests in flight, limit 256" in text
    with running(folder, token="secret") as server:
        text = browse("--dump-dom", f"http://{server.address}/").stdout
        assert '<form id="token">' in text
        assert "<h2" not in text
