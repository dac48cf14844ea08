"""Emit the loop IR on a GPU, where it differs from a CPU: threads, shared memory, barriers.

A kernel has one of two shapes. *Flat*: each thread runs its own item of the grid. *Block*: a block of threads runs one
item together; the threads share the iterations of loops of kind ``thread`` and all run the other statements. A kernel
with barriers of the whole grid has one item, which all blocks run together: they share loops of kind ``blocks``.
"""

from __future__ import annotations

from dataclasses import replace

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Call, Dim, bounds
from aotc.ir.loop.ir import (
    Barrier,
    Buffer,
    For,
    GridBarrier,
    Kernel,
    Prefetch,
    Shuffle,
    Stmt,
    Store,
    WarpMatch,
    thread_count,
    walk,
)
from aotc.ir.loop.scratch import buffer_bytes
from aotc.kernels.cuda.exchange import (
    BLOCK_BARRIER,
    emit_grid_barrier,
    emit_special_register,
    emit_warp_barrier,
    emit_warp_match,
    emit_warp_shuffle_xor,
)
from aotc.kernels.cuda.lanes import LanesEmitter
from aotc.kernels.cuda.shared_memory import shared_buffer_address
from aotc.kernels.emit.index import IndexEmitter
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import I32, I64, PTR, VOID, i32, i64, memory_type
from aotc.vmfb.dtypes import DTYPES, kind_of, size_of


def block_threads(kernel: Kernel) -> int:
    """Return the threads of a block that runs one item together, or 0 if each thread runs its own item.

    Raises
    ------
    InternalError
        If no loop over threads determines their number.
    """
    count = thread_count(kernel)
    if not count and any(isinstance(s, For) and s.kind == "thread" for s in walk(kernel.body)):
        raise InternalError(f"kernels: {kernel.name} has no loop over all threads of a block")
    return count


class CudaEmitter(LanesEmitter):
    """Emitter of a kernel's body for a GPU thread: ``void body(ptr of each buffer, i64 of each dim, i64 item)``.

    A private buffer that is allocated outside of the loops over threads, and whose first dim counts the threads, is one
    array for each thread: thread t accesses only ``[t, ...]``. So its part can stay in registers between such loops.
    """

    @staticmethod
    def parameters(kernel: Kernel) -> list[ir.Type]:
        """Return the LLVM parameter types of the kernel's body function."""
        return [PTR] * (len(kernel.inputs) + len(kernel.outputs)) + [I64] * (len(kernel.dims) + 1)

    @staticmethod
    def create_index_emitter(builder: ir.IRBuilder) -> NarrowIndices:
        """Create an emitter of index expressions that divides in 32 bits if possible."""
        return NarrowIndices(builder)

    def emit(self) -> None:
        """Emit the whole body of the kernel."""
        self._count, self._inside = block_threads(self.kernel), False
        self._parts: set[str] = set()
        super().emit()

    def _bind_parameters(self) -> ir.Value:
        (item,) = self.bind_kernel()
        return item

    def bind_kernel(self) -> list[ir.Value]:
        """Bind the kernel's buffers and dims to the function's parameters; return the remaining parameters."""
        arguments = iter(self.builder.function.args)
        for buffer in (*self.kernel.inputs, *self.kernel.outputs):
            self._pointers[buffer.name] = next(arguments)
        for name in self.kernel.dims:
            self._indices.bind_name(name, next(arguments))
        return list(arguments)

    def _element_address(self, buffer: Buffer, index: tuple[Dim, ...]) -> ir.Value:
        """Return the pointer to an element; a thread's part of a private buffer has no dim for threads."""
        if buffer.name in self._parts:
            return super()._element_address(replace(buffer, shape=buffer.shape[1:]), index[1:])
        return super()._element_address(buffer, index)

    def _emit_statement(self, stmt: Stmt) -> None:
        """Emit a statement; loops over threads and blocks, barriers, shuffles and atomics are specific to GPUs."""
        match stmt:
            case For(kind="thread"):
                self._emit_thread_loop(stmt)
            case For(kind="blocks"):
                self._emit_block_loop(stmt)
            case Prefetch():
                pass
            case GridBarrier(counter=counter):
                emit_grid_barrier(self.builder, self._pointers[counter.name])
            case Barrier(warp=True):
                emit_warp_barrier(self.builder)
            case Barrier():
                call_intrinsic(self.builder, BLOCK_BARRIER, VOID, [])
            case Shuffle(to=to, source=source, mask=mask):
                self._emit_shuffle(to, source, mask)
            case WarpMatch(to=to, source=source, bits=bits):
                own = self.builder.load(self._pointers[source.name], typ=memory_type(source.dtype))
                self.builder.store(emit_warp_match(self.builder, own, bits), self._pointers[to.name])
            case Store(atomic=True):
                self._emit_atomic(stmt)
            case _:
                super()._emit_statement(stmt)

    def _emit_atomic(self, stmt: Store) -> None:
        """Emit an atomic combination of an integer with an element in memory; the order of updates does not matter."""
        unsigned = kind_of(stmt.buffer.dtype) == "u"
        operation = {"max": "umax", "min": "umin"}.get(stmt.reduce, stmt.reduce) if unsigned else stmt.reduce
        value = self.scalar(stmt.value)
        self.builder.atomic_rmw(operation, self._element_address(stmt.buffer, stmt.index), value, "monotonic")

    def _emit_thread_loop(self, loop: For) -> None:
        """Emit a loop whose iterations are distributed to the threads of the block, at most one each."""
        builder = self.builder
        thread = emit_special_register(builder, "tid.x")
        first = builder.add(self._indices.emit(loop.begin), builder.zext(thread, I64), flags=("nsw",))
        body, after = builder.append_basic_block(loop.var), builder.append_basic_block("after_" + loop.var)
        if (loop.begin, loop.end) == (0, self._count):
            builder.branch(body)
        else:
            builder.cbranch(builder.icmp_signed("<", first, self._indices.emit(loop.end)), body, after)
        builder.position_at_end(body)
        self._indices.enter_block()
        self._indices.bind_name(loop.var, first)
        self._inside = True
        self._emit_block(loop.body)
        self._inside = False
        self._indices.leave_block()
        builder.branch(after)
        builder.position_at_end(after)

    def _emit_block_loop(self, loop: For) -> None:
        """Emit a loop whose iterations are distributed round-robin to the blocks of the launch."""
        builder = self.builder
        own, count = (builder.zext(emit_special_register(builder, name), I64) for name in ("ctaid.x", "nctaid.x"))
        begin = builder.add(self._indices.emit(loop.begin), own, flags=("nsw",))
        end = self._indices.emit(loop.end)
        body, after = builder.append_basic_block(loop.var), builder.append_basic_block("after_" + loop.var)
        builder.cbranch(builder.icmp_signed("<", begin, end), body, after)
        self._emit_iterations(loop, (begin, end, count), body, after)

    def _emit_shuffle(self, to: Buffer, source: Buffer, mask: int) -> None:
        """Emit the exchange of a number between threads of a warp; a complex number is exchanged in two parts."""
        kind, builder = memory_type(to.dtype), self.builder
        old, new = self._pointers[source.name], self._pointers[to.name]
        for part in range(2 if DTYPES[to.dtype].kind == "c" else 1):
            place = [i64(part)]
            at = [builder.gep(p, place, inbounds=True, source_etype=kind) if part else p for p in (old, new)]
            builder.store(emit_warp_shuffle_xor(builder, builder.load(at[0], typ=kind), mask), at[1])

    def _emit_alloc(self, buffer: Buffer) -> None:
        """Allocate a buffer: shared memory of the block, or private memory of a thread (also for scratch)."""
        if buffer.space == "shared":
            self._pointers[buffer.name] = shared_buffer_address(self.builder, self.kernel, self.target, buffer)
            return
        kind = memory_type(buffer.dtype)
        parts = 2 if DTYPES[buffer.dtype].kind == "c" else 1
        shape = ir.ArrayType(kind, max(buffer_bytes(buffer) // size_of(buffer.dtype) * parts, 1))
        if not self._inside and buffer.shape and buffer.shape[0] == self._count > 0:
            self._parts.add(buffer.name)
            shape = ir.ArrayType(kind, shape.count // self._count)
        with self.builder.goto_entry_block():
            local = self.builder.alloca(shape, name=buffer.name)
            local.align = size_of(buffer.dtype)
            local.type = PTR  # llvmlite's pointer is typed: it rejects stores of floats
        self._pointers[buffer.name] = local


class NarrowIndices(IndexEmitter):
    """Emitter of index expressions that divides in 32 bits if the operands provably fit."""

    def _emit_division(self, atom: Call, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit a quotient or a remainder, by a 32-bit instruction if both operands provably fit."""
        if not (_is_32_bit_index(atom.a) and _is_32_bit_index(atom.b)):
            return super()._emit_division(atom, a, b)
        builder = self.builder
        narrow = [i32(x.constant) if isinstance(x, ir.Constant) else builder.trunc(x, I32) for x in (a, b)]
        return builder.zext(builder.udiv(*narrow) if atom.fn == "//" else builder.urem(*narrow), I64)


def _is_32_bit_index(e: Dim) -> bool:
    low, high = bounds(e)
    return low is not None and high is not None and low >= 0 and high.bit_length() <= I32.width
