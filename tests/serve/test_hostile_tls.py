"""A server of TLS under clients that do not finish the handshake, or send something else."""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import time
import urllib.request

import pytest
from support.hostile import hostile_server
from support.served import until

grpc = pytest.importorskip("grpc")

pytestmark = pytest.mark.cpu

HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(100)  # the first half of a ClientHello
OPTIONS = ("--token=secret", "--connections=60", "--head-timeout=1", "--idle-timeout=2")
MIB = 1 << 20


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Files of a certificate of our own and of its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    line = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    names = ["-addext", "subjectAltName=DNS:localhost", "-out", cert, "-keyout", key]
    subprocess.run([*line, *names], check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def server(tiny_folder, certificate, tmp_path_factory):
    """A server with tight limits, which speaks TLS on both ports."""
    cert, key = certificate
    tls = (f"--tls-cert={cert}", f"--tls-key={key}")
    with hostile_server(tiny_folder, tmp_path_factory.mktemp("log"), *OPTIONS, *tls) as found:
        found.cert = cert
        yield found


def live(server):
    """Ask after health over HTTP; return the seconds that it took."""
    begin = time.monotonic()
    context = ssl.create_default_context(cafile=server.cert)
    with urllib.request.urlopen(f"https://localhost:{server.port}/v2/health/live", context=context, timeout=10) as got:
        assert json.load(got) == {"live": True}
    return time.monotonic() - begin


def grpc_live(server):
    """Ask after health over gRPC, by a connection of its own."""
    with open(server.cert, "rb") as file:
        credentials = grpc.ssl_channel_credentials(file.read())
    options = [("grpc.use_local_subchannel_pool", 1)]
    with grpc.secure_channel(f"localhost:{server.grpc_port}", credentials, options) as channel:
        return channel.unary_unary("/grpc.health.v1.Health/Check")(b"", timeout=10) == b"\x08\x01"


@contextlib.contextmanager
def connections(port, count, data):
    """Open connections on which something was sent."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            found.append(stack.enter_context(socket.create_connection(("127.0.0.1", port), 20)))
            with contextlib.suppress(OSError):
                found[-1].sendall(data)
        yield found


def closed(connection):
    """Wait until the server closes a connection."""
    connection.settimeout(20)
    with contextlib.suppress(ConnectionError):
        while connection.recv(1 << 12):
            pass
    return True


def files(server):
    return len(os.listdir(f"/proc/{server.pid}/fd"))


@pytest.mark.parametrize("data", [b"", HELLO], ids=["nothing", "half"])
def test_endless_handshakes_are_closed(server, data):
    """At most 64 are under way; each ends in time, and others are answered."""
    live(server)
    before, memory = files(server), server.memory()
    with connections(server.port, 300, data) as found:
        assert until(lambda: files(server) <= before + 70)
        assert live(server) < 5
        assert server.memory() - memory < 60 * MIB
        began = time.monotonic()
        assert all(map(closed, found))
        assert time.monotonic() - began < 5
    assert until(lambda: files(server) <= before + 2)
    assert live(server) < 5


GARBAGE = {
    "text": b"GET /v2/health/live HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "alert": bytes.fromhex("15030300020228"),
    "long record": bytes.fromhex("160303ffff") + bytes(70_000),
    "zeros": bytes(100_000),
}


@pytest.mark.parametrize("kind", GARBAGE)
def test_invalid_tls_records_end_their_connection(server, kind):
    with connections(server.port, 8, GARBAGE[kind]) as found:
        assert all(map(closed, found))
    with connections(server.grpc_port, 8, GARBAGE[kind]) as found:
        assert all(map(closed, found))
    assert live(server) < 5
    assert grpc_live(server)


@pytest.mark.parametrize("data", [b"", HELLO], ids=["nothing", "half"])
def test_endless_grpc_handshakes_are_closed(server, data):
    """The connections of gRPC have a limit too, above which new ones are closed; then others are answered again."""
    before = files(server)
    with connections(server.grpc_port, 200, data) as found:
        assert live(server) < 5
        assert until(lambda: files(server) <= before + 70)
        assert all(map(closed, found))
    assert until(lambda: files(server) <= before + 4)
    assert grpc_live(server)


def test_a_client_may_not_renegotiate(server):
    """TLS 1.2 lets a client ask for another handshake at any time, which costs the server more than the client."""
    line = ["openssl", "s_client", "-connect", f"127.0.0.1:{server.port}", "-tls1_2", "-CAfile", server.cert]
    done = subprocess.run(line, input=b"R\nGET / HTTP/1.1\n\n", capture_output=True, timeout=30)
    text = done.stdout + done.stderr
    assert b"RENEGOTIATING" in text
    assert b"no renegotiation" in text
    assert live(server) < 5
