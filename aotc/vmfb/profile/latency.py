"""Latency and throughput of calls, with confidence intervals."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from math import ceil, floor, sqrt
from statistics import mean, stdev
from time import perf_counter
from typing import Any, NamedTuple

from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.profile.records import Dispatch


class Interval(NamedTuple):
    """An estimate and its 95 % confidence interval, for independent samples."""

    value: float
    low: float
    high: float


# 95 % of a normal distribution is within this many standard deviations of its mean.
SURE_DEVIATIONS = 1.96


def quantile(times: Sequence[float], share: float) -> Interval:
    """Return the quantile ``share`` (0 to 1) of ``times`` with its 95 % confidence interval.

    The interval is from the normal approximation of the ranks of samples.
    """
    ordered, last = sorted(times), len(times) - 1
    off = SURE_DEVIATIONS * sqrt(len(times) * share * (1 - share))
    at = share * last
    low, high = max(0, floor(at - off)), min(last, ceil(at + off))
    return Interval(ordered[int(at)], ordered[low], ordered[high])


# 95 % confidence interval of a mean in standard errors, for 1 to 10 degrees of freedom: Student's t distribution. For
# more degrees the last value serves; its interval is slightly too wide.
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def average(rounds: Sequence[float]) -> Interval:
    """Return the mean of several rounds with its 95 % confidence interval, by Student's t distribution."""
    middle = mean(rounds)
    if len(rounds) < 2:
        return Interval(middle, 0.0, float("inf"))
    off = STUDENT[min(len(rounds) - 2, len(STUDENT) - 1)] * stdev(rounds) / sqrt(len(rounds))
    return Interval(middle, middle - off, middle + off)


def latencies(call: Callable[[], Any], seconds: float) -> list[float]:
    """Call ``call`` for ``seconds``, at least once, and return the latency of each call."""
    found: list[float] = []
    end = perf_counter() + seconds
    while not found or perf_counter() < end:
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return found


def measure_concurrently(call: Callable[[], Any], callers: int, seconds: float) -> tuple[float, list[float]]:
    """Call ``call`` repeatedly on ``callers`` threads for ``seconds``.

    Returns
    -------
    rate : float
        Calls per second of all threads together.
    latencies : list of float
        Seconds of each call.

    Raises
    ------
    Exception
        The first exception of a call.
    """
    times: list[list[float]] = [[] for _ in range(callers)]
    failures: list[BaseException] = []
    go = new_lock()  # held until all threads have started
    go.acquire()

    def work(mine: list[float]) -> None:
        """Call repeatedly on one thread, once all threads have started."""
        with go:
            pass
        try:
            mine += latencies(call, seconds)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(mine,), daemon=True) for mine in times]
    for thread in threads:
        thread.start()
    begin = perf_counter()
    go.release()
    for thread in threads:
        thread.join()
    spent = perf_counter() - begin
    if failures:
        raise failures[0]
    every = [t for mine in times for t in mine]
    return len(every) / spent, every


class KernelTimes(NamedTuple):
    """Statistics of one kernel for certain sizes: runs per call, nanoseconds of a run, share of all time, rates."""

    kernel: str
    loc: str
    sizes: dict[str, int]
    runs: float
    ns: Interval
    share: float
    threads: float
    bytes: int
    flops: int
    gflops: float
    gbs: float
    roofline: float


def times_by_kernel(dispatches: Sequence[Dispatch], calls: int) -> list[KernelTimes]:
    """Summarise the dispatches of ``calls`` calls by kernel and sizes, the largest total time first.

    Rates are those of the median time.
    """
    groups: dict[Any, list[Dispatch]] = {}
    for d in dispatches:
        groups.setdefault((d.kernel, *d.sizes.items()), []).append(d)
    total = sum(d.ns for d in dispatches)
    rows = []
    for some in groups.values():
        d, ns = some[0], quantile([d.ns for d in some], 0.5)
        share = sum(d.ns for d in some) / total
        roof = quantile([d.roofline for d in some], 0.5).value
        threads = sum(len(d.threads) for d in some) / len(some)
        rates = round(d.flops / ns.value, 3), round(d.bytes / ns.value, 3), roof
        counts = len(some) / calls, ns, share, round(threads, 2), d.bytes, d.flops
        rows.append(KernelTimes(d.kernel, d.loc, d.sizes, *counts, *rates))
    return sorted(rows, key=lambda row: -row.share)
