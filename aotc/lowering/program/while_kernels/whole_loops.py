"""Choose the loops that become one kernel, which runs on one thread, one block of threads, or all blocks of a GPU."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from aotc.ir.loop.ir import Kernel, needs_block
from aotc.ir.tensor.ir import Function, Op, Value, walk
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.plans.thresholds import LOOP_TURNS, UNROLLED_STEPS
from aotc.lowering.program.while_kernels.block_loops import block_loop
from aotc.lowering.program.while_kernels.grid_loops import grid_loop
from aotc.lowering.program.while_kernels.small_loops import (
    CandidateLoop,
    LoopKernel,
    is_small_loop,
    kernel_of_whole_loop,
    kernels_in,
)
from aotc.lowering.program.while_kernels.unrolled_loops import with_rolled_loops
from aotc.lowering.threshold import Limit
from aotc.targets import Target


def one_kernel_for_loop(
    loop: CandidateLoop, limit: Limit, targets: Collection[Target], filled: Collection[int]
) -> LoopKernel | None:
    """Return one kernel for a whole loop, if it is so small that one kernel is faster than many; else None.

    ``limit`` bounds the operations of one worker in an iteration; one GPU block may do more, and all blocks still more.
    ``targets`` are the targets of its kernels. ``filled`` numbers the operands that are splat constants: on a CPU they
    are written to the memory of the results, and the kernel continues from there.
    """
    gpu = next((target for target in targets if target.kind == "cuda"), None)
    if gpu is None:
        return with_rolled_loops(kernel_of_whole_loop(loop, filled=filled)) if is_small_loop(loop, limit) else None
    op, functions = loop.op, loop.functions
    constants = {**loop.constants, **constants_in(*op.regions)}
    inner = [o for r in op.regions for o in walk(r) if o.name == "while"]
    if not all(_has_few_iterations(o, constants, functions) for o in inner):
        return None  # it could not be cancelled
    bounded = not _has_few_iterations(op, constants, functions)
    if not _runs_on_one_thread(op, loop.kernels):
        within = replace(loop, constants=constants)
        return block_loop(within, gpu, bounded) or grid_loop(within, gpu, bounded)
    return kernel_of_whole_loop(loop, bounded=bounded) if is_small_loop(loop, limit) else None


def _has_few_iterations(op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]) -> bool:
    iterations = trip_count(op, constants, functions)
    return iterations is not None and LOOP_TURNS.holds(iterations)


def _runs_on_one_thread(op: Op, kernels: Mapping[str, Kernel]) -> bool:
    """Return True if every kernel of a loop has so few items that one thread does them all."""
    inner = kernels_in(op, kernels)
    return all(UNROLLED_STEPS.holds(k.grid) and k.tiling is None and not needs_block(k) for k in inner)
