"""Models on a GPU beside ``jax.jit``, on arrays that lie there: python benchmarks/gpu_models.py.

For each model, in us: a call until its results are ready, the two in turn, medians; and a call of many one behind the
other, of which none is waited for: what the GPU is busy with, or the host if that is slower. The error is the largest
difference from ``jax.jit`` on the CPU in full precision, as a share of the largest value, theirs beside it.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

import jax
import numpy as np
from gpu_zoo import ZOO, Case

import aotc
from aotc.vmfb.devices.cuda import driver

ROUNDS = 30
BEHIND = 30


def timed(call: Callable[[], Any], count: int = 1) -> float:
    """Return us of a call, of so many that are waited for together."""
    driver.call("cuCtxSynchronize")
    begin = time.perf_counter()
    for _ in range(count):
        kept = call()
    driver.call("cuCtxSynchronize")
    took = (time.perf_counter() - begin) / count * 1e6
    del kept
    return took


def worst(found: list[Any], want: list[Any]) -> float:
    """Return the largest difference, in terms of the largest value."""
    both = zip(found, want, strict=True)
    pairs = [(np.asarray(a).astype(np.float64), np.asarray(b).astype(np.float64)) for a, b in both]
    return max(float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-30)) for a, b in pairs)


def on_cpu(case: Case) -> list[np.ndarray]:
    """Return the results on the CPU, in full precision."""
    with jax.default_device(jax.devices("cpu")[0]), jax.default_matmul_precision("highest"):
        return [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function)(case.weights, *case.inputs))]


def measure(name: str, ratios: dict[str, list[float]]) -> None:
    """Print the line of a model."""
    case = ZOO[name]()
    arguments = (case.weights, *case.inputs)
    module = aotc.load(aotc.compile(jax.jit(case.function), *arguments, target="cuda:sm_90", source=False))
    placed = [module.put(np.asarray(x)) for x in jax.tree.leaves(arguments)]
    jitted, theirs = jax.jit(case.function), jax.device_put(arguments)

    def ours() -> Any:
        return module.invoke("main", *placed, results="device")

    def jax_call() -> Any:
        return jitted(*theirs)

    want = on_cpu(case)
    errors = [worst([x.numpy() for x in ours()], want), worst(jax.tree.leaves(jax_call()), want)]
    for _ in range(3):
        timed(ours), timed(jax_call)
    samples = [(timed(ours), timed(jax_call)) for _ in range(ROUNDS)]
    latency = [statistics.median(column) for column in zip(*samples, strict=True)]
    rows = [(timed(ours, BEHIND), timed(jax_call, BEHIND)) for _ in range(3)]
    behind = [statistics.median(column) for column in zip(*rows, strict=True)]
    ratios["latency"].append(latency[0] / latency[1])
    ratios["behind"].append(behind[0] / behind[1])
    wrong = "" if errors[0] <= max(case.tolerance, 2 * errors[1]) else "  WRONG"
    columns = "".join(f" {a:9.0f} {b:9.0f} {a / b:7.2f}" for a, b in (latency, behind))
    print(f"{name:20}{columns}   {errors[0]:.1e} {errors[1]:.1e}{wrong}", flush=True)


def main() -> None:
    """Run what the arguments name."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="parts of names of models")
    parser.add_argument("--compile", action="store_true", help="compile only, into the cache: that needs no GPU")
    given = parser.parse_args()
    names = [n for n in ZOO if not given.names or any(part in n for part in given.names)]
    ratios: dict[str, list[float]] = {"latency": [], "behind": []}
    print(f"{'':20} {'latency':>9} {'jax':>9} {'ratio':>7} {'behind':>9} {'jax':>9} {'ratio':>7}   errors")
    for name in names:
        try:
            if given.compile:
                case = ZOO[name]()
                aotc.compile(jax.jit(case.function), case.weights, *case.inputs, target="cuda:sm_90", source=False)
            else:
                measure(name, ratios)
        except Exception as error:  # the others are still worth measuring
            print(f"{name:20} {type(error).__name__}: {error}"[:400], flush=True)
    for what, found in ratios.items():
        if found:
            print(f"{what}: geometric mean {math.exp(statistics.mean(map(math.log, found))):.3f} of jax.jit's")


if __name__ == "__main__":
    main()
