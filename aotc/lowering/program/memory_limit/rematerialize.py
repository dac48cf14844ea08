"""Recompute values where they are read again, instead of storing them until then."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program.memory_limit.copy_readers import (
    MemoryRewrite,
    copy_readers,
    reader_positions_of_values,
    waits_for_later_readers,
)
from aotc.lowering.program.memory_limit.order_ops import Functions, LiveMemoryModel, has_effects, updates_in_place


def rematerialize_rewrites(model: LiveMemoryModel, costs: Costs) -> Iterator[MemoryRewrite]:
    """Yield rewrites that recompute a value that is alive at the peak and read only later."""
    region = model.region
    worst = model.peak_position(region.ops)
    readers = reader_positions_of_values(model)
    for op in region.ops[:worst]:
        if not is_repeatable(op, model.functions):
            continue
        values = tuple(v for v in op.results if waits_for_later_readers(v, worst, readers.get(v, []), model))
        saved = sum(model.sizes[v] for v in values)
        at = min((n for v in values for n in readers[v] if n > worst), default=0)
        if saved and all(not model.sizes.get(v) or max(readers[v]) >= at for v in model.reads[op]):
            price = costs.of(model.kernels[op.attrs["callee"]]).ns / saved
            yield MemoryRewrite(price, partial(_region_with_op_repeated, model, op, values, at))


def is_repeatable(op: Op, functions: Functions) -> bool:
    """Return True if ``op`` computes the same result at any position, without effects."""
    return op.name == "dispatch" and not has_effects(op, functions) and not updates_in_place(op, functions)


def _region_with_op_repeated(model: LiveMemoryModel, op: Op, values: tuple[Value, ...], at: int, count: str) -> Region:
    """Return the region of ``model`` with ``op`` repeated before position ``at``, for the readers of ``values``."""
    suffix = f"_again{count}"
    results = {v: Value(f"{v.name}{suffix}", v.type) for v in op.results}
    once_more = replace(op, results=tuple(results.values()))
    return copy_readers(model, {v: results[v] for v in values}, [once_more], at, suffix, op)
