"""The process that reads models in aotc compile.

Each round is a fresh process that compiles one model without a cache. ``wait`` is the wall time during which the
compiler waits for the reader process, ``share`` its fraction of the total wall time. ``reader`` is the reader's own
processor time, most of it its start, which is concurrent with the import of the compiler. ``others`` is the processor
time of the compiler and its other processes. All values are medians.
"""

from __future__ import annotations

import re
import statistics
import sys
import tempfile
from pathlib import Path

from benchmarks import children, options, report, timing

MODELS = """
import sys, jax, jax.numpy as jnp, numpy as np
W = np.random.default_rng(0).standard_normal((256, 256)).astype("f") / 16
def tiny(x):
    return x * 2 + 1
def mid(x):
    for n in range(24):
        q = (x @ W) * (n + 1)
        x = x + jax.nn.softmax(q @ q.T / 16) @ jnp.tanh(x @ W.T)
    return x
for name, f in (("tiny", tiny), ("mid", mid)):
    blob = jax.export.export(jax.jit(f))(np.ones((64, 256), "f")).serialize()
    open(f"{sys.argv[1]}/{name}.jaxexp", "wb").write(blob)
"""
TIMED = """
import os, resource, sys, time
begin = time.perf_counter()
from aotc.source import reader_process
waits, read = [], reader_process.read_in_child
def timed(*arguments, **options):
    start = time.perf_counter()
    try:
        return read(*arguments, **options)
    finally:
        waits.append(time.perf_counter() - start)
reader_process.read_in_child = timed
from aotc_cli.main import main
sys.argv = ["aotc", "compile", sys.argv[1], "-o", os.devnull, "--no-cache"]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
wall = time.perf_counter() - begin
reader = reader_process._READERS[0]._process.pid
ticks = sum(int(n) for n in open(f"/proc/{reader}/stat").read().rpartition(")")[2].split()[11:13])
used = sum(os.times()[:4])
print("\\nFIGURES", sum(waits), wall, ticks / os.sysconf("SC_CLK_TCK"), used)
"""


def run(only: options.Only = "", rounds: options.Rounds = 5) -> None:
    """Print a row for each model."""
    titles = ("wait s", "of s", "share", "reader s", "others s")
    table = report.Table("model", *(report.Column(title, width=7) for title in titles), report.Column("kB"))
    with tempfile.TemporaryDirectory() as folder:
        children.output([sys.executable, "-c", MODELS, folder], JAX_PLATFORMS="cpu")
        children.output([sys.executable, str(children.ROOT / "examples/export_small.py"), folder])
        for name in options.select(("tiny.jaxexp", "model.jaxexp", "mid.jaxexp"), only):
            path = Path(folder, name)
            rows = []
            for _ in range(1 if timing.SMOKE else rounds):
                printed = children.output([sys.executable, "-c", TIMED, str(path)], JAX_PLATFORMS="cpu")
                rows.append([float(x) for x in re.search(r"FIGURES (.*)", printed)[1].split()])  # type: ignore[index]
            wait, wall, reader, others = (statistics.median(column) for column in zip(*rows))
            share = timing.spread([row[0] / row[1] for row in rows])
            table.add(name, wait, wall, share, reader, others, path.stat().st_size >> 10)
