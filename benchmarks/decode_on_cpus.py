"""One query against a cache on a CPU, beside a loop that only reads: ``python benchmarks/decode_on_cpus.py --only i8``.

One thread; its processor time counts, for a busy machine's sake. Of each case both are asked in turn, round by round:
the model's attention, and a loop that reads as many bytes as its keys and values have (with a position: those up to
it), once. Printed are medians: of the time, and of the share of the loop's speed in each round. Caches lie as
``jax.nn.dot_product_attention`` has them (``b s h d``), or with a head's keys side by side (``b h s d``); those of i8
have an f32 scale for each key and value.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
LAYOUTS = ("bshd", "bhsd")
DTYPES = ("float32", "bfloat16", "i8")
SIZES = ((16, 16, 8192, 128), (32, 8, 8192, 128), (12, 12, 16384, 64), (8, 1, 65536, 64))


def cases() -> Iterator[tuple[str, str, str, tuple[int, ...], int]]:
    """Yield names, layouts, dtypes, sizes (heads, heads of keys, terms, depth), and of how many terms one is seen."""
    for layout in LAYOUTS:
        for dtype in DTYPES:
            for heads, keys, terms, depth in SIZES:
                for seen in (1, 4):
                    if seen == 1 or (heads, dtype) == (16, "bfloat16"):
                        name = f"{layout} {dtype}, {heads} heads of {depth}, {keys} of keys, {terms} terms, 1/{seen}"
                        yield name, layout, dtype, (heads, keys, terms, depth), seen


def program(layout: str, dtype: str, sizes: tuple[int, ...], seen: int) -> tuple[Any, list[Any]]:
    """Return the function and its arguments, of which the second and third are the cache."""
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np

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


def measure(case: tuple[Any, ...], given: argparse.Namespace, read: Any) -> tuple[float, float, float]:
    """Return the medians of our time, of the loop's, and of the share of its speed."""
    import jax
    import numpy as np

    import aotc
    from benchmarks.behind import sample

    function, arguments = program(*case[1:])
    seen = case[4]
    module = aotc.load(aotc.compile(jax.jit(function), *arguments, target=given.target), threads=1)
    found = np.asarray(module.invoke("main", *arguments)[0]).astype("f8")
    exact = [x.astype("f4") if x.dtype.kind not in "bi" else x for x in arguments]
    wanted = np.asarray(jax.jit(function)(*exact)).astype("f8")
    assert np.abs(found - wanted).max() < 2e-2 * np.abs(wanted).max(), "ours and XLA's differ"

    def reads() -> None:
        for x in arguments[1:3]:
            read(x.ctypes.data, x.nbytes // seen // 512 * 512)

    calls = (lambda: module.invoke("main", *arguments), reads)
    rounds = [[sample(call, time.process_time, given.seconds) for call in calls] for _ in range(given.rounds + 1)][1:]
    ours, alone = (statistics.median(times) for times in zip(*rounds, strict=True))
    return ours, alone, statistics.median(b / a for a, b in rounds)


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases in whose name this pattern is found")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.04, help="per call and round")
    parser.add_argument("--target", default="cpu")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    from benchmarks.thin_products import reader

    read = reader()
    print("| one query, one thread | us | us, reading | share of reading |")
    print("|---|---|---|---|")
    for case in cases():
        if re.search(given.only, case[0]):
            ours, alone, share = measure(case, given, read)
            print(f"| {case[0]} | {1e6 * ours:.0f} | {1e6 * alone:.0f} | {share:.2f} |", flush=True)


if __name__ == "__main__":
    main()
