"""Servers for tests: on a thread, at free ports of 127.0.0.1, ended with the test."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

for package in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(package)

from aotc.serve.run import serve  # noqa: E402
from aotc.serve.settings import Settings  # noqa: E402

SECONDS = 60  # any long time
ROOT = Path(__file__).parents[2]


@dataclass
class Running:
    """A running server: its engine and its ports."""

    engine: Any
    port: int
    grpc_port: int | None

    @property
    def address(self):
        return f"127.0.0.1:{self.port}"

    def ask(self, path, body=None, headers=None, method=""):
        """Return (status, headers, body) of a request."""
        data = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": self.address, "Content-Length": len(data), "Connection": "close", **(headers or {})}
        method = method or ("GET" if body is None else "POST")
        head = "".join(f"{key}: {value}\r\n" for key, value in lines.items() if value is not None)
        return self.say(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + data)

    def say(self, data):
        """Send bytes; return (status, headers, body) of the response, after the server has closed the connection."""
        with socket.create_connection(("127.0.0.1", self.port), SECONDS) as connection:
            connection.sendall(data)
            return answer(connection)

    def json(self, path, body=None, headers=None):
        """Return (status, document)."""
        status, _, data = self.ask(path, body, headers)
        return status, json.loads(data)


def answer(connection):
    """Return (status, headers, body) of all data until the end of the connection."""
    data = b""
    while part := connection.recv(1 << 16):
        data += part
    head, _, body = data.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines[1:])
    return int(lines[0].split()[1]), headers, body


def until(condition):
    """Wait until a condition holds, or a long time has passed; return its last value."""
    end = time.monotonic() + SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.005)
    return condition()


@contextmanager
def running(source, **settings):
    """Run a server of ``source`` within the ``with`` block."""
    started, found, failed = threading.Event(), [], []

    def begin(*about):
        found.extend(about)
        started.set()

    def run():
        try:
            serve(Settings(source, **{"port": 0, "grace": 5.0, "timeout": 20.0, **settings}), begin)
        except BaseException as error:
            failed.append(error)
            started.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert started.wait(SECONDS)
    if failed:
        raise failed[0]
    try:
        yield Running(*found)
    finally:
        found[0].stop()
        thread.join(SECONDS)
        assert not thread.is_alive()
    assert not failed, failed


class ServeProcess:
    """``aotc serve`` as a process; ``port`` of REST is read from its log, if that is a pipe."""

    def __init__(self, source, *options, stderr=subprocess.PIPE):
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
        line = [sys.executable, "-c", "from aotc_cli.start import main; main()", "serve", source, *options]
        self.made = subprocess.Popen(line, stderr=stderr, text=True, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.made.kill()
        self.made.wait()
        if self.made.stderr is not None:
            self.made.stderr.close()

    def port(self):
        """Wait until the server listens; return the port."""
        line = self.until("listening")
        return int(line.partition("127.0.0.1:")[2].split()[0].strip('",'))

    def until(self, word):
        """Return the next line of its log that contains ``word``."""
        for line in self.made.stderr:
            if word in line:
                return line
        raise AssertionError(f"ended with {self.made.wait()}, without {word!r}")

    def rest(self):
        """Wait for its end; return its exit status and the unread part of its log."""
        status = self.made.wait(SECONDS)
        return status, self.made.stderr.read() if self.made.stderr is not None else ""


def free_port():
    """Return a port that is currently unused."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return found.getsockname()[1]


def ask(port, path, body=None):
    """Return (status, document) of a request to a process."""
    return Running(None, port, None).json(path, body)
