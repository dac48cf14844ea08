"""Trials of functions for GPUs on this machine's CPU, beside the loop IR's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.errors import NumbaError

from aotc.ir.loop.ir import Kernel, needs_grid, thread_count
from aotc.kernels.cpu.custom import numba_reason
from aotc.kernels.cuda.flat import flat_threads
from aotc.kernels.cuda.shared_memory import block_launch, dynamic_shared_bytes
from aotc.kernels.numba_front.simulated_cuda import run_kernel
from aotc.kernels.numba_front.trial import Arguments, NoTrial
from aotc.targets import Target

# Threads of a simulated launch, each of which is a thread of this process: 10,000 take about a second to start.
MOST_THREADS = 100_000
# Blocks of a simulated cooperative launch, which run concurrently; the kernel shares its work among any number.
BLOCKS_TOGETHER = 3


def call_simulated(function: Callable[..., Any], kernel: Kernel, target: Target, arguments: Arguments) -> None:
    """Run a function for numba.cuda on a CPU as ``kernel`` is launched; the outputs are overwritten.

    Raises
    ------
    NoTrial
        If the launch is too large, or the function uses what the simulator lacks.
    """
    together, threads = needs_grid(kernel), thread_count(kernel)
    blocks = arguments.grid
    if together:
        blocks = min(block_launch(kernel, target)["blocks"][0], BLOCKS_TOGETHER)
    elif not threads:
        threads = flat_threads(kernel)
        blocks = -(-arguments.grid // threads)
    if blocks * threads > MOST_THREADS:
        raise NoTrial(f"its launch has {blocks * threads:,} threads, more than the {MOST_THREADS:,} of a simulated one")
    values = (*arguments.arrays, *arguments.dims, arguments.grid)
    try:
        run_kernel(function, blocks, threads, dynamic_shared_bytes(kernel, target), values, together)
    except NumbaError as error:
        raise NoTrial(f"it does not run in the simulator: {numba_reason(error)}") from error
