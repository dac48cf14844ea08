"""Reorder a function's ops to use less memory; for a memory limit, also recompute or move values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Protocol

from aotc.diagnostics import CompileError
from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.ir import Kernel
from aotc.ir.program.ir import Buffered, Copy, Launch, Storage, accessed_storages, walk
from aotc.ir.tensor.ir import Function
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.work import estimated_dim, estimated_symbol
from aotc.lowering.placement.memory_spaces import Space
from aotc.lowering.program.graphs import command_sequences
from aotc.lowering.program.memories import Memories
from aotc.lowering.program.memory_limit.evict import evict_at_peak
from aotc.lowering.program.memory_limit.order_ops import order_ops
from aotc.lowering.program.memory_report import scratch_bytes_per_thread, total_arena_bytes
from aotc.lowering.program.plan_memory import plan_memory


class Bufferize(Protocol):
    """A function like :func:`aotc.lowering.program.bufferize.bufferize` with the module and kernels bound."""

    def __call__(self, function: Function, *, memories: Memories) -> Buffered: ...


# Values of a function that are recomputed or moved away to keep a memory limit, at most. Each one takes a pass over all
# ops.
RELIEVED = 256


def fit_memory(
    function: Function, functions: Mapping[str, Function], kernels: Mapping[str, Kernel], memories: Memories,
    bufferize: Bufferize, costs: Costs, limit: int,
) -> Function:  # fmt: skip
    """Reorder a function's ops to use less memory; for a memory limit, also recompute or move values.

    With a ``limit`` (bytes for each memory; 0: none), values are also recomputed or, from a GPU, moved to host memory.
    Symbolic sizes count with their estimates. An order that alternates between memories more often is used only to keep
    the limit.

    Raises
    ------
    CompileError
        If a call still needs more than ``limit`` bytes of a memory.
    """
    if memories.constants.guard_gaps:  # nothing shares memory, for debugging
        return function

    def tried(form: Function) -> Buffered:
        return bufferize(form, memories=memories.without_constants())

    best, ordered = function, order_ops(function, functions, kernels, memories.space_finder(function))
    if ordered.body is not function.body and _needs_less_memory(tried(ordered), tried(function)):
        best = ordered
    if not limit:
        return best
    forms = [best, *(f for f in (function, ordered) if f is not best and f.body is not best.body)]
    versions = [_FunctionVersion(form, tried(form), memories) for form in forms]
    for one in versions:
        if not one.memories_over_limit(limit):
            return one.function
    now = least = versions[0]
    gpus = {n for n, space in enumerate(memories.spaces) if "devices" in function.attrs and space.target.kind != "cpu"}
    evict = partial(evict_at_peak, functions=functions, kernels=kernels, finder=memories.space_finder, costs=costs)
    for count in range(RELIEVED):
        evictions = (
            evict(now.function, space=n, spills=n in gpus, suffix=str(count)) for n in now.memories_over_limit(limit)
        )
        rewritten = next(filter(None, evictions), None)
        if rewritten is None:
            break
        now = _FunctionVersion(rewritten, tried(rewritten), memories)
        if not now.memories_over_limit(limit):
            return rewritten
        least = min(least, now, key=lambda form: form.excess_bytes(limit))
    raise _memory_limit_error(limit, min([*versions, least], key=lambda form: form.excess_bytes(limit)))


def _needs_less_memory(new: Buffered, old: Buffered) -> bool:
    """Return True if the arena of ``new`` is provably smaller than the arena of ``old``."""
    fewer_bytes = estimated_dim(_arena_values(new)) < estimated_dim(_arena_values(old))
    return fewer_bytes and sum(1 for _ in command_sequences(new.steps)) <= sum(1 for _ in command_sequences(old.steps))


def _arena_values(steps: Buffered) -> Dim:
    spaces = {s.space for s in steps.arena}
    return total_arena_bytes([plan_memory([s for s in steps.arena if s.space == n]) for n in sorted(spaces)])


class _FunctionVersion:
    """A version of a function, with the bytes that its calls use in each memory: arena and one thread's scratch.

    Bytes that depend on symbolic sizes are compared with a limit for the estimated sizes: only a call knows the true
    ones.
    """

    def __init__(self, function: Function, steps: Buffered, memories: Memories) -> None:
        """Plan the memory of ``steps``; ``taken`` are the bytes of each memory, scratch included."""
        self.function, self.steps, self.memories = function, steps, memories
        arenas = arena_values_by_memory(steps, len(memories.spaces))
        self.scratch = scratch_bytes_by_memory(steps, memories.spaces)
        self.taken = [plan_memory(arena) + own for arena, own in zip(arenas, self.scratch, strict=True)]

    def memories_over_limit(self, limit: int) -> list[int]:
        """Return the numbers of the memories in which this version of the function exceeds ``limit``."""
        return [n for n, size in enumerate(self.taken) if estimated_dim(size) > limit]

    def excess_bytes(self, limit: int) -> int:
        """Return the bytes by which this version of the function exceeds ``limit``, over all memories."""
        return sum(estimated_dim(self.taken[n]) - limit for n in self.memories_over_limit(limit))


def arena_values_by_memory(steps: Buffered, spaces: int) -> list[list[Storage]]:
    """Return the values in the arena of each memory."""
    return [[s for s in steps.arena if s.space == n] for n in range(spaces)]


def scratch_bytes_by_memory(steps: Buffered, spaces: Sequence[Space]) -> list[int]:
    """Return the scratch bytes of one thread in each memory."""
    scratch = scratch_bytes_per_thread(steps, spaces)
    return [scratch if space.target.kind == "cpu" else 0 for space in spaces]


# Buffers named in the error of a memory limit that cannot be kept, the largest first.
NAMED_BUFFERS = 5


def _memory_limit_error(limit: int, form: _FunctionVersion) -> CompileError:
    """Return the error for an exceeded memory limit, with the values alive at the peak."""
    steps = form.steps
    origins: dict[Storage, str] = {}
    for step in walk(steps.steps):
        if isinstance(step, Launch):
            for s in accessed_storages(step)[1]:
                origins.setdefault(s, f"{step.kernel.name} at {step.loc.traced_by or step.loc}")
        elif isinstance(step, Copy) and step.source.space != step.target.space:
            origins.setdefault(step.target, "a transfer")

    space = form.memories_over_limit(limit)[0]
    own = form.memories.spaces[space]
    size, scratch = estimated_dim(form.taken[space]), form.scratch[space]
    alive = _values_alive_at_peak(arena_values_by_memory(steps, len(form.taken))[space])
    rows = [f"{estimated_dim(s.size):,} bytes of {origins.get(s, 'a copy')}" for s in alive[:NAMED_BUFFERS]]
    thread = f" ({scratch:,} of them for one thread)" if scratch else ""
    where, assumed = f" on {own.device}" if own.device else "", _for_estimated_sizes(form.taken[space])
    remaining = f"; the largest buffers at its peak: {'; '.join(rows)}" if rows else ""
    return CompileError.at(
        form.function.loc,
        f"a call of @{form.function.name} needs {size:,} bytes{where}{assumed}{thread}, {size - limit:,} more than "
        f"the memory limit of {limit:,}{remaining}",
        hint=f"raise --memory-limit, or compile the model for smaller arrays; {_memory_limit_hint(form.function, own)}",
    )


def _for_estimated_sizes(size: Dim) -> str:
    """Return the estimated sizes in ``size`` as text, `` at b=16 (assumed)``; empty if it has no symbols."""
    names = sorted({s.name for s in symbols(size)})
    return f" at {', '.join(f'{name}={estimated_symbol(name)}' for name in names)} (assumed)" if names else ""


def _memory_limit_hint(function: Function, space: Space) -> str:
    """Return the hint of the error: how to need less of the memory ``space``."""
    if space.target.kind == "cpu":
        return "a CPU has no other memory to move values to"
    if "devices" in function.attrs:
        return "all remaining values are needed at that point"
    return "with --device NAME=cuda, values can also move from the GPU to the host"


def _values_alive_at_peak(arena: Sequence[Storage]) -> list[Storage]:
    """Return the values alive at the peak, the largest first."""
    moments = sorted({s.first for s in arena})
    alive = [[s for s in arena if s.first <= moment <= s.last] for moment in moments]
    worst = max(alive, key=lambda some: sum(estimated_dim(s.size) for s in some), default=[])
    return sorted(worst, key=lambda s: -estimated_dim(s.size))
