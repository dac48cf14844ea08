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


def load_count(server: Server) -> float:
    """Return the number of times that the server has loaded the model."""
    return float(server.figures().partition('aotc_loads_total{model="m"} ')[2].partition("\n")[0])


def replace_repeatedly(server: Server, models: Path, both: list[bytes], count: int) -> int:
    """Replace the bundle ``count`` times, each time after the server has loaded it.

    Return the server's memory after a tenth of the replacements.
    """
    early = 0
    for n in range(count):
        if n == count // 10:
            early = server.memory()
        replace_bundle_file(models, both[(n + 1) % 2])
        while load_count(server) < n + 2:
            sleep(0.0005)
    return early


def replace_bundle_file(models: Path, data: bytes) -> None:
    """Replace the bundle's file by a rename."""
    (models / ".new").write_bytes(data)
    os.replace(models / ".new", models / "m.vmfb")


def run(count: Annotated[int, typer.Option(help="Bundles.")] = 1000) -> None:
    """Print one row."""
    count = 3 if timing.SMOKE else count
    both = [dense(64, 1), dense(64, 2)]
    with tempfile.TemporaryDirectory() as folder:
        models = Path(folder, "models")
        models.mkdir()
        replace_bundle_file(models, both[0])
        with Server(models, "--poll=0.001", "--max-batch=8") as server:
            begin, early = monotonic(), []
            meanwhile = lambda: early.append(replace_repeatedly(server, models, both, count))
            counts = load(server.port, "m", 64, 4, meanwhile)
            late = server.memory()
    lost = sum(number for status, number in counts.items() if status != 200)
    columns = [report.Column("seconds"), "responses", "lost", report.Column("MB early", 1e-6)]
    table = report.Table("replaced", *columns, report.Column("MB at end", 1e-6))
    table.add(f"{count:,} bundles", monotonic() - begin, counts.get(200, 0), lost, float(early[0]), float(late))
