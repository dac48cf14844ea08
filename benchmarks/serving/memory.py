"""Memory of the server over many requests."""

from __future__ import annotations

import tempfile
from pathlib import Path
from time import sleep
from typing import Annotated

import typer

from benchmarks import report, timing
from benchmarks.serving.server import Server, dense, load


def run(count: Annotated[int, typer.Option(help="Requests, at least.")] = 100_000) -> None:
    """Print the memory after the first seconds and at the end."""
    count, seconds = (1, 0.2) if timing.SMOKE else (count, 5.0)
    table = report.Table("requests", report.Column("own MB", 1e-6), report.Column("bytes each"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "flat.vmfb")
        path.write_bytes(dense(64, 2))
        with Server(path, "--max-batch=8") as server:
            first = done = load(server.port, "flat", 64, 4, lambda: sleep(seconds))[200]
            before = server.memory()
            table.add(f"{done:,}", float(before), None)
            while done < count or done == first:
                done += load(server.port, "flat", 64, 4, lambda: sleep(seconds))[200]
            after = server.memory()
    table.add(f"{done:,}", float(after), (after - before) / (done - first))
