"""Progress on a terminal: a bar with the stage and the estimated time left of a compilation; the step of a search."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

Report = Callable[[int, int, str], None]

PASSES = "passes"
_KERNELS = "compiling kernels"
_SHARES = {
    "importing the compiler": 9, "reading the model": 4, "importing the model": 4, PASSES: 9, "lowering": 9,
    _KERNELS: 55, "linking": 2, "keeping the model": 1, "writing the bundle": 3, "checking the bundle": 4,
}  # fmt: skip
"""Percent of the compile time of each stage, for a model of about 80 kernels that are not in the cache.

The time left is estimated from it, and for kernels from the kernels that are done.
"""
_REPEATED = (PASSES, "lowering", _KERNELS, "linking")  # once per target; lowering of all targets precedes kernels


def progress_bar(quiet: bool, targets: int = 1) -> AbstractContextManager[Report | None]:
    """Return a progress bar, or None if ``quiet`` or stderr is not a terminal."""
    return nullcontext() if quiet or not sys.stderr.isatty() else CompileProgressBar(targets)


def step_status(quiet: bool) -> AbstractContextManager[Callable[[str], object] | None]:
    """Return a line that shows the current step of a search, or None if ``quiet`` or stderr is not a terminal."""
    return nullcontext() if quiet or not sys.stderr.isatty() else _step_status()


@contextmanager
def _step_status() -> Iterator[Callable[[str], object]]:
    from rich.console import Console

    with Console(stderr=True).status("preparing the search") as status:
        yield status.update


class StageProgress:
    """Progress of a compilation for several targets, from the reports of its stages."""

    def __init__(self, targets: int = 1) -> None:
        self.targets = targets
        self.done = 0.0
        self._turns = dict.fromkeys(_REPEATED, 0)
        self._last = ""

    def update(self, done: int, total: int, what: str) -> float:
        """Return the completed fraction of the whole, which never decreases."""
        stage = what if what in _SHARES else PASSES
        if stage in self._turns and (stage != self._last or (stage == PASSES and done == 1)):
            self._turns[stage] += 1
        self._last = stage
        before = 0.0
        for name, share in _SHARES.items():
            if name == stage:
                break
            turns = self._turns.get(name, 1)
            before += share * min(turns / self.targets, 1.0) if name in _REPEATED else share
        within = max(done - 1, 0) if stage == PASSES else done
        turn = (self._turns.get(stage, 1) - 1 + within / max(total, 1)) / (self.targets if stage in _REPEATED else 1)
        self.done = max(self.done, min((before + _SHARES[stage] * min(turn, 1.0)) / sum(_SHARES.values()), 0.99))
        return self.done


def time_left_text(part: float, seconds: float) -> str:
    """Format the estimated time left after ``seconds``; empty while the estimate is too uncertain."""
    if part < 0.05 or seconds < 0.5:
        return ""
    return duration_text(seconds * (1 - part) / part)


def seconds_left_in_stage(done: int, rest: int, seconds: float) -> float:
    """Return the estimated seconds for ``rest`` more items after ``done`` items in ``seconds``; 0 below 3 items."""
    return seconds * rest / done if done >= 3 else 0.0


def duration_text(rest: float) -> str:
    """Format a duration left; empty below a second, which is below the accuracy of estimates."""
    if rest < 1:
        return ""
    return f"about {rest:.0f} s left" if rest < 90 else f"about {rest / 60:.0f} min left"


class CompileProgressBar:
    """Progress bar of a compilation on stderr, drawn by rich (a dependency of typer)."""

    def __init__(self, targets: int = 1) -> None:
        self._progress = StageProgress(targets)
        self._stage, self._since, self._first = "", 0.0, 0

    def __enter__(self) -> Report:
        """Draw the bar and return the callback that updates it."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

        columns = (
            TextColumn("{task.description:<34}"), BarColumn(bar_width=12), TaskProgressColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )  # fmt: skip
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self.task = self.bar.add_task("importing the compiler", total=1.0, left="")
        self._begun = perf_counter()
        self.bar.start()
        return self.update

    def update(self, done: int, total: int, what: str) -> None:
        """Update the bar with the progress that a compilation reports."""
        part = self._progress.update(done, total, what)
        counted = f"{what} {done}/{total}" if total > 1 else what
        now = perf_counter()
        if what != self._stage:
            self._stage, self._since, self._first = what, now, done
        rest = seconds_left_in_stage(done - self._first, total - done, now - self._since) if what == _KERNELS else 0.0
        left = duration_text(rest) if rest else time_left_text(part, now - self._begun)
        self.bar.update(self.task, completed=part, description=counted, left=left)

    def __exit__(self, *_: object) -> None:
        self.bar.stop()
