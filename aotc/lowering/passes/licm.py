"""Move invariant values out of ``while`` loops (loop-invariant code motion).

A carried value that the body returns unchanged is replaced by its initial value. Ops of the condition and the body that
depend only on values from outside the loop run once, before the loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aotc.ir.dims.algebra import product
from aotc.ir.opset import SCALARS, SOURCES
from aotc.ir.tensor.ir import Module, Op, Region, Value, reads_no_values_of, replaced_values, values_captured_by_op
from aotc.lowering.passes.dce import has_effect
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.vmfb.dtypes import size_of


def licm(module: Module, options: Options) -> Module:
    """Return ``module`` with invariant carries captured and invariant ops hoisted.

    Ops with large results, ops with an effect, and free ops stay in the loop.
    """
    if not module.has("while"):
        return module
    return module.with_functions({n: f.with_body(_hoist_in_region(f.body, {})) for n, f in module.functions.items()})


def _hoist_in_region(region: Region, mapped: dict[Value, Value]) -> Region:
    """Return ``region`` with loop-invariant ops moved before its loops; ``mapped`` has the replaced values."""
    if "while" not in region.names and reads_no_values_of(region, mapped):
        return region
    ops: list[Op] = []
    for op in region.ops:
        op = op.on(replaced_values(op.operands, mapped), op.regions)
        if op.name == "while":
            op = _capture_constant_carries(op, mapped)
        if op.regions:
            op = op.on(op.operands, tuple(_hoist_in_region(r, mapped) for r in op.regions))
        if op.name == "while":
            op = _hoist_invariant_ops(op, ops)
        ops.append(op)
    return region.with_ops(ops, replaced_values(region.results, mapped))


def _capture_constant_carries(op: Op, mapped: dict[Value, Value]) -> Op:
    """Return a loop without carried values that its body returns unchanged; record their replacements in ``mapped``."""
    condition, body = op.regions
    constant = [i for i, (p, r) in enumerate(zip(body.params, body.results)) if r is p]
    if not constant:
        return op
    for i in constant:
        for inner in (condition.params[i], body.params[i], op.results[i]):
            mapped[inner] = op.operands[i]

    def varying_values(values: tuple[Value, ...]) -> tuple[Value, ...]:
        return tuple(v for i, v in enumerate(values) if i not in constant)

    regions = (
        Region(varying_values(condition.params), condition.ops, condition.results),
        Region(varying_values(body.params), body.ops, varying_values(body.results)),
    )
    return replace(op, operands=varying_values(op.operands), results=varying_values(op.results), regions=regions)


def _hoist_invariant_ops(op: Op, before: list[Op]) -> Op:
    """Append to ``before`` the ops that do not depend on values of the loop; return the loop without these.

    A free op (a constant, a broadcast for the arithmetic that reads it) is moved only if a moved op reads it.
    """
    regions = []
    for region in op.regions:
        inside: set[Value] = set(region.params)
        readers = _reader_names_of_values(region)
        free: dict[Value, Op] = {}
        moved: dict[int, Op] = {}
        for inner in region.ops:
            reads = inner.operands
            if inner.regions or has_effect(inner) or any(v in inside for v in reads):
                inside.update(inner.results)
            elif inner.name in SOURCES or _is_read_in_place(inner, readers):
                free.update((v, inner) for v in inner.results)
            elif _is_large_result(inner):
                inside.update(inner.results)
            else:
                _move_with_operands(inner, free, moved)
        before += moved.values()
        regions.append(region.with_ops([o for o in region.ops if id(o) not in moved], region.results))
    return op.on(op.operands, tuple(regions))


def _move_with_operands(op: Op, free: Mapping[Value, Op], moved: dict[int, Op]) -> None:
    """Add ``op`` to the ``moved`` ops, after the free ops that it reads."""
    for v in op.operands:
        if v in free:
            _move_with_operands(free[v], free, moved)
    moved[id(op)] = op


def _reader_names_of_values(region: Region) -> dict[Value, set[str]]:
    """Return the names of the ops that read each value; ``yield`` reads the region's results."""
    readers: dict[Value, set[str]] = {}
    for op in region.ops:
        for v in (*op.operands, *values_captured_by_op(op)):
            readers.setdefault(v, set()).add(op.name)
    for v in region.results:
        readers.setdefault(v, set()).add("yield")
    return readers


def _is_read_in_place(op: Op, readers: Mapping[Value, set[str]]) -> bool:
    """Return True if ``op`` is a broadcast that only arithmetic reads: outside the loop, its result would be stored."""
    return op.name == "broadcast" and readers.get(op.result, set()) <= SCALARS.keys()


HOISTED_BYTES = Limit(
    1 << 20,
    "bytes of a result moved out of a loop",
    "a larger one would occupy memory during the whole loop, instead of a cache when needed",
)


def _is_large_result(op: Op) -> bool:
    return any(not HOISTED_BYTES.holds(product(v.type.shape) * size_of(v.type.dtype)) for v in op.results)
