"""Run a GPU loop that may never end in several launches: the kernel does a bounded number of iterations.

Between two launches the call can be cancelled.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.scratch import bytes_of
from aotc.ir.program.ir import Loop, Step, Storage
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.plans.thresholds import LOOP_TURNS
from aotc.lowering.program.memories import Memories, launch
from aotc.lowering.program.while_kernels.carries import first_state
from aotc.lowering.program.while_kernels.small_loops import LoopKernel
from aotc.vmfb.dtypes import to_numpy


class Places(Protocol):
    """Memory of values while steps are made; implemented by :mod:`aotc.lowering.program.bufferize`."""

    time: int
    arena: list[Storage]
    memories: Memories

    def storage(self, value: Value) -> Storage:
        """Return the memory of a value."""

    def readable(self, value: Value) -> Storage:
        """Return memory with a value, to be read."""

    def fresh(self, value: Value) -> Storage:
        """Return new memory for a value."""

    def copied(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies an array."""

    def touch(self, *storages: Storage) -> None:
        """Begin a step that reads or writes ``storages``."""

    def extend(self, begin: int, op: Op, kept: list[Storage]) -> None:
        """Extend the lifetimes of what a loop reads, and of ``kept``, back to ``begin``."""


def persistent_memory(places: Places, found: LoopKernel, space: int) -> tuple[list[Step], list[Storage]]:
    """Return the memory that a loop's kernel keeps between launches, and the steps that clear it."""
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
    places: Places, op: Op, loop: LoopKernel, kept: list[Storage], iterations: int | None
) -> list[Step]:  # fmt: skip
    """Return the steps of a ``while`` whose kernel continues from the state in its results, with ``kept`` memory.

    The kernel writes the state after some iterations there, and whether there are more iterations. ``iterations`` is
    the trip count, or None.
    """
    begin = places.time
    state = first_state(places, op, whole=False)
    others = [places.readable(v) for v in loop.reads]
    more = places.fresh(op.regions[0].results[0])
    places.touch(*state.places, *others, more, *kept)
    iteration = launch(loop.kernel, tuple(others), (*state.places, more, *kept), op)
    places.time += 1
    places.extend(begin, op, [*state.places, *others, more, *kept])
    launches = None if iterations is None else -(-iterations // LOOP_TURNS.value)
    return [*state.steps, Loop(more, (iteration,), (), launches)]
