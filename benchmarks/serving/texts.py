"""Tokens of several clients, decoded together.

Eight streams of 200 tokens, four layers of 1024 x 1024 in f32; both servers take turns.
"""

from __future__ import annotations

import json
import socket
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import aotc
from benchmarks import options, report, timing
from benchmarks.serving.server import ROWS, Server


def generator() -> bytes:
    """Return a bundle that generates tokens: a few dense layers, and a cache of 256 rows."""
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


def run(
    rounds: options.Rounds = 3, count: Annotated[int, typer.Option(help="Tokens of a stream.")] = 200
) -> None:
    """Print the rate of each server."""
    count = 4 if timing.SMOKE else count
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "llm.vmfb")
        with get_context("spawn").Pool(1) as pool:
            path.write_bytes(pool.apply(generator))
        with Server(path) as alone, Server(path, f"--max-batch={ROWS}") as together, ThreadPoolExecutor(ROWS) as pool:

            def token(server: Server) -> float:
                tokens: list[int] = []
                call = lambda: tokens.extend(pool.map(partial(_ask_tokens, server.port, count), range(ROWS)))
                took = timing.once(call)
                assert sum(tokens) == ROWS * count, tokens
                return took / sum(tokens)

            samples = {"each by itself": lambda: token(alone), "together": lambda: token(together)}
            times = timing.measured(samples, rounds, warm_up=False)
    table = report.Table(f"{ROWS} streams", "tokens/s", report.ratio("speedup"))
    for name in samples:
        table.add(name, 1 / times.median(name), times.ratio("each by itself", name))
