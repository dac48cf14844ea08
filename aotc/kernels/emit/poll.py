"""Polls for cancellation in kernels that may run long: the loops that count their operations, and the poll itself."""

from __future__ import annotations

import re
from collections.abc import Sequence
from math import prod

from llvmlite import ir

from aotc.ir.dims.algebra import Call, Dim, bounds, lone_atom
from aotc.ir.loop.access import scalars_in
from aotc.ir.loop.ir import Const, ExternalCall, For, If, Kernel, Let, Load, Scalar, Stmt, Store, Tile, While
from aotc.kernels.emit import library
from aotc.kernels.emit.metadata import mark_load_invariant
from aotc.kernels.llvm_types import I64, PTR, i64

# Scalar operations between two polls for cancellation, in a kernel that may run long. They take 3 us in vector code,
# 100 us in slow functions: cancellation is promised within 100 us. A poll takes 10 ns.
POLL_OPERATIONS = 20_000


_CALL = re.compile(r'%"poll[.\d]*" = call i64 .*\)')


def annotate_polls(text: str) -> str:
    """Add attributes to the polls in a module's text: they do not access the kernel's memory.

    Llvmlite cannot write these attributes.
    """
    return _CALL.sub(r"\g<0> cold nounwind memory(argmem: readwrite, inaccessiblemem: readwrite)", text)


def _operation_count(scalar: Scalar) -> int:
    """Return the number of operations in a scalar expression; a shared subexpression counts once."""
    return len(scalars_in([scalar]))


# Assumed iterations of a loop whose extent is symbolic, for the estimate of its operations.
UNKNOWN_EXTENT = 1_000


def _iteration_bound(begin: Dim, end: Dim) -> int:
    """Return the number of iterations from ``begin`` to ``end``, or an upper bound: 8 for ``min(n, begin + 8)``."""
    atom = lone_atom(end)
    if isinstance(atom, Call) and atom.fn == "min":
        return min(_iteration_bound(begin, atom.a), _iteration_bound(begin, atom.b))
    most = bounds(end - begin)[1]
    return UNKNOWN_EXTENT if most is None else max(most, 0)


# Scalar operations of an item of the grid, from which a kernel polls even without a while loop: it may run for more
# than 0.1 to 1 ms. An item of a grid that was split for several threads has fewer.
LONG_ITEM = 1_000_000
# Scalar operations of a loop iteration, from which it is counted in a loop that is not a while loop. Counting shorter
# iterations would cost time and stop LLVM from vectorizing. An enclosing loop has iterations of this size.
COUNTED_TURN = 2_000


class _IterationWork:
    """Estimated operations per iteration of each loop of a kernel, and the set of loops that count operations."""

    def __init__(self, kernel: Kernel) -> None:
        self.emit_iteration_poll: dict[int, int] = {}  # by id() of the statement
        self.counted: set[int] = set()
        match kernel.body:
            case (For(kind="parallel", body=body),):
                pass
            case body:
                pass
        if self._count_block(body) >= LONG_ITEM:
            self.counted |= {at for at, weight in self.emit_iteration_poll.items() if weight >= COUNTED_TURN}

    def _count_block(self, body: Sequence[Stmt]) -> int:
        """Return the estimated operations of a sequence of statements."""
        return sum(map(self._count_statement, body))

    def _count_statement(self, stmt: Stmt) -> int:
        """Return the estimated operations of a statement, and record those per iteration if it is a loop."""
        match stmt:
            case Let(value=value):
                return 0 if isinstance(value, Const | Load) else _operation_count(value)
            case Store(value=value):
                return _operation_count(value)
            case If(cond=cond, then=then, otherwise=otherwise):
                return _operation_count(cond) + max(self._count_block(then), self._count_block(otherwise))
            case Tile(rows=rows, cols=cols, levels=levels):
                return rows * cols * prod(_iteration_bound(0, level[0]) for level in levels) // 16
            case ExternalCall():
                return POLL_OPERATIONS
            case For(begin=begin, end=end, step=step, body=body):
                self.emit_iteration_poll[id(stmt)] = weight = self._count_block(body)
                return _iteration_bound(begin, end) // step * weight
            case While(cond=cond, pred=pred, body=body):
                self.emit_iteration_poll[id(stmt)] = weight = (
                    self._count_block(cond) + _operation_count(pred) + self._count_block(body)
                )
                self.counted.add(id(stmt))
                return weight
        return 0


class CancellationPolls:
    """Emitter of the polls for cancellation in a kernel.

    Work is counted in a register, over all loops of the kernel together: an iteration adds its operations, and after
    ``POLL_OPERATIONS`` the kernel polls. If it must stop, it frees its memory and returns.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        At the start of the body.
    kernel : Kernel
    """

    def __init__(self, builder: ir.IRBuilder, kernel: Kernel) -> None:
        self._builder = builder
        self._work = _IterationWork(kernel)
        if self._work.counted:
            self._done = builder.alloca(I64, name="work")
            builder.store(i64(0), self._done)

    def emit_iteration_poll(self, loop: Stmt, heap: Sequence[Sequence[ir.Value]]) -> None:
        """Emit the counter of operations for an iteration of ``loop``, with a poll after ``POLL_OPERATIONS``.

        Addresses in ``heap`` are freed if the kernel stops early.
        """
        if id(loop) not in self._work.counted:
            return
        builder = self._builder
        due, go = (builder.append_basic_block(n) for n in ("poll_due", "go_on"))
        weight = i64(self._work.emit_iteration_poll[id(loop)])
        done = builder.add(builder.load(self._done), weight)
        builder.store(done, self._done)
        is_due = builder.icmp_unsigned(">=", done, i64(POLL_OPERATIONS))
        builder.cbranch(is_due, due, go).set_weights([1, 1000])
        builder.position_at_end(due)
        builder.store(i64(0), self._done)
        self.emit_poll(heap)
        builder.branch(go)
        builder.position_at_end(go)

    def emit_poll(self, heap: Sequence[Sequence[ir.Value]]) -> None:
        """Emit a poll for cancellation, and an early return from the kernel after freeing ``heap``."""
        builder = self._builder
        leave, stay = (builder.append_basic_block(n) for n in ("stopped", "not_stopped"))
        builder.cbranch(self._call_monitor(), leave, stay).set_weights([1, 1000])
        builder.position_at_end(leave)
        for block in heap:
            for address in block:
                library.emit_free(builder, address)
        builder.ret_void()
        builder.position_at_end(stay)

    def _call_monitor(self) -> ir.Value:
        """Emit the call of the executor's monitor function; return the condition to stop."""
        monitor = self._builder.function.args[4]
        function = mark_load_invariant(self._builder.load(monitor, typ=I64))
        kind = ir.FunctionType(I64, [PTR])
        answer = self._builder.call(self._builder.inttoptr(function, kind.as_pointer()), [monitor], name="poll")
        return self._builder.icmp_signed("!=", answer, i64(0))
