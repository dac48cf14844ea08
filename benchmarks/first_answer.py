"""Milliseconds from the start of a process to its first result as a NumPy array, by step.

``python benchmarks/first_answer.py [cuda:sm_90 | cpu]``: each row is a process of its own that loads a bundle and calls
it. The first rows read files that are not in the page cache yet. After the rows of a model come medians of as many
other processes: time and processor time up to each step, and their part after the import of NumPy. That part is a
difference within a process, so it varies less than the times of processes do on a machine that others use. The exit is
not in it: there Python collects garbage, 15 ms of processor time after the import of NumPy alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

ROUNDS = 15
STEPS = ("import numpy", "import aotc", "load", "arguments", "first call")


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
    arguments = ones(np, module)
    points.append(("arguments", time.time()))
    (found,) = module.invoke("main", *arguments)
    points.append(("first call", time.time()))
    assert np.isfinite(found).all()
    rows = [(name, b - a) for (_, a), (name, b) in pairwise(points)]
    print(", ".join(f"{name} {took * 1e3:.1f}" for name, took in rows), (points[-1][1] - began) * 1e3)


def begin(path: str, began: float) -> None:
    """Print the time and the processor time of this process at the end of each of ``STEPS``."""
    clocks = [began]

    def note() -> None:
        clocks.extend((time.time() - began, time.process_time()))

    import numpy as np

    note()
    import aotc

    note()
    module = aotc.load(path)
    note()
    arguments = ones(np, module)
    note()
    module.invoke("main", *arguments)
    note()
    print(*clocks[1:])


def ones(np: Any, module: Any) -> list[Any]:
    """Return arrays of ones for the arguments of a module: 9 MB for 40 layers, 4 ms of their process."""
    arguments = module.functions["main"].signature.arguments
    return [np.ones(row["dims"], row["dtype"].replace("f", "float")) for row in arguments]


def run(*words: str) -> str:
    """Run this file in a process; return what it prints.

    Compiled modules are kept, whatever the environment says of it: else each process would compile the sources.
    """
    command = [sys.executable, __file__, *words, repr(time.time())]
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=kept).stdout.strip()


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
    """Print a row for each process, and for each model the medians of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in make(folder, (sys.argv[1:] or ["cuda:sm_90"])[0]).items():
            samples = []
            for _ in range(ROUNDS):
                samples.append([1e3 * float(text) for text in run("--begin", path).split()])
                row, _, took = run("--answer", path).rpartition(" ")
                print(f"{name}: {float(took):.0f} ms: {row}")
            for step, wall, processor in zip(STEPS, beyond(samples, 0), beyond(samples, 1), strict=True):
                print(f"{name}: up to {step}: {wall}; processor time {processor}")


def beyond(samples: list[list[float]], kind: int) -> list[str]:
    """Return the median of a kind of time (0: time, 1: processor time) up to each step, and after the first one."""
    times = [sample[kind::2] for sample in samples]
    parts = [[time - row[0] for time in row] for row in times]
    return [f"{median(a):.1f} ms, {median(b):.1f} beyond NumPy" for a, b in zip(zip(*times), zip(*parts), strict=True)]


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], float(sys.argv[3]))
    elif sys.argv[1:2] == ["--begin"]:
        begin(sys.argv[2], float(sys.argv[3]))
    else:
        main()
