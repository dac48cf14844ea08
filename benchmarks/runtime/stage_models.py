"""Models of the suites about submissions: an addition, and a pipeline stage; and a process that runs the stages."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np

import aotc
from benchmarks.timing import once

TINY = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
STAGE = """
func.func public @main(%x: tensor<SIZExSIZExf32>, %w: tensor<SIZExSIZExf32>) -> tensor<SIZExSIZExf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<SIZExSIZExf32>, tensor<SIZExSIZExf32>) -> tensor<SIZExSIZExf32>
  %1 = stablehlo.tanh %0 : tensor<SIZExSIZExf32>
  return %1 : tensor<SIZExSIZExf32>
}
"""
REQUESTS = 64


def stage(size: int) -> Path:
    """Compile a matmul with a tanh to a bundle file and return its path."""
    path = Path(tempfile.mkdtemp()) / "stage.vmfb"
    aotc.compile(STAGE.replace("SIZEx", f"{size}x")).save(path)
    return path


def run_requests_on_line(path: Path, size: int) -> None:
    """Run all requests for each line of standard input, and print the time: one of two processes."""
    module = aotc.load(path, threads=1)
    w = np.full((size, size), 0.01, np.float32)
    inputs = [np.full((size, size), 0.001 * n, np.float32) for n in range(REQUESTS)]

    def whole() -> None:
        for x in inputs:
            module.invoke("main", module.invoke("main", x, w)[0], w)

    whole()
    print("ready", flush=True)
    sys.stdin.readline()
    print(once(whole), flush=True)


if __name__ == "__main__":
    run_requests_on_line(Path(sys.argv[1]), int(sys.argv[2]))
