"""aotc as one of the engines: bundles compiled by the command line, with an empty and with a full cache."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.children import environment
from benchmarks.peers.adapter import BF16_TOLERANCE, Loaded

MODULE, INSTALL = "aotc", "-e '.[compile]'"


def _bundle(folder: Path, precision: str) -> Path:
    return folder / f"aotc{precision}.vmfb"


def prepare(name: str, folder: Path, precision: str) -> dict[str, float]:
    """Compile the model twice; return the seconds of both, and the size of the bundle."""
    bundle = _bundle(folder, precision)
    command = [sys.executable, "-m", "aotc_cli.main", "compile", folder / "model.jaxexp", "-q", "-o", bundle]
    command += [f"--matmul-precision={precision}"] if precision else []
    seconds = []
    with tempfile.TemporaryDirectory() as cache:
        for _ in range(2):
            start = time.perf_counter()
            subprocess.run(
                command, check=True, env=environment(AOTC_CACHE_DIR=cache), stderr=subprocess.PIPE, text=True
            )
            seconds.append(time.perf_counter() - start)
    return {"compile": seconds[0], "compile_warm": seconds[1], "bytes": bundle.stat().st_size}


def load(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, precision: str) -> Loaded:
    """Return a call of the loaded bundle."""
    import aotc

    if precision:
        facts["tolerance"] = max(facts["tolerance"], BF16_TOLERANCE)
    module = aotc.load(_bundle(folder, precision), threads=threads)
    arguments = [inputs[i] for i in facts["kept"]]
    return lambda: module.invoke("main", *arguments), None
