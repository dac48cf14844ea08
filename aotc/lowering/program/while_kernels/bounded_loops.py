"""A loop that is one kernel of a GPU and may never end: the kernel does some turns at a time, in a loop of steps.

So between two launches somebody can look whether the call is to end.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.scratch import bytes_of
from aotc.ir.program.ir import Loop, Step, Storage
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.plans.thresholds import LOOP_TURNS
from aotc.lowering.program.memory_spaces import Memories, launch
from aotc.lowering.program.while_kernels.carries import first_state
from aotc.lowering.program.while_kernels.small_loops import LoopKernel
from aotc.vmfb.dtypes import to_numpy


class Places(Protocol):
    """Where values live while steps are made: what :mod:`aotc.lowering.program.bufferize` knows."""

    time: int
    arena: list[Storage]
    memories: Memories

    def storage(self, value: Value) -> Storage:
        """Return where a value lives."""

    def readable(self, value: Value) -> Storage:
        """Return memory that holds a value."""

    def fresh(self, value: Value) -> Storage:
        """Return new memory for a value."""

    def copied(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies an array."""

    def touch(self, *storages: Storage) -> None:
        """Begin a step that reads or writes them."""

    def extend(self, begin: int, op: Op, kept: list[Storage]) -> None:
        """Keep what a loop reads and holds from ``begin`` on."""


def kept_memory(places: Places, found: LoopKernel, space: int) -> tuple[list[Step], list[Storage]]:
    """Return memory that the kernel of a loop has for itself, and the steps that make what must be 0 that."""
    if not found.kept:
        return [], []
    kept = [Storage("arena", bytes_of(b), space=space) for b in found.kept]
    places.arena += kept
    places.touch(*kept)
    if found.kept[-1].shape:
        return [], kept
    zero = np.zeros((), to_numpy(found.kept[-1].dtype))
    source = Storage("constant", zero.nbytes, places.memories.add(zero, "zero", space), space=space)
    return [places.copied(source, kept[-1], zero.nbytes)], kept


def bounded_steps(
    places: Places, op: Op, loop: LoopKernel, kept: list[Storage], turns: int | None
) -> list[Step]:  # fmt: skip
    """Return the steps of a ``while`` whose kernel goes on from the state in its results, with ``kept`` memory.

    The kernel writes the state after some iterations there, and whether there are more. If the number of iterations
    is known, ``turns`` is that.
    """
    begin = places.time
    state = first_state(places, op, whole=False)
    others = [places.readable(v) for v in loop.reads]
    more = places.fresh(op.regions[0].results[0])
    places.touch(*state.places, *others, more, *kept)
    turn = launch(loop.kernel, tuple(others), (*state.places, more, *kept), op)
    places.time += 1
    places.extend(begin, op, [*state.places, *others, more, *kept])
    launches = None if turns is None else -(-turns // LOOP_TURNS.value)
    return [*state.steps, Loop(more, (turn,), (), launches)]
