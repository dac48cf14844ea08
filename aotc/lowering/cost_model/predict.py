"""Predict the time of a kernel: its launch, plus the slower of arithmetic and memory accesses (roofline model)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from aotc.ir.loop.ir import Kernel
from aotc.lowering.cost_model.kernel_work import KernelWork, work_of_kernel
from aotc.lowering.cost_model.machines import Machine, machine_of
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted time of a kernel on one CPU core, or on a whole GPU.

    Attributes
    ----------
    ns : float
        The total nanoseconds.
    compute, memory, overhead : float
        The nanoseconds of arithmetic and of memory, which overlap, and of the launch and the grid items.
    bytes : int
        The bytes of the arrays that it accesses, each counted once.
    """

    ns: float
    compute: float
    memory: float
    overhead: float
    bytes: int

    @property
    def bound(self) -> str:
        """Return the largest part of the time: ``compute``, ``memory`` or ``overhead``."""
        parts = {"compute": self.compute, "memory": self.memory, "overhead": self.overhead}
        return max(parts, key=lambda name: parts[name])


def predict(kernel: Kernel, target: Target, sizes: Mapping[str, int] | None = None) -> Prediction:
    """Return the predicted time of ``kernel`` on ``target``; ``sizes`` are those of its dims that are known."""
    machine = machine_of(target)
    return time_of(work_of_kernel(kernel, machine.vector_bytes, sizes, target.matrices), machine)


def time_of(work: KernelWork, machine: Machine) -> Prediction:
    """Return the predicted time of ``work`` on ``machine``."""
    share = min(1.0, max(work.threads, 1.0) / machine.threads)  # the busy fraction of the machine
    compute = work.vector / machine.vector + work.scalar / machine.scalar
    compute = (compute + work.chained / machine.chained + work.tile / machine.tile) / share
    level = machine.level_of(work.bytes)
    memory = work.bytes / level.rate / min(1.0, share * machine.loads)
    memory += sum(count * machine.level_of(size).random for count, size in work.random) / share
    overhead = machine.launch + machine.item * work.items
    return Prediction(overhead + max(compute, memory), compute, memory, overhead, int(work.bytes))
