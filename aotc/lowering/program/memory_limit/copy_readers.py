"""Let readers of a value after some position read a copy of it, so that the value's memory is free in between."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from aotc.ir.tensor.ir import Op, Region, Value, captured_values
from aotc.lowering.program.memory_limit.order_ops import LiveMemoryModel


@dataclass(frozen=True, slots=True)
class MemoryRewrite:
    """A possible rewrite of a region that reduces its peak memory, with its price.

    Attributes
    ----------
    price : float
        Nanoseconds per byte saved.
    make : callable
        ``make(suffix)`` returns the region; ``suffix`` makes new names unique.
    """

    price: float
    make: Callable[[str], Region]


def reader_positions_of_values(model: LiveMemoryModel) -> dict[Value, list[int]]:
    """Return the positions of the ops that read each value."""
    readers: dict[Value, list[int]] = {}
    for n, op in enumerate(model.region.ops):
        for v in model.reads[op]:
            readers.setdefault(v, []).append(n)
    return readers


def waits_for_later_readers(value: Value, worst: int, readers: Sequence[int], model: LiveMemoryModel) -> bool:
    """Return True if ``value`` occupies memory at position ``worst`` only for later readers."""
    return max(readers, default=-1) > worst and worst not in readers and bool(model.sizes.get(value))


def copy_readers(
    model: LiveMemoryModel,
    new: Mapping[Value, Value],
    inserted: Sequence[Op],
    at: int,
    suffix: str,
    needless: Op | None = None,
) -> Region:
    """Return the region of ``model`` with the ops ``inserted`` before position ``at``; later ops read ``new`` values.

    Views of the old values are recreated. Views that are no longer read are removed, and so is the op ``needless``.
    """
    region, copies = model.region, dict(new)
    again = list(inserted)
    for op in region.ops[:at]:
        if model.is_view(op) and op.operands[0] in copies:
            view = copies[op.result] = Value(f"{op.result.name}{suffix}", op.result.type)
            again.append(replace(op, operands=(copies[op.operands[0]],), results=(view,)))
    behind = [op_reading_copies(op, copies) for op in region.ops[at:]]
    read = set(region.results)
    ops: list[Op] = []
    for op in reversed((*region.ops[:at], *again, *behind)):
        if not ((op is needless or model.is_view(op)) and read.isdisjoint(op.results)):
            ops.append(op)
            read.update(op.operands, *(captured_values(r) for r in op.regions))
    return replace(region, ops=tuple(reversed(ops)))


def op_reading_copies(op: Op, copies: Mapping[Value, Value]) -> Op:
    """Return ``op`` with copies read instead of values, in its regions too."""
    regions = tuple(_region_reading_copies(r, copies) for r in op.regions)
    if copies.keys().isdisjoint(op.operands) and all(new is old for new, old in zip(regions, op.regions)):
        return op
    return replace(op, operands=tuple(copies.get(v, v) for v in op.operands), regions=regions)


def _region_reading_copies(region: Region, copies: Mapping[Value, Value]) -> Region:
    """Return ``region`` with outer values replaced by their ``copies``."""
    if copies.keys().isdisjoint(captured_values(region)):
        return region
    results = tuple(copies.get(v, v) for v in region.results)
    return replace(region, ops=tuple(op_reading_copies(op, copies) for op in region.ops), results=results)
