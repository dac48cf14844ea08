"""Run GPU functions in the simulator, and compare their results with those of the loop IR's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numba.core.errors import NumbaError

from aotc.ir.loop.ir import Kernel, needs_grid, thread_count
from aotc.kernels.cpu.custom import numba_error_reason
from aotc.kernels.cuda.flat import block_threads_of_flat_kernel
from aotc.kernels.cuda.shared_memory import block_launch_entry, dynamic_shared_bytes
from aotc.kernels.numba_front.check_replacement import TRIALS
from aotc.kernels.numba_front.compile import function_from_text
from aotc.kernels.numba_front.gpu_source import gpu_source
from aotc.kernels.numba_front.simulated_cuda import simulate_kernel
from aotc.kernels.numba_front.trial import NoTrial, TrialArguments, output_difference, random_arguments
from aotc.targets import Target

# Threads of a simulated launch, each of which is a thread of this process: 10,000 take about a second to start. Of a
# larger launch the first and the last blocks run.
MOST_THREADS = 20_000
# Blocks of a simulated cooperative launch, which run concurrently; the kernel shares its work among any number.
BLOCKS_TOGETHER = 3


def gpu_trial_difference(kernel: Kernel, source: str, target: Target) -> str:
    """Return the difference between a replacement and its kernel as text; an empty string if there is none.

    Both run in the simulator on random arguments.

    Raises
    ------
    KernelRefused
        If the text does not define the function.
    """
    own = function_from_text(source, kernel.name)
    printed = function_from_text(gpu_source(kernel, target).module, kernel.name)
    try:
        for seed in range(TRIALS):
            arguments = random_arguments(kernel, seed)
            expected, found = arguments.copied(), arguments.copied()
            call_simulated(printed, kernel, target, expected)
            try:
                call_simulated(own, kernel, target, found)
            except NoTrial as reason:
                return str(reason)
            if said := output_difference(kernel, expected, found):
                return f"on random arguments, {said}"
    except NoTrial as reason:
        return f"it cannot be checked alone: {reason}"
    return ""


def call_simulated(function: Callable[..., Any], kernel: Kernel, target: Target, arguments: TrialArguments) -> None:
    """Run a function for numba.cuda on a CPU as ``kernel`` is launched; the outputs are overwritten.

    Raises
    ------
    NoTrial
        If the function uses a feature that the simulator lacks, or accesses an element outside of an array.
    """
    together, threads = needs_grid(kernel), thread_count(kernel)
    blocks = arguments.grid
    if together:
        blocks = min(block_launch_entry(kernel, target)["blocks"][0], BLOCKS_TOGETHER)
    elif not threads:
        threads = block_threads_of_flat_kernel(kernel)
        blocks = -(-arguments.grid // threads)
    most = max(MOST_THREADS // threads // 2, 1)
    some = [*range(most), *range(blocks - most, blocks)] if blocks > 2 * most and not together else []
    values = (*arguments.arrays, *arguments.dims, arguments.grid)
    try:
        simulate_kernel(function, blocks, threads, dynamic_shared_bytes(kernel, target), values, some, together)
    except NumbaError as error:
        raise NoTrial(f"it does not run in the simulator: {numba_error_reason(error)}") from error
    except IndexError as error:
        raise NoTrial(f"it accesses an element outside of an array ({error})") from error
