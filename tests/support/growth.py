"""Growth of a running time with the size of its input, independent of the machine's speed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def check_linear(make: Callable[[int], T], run: Callable[[T], object], size: int) -> None:
    """Assert that ``run`` takes about four times as long for four times the size, and not sixteen times.

    Processor time is measured, and the best of three counts, as other work disturbs the others. A first measurement
    that is short enough is not repeated.
    """
    small, large = make(size), make(4 * size)
    run(small)
    short = min(_seconds(run, small) for _ in range(3))
    long = []
    while not long or (long[-1] >= 9 * short + 0.05 and len(long) < 3):
        long.append(_seconds(run, large))
    assert long[-1] < 9 * short + 0.05, f"{size}: {short:.3f} s, {4 * size}: {min(long):.3f} s"


def _seconds(run: Callable[[T], object], value: T) -> float:
    begin = time.process_time()
    run(value)
    return time.process_time() - begin
