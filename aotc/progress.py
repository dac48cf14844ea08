"""Progress of compilation: stages are reported to ``progress`` as they begin, and timed for ``--timings``.

A stage ends when the next begins, so the lines of ``--timings`` add up to the total time.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from aotc.options import Options
from aotc.vmfb.log import DEBUG, log

FIRST = "importing the compiler"


class StageTimer:
    """Print the time of each stage to stderr when the next one begins."""

    def __init__(self) -> None:
        self.begun = self.since = time.perf_counter()
        self.number, self.name = 0, FIRST

    def next(self, name: str, number: int = 0) -> None:
        """End the current stage and begin the stage ``name``; consecutive stages of the same name are merged."""
        if (name, number) == (self.name, self.number):
            return
        now = time.perf_counter()
        print(timings_line(self.name, now - self.since, self.number), file=sys.stderr)
        self.since, self.number, self.name = now, number, name

    def end(self) -> None:
        """End the last stage and print the total time."""
        self.next("")
        print(timings_line("total", self.since - self.begun), file=sys.stderr)


_LAPS: ContextVar[StageTimer | None] = ContextVar("laps", default=None)


def timings_line(name: str, seconds: float, number: int = 0) -> str:
    """Format a line of the ``--timings`` table; ``number`` is the number of a pass."""
    return f"{number or '':>3} {name:<30} {1e3 * seconds:8.1f} ms"


@contextmanager
def timed_stages(wanted: bool) -> Iterator[None]:
    """Time the stages in the ``with`` block if ``wanted``, unless an outer block already times them."""
    if not wanted or _LAPS.get() is not None:
        yield
        return
    laps = StageTimer()
    token = _LAPS.set(laps)
    try:
        yield
    finally:
        _LAPS.reset(token)
        laps.end()


def begin_stage(options: Options, name: str, number: int = 0, of: int = 1) -> None:
    """Report the begin of a stage to ``progress`` and ``--timings``; a pass has ``number`` ``of`` the total."""
    laps = _LAPS.get()
    if laps is not None and options.timings:
        laps.next(name, number)
    log(DEBUG, *(("pass %d of %d: %s", number, of, name) if number else ("%s", name)))
    options.advance(number, of, name)
