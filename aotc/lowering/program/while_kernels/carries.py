"""Order parallel copies, and copy the initial state of a loop."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from aotc.ir.dims.algebra import Dim, is_static
from aotc.ir.program.ir import Step, Storage
from aotc.ir.tensor.ir import Op, Value

Place = TypeVar("Place", bound=Hashable)


def ordered_copies(
    rows: Iterable[tuple[Place, Place]], temporary: Callable[[Place], Place]
) -> list[tuple[Place, Place]]:
    """Order copies (pairs of source and target) so that no source is overwritten before it is read.

    A cycle is broken by saving a source in ``temporary`` memory first. Targets are distinct.
    """
    left = [(source, target) for source, target in rows if source != target]
    ordered: list[tuple[Place, Place]] = []
    while left:
        sources = {source for source, _ in left}
        free = [row for row in left if row[1] not in sources]
        if free:
            ordered += free
            left = [row for row in left if row[1] in sources]
            continue
        saved = left[0][1]
        saved_copy = temporary(saved)
        ordered.append((saved, saved_copy))
        left = [(saved_copy if source == saved else source, target) for source, target in left]
    return ordered


class StatePlaces(Protocol):
    """Interface to the memory of values, implemented by :mod:`aotc.lowering.program.bufferize`."""

    def storage_of_value(self, value: Value) -> Storage:
        """Return the memory of a value."""

    def copy_step(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies an array."""


@dataclass
class LoopStateMemory:
    """Memory of a loop's state, and the steps that copy the initial state to it.

    ``late`` are copies that a single kernel for the loop does not need, as it reads these values in place.
    """

    places: Sequence[Storage] = ()
    steps: list[Step] = field(default_factory=list)
    late: list[Step] = field(default_factory=list)
    held: set[int] = field(default_factory=set)


def initial_loop_state(places: StatePlaces, op: Op, whole: bool) -> LoopStateMemory:
    """Return the memory of a ``while``'s state, with copies; ``whole`` is True if a kernel for the loop exists, too."""
    state = LoopStateMemory()
    state.places = [places.storage_of_value(v) for v in op.results]
    for n, (init, carry) in enumerate(zip(op.operands, state.places, strict=True)):
        source = places.storage_of_value(init)
        late = whole and source not in state.places and is_static(init.type.shape)
        if not late:
            state.held.add(n)
        if carry.size != 0 and carry is not source:
            (state.late if late else state.steps).append(places.copy_step(source, carry, carry.size))
    return state
