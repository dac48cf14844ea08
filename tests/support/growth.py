"""How the time of something grows with its size: the same on a slow machine as on a fast one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def check_linear(make: Callable[[int], T], run: Callable[[T], object], size: int) -> None:
    """Assert that ``run`` on four times the size takes about four times as long, far from the sixteen of a square.

    Both are timed by processor time, and the best of three counts: the others hold what else the machine did. So what
    is short enough the first time is not timed again.
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
