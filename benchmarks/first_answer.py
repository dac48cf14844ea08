"""Milliseconds from the start of a process to its first result as a NumPy array, by step.

``python benchmarks/first_answer.py [cuda:sm_90 | cpu]``: each row is a process of its own that loads a bundle and calls
it. The first rows read files that are not in the page cache yet. After the rows of a model come medians of processes
that import NumPy alone, also import aotc, also load the bundle, also call it; they run in turn with the rows.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 15
STEPS = ("import numpy", "import aotc", "load", "first call")


def answer(path: str, began: float) -> None:
    """Print the time of each step of this process, and of all as the last number."""
    points = [("", began), ("interpreter", time.time())]
    import numpy as np

    points.append(("numpy", time.time()))
    import aotc

    load = aotc.load
    from aotc.vmfb.devices.cuda import driver

    points.append(("aotc", time.time()))
    if not driver.missing():
        points.append(("driver", time.time()))
        driver.Gpu(0)
        points.append(("context", time.time()))
    module = load(path)
    points.append(("load", time.time()))
    (found,) = module.invoke("main", *ones(np, module))
    points.append(("first call", time.time()))
    assert np.isfinite(found).all()
    rows = [(name, b - a) for (_, a), (name, b) in pairwise(points)]
    print(", ".join(f"{name} {took * 1e3:.1f}" for name, took in rows), (points[-1][1] - began) * 1e3)


def begin(step: str, path: str, began: float) -> None:
    """Do the first of ``STEPS``, up to ``step``, and print the time of this process."""
    import numpy as np

    last = STEPS.index(step)
    if last > 0:
        import aotc
    if last > 1:
        module = aotc.load(path)
    if last > 2:
        module.invoke("main", *ones(np, module))
    print((time.time() - began) * 1e3)


def ones(np: Any, module: Any) -> list[Any]:
    """Return arrays of ones for the arguments of a module; NumPy is imported when the clock runs."""
    arguments = module.functions["main"].signature.arguments
    return [np.ones(row["dims"], row["dtype"].replace("f", "float")) for row in arguments]


def run(*words: str) -> tuple[str, float, float]:
    """Run this file in a process; return what it prints before its last number, that number, and processor time in ms.

    Processor time says more than time on a machine that others use. Compiled modules are kept, whatever the environment
    says of it: else each process would compile the sources.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, __file__, *words, repr(time.time())]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    found = subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout
    row, _, took = found.strip().rpartition(" ")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return row, float(took), 1e3 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def make(folder: str, target: str) -> dict[str, str]:
    """Compile a small model and one of many kernels; return their files."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    import aotc

    def layers(x, *weights):
        for w in weights:
            x = jnp.tanh(x @ w)
            x = x / jnp.sum(x * x, axis=1, keepdims=True)
        return x

    found = {}
    for name, widths in (("1 layer", [64, 64]), ("40 layers", range(64, 64 + 8 * 41, 8))):
        weights = [np.full(shape, 0.01, np.float32) for shape in pairwise(widths)]
        found[name] = str(Path(folder, f"{len(widths)}.vmfb"))
        data = aotc.compile(jax.jit(layers), np.ones((16, 64), np.float32), *weights, target=target)
        Path(found[name]).write_bytes(data)
    return found


def main() -> None:
    """Print a row for each process, and for each model the medians of its steps next to the import of NumPy."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in make(folder, (sys.argv[1:] or ["cuda:sm_90"])[0]).items():
            samples: dict[str, list[tuple[float, float]]] = {step: [] for step in STEPS}
            for _ in range(ROUNDS):
                for step in STEPS:
                    samples[step].append(run("--begin", step, path)[1:])
                row, took, _ = run("--answer", path)
                print(f"{name}: {took:.0f} ms: {row}")
            alone = [median(column) for column in zip(*samples[STEPS[0]])]
            for step in STEPS:
                times = [median(column) for column in zip(*samples[step])]
                texts = [f"{a:.1f} ms, {a - b:.1f} beyond, {a / b:.2f}x" for a, b in zip(times, alone, strict=True)]
                print(f"{name}: up to {step}: {texts[0]}; processor time {texts[1]}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["--begin"]:
        begin(sys.argv[2], sys.argv[3], float(sys.argv[4]))
    else:
        main()
