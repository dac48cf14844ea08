"""Requests of a small model next to calls.

REST with binary tensors, 8 rows of 64 numbers, one connection.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

import numpy as np

import aotc
from benchmarks import options, report, timing
from benchmarks.serving.server import ROWS, Client, Server, dense


def run(rounds: options.Rounds = 3000) -> None:
    """Print the median and the 99th percentile of both."""
    rounds = 10 if timing.SMOKE else rounds
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "small.vmfb")
        path.write_bytes(dense(64, 2))
        module, x = aotc.load(path), np.ones((ROWS, 64), "f4")
        with Server(path) as server:
            client = Client(server.port, "small", x)
            for _ in range(1 if timing.SMOKE else 100):
                client.ask(), module(x)
            calls = {"request": client.ask, "module(...)": lambda: module(x)}
            times = timing.interleaved(calls, rounds=rounds)
    table = report.Table("call", report.us("p50"), report.us("p99"), report.us("over a call"))
    for name in calls:
        p99 = statistics.quantiles([*times.rounds[name], times.least(name)], n=100)[98]
        table.add(name, times.median(name), p99, times.median(name) - times.median("module(...)"))
