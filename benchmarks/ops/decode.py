"""One query against a cache, next to a loop that reads.

One thread, in processor time. The model's attention and a loop that reads as many bytes as its keys and values have
(with a position: those up to it) take turns. Caches have the layout of ``jax.nn.dot_product_attention`` (``b s h d``),
or keys of a head are contiguous (``b h s d``); caches of i8 have an f32 scale for each key and value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

import aotc
from benchmarks import options, report, timing
from benchmarks.ops.read_loop import read_loop

LAYOUTS = ("bshd", "bhsd")
DTYPES = ("float32", "bfloat16", "i8")
SIZES = ((16, 16, 8192, 128), (32, 8, 8192, 128), (12, 12, 16384, 64), (8, 1, 65536, 64))


def cases() -> Iterator[tuple[str, str, str, tuple[int, ...], int]]:
    """Yield name, layout, dtype, sizes (heads, heads of keys, keys, depth), and the number of visible keys."""
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for heads, keys, terms, depth in SIZES:
                for seen in (1, 4):
                    if seen == 1 or (heads, dtype) == (16, "bfloat16"):
                        name = f"{layout} {dtype}, {heads} heads of {depth}, {keys} of keys, {terms} terms, 1/{seen}"
                        yield name, layout, dtype, (heads, keys, terms, depth), seen


def program(layout: str, dtype: str, sizes: tuple[int, ...], seen: int) -> tuple[Any, list[Any]]:
    """Return the function and its arguments; the second and third argument are the cache."""
    heads, keys, terms, depth = sizes
    random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    kind = np.dtype(np.float32) if dtype == "float32" else np.dtype(ml_dtypes.bfloat16)

    def some(seed: int, *shape: int) -> Any:
        return np.resize(np.roll(random, 7 * seed), shape)

    shape = (1, terms, keys) if layout == "bshd" else (1, keys, terms)
    cache = [some(n, *shape, depth) for n in (1, 2)]
    scales = [np.abs(some(n, *shape, 1)) / 40 + 0.01 for n in (3, 4)] if dtype == "i8" else []
    cache = [(40 * x).clip(-127, 127).astype(np.int8) if scales else x.astype(kind) for x in cache]

    def function(q: Any, k: Any, v: Any, *more: Any) -> Any:
        *scales, at = more
        if scales:
            k, v = ((x.astype(jnp.float32) * y).astype(q.dtype) for x, y in zip((k, v), scales, strict=True))
        if layout != "bshd":
            k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        mask = (jnp.arange(terms) <= at)[None, None, None] if seen > 1 else None
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    return function, [some(5, 1, 1, heads, depth).astype(kind), *cache, *scales, np.int32(terms // seen - 1)]


def calls_of(layout: str, dtype: str, sizes: tuple[int, ...], seen: int, target: str) -> dict[str, timing.Call]:
    """Return the calls of the compiled attention and of the loop."""
    function, arguments = program(layout, dtype, sizes, seen)
    module = aotc.load(aotc.compile(jax.jit(function), *arguments, target=target), threads=1)
    got = np.asarray(module.invoke("main", *arguments)[0]).astype("f8")
    exact = [x.astype("f4") if x.dtype.kind not in "bi" else x for x in arguments]
    want = np.asarray(jax.jit(function)(*exact)).astype("f8")
    assert np.abs(got - want).max() < 2e-2 * np.abs(want).max(), "aotc and XLA differ"
    read = read_loop()

    def reads() -> None:
        for x in arguments[1:3]:
            read(x.ctypes.data, x.nbytes // seen // 512 * 512)

    return {"aotc": lambda: module.invoke("main", *arguments), "reading": reads}


def run(
    only: options.Only = "", rounds: options.Rounds = 5, seconds: options.Seconds = 0.04, target: options.Target = "cpu"
) -> None:
    """Print a row for each cache."""
    clock = timing.pin(1)
    table = report.Table("cache", report.us("aotc"), report.us("reading"), report.ratio("of reading"))
    known = {name: rest for name, *rest in cases()}
    for name in options.select(known, only):
        times = timing.interleaved(calls_of(*known[name], target), rounds=rounds, seconds=seconds, clock=clock)
        table.add(name, times.median("aotc"), times.median("reading"), times.ratio("reading", "aotc"))
