"""Evict outer values that a loop or branch reads only before or after its own memory peak.

Before::

    y = exp(x); while { big = f(c); z = g(big); c = y + z }

After, if ``y`` is moved to the host, or recomputed::

    y = exp(x); h = transfer y; while { big = f(c); z = g(big); y2 = transfer h; c = y2 + z }
    while { big = f(c); z = g(big); y2 = exp(x); c = y2 + z }
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from aotc.ir.tensor.ir import Op, Region, Value, captured_values, values_captured_by_op
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.program.memory_limit.copy_readers import MemoryRewrite, copy_readers, reader_positions_of_values
from aotc.lowering.program.memory_limit.order_ops import LiveMemoryModel
from aotc.lowering.program.memory_limit.rematerialize import is_repeatable
from aotc.lowering.program.memory_limit.spill import (
    host_move_ns_per_byte,
    insert_op_after,
    is_fetch,
    transfer_from_host,
    transfer_to_host,
)


def evictions_inside_regions(
    model: LiveMemoryModel, op: Op, v: Value, costs: Costs, places: Mapping[Value, str], iterations: int
) -> Iterator[MemoryRewrite]:
    """Yield the possible evictions of ``v``, an outer value that regions of ``op`` read, during the regions' peaks.

    ``places`` are the devices of values, empty if values cannot be moved; ``iterations`` is the trip count of ``op``.
    """
    makers = [o for o in model.region.ops if v in o.results]
    firsts = _first_readers_in_regions(model, op, v)
    if not firsts or not makers:
        return
    (maker,) = makers
    later = [n for n in reader_positions_of_values(model).get(v, ()) if n > model.region.ops.index(op)]
    size = model.sizes[v]
    if places:
        moves = iterations + bool(later) + (not is_fetch(maker))
        yield MemoryRewrite(
            moves * host_move_ns_per_byte(size),
            partial(_region_with_operand_on_host, model, op, v, maker, (firsts, later), places[v]),
        )
    if not later and is_repeatable(maker, model.functions) and len(maker.results) == 1:
        price = iterations * costs.of(model.kernels[maker.attrs["callee"]]).ns / size
        yield MemoryRewrite(price, partial(_region_with_operand_recomputed, model, op, maker, firsts))


def _first_readers_in_regions(model: LiveMemoryModel, op: Op, v: Value) -> dict[int, int]:
    """Return, by number, the regions of ``op`` that read the outer value ``v``, and the position of their first reader.

    Empty if a region reads it at its peak, or both before and after that, or if ``op`` also has it as operand.
    """
    views = any(model.roots.get(x) is v for x in values_captured_by_op(op))
    if not model.sizes.get(v) or v in op.operands or views:
        return {}
    firsts: dict[int, int] = {}
    for number, region in enumerate(op.regions):
        if v not in captured_values(region):
            continue
        inner = model.model_of_inner_region(region)
        places = reader_positions_of_values(inner).get(v, [])
        worst = inner.peak_position(region.ops)
        full = inner.peak_bytes_and_count(region.ops)[0] == model.inner[op][0]
        if v in region.results or not places or (full and places[0] <= worst <= places[-1]):
            return {}
        firsts[number] = places[0]
    return firsts


def _op_with_own_values_in_regions(
    model: LiveMemoryModel, op: Op, v: Value, inserted: Mapping[int, Op], firsts: Mapping[int, int], suffix: str
) -> Op:
    """Return ``op`` whose regions compute ``v`` themselves by the ops ``inserted``, before the first reader."""
    regions = list(op.regions)
    for number, one in inserted.items():
        inner = model.model_of_inner_region(op.regions[number])
        regions[number] = copy_readers(inner, {v: one.result}, [one], firsts[number], f"{suffix}_{number}")
    return replace(op, regions=tuple(regions))


def _region_with_operand_on_host(
    model: LiveMemoryModel,
    op: Op,
    v: Value,
    maker: Op,
    reads: tuple[Mapping[int, int], list[int]],
    place: str,
    count: str,
) -> Region:
    """Return the region with ``v`` on the host until regions of ``op``, and ops after it, read it."""
    firsts, later = reads
    out = maker if is_fetch(maker) else transfer_to_host(v, place, count, maker.loc)
    host_copy = out.operands[0] if out is maker else out.result
    region, ops = model.region, model.region.ops
    if later:
        into = transfer_from_host(host_copy, v, place, f"{count}_behind", maker.loc)
        region = copy_readers(model, {v: into.result}, [into], later[0], f"_back{count}_behind")
    fetched = {n: transfer_from_host(host_copy, v, place, f"{count}_{n}", maker.loc) for n in firsts}
    changed = _op_with_own_values_in_regions(model, op, v, fetched, firsts, f"_back{count}")
    earlier = [n for n in reader_positions_of_values(model)[v] if n < ops.index(op)]
    remaining = (o for o in region.ops if o is not maker or out is not maker or earlier)
    region = replace(region, ops=tuple(changed if o is op else o for o in remaining))
    if out is maker:
        return region
    return insert_op_after(region, out, set(ops[: max([ops.index(maker), *earlier]) + 1]))


def _region_with_operand_recomputed(
    model: LiveMemoryModel, op: Op, maker: Op, firsts: Mapping[int, int], count: str
) -> Region:
    """Return the region with ``maker`` recomputed in the regions of ``op`` that read its result."""
    v = maker.result
    recomputed = {n: replace(maker, results=(Value(f"{v.name}_again{count}_{n}", v.type),)) for n in firsts}
    changed = _op_with_own_values_in_regions(model, op, v, recomputed, firsts, f"_again{count}")
    early = any(n < model.region.ops.index(op) for n in reader_positions_of_values(model)[v])
    ops = (changed if o is op else o for o in model.region.ops if early or o is not maker)
    return replace(model.region, ops=tuple(ops))
