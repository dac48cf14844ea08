"""The protocol over HTTP: with the client that others use, and with what no client sends."""

import json
import socket
import threading
import time

import numpy as np
import pytest
from support import tiny
from support.served import answer, running

from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype="f4"), np.full(4, 10, "f4")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Path of the tiny bundle."""
    path = tmp_path_factory.mktemp("one") / "tiny.vmfb"
    path.write_bytes(tiny.bundle())
    return path


@pytest.fixture(scope="module")
def server(bundle):
    """A server of it."""
    with running(bundle, max_body=1 << 16, version="1.2.3") as found:
        yield found


def row(name, array, datatype="FP32"):
    return {"name": name, "shape": list(array.shape), "datatype": datatype, "data": array.tolist()}


BODY = {"inputs": [row("x", X), row("y", Y)]}


def test_server_metadata_is_complete(server):
    assert server.json("/v2/health/live") == (200, {"live": True})
    assert server.json("/v2/health/ready") == (200, {"ready": True})
    extensions = ["binary_tensor_data", "model_configuration", "statistics"]
    about = {"name": "aotc", "version": "1.2.3", "extensions": extensions}
    assert server.json("/v2") == (200, about)
    assert server.json("/v2/models/tiny/versions/1/ready") == (200, {"name": "tiny", "ready": True})
    _, document = server.json("/v2/models/tiny.grow")
    assert document["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1]}]
    assert (document["name"], document["versions"], document["platform"]) == ("tiny.grow", ["1"], "aotc_vmfb")
    assert server.json("/v2/repository/index", {}) == (
        200, [{"name": "tiny", "version": "1", "state": "READY", "reason": ""}],
    )  # fmt: skip


def test_results_are_returned_in_json_and_binary(server):
    status, document = server.json("/v2/models/tiny/infer", {**BODY, "id": "a"})
    assert status == 200
    expected = {"name": "output0", "datatype": "FP32", "shape": [4], "data": [10, 11, 12, 13]}
    assert document == {"model_name": "tiny", "model_version": "1", "id": "a", "outputs": [expected]}
    status, headers, body = server.ask(
        "/v2/models/tiny/versions/1/infer", {**BODY, "parameters": {"binary_data_output": True}}
    )
    size = int(headers["inference-header-content-length"])
    assert json.loads(body[:size])["outputs"][0]["parameters"] == {"binary_data_size": 16}
    np.testing.assert_array_equal(np.frombuffer(body[size:], "f4"), X + Y)


def test_tritonclient_works_over_http(server):
    client_of = pytest.importorskip("tritonclient.http")
    client = client_of.InferenceServerClient(server.address)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("other")
    assert client.get_model_metadata("tiny")["inputs"][1]["name"] == "y"
    assert client.get_model_repository_index()[0]["name"] == "tiny"
    inputs = [client_of.InferInput(name, [4], "FP32") for name in "xy"]
    for binary in (True, False):
        for place, array in zip(inputs, (X, Y)):
            place.set_data_from_numpy(array, binary_data=binary)
        for wanted in (None, [client_of.InferRequestedOutput("output0", binary_data=not binary)]):
            result = client.infer("tiny", inputs, outputs=wanted, request_id="7")
            np.testing.assert_array_equal(result.as_numpy("output0"), X + Y)
            assert result.get_response()["id"] == "7"
    with pytest.raises(Exception, match="no such model"):
        client.infer("other", inputs)
    client.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "words"),
    [
        ("/v2/models/other/infer", BODY, 404, ["no such model", "expected: tiny"]),
        ("/v2/models/tiny/versions/2/infer", BODY, 404, ["no such version", "found:    2", "expected: 1"]),
        ("/v2/models/tiny/versions/x/infer", BODY, 404, ["no such version"]),
        ("/v2/models/tiny.nothing/infer", BODY, 404, ["no function 'nothing'", "tiny.main"]),
        ("/v2/models/tiny/infer", {"inputs": [row("x", X)]}, 400, ["no input y", "found:    x", "expected: x, y"]),
        ("/v2/models/tiny/infer", {"inputs": [*BODY["inputs"], row("z", X)]}, 400, ["no argument z"]),
        ("/v2/models/tiny/infer", {**BODY, "outputs": [{"name": "w"}]}, 400, ["no output 'w'", "expected: output0"]),
        ("/v2/models/tiny/infer", {"inputs": [row("x", X[:3]), row("y", Y)]}, 400,
         ["input 'x'", "found:    FP32 [3]", "expected: FP32 [4]"]),
        ("/v2/models/tiny/infer", {"inputs": [row("x", X.astype("i4"), "INT32"), row("y", Y)]}, 400, ["INT32 [4]"]),
        ("/v2/models/tiny.grow/infer", {"inputs": [row("x", X[:3])]}, 400, ["n is 3, expected at least 4"]),
        ("/v2/models/tiny/infer", b"{", 400, ["the body is not JSON"]),
        ("/v2/models/tiny/infer", b"a" * 70_000, 413, ["too long", "70000 bytes", "at most 65536"]),
        ("/v2/nothing", None, 404, ["nothing at this path", "GET /v2/nothing"]),
        ("/v2/models/tiny/infer", None, 405, ["GET /v2/models/tiny/infer"]),
        ("/v2/repository/models/tiny/load", {}, 403, ["--model-control"]),
        ("/v2/repository/index", b"{", 400, ["not JSON"]),
        ("/v2/repository/index", b" " * 70_000, 413, ["too long", "at most 65536"]),
    ],
)  # fmt: skip
def test_an_error_states_found_and_expected(server, path, body, status, words):
    found, headers, data = server.ask(path, body)
    text = json.loads(data)["error"]
    assert found == status
    assert [word for word in words if word not in text] == []
    assert headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", 400),
        (b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n", 400),
        (b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999\r\n\r\n", 413),
        (b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n"
         + b"5000\r\n" + b"a" * 0x5000 + b"\r\n" + (b"8000\r\n" + b"a" * 0x8000 + b"\r\n") * 3, 413),
        (b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: gzip\r\nContent-Length: 1\r\n"
         b"Connection: close\r\n\r\nx", 415),
    ],
)  # fmt: skip
def test_malformed_requests_are_refused(server, data, status):
    assert server.say(data)[0] == status
    assert server.json("/v2/health/live")[0] == 200


def test_an_internal_error_is_a_json_error_response(server, monkeypatch):
    def fails():
        raise ZeroDivisionError("secret")

    monkeypatch.setattr(server.engine, "state", fails)
    status, document = server.json("/v2/state")
    assert status == 500
    assert "ZeroDivisionError" in document["error"]
    assert "secret" not in document["error"]


def test_a_disconnected_client_leaves_no_request(server):
    for data in (b"POST", b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n{"):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.sendall(data)
            time.sleep(0.05)
    end = time.monotonic() + 10
    while server.engine.in_flight and time.monotonic() < end:
        time.sleep(0.01)
    assert server.engine.in_flight == 0


def test_a_connection_is_reused_for_several_requests(server):
    data = json.dumps(BODY).encode()
    head = f"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n".encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head + b"\r\n" + data + head + b"Connection: close\r\n\r\n" + data)
        _, _, body = answer(connection)
    assert body.count(b'"model_name": "tiny"') == 2


def test_requests_from_foreign_web_pages_are_refused(server):
    """It may give its own name the address of this machine: then the browser says that name."""
    assert server.json("/v2", headers={"Host": "evil.example"})[0] == 401
    for host in ("localhost:80", "[::1]:80", "127.0.0.1"):
        assert server.json("/v2", headers={"Host": host})[0] == 200


def test_requests_require_the_token(bundle):
    with running(bundle, token="secret", host="0.0.0.0") as server:
        for wrong in ({}, {"Authorization": "Bearer other"}, {"Authorization": "secret"}):
            status, headers, data = server.ask("/v2/models/tiny/infer", BODY, wrong)
            assert (status, headers["www-authenticate"]) == (401, "bearer")
            assert "token" in json.loads(data)["error"]
        assert server.ask("/metrics")[0] == 401
        assert server.json("/v2/health/ready")[0] == 200
        assert server.json("/v2/models/tiny/infer", BODY, {"Authorization": "Bearer secret"})[0] == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.1", "example.com"])
def test_serving_other_machines_requires_a_token(bundle, host):
    with pytest.raises(CallError, match="--insecure"), running(bundle, host=host):
        pass


def test_a_port_in_use_is_an_error(bundle, server):
    with pytest.raises(CallError, match="cannot listen there"), running(bundle, port=server.port):
        pass


def test_a_full_server_returns_retry_after(bundle):
    with running(bundle, queue=1) as server, socket.create_connection(("127.0.0.1", server.port)) as first:
        first.sendall(b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n")
        end = time.monotonic() + 10
        while not server.engine.in_flight and time.monotonic() < end:
            time.sleep(0.01)
        status, headers, data = server.ask("/v2/models/tiny/infer", BODY)
        assert status == 429
        assert int(headers["retry-after"]) >= 1
        assert "1 requests wait or run" in json.loads(data)["error"]
        assert server.json("/v2/health/ready")[0] == 200


def test_requests_time_out(bundle):
    """One whose body never comes, too."""
    with running(bundle, timeout=0.2) as server:
        began = time.monotonic()
        status, _, data = server.say(
            b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\n"
        )
        assert (status, time.monotonic() - began < 5) == (504, True)
        assert "not done in its time" in json.loads(data)["error"]


def test_metrics_are_in_prometheus_format(server):
    server.json("/v2/models/tiny/infer", BODY)
    server.json("/v2/models/invented/infer", BODY)
    status, headers, text = server.ask("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain")
    lines = text.decode().splitlines()
    assert any(x.startswith('aotc_requests_total{model="tiny",protocol="rest",status="200"}') for x in lines)
    assert 'aotc_loads_total{model="tiny"} 1.0' in lines
    assert "invented" not in text.decode()


def test_many_clients_are_served_concurrently(server):
    answers = []

    def ask():
        for _ in range(20):
            answers.append(server.json("/v2/models/tiny/infer", BODY)[0])

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 160
