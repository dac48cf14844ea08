"""Process that loads a bundle, calls it, and prints the time of its steps.

``python -m benchmarks.runtime.start_process steps|clocks BUNDLE START``; START is the time before its start. Before
the clock starts it only imports the standard library.
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from typing import Any


def steps(path: str, began: float) -> None:
    """Print the time of each step of this process, and the total as the last number."""
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


def clocks_of(path: str, began: float) -> None:
    """Print the time and the processor time of this process at the end of each step of the suite."""
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
    """Return arrays of ones for the arguments of a module.

    For 40 layers these are 9 MB, which take 4 ms.
    """
    arguments = module.functions["main"].signature.arguments
    return [np.ones(row["dims"], row["dtype"].replace("f", "float")) for row in arguments]


if __name__ == "__main__":
    (steps if sys.argv[1] == "steps" else clocks_of)(sys.argv[2], float(sys.argv[3]))
