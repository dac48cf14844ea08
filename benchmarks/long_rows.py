"""Softmax, logsumexp and layer norm of long rows beside jax.jit: python benchmarks/long_rows.py [--target cuda:sm_90].

Both take turns, on arrays that lie where they are read. Times are in microseconds, the best and the median of a call;
of one core also the best of its own time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import aotc

SHAPES = ((32, 1 << 20), (256, 1 << 17), (64, 1 << 17), (8, 1 << 17), (1, 1 << 20), (1, 1 << 22), (4096, 1 << 14))


def layer_norm(x: Any) -> Any:
    """Return rows less their mean over their deviation."""
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


FUNCTIONS = {"softmax": jax.nn.softmax, "logsumexp": lambda x: jax.nn.logsumexp(x, -1), "layer_norm": layer_norm}


def turns(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return the microseconds of each call of ``runs``, by the clock and of this thread."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for n in range(rounds + 2):
        for name, run in runs.items():
            begin, own = time.perf_counter(), time.thread_time()
            run()
            if n > 1:
                found[name].append(((time.perf_counter() - begin) * 1e6, (time.thread_time() - own) * 1e6))
    return found


def main() -> None:
    """Print a line for each function and shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    gpu = options.target.startswith("cuda")
    where = {"devices": "cuda"} if gpu else {"threads": options.threads}
    for name, function in FUNCTIONS.items():
        for shape in SHAPES:
            x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32) * 3 + 1
            compiled = jax.jit(function)
            module = aotc.load(aotc.compile(compiled, x, target=options.target), **where)
            copy = aotc.load(aotc.compile(jax.jit(jnp.positive), x, target=options.target), **where)
            ours = copy.invoke("main", x, results="device")[0] if gpu else x
            theirs = jax.device_put(x)
            kind = "device" if gpu else "numpy"
            runs = {
                "aotc": lambda: module.invoke("main", ours, results=kind),  # noqa: B023  (called in this iteration)
                "jax": lambda: compiled(theirs).block_until_ready(),  # noqa: B023
            }
            text = []
            for who, calls in turns(runs, options.rounds).items():
                wall, own = ([pair[k] for pair in calls] for k in (0, 1))
                text.append(f"{who} {min(wall):8.0f} {median(wall):8.0f} (own {min(own):8.0f})")
            print(f"{name:10} {shape[0]:5} x {shape[1]:<8}", "  ".join(text), flush=True)


if __name__ == "__main__":
    main()
