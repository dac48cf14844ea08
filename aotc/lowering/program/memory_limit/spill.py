"""Move values of a GPU to host memory until later readers need them.

A value is moved to the host after its last reader before the peak, and back before its first reader after the peak. A
value that came from the host is not moved there: it is fetched again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import replace
from functools import partial

from aotc.diagnostics import Loc
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.cost_model.op_time import move_nanoseconds
from aotc.lowering.placement.memory_spaces import SPILLED
from aotc.lowering.program.memory_limit.copy_readers import (
    MemoryRewrite,
    copy_readers,
    reader_positions_of_values,
    waits_for_later_readers,
)
from aotc.lowering.program.memory_limit.order_ops import LiveMemoryModel

REASON = "the memory limit: not read until later"


def spill_rewrites(model: LiveMemoryModel, places: Mapping[Value, str]) -> Iterator[MemoryRewrite]:
    """Yield rewrites that move to the host a value that is alive at the peak and read only later.

    ``places`` are the devices of values.
    """
    region = model.region
    worst = model.peak_position(region.ops)
    readers = reader_positions_of_values(model)
    for position, op in enumerate(region.ops[:worst]):
        for v in op.results:
            if not waits_for_later_readers(v, worst, readers.get(v, []), model):
                continue
            at = min(n for n in readers[v] if n > worst)
            on_host = is_fetch(op)
            price = (1 if on_host else 2) * host_move_ns_per_byte(model.sizes[v])
            if on_host:
                yield MemoryRewrite(price, partial(_region_with_fetch_repeated, model, op, at))
            else:
                last = max([position, *(n for n in readers[v] if n < at)])
                yield MemoryRewrite(price, partial(_region_with_value_on_host, model, v, (last + 1, at), places[v]))


def is_fetch(op: Op) -> bool:
    """Return True if ``op`` fetches a value that was moved to the host."""
    return op.name == "transfer" and op.attrs["source"] == SPILLED


def host_move_ns_per_byte(size: int) -> float:
    """Return the nanoseconds per byte of a move of ``size`` bytes."""
    return move_nanoseconds(size, "cuda", "cpu") / size


def transfer_to_host(v: Value, place: str, count: str, loc: Loc) -> Op:
    """Return the op that moves ``v`` from device ``place`` to the host."""
    attrs = {"source": place, "device": SPILLED, "reason": REASON}
    return Op("transfer", (v,), (Value(f"{v.name}_host{count}", v.type),), attrs, (), loc)


def transfer_from_host(host_copy: Value, v: Value, place: str, count: str, loc: Loc) -> Op:
    """Return the op that moves ``v`` back to device ``place`` from its host copy ``host_copy``."""
    attrs = {"source": SPILLED, "device": place, "reason": REASON}
    return Op("transfer", (host_copy,), (Value(f"{v.name}_back{count}", v.type),), attrs, (), loc)


def _region_with_fetch_repeated(model: LiveMemoryModel, op: Op, at: int, count: str) -> Region:
    """Return the region with the fetch ``op`` repeated before position ``at``."""
    suffix = f"_back{count}"
    back = Value(f"{op.result.name}{suffix}", op.result.type)
    return copy_readers(model, {op.result: back}, [replace(op, results=(back,))], at, suffix, op)


def _region_with_value_on_host(
    model: LiveMemoryModel, v: Value, span: tuple[int, int], place: str, count: str
) -> Region:
    """Return the region with ``v`` on the host between the two positions of ``span``."""
    away, at = span
    loc = model.region.ops[away - 1].loc
    out = transfer_to_host(v, place, count, loc)
    into = transfer_from_host(out.result, v, place, count, loc)
    rewritten = copy_readers(model, {v: into.result}, [into], at, f"_back{count}")
    return insert_op_after(rewritten, out, set(model.region.ops[:away]))


def insert_op_after(region: Region, op: Op, before: Set[Op]) -> Region:
    """Return ``region`` with ``op`` inserted after the leading ops that are in ``before``."""
    number = next((n for n, one in enumerate(region.ops) if one not in before), len(region.ops))
    return replace(region, ops=(*region.ops[:number], op, *region.ops[number:]))
