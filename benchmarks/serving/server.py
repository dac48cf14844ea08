"""A server in its own process, its models, and clients that use the protocol over plain sockets.

Clients run in their own processes, so that their processor time hardly disturbs the measurement. Needs ``aotc[serve]``
and ``aotc[compile]``.
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

import aotc

ROWS, WIDTH = 8, 2048


def dense(width: int, layers: int) -> bytes:
    """Compile a bundle of dense layers with a symbolic number of rows, in another process, as JAX starts threads."""
    with get_context("spawn").Pool(1) as pool:
        return pool.apply(_compiled, (width, layers))


def _compiled(width: int, layers: int) -> bytes:
    import jax
    from jax import export

    weights = np.random.default_rng(0).normal(size=(layers, width, width)).astype("f4") / width**0.5

    def model(x):
        for w in weights:
            x = jax.numpy.tanh(x @ w)
        return x

    x = jax.ShapeDtypeStruct(export.symbolic_shape(f"b, {width}"), np.float32)
    return aotc.compile(export.export(jax.jit(model))(x))


class Client:
    """A connection that repeats one request."""

    def __init__(self, port: int, name: str, x: np.ndarray) -> None:
        tensor = {"name": "x", "shape": x.shape, "datatype": "FP32"}
        tensor["parameters"] = {"binary_data_size": x.nbytes}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        lines = f"Inference-Header-Content-Length: {len(head)}\r\nContent-Length: {len(head) + x.nbytes}"
        first = f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: localhost\r\n"
        self._data = f"{first}{lines}\r\n\r\n".encode() + head + x.tobytes()
        self._socket = socket.create_connection(("127.0.0.1", port), 60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def ask(self) -> int:
        """Send the request, read the whole response, and return its status."""
        self._socket.sendall(self._data)
        data = b""
        while b"\r\n\r\n" not in data:
            data += self._socket.recv(1 << 18)
        head, _, body = data.partition(b"\r\n\r\n")
        length = next(int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length"))
        left = length - len(body)
        while left > 0:
            left -= len(self._socket.recv(min(left, 1 << 18)))
        return int(head.split(b" ", 2)[1])


class Server:
    """``aotc serve`` in its own process."""

    def __init__(self, source: Path, *options: str) -> None:
        command = [sys.executable, "-c", "from aotc_cli.start import main; main()", "serve", str(source), "--port=0"]
        self.process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
        assert self.process.stderr is not None
        line = next(x for x in self.process.stderr if "listening" in x)
        self.port = int(line.partition("127.0.0.1:")[2].split()[0])
        threading.Thread(target=self.process.stderr.read, daemon=True).start()

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *args: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def figures(self) -> str:
        """Return the text of ``/metrics``."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def memory(self) -> int:
        """Return the private memory of the server in bytes, without memory shared with files."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise OSError("no RssAnon")


def _load(port: int, name: str, width: int, ended: Any, results: Any) -> None:
    client = Client(port, name, np.ones((1, width), "f4"))
    counts: dict[int, int] = {}
    while not ended.is_set():
        status = client.ask()
        counts[status] = counts.get(status, 0) + 1
    results.put(counts)


def load(port: int, name: str, width: int, clients: int, meanwhile: Callable[[], object]) -> dict[int, int]:
    """Run ``clients`` client processes while ``meanwhile`` runs here; return the number of responses by status."""
    context = get_context("fork")
    results, ended = context.Queue(), context.Event()
    processes = [context.Process(target=_load, args=(port, name, width, ended, results)) for _ in range(clients)]
    for process in processes:
        process.start()
    meanwhile()
    ended.set()
    total: dict[int, int] = {}
    for counts in [results.get(timeout=60) for _ in processes]:
        for status, count in counts.items():
            total[status] = total.get(status, 0) + count
    for process in processes:
        process.join()
    return total
