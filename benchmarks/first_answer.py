"""Milliseconds from the start of a process to its first answer as a NumPy array, and what they are spent on.

``python benchmarks/first_answer.py [cuda:sm_90]``: each row is a process of its own that loads a bundle and calls it;
the first ones read the files that the system has not read yet.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

ROUNDS = 5


def answer(path: str, began: float) -> None:
    """Be the process: print what the time was spent on."""
    points = [("", began), ("interpreter", time.time())]
    import numpy as np

    points.append(("numpy", time.time()))
    import aotc

    load = aotc.load
    from aotc.vmfb.devices import driver

    points.append(("aotc", time.time()))
    if not driver.missing():
        points.append(("driver", time.time()))
        driver.Gpu(0)
        points.append(("context", time.time()))
    module = load(path)
    points.append(("load", time.time()))
    arguments = module.functions["main"].signature.arguments
    arrays = [np.ones(row["dims"], row["dtype"].replace("f", "float")) for row in arguments]
    (found,) = module.invoke("main", *arrays)
    assert np.isfinite(found).all()
    points.append(("first call", time.time()))
    rows = [(name, b - a) for (_, a), (name, b) in pairwise(points)]
    print(f"{(points[-1][1] - began) * 1e3:.0f} ms:", ", ".join(f"{name} {took * 1e3:.0f}" for name, took in rows))


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
    """Print a row for each process."""
    with tempfile.TemporaryDirectory() as folder:
        for name, path in make(folder, (sys.argv[1:] or ["cuda:sm_90"])[0]).items():
            for _ in range(ROUNDS):
                words = [sys.executable, __file__, "--answer", path, repr(time.time())]
                found = subprocess.run(words, check=True, capture_output=True, text=True).stdout
                print(f"{name}: {found.strip()}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--answer"]:
        answer(sys.argv[2], float(sys.argv[3]))
    else:
        main()
