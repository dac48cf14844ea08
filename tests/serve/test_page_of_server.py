"""The page at ``/``: what it is told, that nothing else runs on it, and what a browser makes of it."""

import json

import numpy as np
import pytest
from support import tiny
from support.browser import CHROMIUM, MEASURE, assert_layout, browse
from support.served import running

from aotc.serve.errors import RequestFault
from aotc.serve.metrics import HISTORY, UNKNOWN_NAMES, Metrics, ModelTraffic
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
def test_the_state_for_the_page_is_complete(folder):
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
    assert len(state["latencies"]["tiny"]) == 3  # the failed request is not among them
    assert state["traffic"]["tiny"]["statuses"] == {"200": 3, "400": 1}
    assert sum(row[1] for row in state["traffic"]["tiny"]["seconds"]) == 4
    assert sum(row[2] for row in state["traffic"]["tiny"]["seconds"]) == 1
    assert all(state["now"] - 60 < row[0] <= state["now"] for row in state["traffic"]["tiny"]["seconds"])
    assert functions["main"]["calls"] == {"1": 3}
    assert functions["main"]["phases"]["compute_infer"] > 0
    assert {row["name"]: row["state"] for row in state["index"]} == {"tiny": "READY", "broken": "UNAVAILABLE"}


@pytest.mark.ir
def test_the_page_allows_only_its_own_script(folder):
    with running(folder, token="secret") as server:
        status, headers, body = server.ask("/")
        assert (status, body.decode()) == (200, PAGE)
        assert "default-src 'none'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert server.ask("/v2/state")[0] == 401
    assert "http" not in PAGE.replace("http://www.w3.org/2000/svg", "")
    assert "innerHTML" not in PAGE


@pytest.mark.ir
def test_requests_without_a_model_are_counted_with_their_names(folder):
    with running(folder, token="secret") as server:
        token = {"Authorization": "Bearer secret"}
        assert server.ask("/v2/models/tini/infer", {"inputs": ROWS}, token)[0] == 404
        assert server.ask("/v2/models/tini/generate", {}, token)[0] == 404
        assert server.ask("/v2/models/tinny", headers=token)[0] == 404
        assert server.ask("/v1/models/tiny:predict", {}, token)[0] == 404
        assert server.ask("/v2/models/tiny/infer", {"inputs": ROWS})[0] == 401
        state = json.loads(server.ask("/v2/state", headers=token)[2])
        text = server.ask("/metrics", headers=token)[2].decode()
    assert state["traffic"][""]["statuses"] == {"404": 4, "401": 1}
    assert state["unknown"] == {"tini": 2, "tinny": 1}
    assert 'aotc_requests_total{model="",protocol="rest",status="404"} 3.0' in text
    assert "tini" not in text


def test_the_number_of_counted_unknown_models_is_limited():
    metrics = Metrics()
    for n in range(1000):
        metrics.refused("rest", RequestFault(404, f"m{n}", "no such model"))
    assert len(metrics.unknown) == UNKNOWN_NAMES
    assert metrics.page()["traffic"][""]["statuses"] == {404: 1000}


def test_latency_quantiles_count_only_successful_requests():
    metrics = Metrics()
    for n in range(99):
        metrics.ended("m", "rest", 200, 0.001 * (n + 1))
    for _ in range(50):
        metrics.ended("m", "rest", 503, 60.0)
    page = metrics.page()
    assert max(seconds for _, seconds in page["latencies"]["m"]) == 0.099
    assert max(row[4] for row in page["traffic"]["m"]["seconds"]) <= 0.099
    assert page["traffic"]["m"]["loads"] == [[1, 0.05, 0.099]]
    assert np.quantile([0.001 * (n + 1) for n in range(99)], 0.5) == pytest.approx(0.05)


def test_latencies_are_grouped_by_requests_in_flight():
    traffic = ModelTraffic()
    for load in range(1, 10):
        traffic.add(1.0, 200, float(load), load)
    assert traffic.report()["loads"] == [[1, 1.0, 1.0], [2, 2.0, 2.0], [4, 4.0, 4.0], [8, 7.0, 8.0], [16, 9.0, 9.0]]


def test_requests_are_counted_per_second():
    traffic = ModelTraffic()
    for now, status in ((10.1, 200), (10.9, 503), (12.0, 503)):
        traffic.add(now, status, 0.5)
    report = traffic.report()
    assert report["statuses"] == {200: 1, 503: 2}
    assert report["seconds"] == [[10, 2, 1, 0.5, 0.5], [12, 1, 1, None, None]]
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
        seconds = [[NOW - k, 5 + k % 7, int(k % 13 == n), 0.002, 0.01 * (1 + k % 9)] for k in range(100)]
        loads = [[1 << k, 0.002 * (1 + k), 0.3] for k in range(9)]
        traffic[name] = {"statuses": {"200": 500, "503": n}, "seconds": seconds, "loads": loads}
    unknown = {"no_model_of_this_name_" * 3: 60, "mpl": 10} if count else {}
    if count:
        traffic[""] = {"statuses": {"404": 70, "401": 12, "429": 5}, "seconds": [], "loads": []}
        reason = "broken.vmfb: the file is not a bundle\n  hint: " + "compile it again " * 9
        index.append({"name": "broken", "version": "", "state": "UNAVAILABLE", "reason": reason})
    return {
        "in_flight": 3, "queue": 256, "ready": True, "models": models, "index": index, "trouble": "", "now": NOW,
        "latencies": latencies, "traffic": traffic, "unknown": unknown,
    }  # fmt: skip


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [1440, 400])
@pytest.mark.parametrize("count", [0, 1, 20])
@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_has_no_overflow_and_enough_contrast(tmp_path, count, width, dark):
    told = json.dumps({"ok": True, "status": 200, "state": state_of(count)})
    stub = f"<script>const TOLD = {told}; TOLD.json = async () => TOLD.state; window.fetch = async () => TOLD;</script>"
    measure = MEASURE.replace("measure();\n</script>", "setTimeout(measure, 500);\n</script>")
    page = tmp_path / "page.html"
    page.write_text(PAGE.replace("<header>", stub + "<header>").replace("</body>", measure + "</body>"))
    assert_layout(f"file://{page}", tmp_path / "page.png", width, dark)


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_the_page_works_in_a_browser(folder, tmp_path):
    with running(folder, max_batch=4) as server:
        ask(server, 60)
        text = browse("--dump-dom", f"http://{server.address}/").stdout
        assert '<h2 class="name">tiny<' in text
        assert "Last 60 successful requests: median" in text
        assert text.count("<circle") >= 2  # of a second, and of a number of requests in flight
        for title in ("Requests per second", "Latency by time", "Latency under load"):
            assert f"<h3>{title}" in text
        for axis in ("requests/s", "seconds ago", "requests in flight when it began", "latency"):
            assert f">{axis}</text>" in text
        assert "<h2>Requests without a model<" not in text
        assert server.json("/v2/models/tini/infer", {"inputs": ROWS})[0] == 404
        text = browse("--dump-dom", f"http://{server.address}/").stdout
        assert "<h2>Requests without a model<" in text
        assert "1 × 404 unknown model or path" in text
        assert "Unknown models: tini (1)" in text
        assert "<h3>Batch size" not in text  # its requests are not batched
        assert "not batched:" in text
        assert "<h2>broken<" in text
        assert "<b>no bundle" not in text
        assert "requests in flight, limit 256" in text
    with running(folder, token="secret") as server:
        text = browse("--dump-dom", f"http://{server.address}/").stdout
        assert '<form id="token">' in text
        assert "<h2" not in text
