"""How the time of something grows with its size: the same on a slow machine as on a fast one."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def check_linear(make: Callable[[int], T], run: Callable[[T], object], size: int) -> None:
    """Assert that ``run`` on four times the size takes about four times as long, far from the sixteen of a square.

    Both are timed in turn, by processor time, and the best of three counts: the others hold what else the machine did.
    """
    small, large = make(size), make(4 * size)
    run(small)
    times = [(_seconds(run, small), _seconds(run, large)) for _ in range(3)]
    short, long = (min(column) for column in zip(*times, strict=True))
    assert long < 9 * short + 0.05, f"{size}: {short:.3f} s, {4 * size}: {long:.3f} s"


def _seconds(run: Callable[[T], object], value: T) -> float:
    begin = time.process_time()
    run(value)
    return time.process_time() - begin
