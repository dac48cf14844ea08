"""Ops of CHLO next to jaxlib's expansions of them, as ``jax.export`` writes these: errors, and processor time.

``PYTHONPATH=tests python -m conformance.expansions`` prints a line for each function and type.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import numpy as np

import aotc
from aotc.vmfb.dtypes import to_numpy
from conformance.edge_references import REAL
from conformance.edges import errors

COUNT, CHECKED, ROUNDS = 100_000, 3_000, 9
RANGES = {"digamma": (-10, 30), "erfc": (-3, 6), "erf_inv": (-1, 1), "lgamma": (-10, 30)}


def compare(name: str, dtype: str) -> str:
    """Return the line of a function: nanoseconds for an element and largest errors, of the op and of the expansion."""
    x = np.random.default_rng(0).uniform(*RANGES[name], COUNT).astype(to_numpy(dtype))
    function = jax.jit(getattr(jax.lax, name))
    models = function.lower(x), jax.export.export(function)(x)
    calls = [aotc.load(aotc.compile(model)) for model in models]
    with np.errstate(all="ignore"):
        want = REAL[name](x[:CHECKED].astype(np.longdouble))
    found = [errors(np.asarray(call(x))[:CHECKED], want).max() for call in calls]
    times = [[_seconds(call, x) for call in calls] for _ in range(ROUNDS)]
    own, theirs = (statistics.median(row) / COUNT * 1e9 for row in zip(*times, strict=True))
    return f"{name} {dtype}: {own:.2f} ns, {found[0]:.3g} ulp; expansion {theirs:.2f} ns, {found[1]:.3g} ulp"


def _seconds(call: Callable[..., Any], x: np.ndarray) -> float:
    start = time.process_time()
    call(x)
    return time.process_time() - start


if __name__ == "__main__":
    with jax.enable_x64(True):
        for name in RANGES:
            for dtype in ("f32", "f64"):
                print(compare(name, dtype), flush=True)
