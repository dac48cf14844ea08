"""Attention in bf16 and f32 next to XLA.

One thread, in processor time. Each case in bf16 and f32 takes turns with XLA's bf16, and with a loop that reads as
many bytes as the keys and values have. The columns: GFLOP/s of both matmuls (half of them for causal attention), the
time relative to XLA's and to that of f32, and for decoding the fraction of the loop's speed. ``--target`` compiles for
another processor, such as ``cpu:x86-64-v4-vnni``, which widens bf16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import aotc
from benchmarks import options, report, timing
from benchmarks.ops.read_loop import read_loop
from benchmarks.peers.jax_jit import jax_call_on_device

Case = tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]


def cases() -> Iterator[Case]:
    """Yield names, functions, and the shapes of queries and keys: batch, rows, heads, depth."""
    def attention(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v)

    def causal(q: Any, k: Any, v: Any) -> Any:
        return jax.nn.dot_product_attention(q, k, v, is_causal=True)

    def cached(q: Any, k: Any, v: Any) -> Any:
        mask = (jnp.arange(k.shape[1]) < k.shape[1] - 5)[None, None, None]
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    for rows, heads, depth in ((128, 12, 64), (512, 12, 64), (2048, 4, 64), (2048, 4, 128), (197, 6, 64)):
        shape = (1, rows, heads, depth)
        yield f"{rows} rows, {heads} heads of {depth}", attention, shape, shape
    yield "causal 2048 rows, 4 heads of 128", causal, (1, 2048, 4, 128), (1, 2048, 4, 128)
    yield "causal 1024 rows, 8 heads of 128, 2 of keys", causal, (1, 1024, 8, 128), (1, 1024, 2, 128)
    for heads, keys, terms, depth in ((16, 16, 8192, 128), (32, 8, 16384, 128), (12, 12, 16384, 64), (8, 1, 65536, 64)):
        shapes = (1, 1, heads, depth), (1, terms, keys, depth)
        yield f"decode {terms} terms, {heads} heads of {depth}, {keys} of keys", attention, *shapes
    yield "decode masked 16384 terms, 32 heads of 128, 8 of keys", cached, (1, 1, 32, 128), (1, 16384, 8, 128)


def calls_of(case: Case, target: str) -> dict[str, timing.Call]:
    """Return the calls in bf16 and in f32, XLA's call, and the read loop."""
    _, function, queries, keys = case
    random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    wide = [np.resize(np.roll(random, 7 * n), shape) for n, shape in enumerate((queries, keys, keys))]
    narrow = [x.astype(ml_dtypes.bfloat16) for x in wide]
    jitted, read = jax.jit(function), read_loop()
    of_bf16, of_f32 = (aotc.load(aotc.compile(jitted, *x, target=target), threads=1) for x in (narrow, wide))
    got, exact = (np.asarray(m.invoke("main", *x)[0]).astype("f8") for m, x in ((of_bf16, narrow), (of_f32, wide)))
    assert np.abs(got - exact).max() < 3e-2 * np.abs(exact).max(), "bf16 and f32 differ"

    def reads() -> None:
        for x in narrow[1:]:
            read(x.ctypes.data, x.nbytes // 512 * 512)

    return {
        "bf16": lambda: of_bf16.invoke("main", *narrow), "f32": lambda: of_f32.invoke("main", *wide),
        "XLA": jax_call_on_device(function, narrow), "reads": reads,
    }  # fmt: skip


def run(
    only: options.Only = "", rounds: options.Rounds = 5, seconds: options.Seconds = 0.05, target: options.Target = "cpu"
) -> None:
    """Print a row for each case."""
    clock = timing.pin(1)
    columns = [report.us("bf16"), report.Column("GFLOP/s", 1e-9), report.ratio("bf16/XLA"), report.ratio("bf16/f32")]
    table = report.Table("attention", *columns, "of reading")
    known = {case[0]: case for case in cases()}
    for name in options.select(known, only):
        case = known[name]
        times = timing.interleaved(calls_of(case, target), rounds=rounds, seconds=seconds, clock=clock)
        (_, rows, heads, depth), terms = case[2], case[3][1]
        ours = times.median("bf16")
        rate = 4 * rows * heads * depth * terms / ours / (2 if "causal" in name else 1)
        share = times.median("reads") / ours if rows == 1 else None
        table.add(name, ours, rate, times.ratio("bf16", "XLA"), times.ratio("bf16", "f32"), share)
