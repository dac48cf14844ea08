"""What a submission costs, and two stages at once: ``python benchmarks/fences.py``.

Costs: a tiny call, and the same submitted and waited for; medians of samples that are taken in turn, round by round.
Who waits with a time limit, or in a coroutine, leaves the call to a dispatcher, which is asleep in the last row.

Stages: a model in two halves of equal work, one thread each, ``cpu:0`` and ``cpu:1``: 64 requests, each stage one after
the other, beside the halves one after the other on one thread; and beside what two processes reach that run the whole
at the same time, which is what this machine has to give.

Callers: how threads that call at the same time share the cores; and what a device of its own is worth to one of them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import aotc

TINY = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
STAGE = """
func.func public @main(%x: tensor<SIZExSIZExf32>, %w: tensor<SIZExSIZExf32>) -> tensor<SIZExSIZExf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<SIZExSIZExf32>, tensor<SIZExSIZExf32>) -> tensor<SIZExSIZExf32>
  %1 = stablehlo.tanh %0 : tensor<SIZExSIZExf32>
  return %1 : tensor<SIZExSIZExf32>
}
"""
REQUESTS = 64


def timed(call: Callable[[], object]) -> float:
    """Return the seconds of a call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def costs(rounds: int, calls: int) -> None:
    """Print what submissions cost more than calls."""
    module = aotc.load(aotc.compile(TINY), threads=1)
    x = np.ones(4, np.float32)

    async def awaited() -> list[float]:
        found = []
        for _ in range(calls):
            start = time.perf_counter()
            await module.submit("main", x)
            found.append(time.perf_counter() - start)
        return found

    def asleep() -> list[float]:
        found = []
        for _ in range(calls // 20):
            time.sleep(0.002)
            found.append(timed(lambda: module.submit("main", x).result(60)))
        return found

    def sampled(call: Callable[[], object]) -> Callable[[], list[float]]:
        return lambda: [timed(call) for _ in range(calls)]

    rows: dict[str, Callable[[], list[float]]] = {
        "a call": sampled(lambda: module.invoke("main", x)),
        "submit, result": sampled(lambda: module.submit("main", x).result()),
        "submit, result(60): a dispatcher runs it": sampled(lambda: module.submit("main", x).result(60)),
        "submit, await": lambda: asyncio.run(awaited()),
        "submit, result(60) after 2 ms": asleep,
    }
    medians: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(rounds):
        for name, row in rows.items():
            medians[name].append(statistics.median(row()) * 1e6)
    plain = statistics.median(medians["a call"])
    for name, found in medians.items():
        middle = statistics.median(found)
        print(f"{name:42} {middle:7.2f} us, {middle - plain:6.2f} over a call")


def stages(size: int, rounds: int) -> None:
    """Print how two stages at once compare with one after the other."""
    path = Path(tempfile.mkdtemp()) / "stage.vmfb"
    aotc.compile(STAGE.replace("SIZEx", f"{size}x")).save(path)
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
    alone, both, pairs = [], [], []
    for _ in range(rounds):
        alone.append(timed(one_device))
        both.append(timed(two_devices))
        pairs.append(processes(path, size))
    pipelined = statistics.median(a / b for a, b in zip(alone, both, strict=True))
    possible = statistics.median(2 * a / p for a, p in zip(alone, pairs, strict=True))
    one, two = (statistics.median(found) * 1e3 for found in (alone, both))
    print(f"{REQUESTS} requests, one device {one:.1f} ms, two {two:.1f} ms:")
    print(f"{pipelined:.2f} times as fast; two processes {possible:.2f}; share of that {pipelined / possible:.2f}")


def callers(size: int, seconds: float) -> None:
    """Print how many calls of all threads one caller makes in a second, and each of several at the same time."""
    path = Path(tempfile.mkdtemp()) / "stage.vmfb"
    aotc.compile(STAGE.replace("SIZEx", f"{size}x")).save(path)
    module = aotc.load(path)
    x = np.full((size, size), 0.01, np.float32)

    def call(made: list[int], end: float) -> None:
        count = 0
        while time.perf_counter() < end:
            module.invoke("main", x, x)
            count += 1
        made.append(count)

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
        print(f"{number} callers, {several} threads: {total:.0f} calls a second, each {each}")


def devices(size: int, seconds: float) -> None:
    """Print how many calls a caller makes in a second beside three others: all on one device, and it on another."""
    path = Path(tempfile.mkdtemp()) / "stage.vmfb"
    aotc.compile(STAGE.replace("SIZEx", f"{size}x")).save(path)
    x = np.full((size, size), 0.01, np.float32)

    def call(module: Any, name: str, made: dict[str, int], end: float) -> None:
        while time.perf_counter() < end:
            module.invoke("main", x, x)
            made[name] += 1

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
        rates = f"{made['one'] / seconds:.0f} calls a second beside {three / seconds:.0f} of three"
        print(f"one caller on {other}, three on cpu:0: {rates}")


def processes(path: Path, size: int) -> float:
    """Return the seconds in which two processes compute all requests each, at the same time."""
    command = [sys.executable, __file__, "--child", str(path), "--size", str(size)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    children = [subprocess.Popen(command, text=True, **pipes) for _ in range(2)]  # type: ignore[call-overload]
    for child in children:
        child.stdout.readline()
    for child in children:
        child.stdin.write("\n")
        child.stdin.flush()
    found = [float(child.stdout.readline()) for child in children]
    for child in children:
        child.stdin.close()
        child.wait()
    return max(found)


def answer(path: Path, size: int) -> None:
    """Be one of two processes."""
    module = aotc.load(path, threads=1)
    w = np.full((size, size), 0.01, np.float32)
    inputs = [np.full((size, size), 0.001 * n, np.float32) for n in range(REQUESTS)]

    def whole() -> None:
        for x in inputs:
            module.invoke("main", module.invoke("main", x, w)[0], w)

    whole()
    print("ready", flush=True)
    sys.stdin.readline()
    print(timed(whole), flush=True)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--size", type=int, default=512, help="of the stages' matrices")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        answer(given.child, given.size)
        return
    costs(given.rounds, given.calls)
    stages(given.size, given.rounds)
    callers(given.size, 3)
    devices(given.size, 3)


if __name__ == "__main__":
    main()
