"""Does a region that takes an op wait for another one that it could have run beside, and what is lost by that?

What reads two independent regions could be computed by either; that one then begins when the other has ended. Where
each has items enough for all workers nothing is lost: one after the other they take as long as at once. Where they have
not, workers are idle that would have had the other's items.
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
from aotc.lowering.cost_model.work import SHARING_NS, guess
from aotc.lowering.plans.thresholds import CHUNK, ITEM_ELEMENTS, ORDER_WORKERS
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class Share:
    """The nanoseconds that a region takes one worker, and how many workers have items of it."""

    nanoseconds: float
    workers: int

    @property
    def wall(self) -> float:
        """The nanoseconds until it ends if it has all workers that it can use."""
        return self.nanoseconds / self.workers


def own_nanoseconds(ops: Iterable[Op], target: Target) -> float:
    """Return what ``ops`` take one worker in a region, of which loops and branches are no part."""
    return sum(op_nanoseconds(op, target) for op in ops if op.name not in FREE and op.name not in CONTROL_FLOW)


def share_of(nanoseconds: float, anchors: Anchors | None, kind: str) -> Share:
    """Return what a region takes, of a kind and with a space as fusion says."""
    return Share(nanoseconds, min(_items(anchors, kind), ORDER_WORKERS.value))


def _items(anchors: Anchors | None, kind: str) -> int:
    """Return about how many items the grid of a region has."""
    if anchors is None:
        return 1
    shape = anchors.anchor.type.shape
    reduced = anchors.reduced or frozenset()
    rows = guess(product(n for k, n in enumerate(shape) if k not in reduced))
    if kind == "row":
        return max(rows, 1)
    return max(rows // (CHUNK if kind == "contract" else ITEM_ELEMENTS).value, 1)


def refuses_to_wait(op: Op, own: Share, others: Iterable[Share], target: Target) -> str:
    """Return why a region that takes ``own`` does not take ``op`` and wait for ``others``, or nothing.

    If it does not, what ``op`` reads of it is written and read again.
    """
    size = 2 * size_in_bytes(op.results[0])
    machine = machine_of(target)
    saved = SHARING_NS.value + machine.launch + size / machine.level_of(size).rate
    if own.wall <= saved:  # it cannot lose more
        return ""
    shares = list(others)
    before = sum(share.wall for share in shares)
    all_at_once = (own.nanoseconds + sum(s.nanoseconds for s in shares)) / ORDER_WORKERS.value
    lost = own.wall + before - max(own.wall, before, all_at_once)
    if lost <= saved:
        return ""
    return f"the region would wait {lost / 1e3:.1f} us for others that run beside it, to save {saved / 1e3:.1f} us"
