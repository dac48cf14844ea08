"""Estimate the parallelism that a fusion loses: a region that absorbs an op may have to wait for another region.

An op that reads two independent regions can be fused into either. That region then starts only when the other one has
ended. Nothing is lost if each region has enough grid items for all workers: the total time is the same one after the
other. With fewer items, workers are idle that could have run the other region concurrently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from aotc.ir.dims.algebra import product
from aotc.ir.opset import CONTROL_FLOW, FREE
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.anchors import Anchors
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.op_time import op_nanoseconds, size_in_bytes
from aotc.lowering.cost_model.work import SHARING_NS, estimated_dim
from aotc.lowering.plans.thresholds import CHUNK, ITEM_ELEMENTS, ORDER_WORKERS
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class RegionShare:
    """Time of a region in nanoseconds on one worker, and the number of workers that its grid items can occupy."""

    nanoseconds: float
    workers: int

    @property
    def wall_nanoseconds(self) -> float:
        """Return the wall time of a region in nanoseconds with all the workers it can use."""
        return self.nanoseconds / self.workers


def single_worker_nanoseconds(ops: Iterable[Op], target: Target) -> float:
    """Return the nanoseconds of ``ops`` on one worker; loops and branches do not count, as no region contains them."""
    return sum(op_nanoseconds(op, target) for op in ops if op.name not in FREE and op.name not in CONTROL_FLOW)


def region_share(nanoseconds: float, anchors: Anchors | None, kind: str) -> RegionShare:
    """Return the time of a region and the number of workers that can share it."""
    return RegionShare(nanoseconds, min(_estimated_grid_items(anchors, kind), ORDER_WORKERS.value))


def _estimated_grid_items(anchors: Anchors | None, kind: str) -> int:
    """Return the estimated number of grid items of a region."""
    if anchors is None:
        return 1
    shape = anchors.anchor.type.shape
    reduced = anchors.reduced or frozenset()
    rows = estimated_dim(product(n for k, n in enumerate(shape) if k not in reduced))
    if kind == "row":
        return max(rows, 1)
    return max(rows // (CHUNK if kind == "contract" else ITEM_ELEMENTS).value, 1)


def refuses_to_wait(op: Op, own: RegionShare, others: Iterable[RegionShare], target: Target) -> str:
    """Return the reason why a region should not fuse ``op`` and delay parallel work, or an empty string.

    Fusion saves a launch, its synchronization, and the write and read of the result of ``op``. Waiting costs the
    time of ``own`` after ``others``, less the time of all of them side by side. The op is fused unless that is more
    than what fusion saves.

    Parameters
    ----------
    op : Op
    own : RegionShare
        The region that would absorb ``op``.
    others : iterable of RegionShare
        The regions that compute other operands of ``op``, for which it would have to wait.
    target : Target
    """
    size = 2 * size_in_bytes(op.results[0])
    machine = machine_of(target)
    saved = SHARING_NS.value + machine.launch + size / machine.level_of(size).rate
    if own.wall_nanoseconds <= saved:  # waiting cannot cost more than the time of the region itself
        return ""
    shares = list(others)
    before = sum(share.wall_nanoseconds for share in shares)
    all_at_once = (own.nanoseconds + sum(s.nanoseconds for s in shares)) / ORDER_WORKERS.value
    lost = own.wall_nanoseconds + before - max(own.wall_nanoseconds, before, all_at_once)
    if lost <= saved:
        return ""
    return f"the region would wait {lost / 1e3:.1f} us for concurrent ones, to save {saved / 1e3:.1f} us"
