"""The steps of a function in the order, and with the values computed twice, that its memory asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Protocol

from aotc.diagnostics import CompileError
from aotc.ir.dims import Dim, Expr, static
from aotc.ir.loop_ir import Kernel
from aotc.ir.program_ir import Buffered, Launch, Storage, touched, walk
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.cost_work import guess
from aotc.lowering.analysis.costs.model import Costs
from aotc.lowering.analysis.limits import NAMED_BUFFERS
from aotc.lowering.program.graphs import graphs
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.memory_report import scratch_of, total_of
from aotc.lowering.program.order_ops import order_ops
from aotc.lowering.program.plan_memory import plan_memory
from aotc.lowering.program.recompute import recomputed


class Bufferize(Protocol):
    """:func:`aotc.lowering.program.bufferize.bufferize` of any function of a module."""

    def __call__(self, function: Function, *, memories: Memories) -> Buffered: ...


def fit_memory(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], memories: Memories,
    bufferize: Bufferize, costs: Costs, limit: int,
) -> tuple[Function, Buffered]:  # fmt: skip
    """Return a function, its ops in the order that takes less memory, and its steps.

    With a ``limit`` of bytes, which is 0 if there is none, values are computed twice rather than kept. An order that
    goes from one memory to another more often is not taken but for a limit's sake.

    Raises
    ------
    CompileError
        If a call would take more than ``limit`` bytes all the same.
    """
    if memories.constants.apart:  # nothing shares memory, for debugging
        return function, bufferize(function, memories=memories)

    def tried(form: Function) -> Buffered:
        return bufferize(form, memories=memories.anew())

    best, ordered = function, order_ops(function, functions, kernels, memories.finder(function))
    if ordered.body is not function.body and _is_better(tried(ordered), tried(function)):
        best = ordered
    if limit:
        other = [f for f in (function, ordered) if f is not best and f.body is not best.body]
        forms = chain([best, *other], recomputed(best, functions, kernels, memories.finder, costs))
        best = _within(limit, ((form, tried(form)) for form in forms), memories)
    return best, bufferize(best, memories=memories)


def _is_better(new: Buffered, old: Buffered) -> bool:
    fewer_bytes = guess(_arena(new)) < guess(_arena(old))
    return fewer_bytes and sum(1 for _ in graphs(new.steps)) <= sum(1 for _ in graphs(old.steps))


def _arena(steps: Buffered) -> Dim:
    spaces = {s.space for s in steps.arena}
    return total_of([plan_memory([s for s in steps.arena if s.space == n]) for n in sorted(spaces)])


def _within(limit: int, forms: Iterable[tuple[Function, Buffered]], memories: Memories) -> Function:
    """Return the first form of a function whose calls take no more than ``limit`` bytes."""
    least: tuple[int, Function, Buffered] | None = None
    for f, steps in forms:
        arena = _arena(steps)
        if isinstance(arena, Expr):  # the runtime says it of each call
            return f
        size = int(arena) + scratch_of(steps, memories.spaces)
        if size <= limit:
            return f
        if least is None or size < least[0]:
            least = size, f, steps
    assert least is not None
    raise _too_much(limit, *least, scratch_of(least[2], memories.spaces))


def shares(limit: int, arenas: Sequence[list[Storage]], scratch: int) -> list[int]:
    """Return how many bytes each arena may take under a limit on all: what it needs, and a part of what is left."""
    least = [static(plan_memory([s for s in arena if isinstance(s.size, int)])) for arena in arenas]
    return [size + (limit - scratch - sum(least)) // len(arenas) for size in least]


def _too_much(limit: int, size: int, function: Function, steps: Buffered, scratch: int) -> CompileError:
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
