"""Process of one engine and one model: ``python -m benchmarks.models.worker ENGINE FOLDER THREADS``.

It loads the model, compares the results with XLA's, and prints facts of its start. For each line with a number of
seconds it prints the time of a call and the memory of the process.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.peers.adapter import adapter
from benchmarks.timing import sample


def check(got: list[Any], folder: Path, tolerance: float) -> float:
    """Return the largest error relative to the result's largest value; raise if an error is above ``tolerance``."""
    stored = np.load(folder / "results.npz")
    want = [stored[key] for key in stored.files]
    if len(got) != len(want):
        raise ValueError(f"{len(got)} results, expected {len(want)}")
    worst = 0.0
    for a, b in zip(got, want):
        a = np.asarray(a)
        if a.shape != b.shape:
            raise ValueError(f"shape {a.shape}, expected {b.shape}")
        if not b.size:
            continue
        wide = "complex128" if a.dtype.kind == "c" else "float64"
        scale = max(float(np.abs(b).max()), 1e-30)
        error = float(np.abs(a.astype(wide) - b.astype(wide)).max()) / scale
        if not error <= tolerance:
            raise ValueError(f"error {error:.2g} of the largest value, allowed {tolerance:g}")
        worst = max(worst, error)
    return worst


def main(engine: str, folder: Path, threads: int) -> None:
    """Load and check a model, then measure calls for each line with a number of seconds."""
    facts = json.loads((folder / "facts.json").read_text())
    stored = np.load(folder / "inputs.npz")
    inputs = [stored[key] for key in stored.files]
    reply = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an engine prints is no reply
    module, precision = adapter(engine)
    begin = time.perf_counter()
    call, fetch = module.load(folder, inputs, facts, threads, precision)
    loaded = time.perf_counter()
    results = call()
    first = time.perf_counter()
    cold = time.time() - float(os.environ["BENCH_START"])
    error = check(fetch(results) if fetch else list(results), folder, facts["tolerance"])
    start = {"load": loaded - begin, "first": first - loaded, "cold": cold, "error": error}
    print(json.dumps(start), file=reply, flush=True)
    for line in sys.stdin:
        took = sample(call, float(line))
        rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({"seconds": took, "rss": rss}), file=reply, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
