"""Run a GPU loop of unknown trip count in several launches, each with a bounded number of iterations.

Between two launches the call can be cancelled, even if the loop never ends.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.scratch import buffer_bytes
from aotc.ir.program.ir import Loop, Step, Storage
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.plans.thresholds import LOOP_TURNS
from aotc.lowering.program.memories import Memories, launch_step
from aotc.lowering.program.while_kernels.carries import initial_loop_state
from aotc.lowering.program.while_kernels.small_loops import LoopKernel
from aotc.vmfb.dtypes import to_numpy


class StoragePlaces(Protocol):
    """Interface to the memory of values during bufferization, implemented by :mod:`aotc.lowering.program.bufferize`."""

    time: int
    arena: list[Storage]
    memories: Memories

    def storage_of_value(self, value: Value) -> Storage:
        """Return the memory of a value."""

    def readable_storage(self, value: Value) -> Storage:
        """Return memory from which a value can be read."""

    def allocate_like(self, value: Value) -> Storage:
        """Allocate new memory for a value."""

    def copy_step(self, source: Storage, target: Storage, size: Dim) -> Step:
        """Return the step that copies an array."""

    def begin_step(self, *storages: Storage) -> None:
        """Begin a step, and extend the live ranges of the ``storages`` that it accesses."""

    def extend_live_ranges(self, begin: int, op: Op, storages: list[Storage]) -> None:
        """Extend the lifetimes of values that a loop reads, and of ``storages``, back to step ``begin``."""


def persistent_memory(places: StoragePlaces, loop_kernel: LoopKernel, space: int) -> tuple[list[Step], list[Storage]]:
    """Return the work memory that a loop's kernel uses across launches, and the steps that clear it."""
    if not loop_kernel.kept:
        return [], []
    persistent = [Storage("arena", buffer_bytes(b), space=space) for b in loop_kernel.kept]
    places.arena += persistent
    places.begin_step(*persistent)
    if loop_kernel.kept[-1].shape:
        return [], persistent
    zero = np.zeros((), to_numpy(loop_kernel.kept[-1].dtype))
    source = Storage("constant", zero.nbytes, places.memories.add_constant(zero, "zero", space), space=space)
    return [places.copy_step(source, persistent[-1], zero.nbytes)], persistent


def bounded_steps(
    places: StoragePlaces, op: Op, loop: LoopKernel, persistent: list[Storage], iterations: int | None
) -> list[Step]:  # fmt: skip
    """Return the steps that launch a loop's kernel until no iterations remain.

    Each launch reads the state from the memory of the results, runs some iterations, and writes the new state there,
    and whether iterations remain. ``iterations`` is the trip count, or None.
    """
    begin = places.time
    state = initial_loop_state(places, op, whole=False)
    others = [places.readable_storage(v) for v in loop.reads]
    more = places.allocate_like(op.regions[0].results[0])
    places.begin_step(*state.places, *others, more, *persistent)
    iteration = launch_step(loop.kernel, tuple(others), (*state.places, more, *persistent), op)
    places.time += 1
    places.extend_live_ranges(begin, op, [*state.places, *others, more, *persistent])
    launches = None if iterations is None else -(-iterations // LOOP_TURNS.value)
    return [*state.steps, Loop(more, (iteration,), (), launches)]
