"""A loop that is one kernel of a GPU and may never end: the kernel does some turns at a time, in a loop of steps.

So between two launches somebody can look whether the call is to end.
"""

from __future__ import annotations

from typing import Protocol

from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Kernel
from aotc.ir.program_ir import Copy, Loop, Step, Storage
from aotc.ir.tensor_ir import Op, Value
from aotc.lowering.program.memories import launch


class Places(Protocol):
    """Where values live while steps are made: what :mod:`aotc.lowering.program.bufferize` knows."""

    time: int

    def storage(self, value: Value) -> Storage:
        """Return where a value lives."""

    def fresh(self, value: Value) -> Storage:
        """Return new memory for a value."""

    def target(self, value: Value) -> Storage:
        """Return memory for a value to be written."""

    def copied(self, source: Storage, target: Storage, size: Dim) -> Copy:
        """Return a copy."""

    def touch(self, *storages: Storage) -> None:
        """Begin a step that reads or writes them."""

    def extend(self, begin: int, op: Op, kept: list[Storage]) -> None:
        """Keep what a loop reads and holds from ``begin`` on."""


def bounded_steps(places: Places, op: Op, kernel: Kernel, reads: tuple[Value, ...]) -> list[Step]:
    """Return the steps of a ``while`` whose ``kernel`` goes on from the state that it reads first.

    It writes the state after some turns, and whether there are more: then that state is the one to go on from.
    """
    count = len(op.results)
    steps: list[Step] = []
    state = [places.fresh(v) for v in op.results]
    for v, held in zip(reads, state):
        if held.size != 0:
            steps.append(places.copied(places.storage(v), held, held.size))
    begin = places.time
    others = [places.storage(v) for v in reads[count:]]
    writes = [places.target(v) for v in op.results]
    more = places.fresh(op.regions[0].results[0])
    places.touch(*state, *others, *writes, more)
    turn = launch(kernel, (*state, *others), (*writes, more), op)
    back = [places.copied(new, old, old.size) for new, old in zip(writes, state, strict=True) if old.size != 0]
    places.time += 1
    places.extend(begin, op, [*state, *others, *writes, more])
    return [*steps, Loop(more, (turn,), tuple(back))]
