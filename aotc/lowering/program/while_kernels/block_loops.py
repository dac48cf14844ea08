"""Turn a loop over small values into one GPU kernel, executed by one block of threads.

The kernels of the loop body are inlined one after the other. Their items are distributed over the threads of the block,
with barriers where one kernel accesses results of another. Every thread computes values of a few elements redundantly
in registers, so that counters and conditions need no barrier. Other values are in shared memory; carried values that
are too large for it are in the memory of the results.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from aotc.ir.dims.algebra import product, static, sym
from aotc.ir.loop.ir import (
    Alloc,
    Barrier,
    Buffer,
    Either,
    ExternalCall,
    For,
    Kernel,
    Load,
    Scalar,
    Space,
    Stmt,
    Store,
    Tile,
    While,
    needs_block,
    thread_count,
    walk,
)
from aotc.ir.loop.scratch import shared_bytes
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.analysis.index_maps import reshape_index
from aotc.lowering.cost_model.work import estimated_bytes, expected_iterations
from aotc.lowering.plans.thresholds import UNROLLED_STEPS
from aotc.lowering.program.owners.ties import original_iterations_per_iteration
from aotc.lowering.program.while_kernels.inline_kernels import inline_kernel
from aotc.lowering.program.while_kernels.small_loops import (
    CandidateLoop,
    LoopKernel,
    LoopKernelWriter,
    copy_buffers,
    is_closed_loop,
    kernel_of_whole_loop,
    kernels_in,
    load_of_only_element,
)
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target

LOOP_BLOCK_FLOPS = Limit(
    1 << 17,
    "operations per iteration of a while loop that becomes one block of GPU threads",
    "two microseconds of one multiprocessor, the time in which two kernels of a graph start",
)
LOOP_BLOCK_BYTES = Limit(
    1 << 18,
    "bytes that the kernels of such a loop access per iteration",
    "one multiprocessor reads them from the L2 cache in two microseconds",
)


def block_loop(loop: CandidateLoop, target: Target, bounded: bool) -> LoopKernel | None:
    """Return a ``while`` loop as one kernel of one GPU block, or None if the loop is too large."""
    inner = kernels_in(loop.op, loop.kernels)
    closed = is_closed_loop(loop.op, loop.functions, loop.kernels, loop.owners)
    if not inner or not closed or not all(map(runs_in_block, inner)):
        return None
    flops, bytes_ = work_of_iteration(loop)
    threads = common_threads(inner)
    if not threads or not LOOP_BLOCK_FLOPS.holds(flops) or not LOOP_BLOCK_BYTES.holds(bytes_):
        return None
    make = partial(BlockLoopWriter, threads=threads)
    whole = kernel_of_whole_loop(loop, make, bounded)
    fixed = {thread_count(k) for k in inner if needs_block(k)}
    return whole if fits_block(whole.kernel, fixed, target) else None


def runs_in_block(kernel: Kernel) -> bool:
    """Return True if the threads of one block can execute the kernel's statements."""
    return kernel.tiling is None and not any(isinstance(s, Tile | ExternalCall | Either) for s in walk(kernel.body))


def work_of_iteration(loop: CandidateLoop) -> tuple[int, int]:
    """Return the operations, and the bytes that kernels and copies access, of one iteration of a loop."""

    def work_of_region(region: Region) -> tuple[int, int]:
        """Return the operations and bytes of a region executed once; inner loops count with their iterations."""
        flops = bytes_ = 0
        for o in region.ops:
            if o.name == "dispatch":
                kernel = loop.kernels[o.attrs["callee"]]
                work, times = (static(kernel.flops), static(kernel.bytes)), 1
            elif o.regions:
                parts = [work_of_region(r) for r in o.regions]
                work = sum(p[0] for p in parts), sum(p[1] for p in parts)
                times = expected_iterations(o, loop.constants, loop.functions) if o.name == "while" else 1
            else:
                continue
            flops, bytes_ = flops + times * work[0], bytes_ + times * work[1]
        return flops, bytes_

    parts = [work_of_region(region) for region in loop.op.regions]
    copied = sum(2 * estimated_bytes(tie.new) for tie in loop.owners.copies_in_loop(loop.op))
    count = original_iterations_per_iteration(loop.op)
    return sum(p[0] for p in parts) // count, (sum(p[1] for p in parts) + copied) // count


def common_threads(inner: list[Kernel]) -> int:
    """Return the number of threads of the block, or 0 if kernels require different numbers."""
    fixed = {thread_count(k) for k in inner if needs_block(k)}
    if fixed:
        return fixed.pop() if len(fixed) == 1 else 0
    widest = max(static(k.grid) for k in inner)
    return next(n for n in _SIZES if n >= min(widest, _SIZES[-1]))


LOOP_BLOCK_THREADS = BlockSize(512, "threads of such a block, at most", "128 registers for each")


_SIZES = [LOOP_BLOCK_THREADS.value >> n for n in range(5)][::-1]


def fits_block(kernel: Kernel, fixed: set[int], target: Target) -> bool:
    """Return True if a block of the target can run the kernel, with the number of threads that inlined kernels fix."""
    count = thread_count(kernel)
    alike = any(a.shape and a.shape[0] == count for a in _private_buffers_outside_loops(kernel.body))
    return count > 0 and fixed <= {count} and not (alike and not fixed) and shared_bytes(kernel.body) <= target.shared


def _private_buffers_outside_loops(body: tuple[Stmt, ...]) -> list[Buffer]:
    """Return the private buffers that are allocated outside of loops over threads."""
    inside = {id(s) for loop in walk(body) if isinstance(loop, For) and loop.kind == "thread" for s in walk(loop.body)}
    allocations = [s for s in walk(body) if isinstance(s, Alloc) and id(s) not in inside]
    return [s.buffer for s in allocations if s.buffer.space == "private"]


LOOP_OWN_FLOPS = Limit(
    256,
    "operations of a kernel with few results that every thread of such a block computes redundantly",
    "a barrier takes as long as several tens of operations",
)


@dataclass
class TeamLoopWriter(LoopKernelWriter):
    """Emit a loop for ``threads`` threads; ``own`` is True while every thread runs a kernel redundantly."""

    common: ClassVar[Space]
    """The memory space of values that all threads read."""
    threads: int = 0
    own: bool | None = None

    def local_memory_space(self, value: Value) -> Space:
        return "private" if self.own is not False and UNROLLED_STEPS.holds(product(value.type.shape)) else self.common

    def distributed_loop(self, var: str, count: int, body: tuple[Stmt, ...]) -> For:
        """Return a loop whose iterations are distributed over the threads of the block."""
        raise NotImplementedError

    def emit_copy(self, block: list[Stmt], source: Buffer, target: Buffer) -> None:
        """Emit a copy of a whole array: private copies by each thread, others distributed over the threads."""
        self.count += 1
        size = static(product(target.shape))
        if target.space == "private":
            copy_buffers(block, source, target, f"_{self.count}")
        elif size and source.name != target.name:
            name = f"e_{self.count}"
            place = [reshape_index((sym(name, 0, size),), (size,), b.shape) for b in (source, target)]
            block.append(self.distributed_loop(name, size, (Store(target, place[1], Load(source, place[0])),)))

    def can_compute_in(self, value: Value, place: Buffer) -> bool:
        same = self.own is None or (place.space == "private") == (self.local_memory_space(value) == "private")
        return same and super().can_compute_in(value, place)

    def _emit_dispatch(self, op: Op, block: list[Stmt]) -> None:
        """Emit a dispatch; each thread runs a cheap kernel on small values itself, without a barrier."""
        kernel = self.kernels[op.attrs["callee"]]
        small = all(UNROLLED_STEPS.holds(product(v.type.shape)) for v in op.results)
        self.own = small and not needs_block(kernel) and not kernel.tiling and LOOP_OWN_FLOPS.holds(kernel.flops)
        super()._emit_dispatch(op, block)
        self.own = None


LOOP_BLOCK_VALUE = Limit(
    2048,
    "elements of a value that such a loop carries in shared memory",
    "8 KiB of f32, of the 48 KiB that a block has without opting in to more",
)


@dataclass
class BlockLoopWriter(TeamLoopWriter):
    """Emit a loop for one block of GPU threads."""

    common = "shared"
    written: set[str] = field(default_factory=set)  # since the last barrier
    read: set[str] = field(default_factory=set)
    touches: int = 0  # accesses of memory that threads share
    begun: list[int] = field(default_factory=list)  # their number when each loop being written began

    def carried_buffer(self, value: Value, out: Buffer, block: list[Stmt]) -> Buffer:
        """Return the buffer of a loop state: local if it is small, else that of the result ``out``."""
        return (
            self.buffer_of_value(value, block)
            if LOOP_BLOCK_VALUE.holds(product(value.type.shape))
            else self.assign_buffer(value, out)
        )

    def emit_kernel(self, block: list[Stmt], kernel: Kernel, where: Mapping[str, Buffer]) -> None:
        """Emit a dispatched kernel's items, distributed over the block's threads, after a barrier if needed."""
        self._emit_barrier_if_needed(
            block, [where[b.name] for b in kernel.inputs], [where[b.name] for b in kernel.outputs]
        )
        self.count += 1
        inlined = inline_kernel(kernel, where, f"_{self.count}")
        first, parallel = inlined[0], isinstance(kernel.body[0], For) and kernel.body[0].kind == "parallel"
        if self.own:
            block += inlined
        elif parallel and isinstance(first, For):
            if needs_block(kernel):
                block.append(For(first.var, 0, first.end, (Barrier(), *first.body)))
            else:
                block.append(self.distributed_loop(first.var, static(first.end), first.body))
        else:
            block += inlined if needs_block(kernel) else (For(f"one_{self.count}", 0, 1, inlined, "thread"),)

    def emit_copy(self, block: list[Stmt], source: Buffer, target: Buffer) -> None:
        self._emit_barrier_if_needed(block, [source], [target])
        super().emit_copy(block, source, target)

    def load_predicate(self, value: Value, block: list[Stmt]) -> Load:
        self._emit_barrier_if_needed(block, [self.memory[value]], [])
        return load_of_only_element(self.memory[value])

    def emit_before_loop(self, block: list[Stmt]) -> None:
        if self.read or self.written:
            self._emit_barrier(block)
        self.begun.append(self.touches)

    def emit_while(self, block: list[Stmt], test: list[Stmt], continue_while: Scalar, step: list[Stmt]) -> None:
        """Emit a loop; a barrier follows each iteration unless threads iterate independently."""
        if self.touches == self.begun.pop():  # every thread iterates independently
            return super().emit_while(block, test, continue_while, step)
        block += [While(tuple(test), continue_while, (*step, Barrier())), Barrier()]
        self._forget_accesses()

    def _emit_branch(self, op: Op, block: list[Stmt]) -> None:
        self._emit_barrier(block)
        super()._emit_branch(op, block)
        self._emit_barrier(block)

    def distributed_loop(self, var: str, count: int, body: tuple[Stmt, ...]) -> For:
        """Return a loop whose iterations are distributed over the threads of the block."""
        if count <= self.threads:
            return For(var, 0, count, body, "thread")
        thread = f"t_{var}"
        iterations = For(var, sym(thread, 0, self.threads), count, body, "serial", self.threads)
        return For(thread, 0, self.threads, (iterations,), "thread")

    def _emit_barrier_if_needed(self, block: list[Stmt], reads: list[Buffer], writes: list[Buffer]) -> None:
        """Emit a barrier before a kernel or copy if that accesses data accessed by others since the last one."""
        read, written = ({b.name for b in some if b.space != "private"} for some in (reads, writes))
        if read & self.written or written & (self.written | self.read):
            self._emit_barrier(block)
        self.touches += len(read) + len(written)
        self.read |= read
        self.written |= written

    def _emit_barrier(self, block: list[Stmt]) -> None:
        block.append(Barrier())
        self._forget_accesses()

    def _forget_accesses(self) -> None:
        self.read, self.written = set(), set()
