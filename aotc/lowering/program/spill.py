"""Values of a GPU that wait in the process's memory for readers that come later, where the GPU's does not hold them.

A value is moved to the host behind its last reader before the worst moment, and back before the first one after it. One
that came from the host is not moved there: it is fetched once more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from aotc.ir.tensor_ir import Function, Op, Region, Value
from aotc.lowering.analysis.costs.devices import move_nanoseconds
from aotc.lowering.analysis.spaces import SPILLED, homes
from aotc.lowering.program.order_ops import Alive
from aotc.lowering.program.reread import Relief, readers_of, reread, waits

REASON = "the memory limit: not read until later"


def spilled(model: Alive, function: Function) -> Iterator[Relief]:
    """Yield what may wait on the host of what is alive at the worst moment and read only later."""
    region = model.region
    worst = model.worst(region.ops)
    readers, places = readers_of(model), homes(function)
    for made, op in enumerate(region.ops[:worst]):
        for v in op.results:
            if not waits(v, worst, readers.get(v, []), model):
                continue
            at = min(n for n in readers[v] if n > worst)
            there = op.name == "transfer" and op.attrs["source"] == SPILLED
            moves = 1 if there else 2
            saved = model.sizes[v]
            price = moves * move_nanoseconds(saved, "cuda", "cpu") / saved
            if there:
                yield Relief(price, partial(_fetched, model, op, at))
            else:
                last = max([made, *(n for n in readers[v] if n < at)])
                yield Relief(price, partial(_moved, model, op, v, (last + 1, at), places))


def _fetched(model: Alive, op: Op, at: int, count: str) -> Region:
    """Return the region with what ``op`` brings from the host fetched again before place ``at``."""
    suffix = f"_back{count}"
    back = Value(f"{op.result.name}{suffix}", op.result.type)
    return reread(model, {op.result: back}, [replace(op, results=(back,))], at, suffix, op)


def _moved(
    model: Alive, op: Op, v: Value, span: tuple[int, int], places: Mapping[Value, str], count: str
) -> Region:
    """Return the region with ``v``, which ``op`` makes, on the host between the two places of ``span``."""
    away, at = span
    held, back = (Value(f"{v.name}_{word}{count}", v.type) for word in ("host", "back"))
    leave = {"source": places[v], "device": SPILLED, "reason": REASON}
    come = {"source": SPILLED, "device": places[v], "reason": REASON}
    out, into = Op("transfer", (v,), (held,), leave, (), op.loc), Op("transfer", (held,), (back,), come, (), op.loc)
    made = reread(model, {v: back}, [into], at, f"_back{count}")
    before = set(model.region.ops[:away])
    number = next((n for n, one in enumerate(made.ops) if one not in before), len(made.ops))
    return replace(made, ops=(*made.ops[:number], out, *made.ops[number:]))
