"""Products of ragged groups beside XLA: benchmarks/ragged.py; ms of all threads' processor time, least of 7 calls."""

from __future__ import annotations

import time
from functools import partial

import jax
import numpy as np

import aotc

TERMS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
CASES = [(512, 512, 512, 8), (64, 256, 512, 8), (8, 256, 256, 32), (2048, 256, 256, 8)]


def by_terms(x, y, sizes):
    return jax.lax.ragged_dot_general(x, y, sizes, TERMS)


def least(run):
    """Return the processor time of all threads that the quickest of 7 calls takes, in ms."""
    times = []
    for _ in range(7):
        begin = time.process_time()
        run()
        times.append(1e3 * (time.process_time() - begin))
    return min(times)


def waited(jitted, *arguments):
    return jitted(*arguments).block_until_ready()


def main() -> None:
    """Print a row for each case."""
    random = np.random.default_rng(0)
    print(f"{'rows, terms, columns, groups':36} {'aotc':>8} {'XLA':>8} {'ratio':>6}")
    for rows, terms, columns, groups in CASES:
        x, w, y = (
            random.standard_normal(s, np.float32) for s in ((rows, terms), (groups, terms, columns), (rows, columns))
        )
        sizes = random.multinomial(rows, np.ones(groups) / groups).astype(np.int32)
        for name, function, arguments in (("", jax.lax.ragged_dot, (x, w, sizes)), ("terms", by_terms, (x, y, sizes))):
            module = aotc.load(aotc.compile(jax.jit(function), *arguments), threads=1)
            jitted = jax.jit(function)
            own = least(partial(module.invoke, "main", *arguments))
            other = least(partial(waited, jitted, *arguments))
            print(f"{f'{rows}, {terms}, {columns}, {groups} {name}':36} {own:8.2f} {other:8.2f} {own / other:6.2f}")


if __name__ == "__main__":
    main()
