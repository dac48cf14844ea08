"""Bundles replaced under load."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from time import monotonic, sleep
from typing import Annotated

import typer

from benchmarks import report, timing
from benchmarks.serving.server import Server, dense, load


def loads(server: Server) -> float:
    """Return how often the server loaded the model."""
    return float(server.figures().partition('aotc_loads_total{model="m"} ')[2].partition("\n")[0])


def replace(server: Server, models: Path, both: list[bytes], count: int) -> int:
    """Replace the bundle ``count`` times, each time when the server has loaded it; return its memory after a tenth."""
    early = 0
    for n in range(count):
        if n == count // 10:
            early = server.memory()
        put(models, both[(n + 1) % 2])
        while loads(server) < n + 2:
            sleep(0.0005)
    return early


def put(models: Path, data: bytes) -> None:
    """Replace the bundle by a rename."""
    (models / ".new").write_bytes(data)
    os.replace(models / ".new", models / "m.vmfb")


def run(count: Annotated[int, typer.Option(help="Bundles.")] = 1000) -> None:
    """Print one row."""
    count = 3 if timing.SMOKE else count
    both = [dense(64, 1), dense(64, 2)]
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        models.mkdir()
        put(models, both[0])
        with Server(models, "--poll=0.001", "--max-batch=8") as server:
            begin, early = monotonic(), []
            counts = load(server.port, "m", 64, 4, lambda: early.append(replace(server, models, both, count)))
            late = server.memory()
    lost = sum(number for status, number in counts.items() if status != 200)
    columns = [report.Column("seconds"), "responses", "lost", report.Column("MB early", 1e-6)]
    table = report.Table("replaced", *columns, report.Column("MB at end", 1e-6))
    table.add(f"{count:,} bundles", monotonic() - begin, counts.get(200, 0), lost, float(early[0]), float(late))
