"""Models next to XLA, IREE, ONNX Runtime and OpenVINO.

Each engine runs in its own process on THREADS cores; the engines take turns. Before the measurement each result is
compared with XLA's. A row for each engine: the time of a call and its ratio to XLA's, the seconds of a cold start (a
fresh process to its first result), of the compilation and of a second one with a full cache, the size of the file.
``aotc`` is always measured; ``--against`` selects the others. Missing engines are omitted.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks import children, options, report, timing
from benchmarks.peers.adapter import ENGINES, adapter, installed

DATA = Path(__file__).parents[1] / "data"
OTHERS = ",".join(engine for engine in ENGINES if engine != "aotc")
FACTS = ("load", "first", "rss", "error")  # for the record alone


class Worker:
    """A process that runs one engine on ``threads`` cores."""

    def __init__(self, engine: str, folder: Path, threads: int) -> None:
        cores = set(sorted(os.sched_getaffinity(0))[:threads])
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (lives as long as the process)
        self.process = subprocess.Popen(
            children.module_command_line("benchmarks.models.worker", engine, folder, threads),
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log, text=True,
            env=children.environment(BENCH_START=repr(time.time()), AOTC_NUM_THREADS=str(threads)),
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
        self.rss = 0

    def ask(self, line: float | None = None) -> dict[str, Any]:
        """Send a line, unless ``line`` is None, and return the reply."""
        reply = children.exchange_line(self.process, line)
        if not reply:
            self.process.wait()
            self.log.seek(0)
            raise RuntimeError(children.failure_line(self.log.read()))
        return json.loads(reply)

    def sample(self, seconds: float) -> float:
        """Return the time of a call, measured for ``seconds``."""
        reply = self.ask(0.0 if timing.SMOKE else seconds)
        self.rss = reply["rss"]
        return reply["seconds"]

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()


def start(name: str, engine: str, threads: int, cold: int) -> tuple[Worker, dict[str, float]]:
    """Prepare a model for an engine and start its process ``cold`` times; return the last process, and medians."""
    folder = DATA / name
    module, precision = adapter(engine)
    facts = dict(module.prepare(name, folder, precision))
    starts = []
    for number in range(cold):
        worker = Worker(engine, folder, threads)
        try:
            starts.append(worker.ask())
        except RuntimeError:
            worker.close()
            raise
        if number < cold - 1:
            worker.close()
    return worker, facts | {key: statistics.median(s[key] for s in starts) for key in starts[0]}


def measure(name: str, engines: list[str], table: report.Table, how: dict[str, Any]) -> None:
    """Add a row for each engine of a model."""
    live: dict[str, Worker] = {}
    facts: dict[str, dict[str, float]] = {}
    for engine in engines:
        try:
            live[engine], facts[engine] = start(name, engine, how["threads"], how["cold"])
        except (RuntimeError, subprocess.CalledProcessError) as error:
            text = children.failure_line(getattr(error, "stderr", None) or str(error))
            table.failed(f"{name}, {engine}", text)
    samples = {engine: (lambda w=worker: w.sample(how["seconds"])) for engine, worker in live.items()}
    times = timing.measured(samples, how["rounds"])
    for engine, worker in live.items():
        worker.close()
        row = facts[engine] | {"rss": worker.rss}
        relative = times.ratio(engine, "xla") if "xla" in live else None
        cells = [row.get(key) for key in ("cold", "compile", "compile_warm", "bytes", *FACTS)]
        table.add(f"{name}, {engine}", times.median(engine), relative, *cells)


def plot(table: report.Table, path: Path) -> None:
    """Draw the ratios to XLA as bars; needs matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    ratios = {name: cells[1].median for name, cells in table.rows if cells[1] is not None}
    models = list(dict.fromkeys(name.partition(", ")[0] for name in ratios))
    engines = [e for e in ENGINES if e != "xla" and any(name.endswith(f", {e}") for name in ratios)]
    figure, axes = pyplot.subplots(figsize=(10, 4))
    for number, engine in enumerate(engines):
        heights = [ratios.get(f"{model}, {engine}", 0) for model in models]
        width = 0.8 / len(engines)
        axes.bar([i + width * number for i in range(len(models))], heights, width, label=engine)
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(models)), models, rotation=45, ha="right")
    axes.set_ylabel("time / XLA's (lower is better)")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path)


def run(
    only: options.Only = "",
    against: options.Against = OTHERS,
    threads: options.Threads = 2,
    rounds: options.Rounds = 5,
    seconds: options.Seconds = 0.5,
    cold: Annotated[int, typer.Option(min=1, help="Cold starts.")] = 3,
    export: Annotated[bool, typer.Option("--export", help="Export the models again.")] = False,
    svg: Annotated[Path | None, typer.Option("--plot", help="Draw the ratios to XLA; needs matplotlib.")] = None,
) -> None:
    """Print a row for each model and engine."""
    from benchmarks.programs.models import MODELS

    engines = list(dict.fromkeys([*filter(None, against.split(",")), "aotc"]))
    engines = installed(["xla", "aotc"] if timing.SMOKE else engines)
    report.RUN.peers.update(adapter(engine)[0].MODULE for engine in engines)
    columns = [report.Column("call ms", 1e3, 7), report.ratio("of XLA's"), report.Column("cold s", width=6)]
    columns += [report.Column("compile", width=7), report.Column("again", width=5), report.Column("MB", 1e-6, 6)]
    hidden = [report.Column(key, shown=False) for key in FACTS]
    table = report.Table("model, engine", *columns, *hidden)
    how = {"threads": threads, "rounds": rounds, "seconds": seconds, "cold": 1 if timing.SMOKE else cold}
    for name in options.select(MODELS, only, smallest="tiny_add"):
        folder = DATA / name
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if export or not (folder / "facts.json").exists():
                children.output(children.module_command_line("benchmarks.programs.export", name, folder))
        except RuntimeError as error:
            table.failed(name, error)
            continue
        measure(name, engines, table, how)
    if svg:
        plot(table, svg)
