"""Submissions, pipelines, callers that share cores.

Costs: a tiny call, and the same call as a submission with a wait. A wait with a time limit, or in a coroutine, leaves
the call to a dispatcher, which is asleep in the last row.

Stages: a model in two halves of equal work on one thread each, ``cpu:0`` and ``cpu:1``: 64 requests through both
stages as a pipeline, next to the halves one after the other on one thread, and next to two processes that run the
whole model concurrently, which is the capacity of the machine.

Callers: the shares of concurrent callers of the same cores, and the gain of a separate device for one of them.
"""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

import aotc
from benchmarks import children, options, report, timing
from benchmarks.runtime.stage_models import REQUESTS, TINY, stage
from benchmarks.timing import once


def costs(rounds: int, calls: int) -> None:
    """Report the additional cost of submissions compared with calls."""
    module = aotc.load(aotc.compile(TINY), threads=1)
    x = np.ones(4, np.float32)

    async def awaited() -> float:
        times = []
        for _ in range(calls):
            start = time.perf_counter()
            await module.submit("main", x)
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def asleep() -> float:
        times = []
        for _ in range(calls // 20 + 1):
            time.sleep(0.002)
            times.append(once(lambda: module.submit("main", x).result(60)))
        return statistics.median(times)

    def sampled(call: Callable[[], object]) -> Callable[[], float]:
        return lambda: statistics.median(once(call) for _ in range(calls))

    samples: dict[str, Callable[[], float]] = {
        "a call": sampled(lambda: module.invoke("main", x)),
        "submit, result": sampled(lambda: module.submit("main", x).result()),
        "submit, result(60): a dispatcher runs it": sampled(lambda: module.submit("main", x).result(60)),
        "submit, await": lambda: asyncio.run(awaited()),
        "submit, result(60) after 2 ms": asleep,
    }
    times = timing.measured(samples, rounds)
    table = report.Table("submission", report.us("median"), report.us("over a call"))
    for name in samples:
        table.add(name, times.median(name), times.median(name) - times.median("a call"))


def stages(size: int, rounds: int) -> None:
    """Report two concurrent stages next to stages one after the other."""
    path = stage(size)
    first, second = (aotc.load(path, devices=f"cpu:{n}", threads=1) for n in (0, 1))
    w = np.full((size, size), 0.01, np.float32)
    inputs = [np.full((size, size), 0.001 * n, np.float32) for n in range(REQUESTS)]

    def one_device() -> list[np.ndarray]:
        return [first.invoke("main", first.invoke("main", x, w)[0], w)[0] for x in inputs]

    def two_devices() -> list[np.ndarray]:
        fences: list[aotc.Fence] = []
        last: tuple[list[aotc.Fence], list[aotc.Fence]] = ([], [])
        for x in inputs:
            half = first.submit("main", x, w, wait=last[0])
            whole = second.submit("main", half, w, wait=last[1])
            last = [half], [whole]
            fences.append(whole)
        return [fence.result(600)[0] for fence in fences]

    assert all(np.array_equal(a, b) for a, b in zip(one_device(), two_devices(), strict=True))
    samples: dict[str, Callable[[], float]] = {
        "one device": lambda: once(one_device), "two devices": lambda: once(two_devices),
        "two processes": lambda: processes(path, size),
    }  # fmt: skip
    times = timing.measured(samples, rounds, warm_up=False)
    table = report.Table(f"{REQUESTS} requests", report.ms("all"), report.ratio("speedup"))
    table.add("one device", times.median("one device"), None)
    table.add("two devices", times.median("two devices"), times.ratio("one device", "two devices"))
    possible = [2 * a / p for a, p in zip(times.rounds["one device"], times.rounds["two processes"], strict=True)]
    table.add("two processes, twice the work", times.median("two processes"), timing.spread(possible))


def callers(size: int, seconds: float) -> None:
    """Report the calls per second of one caller, and of several concurrent ones."""
    path = stage(size)
    module = aotc.load(path)
    x = np.full((size, size), 0.01, np.float32)

    def call(made: list[int], end: float) -> None:
        count = 0
        while time.perf_counter() < end:
            module.invoke("main", x, x)
            count += 1
        made.append(count)

    table = report.Table("callers", "threads", report.Column("calls/s"), report.Column("each", width=24))
    for number in (1, 2, 4):
        made: list[int] = []
        end = time.perf_counter() + seconds
        threads = [threading.Thread(target=call, args=(made, end)) for _ in range(number)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        each = ", ".join(f"{count / seconds:.0f}" for count in sorted(made))
        total, several = sum(made) / seconds, module.stats()["threads"]
        table.add(str(number), several, total, each)


def devices(size: int, seconds: float) -> None:
    """Report the calls per second of a caller next to three others, on the same device and on its own device."""
    path = stage(size)
    x = np.full((size, size), 0.01, np.float32)

    def call(module: Any, name: str, made: dict[str, int], end: float) -> None:
        while time.perf_counter() < end:
            module.invoke("main", x, x)
            made[name] += 1

    table = report.Table("one caller, three on cpu:0", report.Column("calls/s"), report.Column("of three/s"))
    for other in ("cpu:0", "cpu:1"):
        modules = [aotc.load(path, devices=device) for device in ("cpu:0", "cpu:0", "cpu:0", other)]
        made = dict.fromkeys(["a", "b", "c", "one"], 0)
        end = time.perf_counter() + seconds
        threads = [threading.Thread(target=call, args=(*row, made, end)) for row in zip(modules, made, strict=True)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        three = sum(made.values()) - made["one"]
        table.add(f"on {other}", made["one"] / seconds, three / seconds)


def processes(path: Path, size: int) -> float:
    """Return the seconds in which two concurrent processes compute all requests each."""
    command = children.module_command_line("benchmarks.runtime.stage_models", path, size)
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": children.environment()}
    both = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for child in both:
        child.stdout.readline()
    for child in both:
        child.stdin.write("\n")
        child.stdin.flush()
    seconds = [float(child.stdout.readline()) for child in both]
    for child in both:
        child.stdin.close()
        child.wait()
    return max(seconds)


def run(
    only: options.Only = "",
    rounds: options.Rounds = 9,
    calls: Annotated[int, typer.Option(help="Calls in a sample.")] = 1000,
    size: Annotated[int, typer.Option(help="Rows and columns of the stages' matrices.")] = 512,
    seconds: options.Seconds = 3.0,
) -> None:
    """Measure all parts, or those that --only selects."""
    if timing.SMOKE:
        rounds, calls, size, seconds = 1, 10, 16, 0.05
    parts: dict[str, Callable[[], None]] = {
        "costs": lambda: costs(rounds, calls), "stages": lambda: stages(size, rounds),
        "callers": lambda: callers(size, seconds), "devices": lambda: devices(size, seconds),
    }  # fmt: skip
    for name in parts if timing.SMOKE else options.select(parts, only):
        parts[name]()
