"""The steps of a function in the order, and with the values computed twice, that its memory asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Protocol

from aotc.diagnostics import CompileError
from aotc.ir.dims import Expr
from aotc.ir.loop_ir import Kernel
from aotc.ir.loop_scratch import scratch_bytes
from aotc.ir.program_ir import Buffered, Constants, Launch, Storage, touched, walk
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.cost_work import guess
from aotc.lowering.analysis.limits import NAMED_BUFFERS
from aotc.lowering.program.order_ops import order_ops
from aotc.lowering.program.plan_memory import plan_memory
from aotc.lowering.program.recompute import recomputed


class Bufferize(Protocol):
    """:func:`aotc.lowering.program.bufferize.bufferize` of any function of a module."""

    def __call__(self, function: Function, *, constants: Constants) -> Buffered: ...


def fit_memory(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], constants: Constants,
    bufferize: Bufferize, limit: int,
) -> tuple[Function, Buffered]:  # fmt: skip
    """Return a function, its ops in the order that takes less memory, and its steps.

    With a ``limit`` of bytes, which is 0 if there is none, values are computed twice rather than kept.

    Raises
    ------
    CompileError
        If a call would take more than ``limit`` bytes all the same.
    """
    if constants.apart:  # nothing shares memory, for debugging
        return function, bufferize(function, constants=constants)
    best, ordered = function, order_ops(function, functions, kernels)
    if ordered.body is not function.body and _arena(ordered, bufferize) < _arena(function, bufferize):
        best = ordered
    if limit:
        other = [f for f in (function, ordered) if f is not best and f.body is not best.body]
        best = _within(limit, chain([best, *other], recomputed(best, functions, kernels)), bufferize)
    return best, bufferize(best, constants=constants)


def _within(limit: int, forms: Iterable[Function], bufferize: Bufferize) -> Function:
    """Return the first form of a function whose calls take no more than ``limit`` bytes."""
    least: tuple[int, Function, Buffered] | None = None
    for f in forms:
        steps = bufferize(f, constants=Constants())
        arena = plan_memory(steps.arena)
        if isinstance(arena, Expr):  # the runtime says it of each call
            return f
        size = arena + scratch_of(steps)
        if size <= limit:
            return f
        if least is None or size < least[0]:
            least = size, f, steps
    assert least is not None
    raise _too_much(limit, *least)


def scratch_of(steps: Buffered) -> int:
    """Return the bytes of scratch memory of one thread."""
    return max((scratch_bytes(kernel) for kernel in steps.kernels.values()), default=0)


def _arena(function: Function, bufferize: Bufferize) -> int:
    return guess(plan_memory(bufferize(function, constants=Constants()).arena))


def _too_much(limit: int, size: int, function: Function, steps: Buffered) -> CompileError:
    scratch = scratch_of(steps)
    made: dict[Storage, str] = {}
    for step in walk(steps.steps):
        if isinstance(step, Launch):
            for s in touched(step)[1]:
                made.setdefault(s, f"{step.kernel.name} at {step.loc.traced_by or step.loc}")

    largest = sorted(steps.arena, key=lambda s: -guess(s.size))[:NAMED_BUFFERS]
    rows = [f"{s.size:,} bytes of {made.get(s, 'a copy')}" for s in largest]
    thread = f" ({scratch:,} of them for one thread)" if scratch else ""
    return CompileError.at(
        function.loc,
        f"a call of @{function.name} takes {size:,} bytes{thread}, the memory limit is {limit:,}; "
        f"the largest buffers: {'; '.join(rows)}",
        hint="raise --memory-limit, or give the model smaller arrays at a time",
    )
