"""Requests of one row, with batches and without.

Sixteen clients, four layers of 2048 x 2048 in f32; both servers take turns.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import sleep

from benchmarks import options, report, timing
from benchmarks.serving.server import ROWS, WIDTH, Server, dense, load


def run(rounds: options.Rounds = 3, seconds: options.Seconds = 4.0) -> None:
    """Print the rate of each server."""
    width, seconds = (64, 0.2) if timing.SMOKE else (WIDTH, seconds)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "dense.vmfb")
        path.write_bytes(dense(width, 4))
        with Server(path) as alone, Server(path, f"--max-batch={ROWS}") as batched:

            def request(server: Server) -> float:
                counts = load(server.port, "dense", width, 2 * ROWS, lambda: sleep(seconds))
                assert set(counts) == {200}, counts
                return seconds / counts[200]

            samples = {"one by one": lambda: request(alone), "batches": lambda: request(batched)}
            times = timing.measured(samples, rounds, warm_up=False)
            lines = batched.figures().splitlines()
    rows = [float(x.split()[-1]) for x in lines if x.startswith(("aotc_batch_rows_count", "aotc_batch_rows_sum"))]
    table = report.Table("server", "requests/s", report.ratio("speedup"), "rows a batch")
    for name, size in (("one by one", None), ("batches", rows[1] / rows[0])):
        table.add(name, 1 / times.median(name), times.ratio("one by one", name), size)
