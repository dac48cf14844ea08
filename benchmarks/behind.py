"""Programs that were slower than XLA, beside it: ``python benchmarks/behind.py --threads 1``.

Samples in turn, medians. At one thread the time is the process's processor time, which other work on the machine does
not change; at more it is the wall's.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))


def sample(call: Callable[[], Any], clock: Callable[[], float], seconds: float) -> float:
    """Return the mean time of calls that take so long together."""
    count, start, end = 0, clock(), 0.0
    while end < seconds:
        call()
        count += 1
        end = clock() - start
    return end / count


def measure(name: str, given: argparse.Namespace) -> tuple[float, float, float]:
    """Return the median time of ours and of XLA's, and the median of the rounds' ratios."""
    import jax
    import numpy as np

    import aotc
    from benchmarks.behind_programs import PROGRAMS

    function, arguments = PROGRAMS[name]()
    jitted = jax.jit(function)
    leaves = [np.asarray(x) for x in jax.tree.leaves(arguments)]
    there = jax.device_put(arguments)
    module = aotc.load(aotc.compile(jitted, *arguments), threads=given.threads)
    for ours, theirs in zip(module.invoke("main", *leaves), jax.tree.leaves(jitted(*there)), strict=True):
        largest = float(np.abs(np.asarray(theirs)).max(initial=1e-6))
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-3 * largest)
    calls = [lambda: module.invoke("main", *leaves), lambda: jax.block_until_ready(jitted(*there))]
    clock = time.process_time if given.threads == 1 else time.perf_counter
    rounds = [[sample(call, clock, given.seconds) for call in calls] for _ in range(given.rounds + 1)][1:]
    ours, theirs = (statistics.median(times) for times in zip(*rounds))
    return ours, theirs, statistics.median(a / b for a, b in rounds)


def main() -> None:
    """Print a row for each program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="programs; all without one")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.05, help="per engine and round")
    given = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    if given.threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
    import aotc
    from benchmarks.behind_programs import PROGRAMS

    print(f"| program, {given.threads} threads | aotc | XLA | aotc / XLA |\n|---|---|---|---|")
    for name in given.names or PROGRAMS:
        try:
            ours, theirs, ratio = measure(name, given)
        except (ImportError, AssertionError, aotc.CompileError) as error:
            print(f"| {name} | {error} | | |".replace("\n", " "), flush=True)
            continue
        print(f"| {name} | {1e6 * ours:.1f} us | {1e6 * theirs:.1f} us | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
