"""IREE: llvm-cpu for the host, its task system with one group for each thread."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.peers.adapter import Loaded

MODULE, INSTALL = "iree", "iree-base-compiler iree-base-runtime"
FLAGS = (
    "--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host", "--iree-opt-data-tiling",
    "--iree-input-type=stablehlo", "--iree-input-demote-i64-to-i32=false",
)  # fmt: skip


def prepare(name: str, folder: Path, precision: str) -> dict[str, float]:
    """Compile the model; return seconds and bytes."""
    tool = [sys.executable, "-m", "iree.compiler.tools.scripts.iree_compile"]
    start = time.perf_counter()
    command = [*tool, folder / "model.mlirbc", *FLAGS, "-o", folder / "model.iree"]
    subprocess.run(command, check=True, stderr=subprocess.PIPE, text=True)
    return {"compile": time.perf_counter() - start, "bytes": (folder / "model.iree").stat().st_size}


def load(folder: Path, inputs: list[Any], facts: dict[str, Any], threads: int, precision: str) -> Loaded:
    """Return a call of the compiled model on IREE's arrays, and the function that copies its results."""
    from iree import runtime

    runtime.flags.parse_flags(f"--task_topology_group_count={threads}")
    config = runtime.Config("local-task")
    module = runtime.load_vm_module(runtime.VmModule.mmap(config.vm_instance, str(folder / "model.iree")), config)
    values = [runtime.asdevicearray(config.device, inputs[i]) for i in facts["kept"]]

    def call() -> list[Any]:
        results = module.main(*values)
        return list(results) if isinstance(results, (tuple, list)) else [results]

    return call, lambda results: [x.to_host() for x in results]
