"""A server under hostile load, as a process: health is answered within 100 ms, memory is bounded, others are served."""

import contextlib
import json
import socket
import struct
import threading
import time

import numpy as np
import pytest
from support.hostile import assert_no_stall, hostile_server
from support.served import answer, until

pytestmark = pytest.mark.cpu

INFER = "/v2/models/tiny/infer"
X = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
MIB = 1 << 20
OPTIONS = (
    "--max-body-mb=24", "--max-json-mb=12", "--memory-mb=64", "--connections=40", "--head-timeout=1",
    "--body-timeout=1", "--idle-timeout=1",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(hostile_models, tmp_path_factory):
    """A server with tight limits."""
    with hostile_server(hostile_models, tmp_path_factory.mktemp("log"), *OPTIONS) as found:
        yield found


def good(server):
    return server.json(INFER, {"inputs": X})[1]["outputs"][0]["data"] == [2, 4, 6, 8]


def head(length, path=INFER, more=""):
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {length}\r\n{more}\r\n".encode()


CHUNKED = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n".encode()


@contextlib.contextmanager
def connections(server, count, data=b""):
    """So many connections on which something was sent."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.port), 20))
            with contextlib.suppress(OSError):
                connection.sendall(data)
            found.append(connection)
        yield found


def closed(connection):
    """Read what comes until the server closes; return it."""
    connection.settimeout(20)
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := connection.recv(1 << 16):
            data += part
    return data


# ---------------------------------------------------------------- documents that are dear to parse

DOCUMENTS = {
    "numbers": lambda n: b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": [4], "data": [%s1]}]}'
    % (b"0.5," * (n // 4)),
    "lists": lambda n: b'{"inputs": [%s[]]}' % (b"[]," * (n // 3)),
    "objects": lambda n: b'{"inputs": [%s{}]}' % (b'{"a":0},' * (n // 8)),
    "keys": lambda n: json.dumps({str(k): 0 for k in range(n // 12)}).encode(),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["numbers", pytest.param("lists", marks=pytest.mark.slow),
                                  "objects", pytest.param("keys", marks=pytest.mark.slow)])  # fmt: skip
def test_a_large_document_does_not_stall_the_server(server, kind):
    body = DOCUMENTS[kind](8 * MIB)
    before = server.memory()

    def attack():
        for path in (INFER, "/v2/models/tiny/generate"):
            status, document = server.json(path, body)
            assert status in (400, 413), document

    assert_no_stall(server, attack)
    assert server.memory() - before < 300 * MIB
    assert good(server)


def test_a_document_beyond_the_limit_is_refused(server):
    status, document = server.json(INFER, b'{"a":"' + b"a" * (13 * MIB) + b'"}')
    assert status == 413
    assert "--max-json-mb" in document["error"]


def test_large_documents_get_the_results_of_small_ones(server):
    """Read and written by another process: the same answer, and nothing waits."""
    x = np.arange(300_000, dtype="f4")
    body = json.dumps({"inputs": [{"name": server.x, "shape": [x.size], "datatype": "FP32", "data": x.tolist()}]})
    found = []
    assert_no_stall(server, lambda: found.append(server.json("/v2/models/double/infer", body.encode())))
    status, document = found[-1]
    assert status == 200, document
    np.testing.assert_array_equal(np.array(document["outputs"][0]["data"], "f4"), x * 2)


def binary(server, x, **more):
    """Return the body and headers of a request with a binary tensor."""
    row = {"name": server.x, "shape": [x.size], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    document = json.dumps({"inputs": [row], **more}).encode()
    return document + x.tobytes(), {"Inference-Header-Content-Length": len(document)}


def test_a_large_binary_response_does_not_stall_the_server(server):
    x = np.arange(4 * MIB, dtype="f4")
    body, headers = binary(server, x, parameters={"binary_data_output": True})
    found = []
    assert_no_stall(server, lambda: found.append(server.ask("/v2/models/double/infer", body, headers)))
    status, headers, data = found[-1]
    assert status == 200
    np.testing.assert_array_equal(np.frombuffer(data[int(headers["inference-header-content-length"]) :], "f4"), x * 2)


def test_results_too_large_for_json_are_refused(server):
    body, headers = binary(server, np.ones(4 * MIB, "f4"))
    status, _, data = server.ask("/v2/models/double/infer", body, headers)
    assert status == 400
    assert "binary_data" in json.loads(data)["error"]


# ---------------------------------------------------------------- connections


def test_an_endless_request_is_closed(server):
    """One that has not begun; in its head; in its body, of a known length and in chunks."""
    begun = (b"", b"POST /v2", head(9)[:-2], head(9) + b"{", CHUNKED + b"5\r\n{")
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(connections(server, 1, data))[0] for data in begun]
        began = time.monotonic()
        answers = [closed(connection) for connection in found]
    assert time.monotonic() - began < 5
    assert all(data.startswith(b"HTTP/1.1 408") for data in answers), answers
    assert until(lambda: server.figure("aotc_in_flight") == 0)


def test_a_connection_without_a_request_is_closed(server):
    with connections(server, 1) as (connection,):
        connection.sendall(b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n")
        began = time.monotonic()
        assert closed(connection).startswith(b"HTTP/1.1 200")
        assert time.monotonic() - began < 5


@pytest.mark.parametrize("count", [16, pytest.param(128, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", [b"X: ", b"", b"\r\n"])
def test_an_endless_head_is_refused(server, form, count):
    """One field, many fields, or empty lines before the request."""

    def attack():
        with connections(server, 1, b"" if form == b"\r\n" else b"GET / HTTP/1.1\r\nHost: localhost\r\n" + form) as (
            one,
        ):
            with contextlib.suppress(ConnectionError):
                for _ in range(count):
                    one.sendall(
                        {b"X: ": b"a" * MIB, b"": b"a: b\r\n" * (MIB // 6), b"\r\n": b"\r\n" * (MIB // 2)}[form]
                    )
            closed(one)

    assert_no_stall(server, attack)
    assert good(server)


def test_a_long_head_is_refused_with_a_reason(server):
    status, document = server.json("/v2/health/live", headers={"X": "a" * 40_000})
    assert status == 431
    assert "--max-head-kb" in document["error"]
    assert server.json("/v2/health/live", headers={"X": "a" * 30_000})[0] == 200


def test_endless_trailers_are_refused(server):
    """Trailers without end."""
    with connections(server, 1, CHUNKED + b"2\r\n{}\r\n0\r\n") as (connection,):
        with contextlib.suppress(ConnectionError):
            for _ in range(8):
                connection.sendall(b"a: b\r\n" * (MIB // 6))
        closed(connection)
    assert good(server)


def test_many_requests_in_one_read_are_refused(server):
    with connections(server, 1, b"GET /v2 HTTP/1.1\r\nHost: localhost\r\n\r\n" * 5000) as (connection,):
        assert closed(connection).count(b"HTTP/1.1 200") < 500
    assert good(server)


def test_health_responds_while_all_connections_are_in_use(server):
    """More connections than there may be, none of which is idle: health is answered, others are told why not."""

    def attack():
        with connections(server, 150, head(9)):
            status, document = server.json(INFER, {"inputs": X})
            assert status in (200, 429), document
            assert status == 200 or "--connections" in document["error"]

    assert_no_stall(server, attack)
    assert until(lambda: good(server))


def test_idle_connections_are_closed_for_new_ones(server):
    ask = b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with connections(server, 60, ask) as found:
        assert found[-1].recv(1 << 12).startswith(b"HTTP/1.1 200")
        assert good(server)
        assert closed(found[0]).startswith(b"HTTP/1.1 200")


# ---------------------------------------------------------------- memory


def test_waiting_bodies_share_a_memory_limit(server):
    """30 clients that send 8 MB of a longer body: 64 MiB are kept, the others are refused, a small request is not."""
    before = server.memory()
    part = head(9 * MIB) + bytes(8 * MIB)
    with contextlib.ExitStack() as stack:
        threads = []

        def send():
            with connections(server, 1, part) as (connection,):
                closed(connection)

        for _ in range(30):
            thread = threading.Thread(target=send)
            thread.start()
            threads.append(thread)
        stack.callback(lambda: [thread.join() for thread in threads])
        for _ in range(10):
            assert server.memory() - before < 160 * MIB
            assert good(server) or server.figure("aotc_in_flight") > 0
            time.sleep(0.05)
    assert until(lambda: server.figure("aotc_in_flight") == 0)


def test_clients_that_never_read_are_disconnected(server):
    x = np.ones(2 * MIB, "f4")
    body, headers = binary(server, x, parameters={"binary_data_output": True})
    lines = "".join(f"{key}: {value}\r\n" for key, value in headers.items())
    before, data = server.memory(), head(len(body), "/v2/models/double/infer", lines) + body
    for _ in range(2):
        leave_unread(server, data, before)
    assert good(server)


def leave_unread(server, data, before):
    """Have six clients that read nothing, until they are left; 64 MiB are theirs, 24 MiB idle results of the model."""
    with contextlib.ExitStack() as stack:
        for _ in range(6):
            connection = stack.enter_context(socket.socket())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.port))
            with contextlib.suppress(ConnectionError):  # it is refused: others have the memory
                connection.sendall(data)
        assert server.memory() - before < 160 * MIB
        assert until(lambda: server.figure("aotc_request_bytes") == 0)
        assert until(lambda: server.memory() - before < 80 * MIB)


def test_a_reset_connection_leaves_no_request(server):
    for data in (b"", head(9) + b"{", head(0)):
        with connections(server, 8, data) as found:
            for connection in found:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert until(lambda: server.figure("aotc_in_flight") == 0)
    assert good(server)


# ---------------------------------------------------------------- models that take all


def test_an_endless_model_does_not_starve_others(server):
    """As many requests as there are threads, and more."""
    row = {"name": server.n, "shape": [], "datatype": "INT32", "data": [1 << 30]}
    data = json.dumps({"inputs": [row], "parameters": {"timeout": 8_000_000}}).encode()
    with connections(server, 12, head(len(data), "/v2/models/spin/infer") + data):
        assert until(lambda: server.figure("aotc_in_flight") == 12)
        began = time.monotonic()
        for _ in range(10):
            assert good(server)
        assert time.monotonic() - began < 3
    assert until(lambda: server.figure("aotc_in_flight") == 0)


def test_a_slow_reader_gets_the_whole_response(server):
    """However slowly it reads, if it reads."""
    x = np.arange(MIB, dtype="f4")
    body, headers = binary(server, x, parameters={"binary_data_output": True})
    lines = "".join(f"{key}: {value}\r\n" for key, value in {**headers, "Connection": "close"}.items())
    with connections(server, 1) as (connection,):
        connection.sendall(head(len(body), "/v2/models/double/infer", lines) + body)
        time.sleep(0.5)
        status, found, data = answer(connection)
    assert status == 200
    np.testing.assert_array_equal(np.frombuffer(data[int(found["inference-header-content-length"]) :], "f4"), x * 2)
