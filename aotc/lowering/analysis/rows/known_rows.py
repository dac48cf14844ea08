"""What is known of a softmax's rows: none of its exponentials is above 1, and its sum tells of what is no number.

``exp(x - max(x))`` is at most 1. Where an element of a row is NaN, so are its exponential and the row's sum, whatever
the maximum is. So the maximum need not hand on NaN if all that it gives is combined with the sum in the end::

    %t = reduce %x (max)                    max_number: NaN is left out
    %d = sub %x, (broadcast %t)
    %e = exp %d                             decay: of at most 0
    %s = reduce %e (add)                    NaN, where %x has one
    %p = div %e, (broadcast %s)             NaN in the whole row
"""

from __future__ import annotations

from collections.abc import Mapping

from aotc.ir.dims import product
from aotc.ir.opset import ELEMENTWISE, KEEPS_NAN
from aotc.ir.tensor_ir import Op, Region, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.rows.online_rows import LongRow, number_of_row, rows_of, same_order


def known_rows(region: Region) -> dict[Value, str]:
    """Return the ops of the loop IR that take the place of a region's, by their results."""
    makers = {v: op for op in region.ops for v in op.results}
    found: dict[Value, str] = {}
    for row in rows_of(region):
        if not row.rescaled or len(row.steps) > 1 or row.difference.result.type.dtype not in ("f32", "f64"):
            continue
        if _is_at_least_first(row, makers):
            found[row.steps[0].result] = "decay"
        if _sum_tells(row, region):
            found[row.first.result] = "max_number"
    return found


def _is_at_least_first(row: LongRow, makers: Mapping[Value, Op]) -> bool:
    """Is what is subtracted a row's maximum, or the largest of that and single numbers?"""
    value = row.centre
    while value is not row.first.result:
        op = makers.get(value)
        if op is None or not (op.name == "max" or same_order(op)):
            return False
        others = [v for v in op.operands if splat_of(v, makers) is None]
        if len(others) != 1:
            return False
        (value,) = others
    return True


def _sum_tells(row: LongRow, region: Region) -> bool:
    """Is all that depends on the maximum combined with the sum, by what makes NaN of NaN, before it is a result?"""
    makers = {v: op for op in region.ops for v in op.results}
    waiting, told = {row.first.result}, {row.second.result}
    for op in region.ops:
        waits, tells = (not values.isdisjoint(op.operands) for values in (waiting, told))
        if op is row.second or not (waits or tells):
            continue
        in_place = _stays_in_its_row(op, row, makers)
        if tells and in_place and (op.name in KEEPS_NAN or op.name not in ELEMENTWISE):
            told.update(op.results)
        elif waits and in_place:
            waiting.update(op.results)
        elif waits:
            return False
    return waiting.isdisjoint(region.results)


def _stays_in_its_row(op: Op, row: LongRow, makers: Mapping[Value, Op]) -> bool:
    """Are the elements of ``op`` made of those of the same row?"""
    if op.name in ELEMENTWISE:
        return True
    numbers = product(op.operands[0].type.shape) == product(row.kept) if op.operands else False
    return numbers and (same_order(op) or number_of_row(op.results[0], row.second, makers) is not None)
