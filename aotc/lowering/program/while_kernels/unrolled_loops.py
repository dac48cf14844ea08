"""Choose the loops that the kernel of a whole ``while`` unrolls on a CPU, by the size of their code."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from aotc.ir.dims.algebra import Expr
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import accesses, scalars_in, statement_scalars
from aotc.ir.loop.ir import Apply, For, If, Load, Scalar, Stmt, Store, Tile, While, children, walk
from aotc.ir.opset import SCALARS
from aotc.lowering.program.while_kernels.small_loops import LoopKernel
from aotc.lowering.threshold import Estimate, Limit
from aotc.vmfb.dtypes import kind_of

UNROLLED_CODE = Limit(
    128,
    "scalar operations, at most, of all iterations together of a loop that is unrolled",
    "14 programs of benchmarks/programs/small_loops.py, geometric means of processor time relative to no limit: at 64 "
    "compile 0.36 and run 0.98, at 128 0.37 and 0.88, at 512 0.45 and 0.95",
    benchmark="python -m benchmarks costs unrolled_loops",
)
LOOP_CODE = Estimate(
    4,
    "copies of its body that a loop counts as, if it is not unrolled",
    "the vectorized loop, interleaved, and the loop for the remainder",
)
TILE_CODE = Estimate(100, "scalar operations that a register tile counts as", "a tile of 4 x 4 vectors and its loads")


def with_rolled_loops(loop_kernel: LoopKernel) -> LoopKernel:
    """Return the kernel of a whole loop without unrolled loops that write much code or only copy memory."""
    return loop_kernel._replace(kernel=replace(loop_kernel.kernel, body=roll_long_loops(loop_kernel.kernel.body)))


def roll_long_loops(body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Return statements in which loops to unroll are serial loops, if unrolling costs much code or gains nothing.

    Innermost loops are decided first. So a loop around a long loop counts the code of that loop once for each of its
    own iterations.

    LLVM keeps an array in registers only if every index of it is constant. An array that a serial loop indexes is in
    memory. Copies between such arrays are not unrolled either: LLVM vectorizes them, and vector loads of what scalar
    stores wrote would wait for the stores.
    """
    body = _map_unrolled(body, lambda loop: UNROLLED_CODE.holds(code_size((loop,))))
    memory, before = _buffers_in_memory(body), -1
    while len(memory) != before:
        body, before = _map_unrolled(body, partial(_is_worth_unrolling, memory)), len(memory)
        memory = _buffers_in_memory(body)
    return body


def _map_unrolled(body: Sequence[Stmt], keep: Callable[[For], bool]) -> tuple[Stmt, ...]:
    """Return statements in which unrolled loops are serial unless ``keep`` returns True, innermost loops first."""

    def changed(stmt: Stmt) -> Stmt:
        """Return ``stmt`` with unrolled loops that ``keep`` rejects as serial loops, also nested ones."""
        match stmt:
            case For():
                loop = replace(stmt, body=_map_unrolled(stmt.body, keep))
                return replace(loop, kind="serial") if loop.kind == "unroll" and not keep(loop) else loop
            case If(cond, then, otherwise):
                return If(cond, _map_unrolled(then, keep), _map_unrolled(otherwise, keep))
            case While(cond, pred, inner):
                return While(_map_unrolled(cond, keep), pred, _map_unrolled(inner, keep))
        return stmt

    return tuple(map(changed, body))


def _buffers_in_memory(body: tuple[Stmt, ...]) -> set[str]:
    """Return the buffers that LLVM cannot keep in registers: all but private ones with constant indices."""
    names_in_memory = set()
    for access in accesses(body):
        unrolled = {loop.var for loop in access.loops if isinstance(loop, For) and loop.kind == "unroll"}
        names = {""} if access.index is None else {s.name for e in access.index for s in symbols(e)}
        if access.buffer.space != "private" or names - unrolled:
            names_in_memory.add(access.buffer.name)
    return names_in_memory


def _is_worth_unrolling(memory: set[str], loop: For) -> bool:
    """Return False if a loop only copies elements between buffers in ``memory``."""
    return not all(
        isinstance(s, For)
        or (
            isinstance(s, Store)
            and not s.reduce
            and isinstance(s.value, Load)
            and {s.buffer.name, s.value.buffer.name} <= memory
        )
        for s in walk(loop.body)
    )


def code_size(body: Sequence[Stmt]) -> int:
    """Return the approximate number of scalar operations in the code of ``body``."""
    return sum(map(_statement_code, body))


def _statement_code(stmt: Stmt) -> int:
    """Return the estimated code size of a statement, in scalar operations after unrolling."""
    own = sum(map(_scalar_code, scalars_in(statement_scalars(stmt)))) + sum(map(code_size, children(stmt)))
    match stmt:
        case For(begin=begin, end=end, kind="unroll") if not isinstance(begin, Expr) and not isinstance(end, Expr):
            return own * len(range(begin, end, stmt.step))
        case For():
            return own * LOOP_CODE.value
        case Store():
            return own + 1
        case Tile():
            return TILE_CODE.value
    return own


COMPLEX_CODE = Estimate(4, "scalar operations for one operation on complex numbers", "a product: 2 products, 2 FMAs")


def _scalar_code(s: Scalar) -> int:
    """Return the operations of a scalar itself, without those of its operands."""
    match s:
        case Load():
            return 1
        case Apply(fn=fn, dtype=dtype):
            row = SCALARS.get(fn)
            return (row.vector_work if row else 1) * (COMPLEX_CODE.value if kind_of(dtype) == "c" else 1)
    return 0
