"""Calls that take long: deadlines and clients that leave end them; a server that ends waits for them."""

import contextlib
import json
import signal
import socket
import threading
import time

import jax
import numpy as np
import pytest
from support.served import Running, ServeProcess, answer, running, until

import aotc

pytestmark = pytest.mark.cpu

FOREVER = 1 << 30


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """Path of a model that takes about as long as it is told."""

    def spin(n):
        return jax.lax.fori_loop(0, n, lambda i, x: jax.numpy.sin(x) + 1, np.ones(1000, "f4")).sum()

    path = tmp_path_factory.mktemp("spin") / "spin.vmfb"
    path.write_bytes(aotc.compile(spin, np.int32(0)))
    return path


@pytest.fixture(scope="module")
def server(bundle):
    """A server of it."""
    with running(bundle) as found:
        found.name = found.json("/v2/models/spin")[1]["inputs"][0]["name"]
        yield found


def body(server, iterations, **more):
    row = {"name": server.name, "shape": [], "datatype": "INT32", "data": [iterations]}
    return {"inputs": [row], **more}


def test_a_deadline_cancels_the_call(server):
    began = time.monotonic()
    status, document = server.json("/v2/models/spin/infer", body(server, FOREVER, parameters={"timeout": 100_000}))
    assert status == 504
    assert "not done in its time" in document["error"]
    assert time.monotonic() - began < 5
    assert server.json("/v2/models/spin/infer", body(server, 3))[0] == 200


def test_a_call_ends_when_its_client_disconnects(server):
    data = json.dumps(body(server, FOREVER)).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        head = f"POST /v2/models/spin/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert until(lambda: server.engine.in_flight == 1)
    assert until(lambda: server.engine.in_flight == 0)
    assert 'status="499"' in server.ask("/metrics")[2].decode()
    assert server.json("/v2/models/spin/infer", body(server, 3))[0] == 200


def test_shutdown_finishes_running_requests(bundle):
    with running(bundle) as server:
        server.name = server.json("/v2/models/spin")[1]["inputs"][0]["name"]
        answers = []
        long = body(server, 60_000)
        asking = threading.Thread(target=lambda: answers.append(server.json("/v2/models/spin/infer", long)))
        asking.start()
        assert until(lambda: server.engine.in_flight == 1)
    asking.join()
    assert answers[0][0] == 200


def test_shutdown_waits_at_most_the_grace_period(bundle):
    began = time.monotonic()
    with running(bundle, grace=1.0) as server:
        server.name = server.json("/v2/models/spin")[1]["inputs"][0]["name"]
        data = json.dumps(body(server, FOREVER)).encode()
        connection = socket.create_connection(("127.0.0.1", server.port))
        head = f"POST /v2/models/spin/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
        connection.sendall(head.encode() + data)
        assert until(lambda: server.engine.in_flight == 1)
    with connection:
        assert answer(connection)[0] == 503
    assert time.monotonic() - began < 15


@pytest.fixture
def process(bundle):
    """Starts ``aotc serve``; returns the process and its port."""
    with contextlib.ExitStack() as stack:

        def start(*options):
            made = stack.enter_context(ServeProcess(bundle, "--port=0", *options))
            return made.made, made.port()

        yield start


def test_sigterm_under_load_loses_no_request(process):
    """What has begun is answered; afterwards nobody listens."""
    made, port = process("--json-logs", "--access-log")
    row = {"name": "n", "shape": [], "datatype": "INT32", "data": [300]}
    data = json.dumps({"inputs": [row]}).encode()
    lines = f"Host: localhost\r\nContent-Length: {len(data)}\r\nConnection: close\r\n"
    head = f"POST /v2/models/spin/infer HTTP/1.1\r\n{lines}\r\n"
    good, other, refused = [], [], threading.Event()

    def ask():
        while not refused.is_set():
            try:
                connection = socket.create_connection(("127.0.0.1", port), 20)
            except OSError:
                refused.set()
                return
            with connection:
                try:
                    connection.sendall(head.encode() + data)
                    status = answer(connection)[0]
                except (OSError, IndexError):
                    status = 0  # it was in the queue of the socket that was closed: no request of ours was read
                (good if status == 200 else other).append(status)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    assert until(lambda: len(good) > 50)
    made.send_signal(signal.SIGTERM)
    assert made.wait(30) == 0
    for thread in threads:
        thread.join(30)
    events = [json.loads(line) for line in made.stderr.read().splitlines()]
    requests = [e for e in events if e["event"] == "request"]
    assert {e["status"] for e in requests} <= {200, 503}
    assert sum(e["status"] == 200 for e in requests) >= len(good) > 50
    assert set(other) <= {0, 503}
    assert [e["event"] for e in events if e["event"] != "request"] == ["ending", "ended"]
    assert events[-1]["lost"] == 0


def test_a_second_signal_ends_the_server_at_once(process):
    """Requests under way are told so."""
    made, port = process("--grace=60")
    row = {"name": "n", "shape": [], "datatype": "INT32", "data": [FOREVER]}
    data = json.dumps({"inputs": [row]}).encode()
    head = f"POST /v2/models/spin/infer HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", port), 20) as connection:
        connection.sendall(head.encode() + data)
        assert until(lambda: b"aotc_in_flight 1.0" in Running(None, port, None).ask("/metrics")[2])
        made.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert made.poll() is None
        began = time.monotonic()
        made.send_signal(signal.SIGINT)
        assert answer(connection)[0] == 503
        assert made.wait(30) == 0
    assert time.monotonic() - began < 10


def test_an_interrupt_ends_the_server(process):
    made, _ = process()
    made.send_signal(signal.SIGINT)
    assert made.wait(30) == 0
