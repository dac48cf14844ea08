"""Turn a loop whose state has symbolic sizes into one kernel, for calls in which they are small.

The kernel reads its initial state from the memory of its results. Values of symbolic size are in scratch memory that
the kernel allocates at its start. Unless sizes are known to be small, another kernel checks them in each call, and the
program contains the loop in both forms.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from aotc.ir.dims.algebra import Dim, Expr, is_static, product
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.ir import Apply, Buffer, Const, Index, Kernel, Scalar, Space, Stmt, Store
from aotc.ir.tensor.ir import Function, Op, Value, captured_values, walk
from aotc.lowering.analysis.in_place import count_overwritten_parameters
from aotc.lowering.plans.thresholds import LOOP_ELEMENTS, LOOP_VALUE
from aotc.lowering.program.while_kernels.small_loops import (
    CandidateLoop,
    LoopKernel,
    LoopKernelWriter,
    is_whole_loop,
    kernel_of_whole_loop,
    kernels_in,
    values_computed_in_loop,
)
from aotc.lowering.program.while_kernels.unrolled_loops import with_rolled_loops
from aotc.lowering.threshold import Limit


class SizeBound(NamedTuple):
    """A size, and its upper bound for running a loop as one kernel."""

    size: Dim
    most: int


def control_depth(op: Op) -> int:
    """Return the nesting depth of loops and branches in ``op``, itself included."""
    return 1 + max((control_depth(o) for r in op.regions for o in r.ops if o.regions), default=0)


def loop_size_bounds(
    op: Op, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], limit: Limit
) -> list[SizeBound] | None:  # fmt: skip
    """Return the bounds to check in a call before a ``while`` runs as one kernel.

    None if all sizes are known, or if even the smallest sizes exceed a bound. ``limit`` bounds the operations of one
    worker in an iteration.
    """
    work = kernels_in(op, kernels)
    is_known = all(is_static(v.type.shape) for v in values_computed_in_loop(op)) and not any(k.dims for k in work)
    if is_known or not is_whole_loop(op):
        return None
    sizes = [product(v.type.shape) for v in _values_computed_per_iteration(op, functions)]
    flops: Dim = sum((k.flops for k in work), 0)
    rows = [*((size, LOOP_VALUE) for size in sizes), (sum(sizes, 0), LOOP_ELEMENTS), (flops, limit)]
    least = {s.name: max(s.lo, 1) for size, _ in rows for s in symbols(size)}
    if any(not most.holds(_size_at_values(size, least)) for size, most in rows):
        return None
    return list(dict.fromkeys(SizeBound(size, most.value) for size, most in rows if isinstance(size, Expr)))


def _size_at_values(size: Dim, values: Mapping[str, int]) -> Dim:
    return substitute(size, values) if isinstance(size, Expr) else size


def _values_computed_per_iteration(op: Op, functions: Mapping[str, Function]) -> list[Value]:
    """Return the values that an iteration computes, apart from the loop state and its in-place updates."""
    inner = [o for r in op.regions for o in walk(r)]
    loops = [o for o in inner if o.name == "while"]
    outside = {v for r in op.regions for v in captured_values(r)} | {o.result for o in inner if o.name == "constant"}
    values = [v for o in loops for v in o.results]  # their state
    for o in inner:
        if o.name == "dispatch":
            updates = count_overwritten_parameters(functions[o.attrs["callee"]])
            values += [v for n, v in enumerate(o.results) if n >= updates or o.operands[n] in outside]
    return values


@dataclass
class SymbolicLoopWriter(LoopKernelWriter):
    """Emit loops with values of symbolic size, allocated at the start of the kernel."""

    allocated: list[Stmt] = field(default_factory=list)

    def local_memory_space(self, value: Value) -> Space:
        return super().local_memory_space(value) if is_static(value.type.shape) else "scratch"

    def allocate_local(self, value: Value, block: list[Stmt]) -> Buffer:
        return super().allocate_local(value, block if is_static(value.type.shape) else self.allocated)

    def kernel_statements(self, block: list[Stmt]) -> list[Stmt]:
        return [*self.allocated, *block]


def symbolic_kernel(loop: CandidateLoop, initialized: Collection[int]) -> LoopKernel:
    """Return the kernel of a whole loop; the memory of results numbered ``initialized`` contains the initial state."""
    return with_rolled_loops(kernel_of_whole_loop(loop, SymbolicLoopWriter, initialized=initialized))


def bounds_kernel(name: str, bounds: Collection[SizeBound]) -> Kernel:
    """Return the kernel that writes 0 if sizes are within ``bounds``, else 1."""
    fits: Scalar = Const(True, "i1")
    for n, (size, most) in enumerate(bounds):
        fit = Apply("le", (Index(size), Const(most, "i64")), "i1")
        fits = Apply("and", (fits, fit), "i1") if n else fit
    out = Buffer("o0", "i32", ())
    chosen = Apply("select", (fits, Const(0, "i32"), Const(1, "i32")), "i32")
    dims = sorted({s.name for size, _ in bounds for s in symbols(size)})
    return Kernel(name, (), (out,), tuple(dims), 1, (Store(out, (), chosen),), (), len(bounds), 0)
