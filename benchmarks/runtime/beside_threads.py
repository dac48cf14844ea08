"""A call next to Python threads that compute.

The calling thread's time is computation, waiting for a core, and waiting for the GIL. The kernel counts the first two
(Linux, /proc/thread-self/schedstat); the third is the rest of the time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import aotc
from benchmarks import options, report, timing

LOOP = """
func.func public @fused(%n: tensor<i32>, %x: tensor<f32>) -> tensor<f32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<f32> cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %s = stablehlo.sine %a : tensor<f32>
    stablehlo.return %j, %s : tensor<i32>, tensor<f32>
  }
  return %0#1 : tensor<f32>
}
func.func public @products(%n: tensor<i32>, %x: tensor<300x300xf32>) -> tensor<300x300xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %a = %x) : tensor<i32>, tensor<300x300xf32> cond {
    %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %j = stablehlo.add %i, %one : tensor<i32>
    %d = stablehlo.dot_general %a, %x, contracting_dims = [1] x [0]
      : (tensor<300x300xf32>, tensor<300x300xf32>) -> tensor<300x300xf32>
    %s = stablehlo.sine %d : tensor<300x300xf32>
    stablehlo.return %j, %s : tensor<i32>, tensor<300x300xf32>
  }
  return %0#1 : tensor<300x300xf32>
}
"""
ARRAYS = {"fused": np.float32(0.5), "products": np.full((300, 300), 0.01, np.float32)}


def count_waiting_time(call: Callable[[], object]) -> tuple[float, float, float]:
    """Run a call; return the seconds that this thread computed, waited for a core, and waited otherwise."""

    def now() -> tuple[float, float, float]:
        with open("/proc/thread-self/schedstat") as file:
            queued = int(file.read().split()[1])
        return time.perf_counter(), time.thread_time(), queued / 1e9

    before = now()
    call()
    wall, running, queued = (b - a for a, b in zip(before, now()))
    return running, queued, wall - running - queued


def compute_until(stop: threading.Event) -> None:
    """Compute in Python until ``stop`` is set."""
    n = 0
    while not stop.is_set():
        n = (n * 5 + 1) % 65537


def steps_of(module: aotc.LoadedModule, name: str, seconds: float) -> np.int32:
    """Return the number of steps that take ``seconds`` to compute."""
    steps, running = 100, 0.0
    while running < seconds / 10:
        steps *= 4
        running, _, _ = count_waiting_time(partial(module.invoke, name, np.int32(steps), ARRAYS[name]))
    return np.int32(steps * seconds / running)


def run(seconds: options.Seconds = 1.0, rounds: options.Rounds = 5) -> None:
    """Print a row for each function and number of busy threads."""
    columns = [report.Column("computes s"), report.Column("core s"), report.Column("lock s"), "of all"]
    table = report.Table("function, threads, busy threads", *columns)
    seconds, rounds = (0.01, 1) if timing.SMOKE else (seconds, rounds)
    data = aotc.compile(LOOP)
    for name, threads in (("fused", 1), ("products", 1), ("products", 2)):
        module = aotc.load(data, threads=threads)
        steps = steps_of(module, name, seconds)
        for count in (0, 1, 4):
            stop = threading.Event()
            others = [threading.Thread(target=compute_until, args=(stop,)) for _ in range(count)]
            for thread in others:
                thread.start()
            rows = [count_waiting_time(partial(module.invoke, name, steps, ARRAYS[name])) for _ in range(rounds)]
            stop.set()
            for thread in others:
                thread.join()
            running, queued, waiting = (sum(column) / len(rows) for column in zip(*rows))
            share = waiting / (running + queued + waiting)
            table.add(f"{name}, {threads}, {count}", running, queued, waiting, share)
