"""Attention on a CPU beside XLA: ``python benchmarks/attention_on_cpus.py --only decode``.

One thread; its processor time counts, for a busy machine's sake. Of each case bf16 and f32 are asked in turn, round by
round, with XLA's bf16, and with a loop that reads as many bytes as the keys and values have, once. Printed are medians:
GFLOP/s of both products (half of them where causal), of XLA's time, of the time of f32, and the share of the loop's
speed. ``--target`` compiles for another processor, as ``cpu:x86-64-v4-vnni``, which widens bf16.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
Case = tuple[str, Callable[..., Any], tuple[int, ...], tuple[int, ...]]


def cases() -> Iterator[Case]:
    """Yield names, functions, and the shapes of queries and keys: batch, rows, heads, depth."""
    import jax
    import jax.numpy as jnp

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


def measure(case: Case, given: argparse.Namespace, read: Any) -> list[float]:
    """Return the median times of ours in bf16 and in f32, XLA's, and the loop's."""
    import jax
    import ml_dtypes
    import numpy as np

    import aotc
    from benchmarks.behind import sample

    _, function, queries, keys = case
    random = np.random.default_rng(0).standard_normal(1 << 20, np.float32)
    wide = [np.resize(np.roll(random, 7 * n), shape) for n, shape in enumerate((queries, keys, keys))]
    narrow = [x.astype(ml_dtypes.bfloat16) for x in wide]
    jitted = jax.jit(function)
    of_bf16, of_f32 = (aotc.load(aotc.compile(jitted, *x, target=given.target), threads=1) for x in (narrow, wide))
    there = jax.device_put(narrow)
    got, exact = (np.asarray(m.invoke("main", *x)[0]).astype("f8") for m, x in ((of_bf16, narrow), (of_f32, wide)))
    assert np.abs(got - exact).max() < 3e-2 * np.abs(exact).max(), "bf16 and f32 differ"
    k, v = narrow[1:]

    def reads() -> None:
        for x in (k, v):
            read(x.ctypes.data, x.nbytes // 512 * 512)

    calls = [
        lambda: of_bf16.invoke("main", *narrow), lambda: of_f32.invoke("main", *wide),
        lambda: jax.block_until_ready(jitted(*there)), reads,
    ]  # fmt: skip
    rounds = [[sample(call, time.process_time, given.seconds) for call in calls] for _ in range(given.rounds + 1)][1:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def main() -> None:
    """Print a row for each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases in whose name this pattern is found")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=0.05, help="per call and round")
    parser.add_argument("--target", default="cpu")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    from benchmarks.thin_products import reader

    read = reader()
    print("| attention, one thread | bf16 us | GFLOP/s | of XLA's time | of f32's | share of reading, bf16; f32 |")
    print("|---|---|---|---|---|---|")
    for case in cases():
        if not re.search(given.only, case[0]):
            continue
        ours, wide, theirs, alone = measure(case, given, read)
        (_, rows, heads, depth), terms = case[2], case[3][1]
        rate = 4 * rows * heads * depth * terms / ours / (2 if "causal" in case[0] else 1) * 1e-9
        shares = f"{alone / ours:.2f}; {2 * alone / wide:.2f}" if rows == 1 else ""
        row = f"| {case[0]} | {1e6 * ours:.0f} | {rate:.0f} | {ours / theirs:.2f} | {ours / wide:.2f} | {shares} |"
        print(row, flush=True)


if __name__ == "__main__":
    main()
