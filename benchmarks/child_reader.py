"""The share of the process that reads models first in the time of ``aotc compile``, for blobs of ``jax.export``.

    python benchmarks/child_reader.py [RUNS]

Each run is a fresh process that compiles one model without a cache. ``wait`` is the wall time in which the compiler
waits for the reader, ``share`` is its part of the wall time of the process. ``reader`` is the reader's own processor
time, most of it the start, which goes on while the compiler is imported; ``others`` is that of the compiler and its
other processes. Medians.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
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
waits, read = [], reader_process.read
def timed(*arguments, **options):
    start = time.perf_counter()
    try:
        return read(*arguments, **options)
    finally:
        waits.append(time.perf_counter() - start)
reader_process.read = timed
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


def main() -> None:
    """Print a line for each model."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", MODELS, folder], env=environment, check=True)
        subprocess.run([sys.executable, ROOT / "examples/export_small.py", folder], env=environment, check=True)
        for name in ("tiny.jaxexp", "model.jaxexp", "mid.jaxexp"):
            path = Path(folder, name)
            rows = []
            for _ in range(runs):
                command = [sys.executable, "-c", TIMED, str(path)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
                rows.append([float(x) for x in re.search(r"FIGURES (.*)", done.stdout)[1].split()])  # type: ignore[index]
            wait, wall, reader, others = (statistics.median(column) for column in zip(*rows))
            share = statistics.median(row[0] / row[1] for row in rows)
            size = path.stat().st_size >> 10
            times = f"processor time: reader {reader:.2f} s, others {others:.2f} s"
            print(f"{name:14} {size:6} kB  wait {wait:.2f} s of {wall:.2f} s, share {share:.1%}; {times}")


if __name__ == "__main__":
    main()
