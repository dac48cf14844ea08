"""Timing shared by all suites: interleaved samples, medians over rounds, ratios with their spread.

Other work on a machine disturbs all engines alike only if they take turns. So each round takes one sample of every
engine, in rotating order; a ratio is the median over the rounds of the ratio within a round.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

Call = Callable[[], Any]
Clock = Callable[[], float]
SMOKE = False  # one repetition of everything; set by --smoke
BATCH_SECONDS = 2e-5  # shorter calls are timed together, so that reading the clock (50 to 300 ns) does not count


@dataclass(frozen=True, slots=True)
class Ratio:
    """Median of the ratios of the rounds, with their lower and upper quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        digits = 2 if self.median >= 0.1 else 3
        around = f" ±{(self.high - self.low) / 2:.{digits}f}" if self.low < self.high else ""
        return f"{self.median:.{digits}f}{around}"


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a call of each engine, one number for each round."""

    rounds: Mapping[str, tuple[float, ...]]

    def median(self, name: str) -> float:
        """Return the median time of an engine."""
        return statistics.median(self.rounds[name])

    def least(self, name: str) -> float:
        """Return the shortest time of an engine."""
        return min(self.rounds[name])

    def ratio(self, name: str, base: str) -> Ratio:
        """Return the time of engine ``name`` relative to that of engine ``base``."""
        return spread([a / b for a, b in zip(self.rounds[name], self.rounds[base], strict=True)])


def spread(ratios: list[float]) -> Ratio:
    """Return the median and the quartiles of ratios."""
    if len(ratios) < 2:
        return Ratio(ratios[0], ratios[0], ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(median, low, high)


def interleaved(
    calls: Mapping[str, Call],
    *,
    rounds: int,
    seconds: float = 0.0,
    clock: Clock = time.perf_counter,
    wait: Call | None = None,
    batch: int = 1,
) -> Times:
    """Time calls of several engines in turn.

    Parameters
    ----------
    calls : mapping of str to callable
        A call for each engine.
    rounds : int
        Number of samples of each engine.
    seconds : float
        Duration of a sample; 0 for a single call.
    clock : Callable
        ``time.process_time`` where other processes use the machine and the call has one thread.
    wait : Callable, optional
        Waits for a GPU; called before a sample begins and before it ends.
    batch : int
        Minimum number of calls between two readings of the clock.
    """
    seconds, batch = (0.0, 1) if SMOKE else (seconds, batch)
    samples = {name: partial(sample, call, seconds, clock, wait, batch) for name, call in calls.items()}
    return measured(samples, rounds)


def measured(samples: Mapping[str, Callable[[], float]], rounds: int, warm_up: bool = True) -> Times:
    """Run functions that measure their own time in seconds, each once in every round.

    ``warm_up`` adds a first round that does not count.
    """
    warm_up = warm_up and not SMOKE
    order = list(samples)
    times: dict[str, list[float]] = {name: [] for name in order}
    for number in range(1 if SMOKE else rounds + warm_up):
        iteration = number % max(len(order), 1)
        for name in order[iteration:] + order[:iteration]:
            took = samples[name]()
            if number or not warm_up:
                times[name].append(took)
    return Times({name: tuple(row) for name, row in times.items()})


def sample(
    call: Call, seconds: float = 0.0, clock: Clock = time.perf_counter, wait: Call | None = None, batch: int = 1
) -> float:
    """Return the median time of the calls of one sample; very short calls are timed in batches."""
    readings: list[float] = []
    wait = wait or (lambda: None)
    wait()
    begin = time.perf_counter()
    while not readings or time.perf_counter() - begin < seconds:
        start = clock()
        for _ in range(batch):
            call()
        wait()
        took = (clock() - start) / batch
        readings.append(took)
        if seconds and len(readings) == 1 and batch * took < BATCH_SECONDS:
            batch = int(2 * BATCH_SECONDS / max(took, 1e-7)) + 1
            readings.clear()
    return statistics.median(readings)


def back_to_back(run: Call, wait: Call, seconds: float = 0.02, before: float = 0.2) -> float:
    """Return the seconds of a call among many on a GPU, without the latency of the first call and of the wait.

    Calls run for ``before`` seconds first: large matmuls raise a GPU to its power limit, where its clock depends on the
    previous work. So each program is measured after its own calls.
    """
    before = 0.0 if SMOKE else before
    end = time.perf_counter() + before
    while time.perf_counter() < end:
        for _ in range(4):
            run()
        wait()
    begin = time.perf_counter()
    run()
    wait()
    count = max(min(int(seconds / max(time.perf_counter() - begin, 1e-6)), 400), 4)

    def timed(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        return time.perf_counter() - start

    return statistics.median((timed(3 * count) - timed(count)) / (2 * count) for _ in range(1 if SMOKE else 5))


def once(call: Call) -> float:
    """Return the seconds of a single call that cannot be repeated."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def pin(threads: int) -> Clock:
    """Limit XLA to ``threads`` threads before it starts; return the clock for that number of threads.

    For one thread the clock is the processor time of the process, which is independent of other work on the machine.
    For more threads it is the wall clock, and the process is bound to as many cores.
    """
    if threads == 1:
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
        return time.process_time
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    return time.perf_counter
