"""A time for what a kernel does: the slower of its arithmetic and its memory, and what each launch takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotc.ir.loop.ir import Kernel
from aotc.lowering.cost_model.kernel_work import KernelWork, work_of_kernel
from aotc.lowering.cost_model.machines import Machine, machine_of
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a kernel takes on one core of a CPU, or on a whole GPU.

    Attributes
    ----------
    ns : float
        All of it.
    compute, memory, overhead : float
        Its parts, in nanoseconds: arithmetic and memory overlap.
    bytes : int
        Of the arrays that it touches, each byte once.
    """

    ns: float
    compute: float
    memory: float
    overhead: float
    bytes: int

    @property
    def bound(self) -> str:
        """Return what takes most of the time: ``compute``, ``memory`` or ``overhead``."""
        parts = {"compute": self.compute, "memory": self.memory, "overhead": self.overhead}
        return max(parts, key=lambda name: parts[name])


def predict(kernel: Kernel, target: Target, sizes: Mapping[str, int] | None = None) -> Prediction:
    """Return a time for ``kernel`` on ``target``, with sizes for its dims as far as they are known."""
    machine = machine_of(target)
    return time_of(work_of_kernel(kernel, machine.vector_bytes, sizes, target.matrices), machine)


def time_of(work: KernelWork, machine: Machine) -> Prediction:
    """Return how long ``machine`` takes for ``work``."""
    share = min(1.0, max(work.threads, 1.0) / machine.threads)  # of the machine, that has something to do
    compute = work.vector / machine.vector + work.scalar / machine.scalar
    compute = (compute + work.chained / machine.chained + work.tile / machine.tile) / share
    level = machine.level_of(work.bytes)
    memory = work.bytes / level.rate / min(1.0, share * machine.loads)
    memory += sum(count * machine.level_of(size).random for count, size in work.random) / share
    overhead = machine.launch + machine.item * work.items
    return Prediction(overhead + max(compute, memory), compute, memory, overhead, int(work.bytes))
