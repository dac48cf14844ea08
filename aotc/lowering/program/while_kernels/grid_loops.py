"""Turn a loop whose kernels take a few microseconds on a GPU into one cooperative kernel, whose blocks all run at once.

The kernels of the loop body are inlined one after the other, with items distributed over all threads. Grid barriers
separate conflicting accesses (:mod:`aotc.lowering.program.while_kernels.grid_barriers`). A barrier takes about one
microsecond, the launch of a kernel in a graph about three. Every thread computes values of a few elements redundantly
in registers. Other values are in global memory, and so in the L2 cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from aotc.ir.dims.algebra import floordiv, is_static, mod, static, sym
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.ir import WARP, Alloc, Barrier, Buffer, For, Kernel, Stmt, needs_block, thread_count
from aotc.ir.loop.scratch import shared_bytes
from aotc.ir.tensor.ir import Value
from aotc.lowering.program.while_kernels.block_loops import TeamLoopWriter, runs_in_block, work_of_iteration
from aotc.lowering.program.while_kernels.grid_barriers import BarrierPlacer
from aotc.lowering.program.while_kernels.grid_products import GridMatmul, tiling_for_grid_matmul
from aotc.lowering.program.while_kernels.inline_kernels import inline_kernel
from aotc.lowering.program.while_kernels.small_loops import (
    CandidateLoop,
    LoopKernel,
    is_closed_loop,
    kernel_of_whole_loop,
    kernels_in,
)
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.abi import MAX_PLACES
from aotc.vmfb.dtypes import size_of

COUNTER = Buffer("met", "u32", ())
"""The counter that every block increments."""


LOOP_GRID_FLOPS = Limit(
    1 << 27,
    "operations per iteration of a while loop that becomes one kernel on all blocks of a GPU",
    "NVIDIA H200, an LSTM cell, us in one kernel and as a graph: 2^26 operations 8.5 and 51, 2^24 6 and 33",
    benchmark="python -m benchmarks gpu loops",
)
LOOP_GRID_BYTES = Limit(
    1 << 25,
    "bytes that the kernels of such a loop access per iteration",
    "they stay in an L2 cache of 50 MB",
)
LOOP_GRID_VALUE = Limit(
    1 << 22,
    "elements of all values that such a loop computes",
    "16 MiB of f32 stay in an L2 cache",
)
LOOP_GRID_THREADS = BlockSize(
    256,
    "threads per block of such a loop, unless a kernel inside requires another number",
    "255 registers for each",
)
LOOP_GRID_BLOCKS = BlockSize(
    128,
    "blocks of such a loop, no more than one per multiprocessor",
    "an NVIDIA H200 has 132 multiprocessors",
)
LOOP_STAGE_BYTES = BlockSize(
    98_304,
    "bytes of shared memory for the operands of a matmul in such a loop, at most",
    "one block runs per multiprocessor, which has 227 KiB",
)


def grid_loop(loop: CandidateLoop, target: Target, bounded: bool) -> LoopKernel | None:
    """Return a ``while`` loop as one kernel with grid barriers, or None if too large or unsuitable."""
    inner = kernels_in(loop.op, loop.kernels)
    closed = is_closed_loop(loop.op, loop.functions, loop.kernels, loop.owners, LOOP_GRID_VALUE, LOOP_GRID_VALUE)
    if not inner or not closed or not all(_kernel_runs_in_grid(k) for k in inner):
        return None
    flops, bytes_ = work_of_iteration(loop)
    fixed = {thread_count(k) for k in inner if needs_block(k)}
    if len(fixed) > 1 or not LOOP_GRID_FLOPS.holds(flops) or not LOOP_GRID_BYTES.holds(bytes_):
        return None
    threads = next(iter(fixed), LOOP_GRID_THREADS.value)
    if threads % WARP:
        return None
    room = min(LOOP_STAGE_BYTES.value, target.shared_memory // 2)
    make = partial(GridLoopWriter, threads=threads, blocks=LOOP_GRID_BLOCKS.value, room=room)
    whole = kernel_of_whole_loop(loop, make, bounded)
    count = len(whole.kernel.inputs) + len(whole.kernel.outputs)
    fits = shared_bytes(whole.kernel.body) <= target.shared_memory
    return whole if count <= MAX_PLACES and fits else None


def _kernel_runs_in_grid(kernel: Kernel) -> bool:
    """Return True if all blocks can share the items of a kernel: it fits a block, or is a matmul of static size."""
    if kernel.tiling is None:
        return runs_in_block(kernel)
    try:
        p = read_product(kernel)
    except ValueError:
        return False
    return is_static((p.batch[1], p.row[1], p.col[1], p.k[1]))


@dataclass
class GridLoopWriter(TeamLoopWriter):
    """Emit a loop for ``blocks`` blocks of GPU threads, with grid barriers."""

    common = "global"
    blocks: int = 0
    room: int = 0  # bytes of shared memory for a matmul
    stages: dict[str, Buffer] = field(default_factory=dict)

    def allocate_local(self, value: Value, block: list[Stmt]) -> Buffer:
        """Allocate memory for ``value``: private, or shared by all blocks as a further output of the kernel."""
        if self.local_memory_space(value) == "private":
            return super().allocate_local(value, block)
        self.count += 1
        buffer = Buffer(f"w{self.count}", value.type.dtype, value.type.shape)
        self.kept.append(buffer)
        return buffer

    def emit_kernel(self, block: list[Stmt], kernel: Kernel, where: Mapping[str, Buffer]) -> None:
        """Emit a dispatched kernel's items, distributed over all threads; a matmul by tiles, one per block."""
        self.count += 1
        name = f"_{self.count}"
        inlined = inline_kernel(kernel, where, name)
        first, parallel = inlined[0], isinstance(kernel.body[0], For) and kernel.body[0].kind == "parallel"
        if self.own:
            block += inlined
        elif kernel.tiling is not None:
            p = read_product(replace(kernel, body=inlined))
            stage = self._shared_matmul_buffer(p.total.dtype)
            tile = tiling_for_grid_matmul(p, self.blocks, self.threads, static(stage.shape[0]))
            block += GridMatmul(p, tile, self.threads, stage, name).matmul_statements()
        elif parallel and isinstance(first, For):
            if needs_block(kernel):
                block.append(For(first.var, 0, first.end, (Barrier(), *first.body), "blocks"))
            else:
                block.append(self.distributed_loop(first.var, static(first.end), first.body))
        else:
            one = (Barrier(), *inlined) if needs_block(kernel) else (For(f"one{name}", 0, 1, inlined, "thread"),)
            block.append(For(f"b{name}", 0, 1, one, "blocks"))

    def _shared_matmul_buffer(self, dtype: str) -> Buffer:
        """Return the shared memory for all matmuls of a dtype."""
        return self.stages.setdefault(dtype, Buffer(f"stage_{dtype}", dtype, (self.room // size_of(dtype),), "shared"))

    def distributed_loop(self, var: str, count: int, body: tuple[Stmt, ...]) -> For:
        """Return a loop distributed over all threads: a warp has adjacent iterations, warps alternate over blocks."""
        block, thread = f"b_{var}", f"t_{var}"
        b, t = sym(block, 0, self.blocks), sym(thread, 0, self.threads)
        begin = (floordiv(t, WARP) * self.blocks + b) * WARP + mod(t, WARP)
        iterations = For(var, begin, count, body, "serial", self.blocks * self.threads)
        return For(block, 0, self.blocks, (For(thread, 0, self.threads, (iterations,), "thread"),), "blocks")

    def kernel_statements(self, block: list[Stmt]) -> list[Stmt]:
        """Return the body of the kernel with grid barriers, which count in a further output."""
        placer = BarrierPlacer(COUNTER)
        stmts = [*map(Alloc, self.stages.values()), *placer.with_barriers(block)]
        if placer.count:
            self.kept.append(COUNTER)
        return stmts
