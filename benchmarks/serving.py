"""A server beside direct calls: overhead, batches, bundles replaced under load, memory over many requests.

python benchmarks/serving.py [--requests=N] [--swaps=N] [--flat=N] [--only=overhead,batching,texts,swaps,memory]

The server is a process of its own; load comes from processes that say the protocol over plain sockets, so that a
client's own time does not count more than it must. Needs ``aotc[serve]`` and ``aotc[compile]``.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import monotonic, perf_counter, sleep
from typing import Any

import numpy as np

import aotc

ROWS, WIDTH = 8, 2048


def dense(width: int, layers: int) -> bytes:
    """Return a bundle of dense layers with a symbolic number of rows; JAX's threads stay in another process."""
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
    """A connection over which one request is sent again and again."""

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
        """Return the status of one more answer, which is read whole."""
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
    """``aotc serve`` in a process of its own."""

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
        """Return what ``/metrics`` says."""
        with socket.create_connection(("127.0.0.1", self.port)) as connection:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
            return b"".join(iter(lambda: connection.recv(1 << 16), b"")).decode()

    def memory(self) -> int:
        """Return the bytes that are this process's own: what it shares with files is not counted."""
        for line in Path(f"/proc/{self.process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise OSError("no RssAnon")


def overhead(folder: Path, requests: int) -> None:
    """Time requests beside calls of the same module, in turns."""
    path = folder / "small.vmfb"
    path.write_bytes(dense(64, 2))
    module, x = aotc.load(path), np.ones((ROWS, 64), "f4")
    with Server(path) as server:
        client = Client(server.port, "small", x)
        asked, called = [], []
        for n in range(requests):
            for times, function in ((asked, client.ask), (called, lambda: module(x))):
                begin = perf_counter()
                function()
                if n > 100:
                    times.append(perf_counter() - begin)
    p50, p99 = statistics.median(asked), statistics.quantiles(asked, n=100)[98]
    direct = statistics.median(called)
    print(f"overhead of a request, REST binary, {ROWS} rows of 64: p50 {(p50 - direct) * 1e6:.0f} us", end=" ")
    print(f"(request {p50 * 1e6:.0f}, p99 {p99 * 1e6:.0f}; module(...) {direct * 1e6:.1f})")


def _load(port: int, name: str, width: int, ended: Any, results: Any) -> None:
    client = Client(port, name, np.ones((1, width), "f4"))
    counts: dict[int, int] = {}
    while not ended.is_set():
        status = client.ask()
        counts[status] = counts.get(status, 0) + 1
    results.put(counts)


def load(port: int, name: str, width: int, clients: int, meanwhile: Callable[[], object]) -> dict[int, int]:
    """Return how many answers of each status so many clients had, each a process, while a function ran here."""
    context = get_context("fork")
    results, ended = context.Queue(), context.Event()
    made = [context.Process(target=_load, args=(port, name, width, ended, results)) for _ in range(clients)]
    for process in made:
        process.start()
    meanwhile()
    ended.set()
    total: dict[int, int] = {}
    for counts in [results.get(timeout=60) for _ in made]:
        for status, count in counts.items():
            total[status] = total.get(status, 0) + count
    for process in made:
        process.join()
    return total


def batching(folder: Path, seconds: float = 4.0) -> None:
    """Count requests of one row, with batches and without, in turns."""
    path = folder / "dense.vmfb"
    path.write_bytes(dense(WIDTH, 4))
    rates: dict[int, list[float]] = {1: [], ROWS: []}
    with Server(path) as alone, Server(path, f"--max-batch={ROWS}") as batched:
        for _ in range(3):
            for most, server in ((1, alone), (ROWS, batched)):
                counts = load(server.port, "dense", WIDTH, 2 * ROWS, lambda: sleep(seconds))
                assert set(counts) == {200}, counts
                rates[most].append(counts[200] / seconds)
        lines = batched.figures().splitlines()
        rows = [x.split()[-1] for x in lines if x.startswith(("aotc_batch_rows_count", "aotc_batch_rows_sum"))]
    one, many = (statistics.median(x) for x in rates.values())
    print(f"{2 * ROWS} clients of one row, 4 layers of {WIDTH} x {WIDTH} f32: {one:.0f} requests/s without", end=" ")
    print(f"batches, {many:.0f} with up to {ROWS} rows ({many / one:.2f});", end=" ")
    print(f"{float(rows[1]) / float(rows[0]):.1f} rows a batch")


def _texts() -> bytes:
    """Return a bundle that generates: a few dense layers, and a cache of 256 rows."""
    import jax
    import jax.numpy as jnp
    from jax import export

    width, rows, layers = 1024, 256, 4
    weights = np.random.default_rng(0).normal(size=(layers, width, width)).astype("f4") / width**0.5

    def step(x: Any, state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        for w in weights:
            x = jnp.tanh(x @ w)
        place = state["position"] % rows
        cache = state["cache"].at[jnp.arange(x.shape[0]), place].set(x)
        return x + cache.mean(1), {"cache": cache, "position": state["position"] + 1}

    def prefill(tokens: Any) -> Any:
        state = {"cache": jnp.zeros((1, rows, width)), "position": jnp.zeros(1, jnp.int32)}
        return step(jnp.full((1, width), tokens.sum(), "f4"), state)

    def decode(token: Any, state: dict[str, Any]) -> Any:
        return step(jnp.broadcast_to(token.astype("f4"), (token.shape[0], width)), state)

    (n,), (b,) = export.symbolic_shape("n"), export.symbolic_shape("b")
    state = {"cache": jax.ShapeDtypeStruct((b, rows, width), "f4"), "position": jax.ShapeDtypeStruct((b,), "i4")}
    args = {
        "prefill": (jax.ShapeDtypeStruct((1, n), "i4"),),
        "decode": (jax.ShapeDtypeStruct((b, 1), "i4"), state),
    }
    return aotc.compile({"prefill": jax.jit(prefill), "decode": jax.jit(decode, donate_argnums=1)}, args=args)


def _ask_tokens(port: int, count: int, _: int) -> int:
    data = json.dumps({"tokens": [1, 2], "max_tokens": count}).encode()
    lines = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(data)}\r\n"
    with socket.create_connection(("127.0.0.1", port), 600) as connection:
        connection.sendall(f"POST /v2/models/llm/generate_stream HTTP/1.1\r\n{lines}\r\n".encode() + data)
        return b"".join(iter(lambda: connection.recv(1 << 16), b"")).count(b'"index"')


def texts(folder: Path, count: int = 200) -> None:
    """Time the tokens of several clients, decoded together and each by itself, in turns."""
    path = folder / "llm.vmfb"
    with get_context("spawn").Pool(1) as pool:
        path.write_bytes(pool.apply(_texts))
    rates: dict[int, list[float]] = {1: [], ROWS: []}
    with Server(path) as alone, Server(path, f"--max-batch={ROWS}") as together, ThreadPoolExecutor(ROWS) as clients:
        for _ in range(3):
            for most, server in ((1, alone), (ROWS, together)):
                begin = perf_counter()
                made = sum(clients.map(partial(_ask_tokens, server.port, count), range(ROWS)))
                assert made == ROWS * count, made
                rates[most].append(made / (perf_counter() - begin))
    one, many = (statistics.median(x) for x in rates.values())
    print(f"{ROWS} streams of {count} tokens, 4 layers of 1024 x 1024 f32: {one:.0f} tokens/s each by itself,", end=" ")
    print(f"{many:.0f} together ({many / one:.2f})")


def swaps(folder: Path, count: int) -> None:
    """Replace the bundle while it is asked."""
    both = [dense(64, 1), dense(64, 2)]
    models = folder / "models"
    models.mkdir()

    def put(data: bytes) -> None:
        (models / ".new").write_bytes(data)
        os.replace(models / ".new", models / "m.vmfb")

    put(both[0])
    with Server(models, "--poll=0.001", "--max-batch=8") as server:
        begin = monotonic()

        def loads() -> float:
            return float(server.figures().partition('aotc_loads_total{model="m"} ')[2].partition("\n")[0])

        sizes = []

        def replace() -> None:
            for n in range(count):
                if n == count // 10:
                    sizes.append(server.memory())
                put(both[(n + 1) % 2])
                while loads() < n + 2:
                    sleep(0.0005)

        counts = load(server.port, "m", 64, 4, replace)
        lost = sum(number for status, number in counts.items() if status != 200)
        sizes.append(server.memory())
    print(f"{count:,} bundles replaced in {monotonic() - begin:.0f} s under load of 4 clients:", end=" ")
    print(f"{counts.get(200, 0):,} answers, {lost} lost;", end=" ")
    print("memory after a tenth and after all of it: " + ", ".join(f"{size >> 10:,} KiB" for size in sizes))


def memory(folder: Path, count: int) -> None:
    """Ask many times, and look at the server's memory."""
    path = folder / "flat.vmfb"
    path.write_bytes(dense(64, 2))
    with Server(path, "--max-batch=8") as server:
        done, before = 0, 0
        while done < count:
            done += load(server.port, "flat", 64, 4, lambda: sleep(5))[200]
            if not before:
                before, first = server.memory(), done
                print(f"memory of its own after {done:,} requests: {before >> 10:,} KiB", end="; ", flush=True)
        after = server.memory()
    print(f"after {done:,}: {after >> 10:,} KiB ({(after - before) / (done - first):+.2f} bytes a request)")


def main() -> None:
    """Measure what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--swaps", type=int, default=1000)
    parser.add_argument("--flat", type=int, default=100_000)
    parser.add_argument("--only", default="overhead,batching,texts,swaps,memory")
    options = parser.parse_args()
    wanted = options.only.split(",")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if "overhead" in wanted:
            overhead(folder, options.requests)
        if "batching" in wanted:
            batching(folder)
        if "texts" in wanted:
            texts(folder)
        if "swaps" in wanted:
            swaps(folder, options.swaps)
        if "memory" in wanted:
            memory(folder, options.flat)


if __name__ == "__main__":
    main()
