"""Bytes that no well-behaved client of HTTP sends: refused with a reason, or answered as RFC 9112 says."""

import contextlib
import gzip
import json
import os
import socket
import threading

import pytest
from support.hostile import assert_no_stall, hostile_server
from support.served import answer, until

pytestmark = pytest.mark.cpu

INFER, GENERATE = "/v2/models/tiny/infer", "/v2/models/texts/generate"
X = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
BODY = json.dumps({"inputs": X}).encode()
MIB = 1 << 20
OPTIONS = (
    "--max-body-mb=24", "--max-json-mb=12", "--memory-mb=64", "--connections=40", "--head-timeout=1",
    "--body-timeout=1", "--idle-timeout=1", "--model-control",
)  # fmt: skip


@pytest.fixture(scope="module")
def server(two_models, tmp_path_factory):
    """A server with tight limits, whose models clients may load."""
    with hostile_server(two_models, tmp_path_factory.mktemp("log"), *OPTIONS) as found:
        yield found


def head(method, path, *lines, last="Connection: close"):
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *lines, last, "", ""]).encode("latin-1")


def post(*lines, body=b"", path=INFER):
    return head("POST", path, *lines) + body


def chunked(body, *lines):
    return post("Transfer-Encoding: chunked", *lines, body=body)


LENGTH = f"Content-Length: {len(BODY)}"
CHUNK = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
BOMB = gzip.compress(bytes(50 * MIB), 1)
NOT_HTTP = {
    "two lengths": post(LENGTH, "Content-Length: 5", body=BODY),
    "equal lengths": post(LENGTH, LENGTH, body=BODY),
    "a list of lengths": post(f"{LENGTH}, {len(BODY)}", body=BODY),
    "a negative length": post("Content-Length: -5", body=BODY),
    "a signed length": post(f"Content-Length: +{len(BODY)}", body=BODY),
    "a length of 26 digits": post(f"Content-Length: {'9' * 26}", body=BODY),
    "no digits": post("Content-Length: ", body=BODY),
    "chunks, then a length": post("Transfer-Encoding: chunked", "Content-Length: 4", body=CHUNK),
    "a length, then chunks": post("Content-Length: 4", "Transfer-Encoding: chunked", body=CHUNK),
    "another encoding last": post("Transfer-Encoding: chunked, gzip", body=CHUNK),
    "no encoding": post("Transfer-Encoding: xchunked", LENGTH, body=BODY),
    "a space before the colon": post("Transfer-Encoding : chunked", body=CHUNK),
    "a chunk of 2^68 bytes": chunked(b"fffffffffffffffff\r\n"),
    "a negative chunk": chunked(b"-5\r\nabcde\r\n0\r\n\r\n"),
    "a chunk in C's form": chunked(b"0x5\r\nabcde\r\n0\r\n\r\n"),
    "chunks without CR": chunked(b"5\nabcde\n0\n\n"),
    "a long chunk extension": chunked(b"%x;" % len(BODY) + b"a=b;" * 100_000 + b"\r\n" + BODY + b"\r\n0\r\n\r\n"),
    "NUL in a field": head("GET", "/v2", "X: a\0b"),
    "NUL in a name": head("GET", "/v2", "X\0: a"),
    "CR in a field": head("GET", "/v2", "X: a\rb"),
    "a folded field": head("GET", "/v2", "X: a\r\n b"),
    "lines without CR": b"GET /v2 HTTP/1.1\nHost: localhost\n\n",
    "NUL in a path": head("GET", "/v2/models/a\0b"),
    "bytes above 127 in a path": head("GET", "/v2/models/\xe4\xff"),
    "two hosts": head("GET", "/v2", "Host: example.org"),
    "a port of 99999": head("GET", "https://user:word@localhost:99999/v2"),
    "an authority": head("CONNECT", "localhost:80"),
    "HTTP/9.9": b"GET /v2 HTTP/9.9\r\nHost: localhost\r\n\r\n",
    "HTTP/2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(100),
    "TLS": bytes.fromhex("16030100c8010000c40303") + bytes(200),
}


@pytest.mark.parametrize("case", NOT_HTTP)
def test_malformed_requests_get_protocol_errors(server, case):
    """The connection ends: what comes after it on the connection is never read as another request."""
    status, headers, data = server.say(NOT_HTTP[case])
    assert status == 400, data
    assert headers["connection"] == "close"
    assert json.loads(data)["error"]


OTHERS = {
    "gzip": (post("Content-Encoding: gzip", f"Content-Length: {len(BOMB)}", body=BOMB[:100]), 415),
    "two encodings": (post("Content-Encoding: identity", "Content-Encoding: gzip", LENGTH), 415),
    "a length of 2^63 - 1": (post(f"Content-Length: {2**63 - 1}"), 413),
    "a chunk of 2^63 bytes": (chunked(b"7fffffffffffffff\r\n"), 408),
    "a body that never comes": (post("Expect: 100-continue", LENGTH), 100),
    "up and away": (head("GET", "/v2/models/%2e%2e%2f%2e%2e%2fetc%2fpasswd"), 404),
    "up": (head("GET", "/v2/models/../../etc/passwd"), 404),
    "up, encoded twice": (head("GET", "/v2/models/%252e%252e"), 404),
    "NUL": (head("GET", "/v2/models/..%00"), 404),
    "no UTF-8": (head("GET", "/v2/models/%ff%ed%a0%80"), 404),
    "lines in a name": (head("GET", "/v2/models/a%0d%0aX:%20b"), 404),
    "digits of another script": (head("GET", "/v2/models/tiny/versions/%d9%a1"), 404),
    "6000 digits": (head("GET", f"/v2/models/tiny/versions/{'9' * 6000}"), 404),
    "load NUL": (head("POST", "/v2/repository/models/a%00b/load", "Content-Length: 0"), 400),
    "load up": (head("POST", "/v2/repository/models/%2e%2e/load", "Content-Length: 0"), 400),
    "an absolute address": (head("GET", "http://localhost/v2/health/live"), 200),
    "a web socket": (head("GET", "/v2", "Upgrade: websocket", last="Connection: Upgrade, close"), 200),
    "a small web socket": (post("UPGRADE:websocket", LENGTH, "connection: upgrade", body=BODY), 200),
    "expect what is not": (post("Expect: 200-ok", LENGTH, body=BODY), 200),
    "tiny chunks": (chunked(b"1\r\n \r\n" * 100_000 + CHUNK), 200),
    "another script": (post("Content-Length: 2", body=b"{}", path="/v2/models/%F0%9F%92%A5/infer"), 404),
}


@pytest.mark.parametrize("case", OTHERS)
def test_unusual_requests_get_a_timely_response(server, case):
    data, expected = OTHERS[case]
    found = []
    assert_no_stall(server, lambda: found.append(server.say(data)[0]))
    assert set(found) == {expected}


def test_pipelined_requests_are_answered_in_order(server):
    first = head("POST", INFER, LENGTH, last="X: 1") + BODY
    status, _, data = server.say(first + head("GET", "/v2/health/live", last="X: 2") + head("GET", "/v2/models/tiny"))
    assert status == 200
    assert data.count(b"HTTP/1.1 200 OK") == 2
    places = [data.index(word) for word in (b'"outputs"', b'"live"', b'"versions"')]
    assert places == sorted(places)


def test_malformed_requests_are_not_logged(server):
    """Else a client could fill the disk."""
    before = server.log()
    for data in (NOT_HTTP["TLS"], OTHERS["a web socket"][0], OTHERS["up"][0]):
        server.say(data)
    assert server.log() == before


WISHES = {
    "10^18 tokens": ({"max_tokens": 10**18}, 400),
    "strings": ({"stop": ["a"] * 100_000}, 400),
    "every token stops": ({"stop": list(range(100_000))}, 200),
    "tokens": ({"tokens": [1] * 1_000_000}, 400),
    "a million answers": ({"n": 10**6}, 400),
    "biases": ({"logit_bias": {str(n): 1 for n in range(10_000)}}, 413),
    "NaN": ({"temperature": float("nan")}, 400),
    "a negative temperature": ({"temperature": -1}, 400),
    "almost cold": ({"temperature": 5e-324, "seed": 1}, 200),
    "a top_k of 10^18": ({"top_k": 10**18}, 400),
    "no seed": ({"seed": -1, "temperature": 1}, 400),
    "NUL in a name": ({"sequence_id": "a\0b", "sequence_start": True, "sequence_end": True}, 200),
}


@pytest.mark.parametrize("case", WISHES)
def test_invalid_generation_parameters_are_refused_in_time(server, case):
    parameters, expected = WISHES[case]
    body, found = {"tokens": [1, 2], "max_tokens": 2, **parameters}, []
    assert_no_stall(server, lambda: found.append(server.json(GENERATE, json.dumps(body).encode())))
    assert {status for status, _ in found} == {expected}, found
    assert "Warning" not in server.log()


def test_small_chunks_of_a_body_take_only_their_bytes(server):
    """An object of Python for each part would take many times as much."""
    before = server.memory()
    with socket.create_connection(("127.0.0.1", server.port), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(post(f"Content-Length: {10 * MIB}"))
        with contextlib.suppress(ConnectionError):
            for _ in range(20_000):
                connection.sendall(b"  ")
        assert server.memory() - before < 20 * MIB
        with contextlib.suppress(ConnectionError, IndexError):
            assert answer(connection)[0] == 408


def test_clients_that_do_not_read_events_are_disconnected(server):
    """Tokens go no further than the buffers of the connection; the stream ends when its time is over."""
    parameters = json.dumps({"tokens": [1, 2], "max_tokens": 1 << 20}).encode()
    before, data = (
        server.memory(),
        post(f"Content-Length: {len(parameters)}", body=parameters, path=f"{GENERATE}_stream"),
    )

    def attack():
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                connection = stack.enter_context(socket.socket())
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", server.port))
                connection.sendall(data)
            assert until(lambda: server.figure("aotc_in_flight") == 8)
            assert server.memory() - before < 60 * MIB

    assert_no_stall(server, attack)
    assert until(lambda: server.figure("aotc_in_flight") == 0)


def test_concurrent_loads_and_unloads_are_consistent(server):
    """Each is there or not; requests meanwhile are answered or told so, and no version leaks."""
    statuses = []

    def ask(change):
        for _ in range(6):
            statuses.append(server.ask(f"/v2/repository/models/tiny/{change}", b"")[0])
            statuses.append(server.ask("/v2/repository/index", b"{}")[0])
            statuses.append(server.ask(INFER, BODY)[0])

    def attack():
        threads = [threading.Thread(target=ask, args=(change,)) for change in ("load", "unload") * 4]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    before = len(os.listdir(f"/proc/{server.pid}/fd"))
    assert_no_stall(server, attack)
    assert set(statuses) <= {200, 404, 503}, statuses
    assert server.ask("/v2/repository/models/tiny/load", b"")[0] == 200
    assert server.json(INFER, BODY)[1]["outputs"][0]["data"] == [2, 4, 6, 8]
    assert len(os.listdir(f"/proc/{server.pid}/fd")) <= before + 4
