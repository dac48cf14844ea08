"""Export, compile, load and time the models of the zoo beside ``jax.jit``: ``python benchmarks/zoo.py [NAME...]``.

Each in a process of its own; their answers are compared. One thread, processor time of all processes, calls in turn,
medians: other work on the machine changes little of the ratios. ``--write`` keeps the figures in
examples/zoo/measured.json, of which ``python docs/make_zoo.py`` makes the page.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

MEASURED = ROOT / "examples/zoo/measured.json"
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"


def sample(call: Callable[[], Any], seconds: float) -> float:
    """Return the mean processor time of calls that take so long together."""
    count, start, end = 0, time.process_time(), 0.0
    while end < seconds:
        call()
        count += 1
        end = time.process_time() - start
    return end / count


def largest_error(ours: Any, theirs: Any) -> float:
    """Return the largest difference of two results, in the largest value of each leaf."""
    import jax
    import numpy as np

    errors = [0.0]
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        wide = np.asarray(b, "float64")
        errors.append(float(np.abs(np.asarray(a, "float64") - wide).max() / max(np.abs(wide).max(), 1e-30)))
    return max(errors)


def measure(name: str, small: bool, rounds: int, seconds: float) -> dict[str, float]:
    """Return the figures of a model: export to a file, compile it without a cache, load, compare, time."""
    import jax

    import aotc
    from benchmarks.compile_ratios import processor_time
    from examples.zoo.models import ZOO

    model = ZOO[name].build(small)
    with TemporaryDirectory() as folder:
        exported, bundle = Path(folder, f"{name}.jax"), Path(folder, f"{name}.vmfb")
        jitted = jax.jit(model.function)
        exported.write_bytes(jax.export.export(jitted)(*model.inputs).serialize())
        start = processor_time()
        aotc.compile(exported, cache=False, source=False).save(bundle)
        compiled = processor_time() - start
        module = aotc.load(bundle, threads=1)
        there = jax.device_put(model.inputs)
        start = time.process_time()
        theirs = jax.block_until_ready(jitted(*there))
        theirs_compiled = time.process_time() - start
        error = largest_error(module(*model.inputs), theirs)
        if not error < 1e-3:
            sys.exit(f"{name}: the largest error is {error:.1e} of the largest value")
        calls = [lambda: module(*model.inputs), lambda: jax.block_until_ready(jitted(*there))]
        times = [[sample(call, seconds) for call in calls] for _ in range(rounds + 1)][1:]
        return {
            "parameters": sum(x.size for x in jax.tree.leaves(model.weights)),
            "bundle": bundle.stat().st_size,
            "compile": compiled,
            "jit": theirs_compiled,
            "error": error,
            "call": statistics.median(ours for ours, _ in times),
            "ratio": statistics.median(ours / theirs for ours, theirs in times),
        }


def main() -> None:
    """Print a line for each model."""
    from examples.zoo.models import ZOO

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="models; all without one")
    parser.add_argument("--small", action="store_true", help="the small form, which the tests run")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.3, help="per engine and round")
    parser.add_argument("--write", action="store_true", help="keep the figures for the page")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(measure(given.one, given.small, given.rounds, given.seconds)))
        return
    environment = {**os.environ, "XLA_FLAGS": ONE_THREAD, "PYTHONWARNINGS": "ignore"}
    failed = []
    for name in given.names or ZOO:
        words = [*sys.argv[1:], f"--one={name}"]
        done = subprocess.run([sys.executable, __file__, *words], env=environment, stdout=subprocess.PIPE)
        if done.returncode:
            failed.append(name)
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        shown = (
            f"{row['parameters'] / 1e6:.1f} M parameters, {row['bundle'] / 1e6:.1f} MB, compiled in "
            f"{row['compile']:.1f} s, a call {1e3 * row['call']:.2f} ms, {row['ratio']:.2f} of jax.jit's, "
            f"error {row['error']:.0e}"
        )
        print(f"{name}: {shown}", flush=True)
        if given.write:
            known = json.loads(MEASURED.read_text()) if MEASURED.exists() else {}
            MEASURED.write_text(json.dumps({**known, name: row}, indent=1, sort_keys=True) + "\n")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
