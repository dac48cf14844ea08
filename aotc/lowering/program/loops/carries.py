"""The state of a loop of several kernels: where it lies, and how the next one takes the place of the last."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from aotc.ir.dims import Dim, is_static
from aotc.ir.program_ir import Step, Storage
from aotc.ir.tensor_ir import Op, Region, Value, captured


class StatePlaces(Protocol):
    """Where values live while steps are made: what :mod:`aotc.lowering.program.bufferize` knows."""

    depth: int
    where: dict[Value, Storage]
    counts: dict[Value, int]
    wanted: dict[Value, Storage]

    def storage(self, value: Value) -> Storage:
        """Return where a value lives."""

    def fresh(self, value: Value) -> Storage:
        """Return new memory for a value."""

    def target(self, value: Value) -> Storage:
        """Return memory for a value to be written."""

    def copied(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies an array."""


@dataclass
class Carried:
    """The memory of a loop's state, the steps that bring the first one there, and the numbers of what these are for.

    ``late`` are those of values that a single kernel for the loop would read where they are.
    """

    places: list[Storage] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    late: list[Step] = field(default_factory=list)
    held: set[int] = field(default_factory=set)


def first_state(places: StatePlaces, op: Op, whole: bool) -> Carried:
    """Return where the state of a ``while`` is; ``whole`` if a single kernel for it is to be made too."""
    made = Carried()
    for n, (init, v) in enumerate(zip(op.operands, op.results, strict=True)):
        source = places.storage(init)
        mine = source.kind == "arena" and source.reads_left == 1 and source.depth == places.depth
        if mine and v not in places.wanted and source not in made.places:
            places.where[v] = source
            source.reads_left += places.counts.get(v, 0)
            made.places.append(source)
            made.held.add(n)
            continue
        carry = places.target(v)
        made.places.append(carry)
        late = whole and carry is not source and is_static(v.type.shape)
        if not late:
            made.held.add(n)
        if carry.size != 0 and carry is not source:
            (made.late if late else made.steps).append(places.copied(source, carry, carry.size))
    return made


def moves(places: StatePlaces, body: Region, carries: Collection[Storage]) -> list[Step]:
    """Return the copies of the next state over the old one; values that sit in another carry are saved first."""
    steps: list[Step] = []
    rows = []
    for v, carry in zip(body.results, carries, strict=True):
        source = places.storage(v)
        if source is carry or carry.size == 0:
            continue
        if source in carries:
            held = places.fresh(v)
            steps.append(places.copied(source, held, carry.size))
            source = held
        rows.append((source, carry))
    return steps + [places.copied(source, carry, carry.size) for source, carry in rows]


def is_first_state(op: Op, new: Value, old: Value, roots: Mapping[Value, Value]) -> bool:
    """Does a loop read ``old`` only as the first state of what becomes ``new``? ``roots`` has what views are of."""
    readers = [k for k, v in enumerate(op.operands) if roots.get(v) is old]
    inner = any(roots.get(v) is old for r in op.regions for v in captured(r))
    return readers == [op.results.index(new)] and not inner


def may_overwrite(
    op: Op, new: Value, old: Value, roots: Mapping[Value, Value], updates: int, aliases: Collection[tuple[int, int]]
) -> bool:  # fmt: skip
    """May a dispatch write ``new`` over ``old``: as one of its ``updates``, or where its kernel lets them be one?"""
    n = op.results.index(new)
    readers = [k for k, v in enumerate(op.operands) if roots.get(v) is old]
    if updates:
        return readers == [n] and n < updates
    return all((n, k) in aliases for k in readers)
