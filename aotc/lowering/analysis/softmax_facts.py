"""What is known of a softmax's rows: none of its exponentials is above 1, and its sum tells of what is no number.

``exp(x - max(x))`` is at most 1. Where an element of a row is NaN, so are its exponential and the row's sum, whatever
was taken for the maximum: so that may miss the NaN, if all that comes of it is NaN with the sum::

    %t = reduce %x (max)                    max_number: it may be any, one instruction in place of three
    %d = sub %x, (broadcast %t)
    %e = exp %d                             decay: of at most 0
    %s = reduce %e (add)                    NaN, where %x has one
    %p = div %e, (broadcast %s)             NaN in the whole row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from aotc.ir.opset import ELEMENTWISE, NAN_KEEPING
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.long_rows import LongRow, repeats_numbers, rows_of, same_order, unconverted
from aotc.lowering.analysis.prefix_scans import combiner
from aotc.vmfb.dtypes import kind_of

_WIDE = ("f32", "f64")


def softmax_facts(region: Region) -> dict[Value, str]:
    """Return the ops of the loop IR that take the place of a region's, by their results."""
    if all(op.name != "reduce" for op in region.ops):
        return {}
    makers = {v: op for op in region.ops for v in op.results}
    found = {op.result: "max_number" for op in region.ops if _may_miss_nan(op, region, makers)}
    for row in rows_of(region):
        lone = row.rescaled and len(row.steps) == 1 and row.difference.result.type.dtype in _WIDE
        if lone and row.first.operands[0] is row.difference.operands[0] and _is_at_least_first(row, makers):
            found[row.steps[0].result] = "decay"
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


# --- rows with a NaN -------------------------------------------------------------


class _Nan(IntEnum):
    """Where a value is NaN for sure if an element of its row is."""

    NOWHERE = 0
    THERE = 1  # at that element
    ROW = 2  # in all of the row


@dataclass(frozen=True, slots=True)
class _Known:
    """Is a value what it is meant to be in rows with a NaN too, and where is it NaN in these?"""

    exact: bool = True
    nan: _Nan = _Nan.NOWHERE


def _may_miss_nan(op: Op, region: Region, makers: Mapping[Value, Op]) -> bool:
    """May the reduction ``op`` find some number in a row with a NaN, as all results of ``region`` are NaN all the same?

    So they are if arithmetic makes them of the row's sum, and the sum has what arithmetic makes of the NaN.
    """
    if op.name != "reduce" or combiner(op) != "max" or op.result.type.dtype not in _WIDE:
        return False
    rows = {op.operands[0], unconverted(op.operands[0], makers)}
    known = dict.fromkeys(rows, _Known(nan=_Nan.THERE)) | {op.result: _Known(exact=False)}
    for other in region.ops:
        given = [known.get(v, _Known()) for v in other.operands]
        if not all(k.exact for k in given) and not _stays_in_rows(other, op):
            return False
        found = _known(other, op, given)
        known |= {v: found for v in other.results if v not in known}
    return all(k.exact or k.nan is _Nan.ROW for k in (known.get(v, _Known()) for v in region.results))


def _stays_in_rows(op: Op, row: Op) -> bool:
    """Is what ``op`` makes for each row that ``row`` reduces made of what is in that row?"""
    whole = op.name == "reduce" and op.attrs["dims"] == row.attrs["dims"]
    return op.name in ELEMENTWISE or same_order(op) or repeats_numbers(op, row) or whole


def _known(op: Op, row: Op, operands: Sequence[_Known]) -> _Known:
    """Return what is known of the results of ``op``."""
    exact, nan = all(k.exact for k in operands), max((k.nan for k in operands), default=_Nan.NOWHERE)
    floats = all(kind_of(v.type.dtype) == "f" for v in (*op.operands, *op.results))
    if (op.name in NAN_KEEPING and floats) or same_order(op) or repeats_numbers(op, row):
        return _Known(exact, nan)
    summed = op.name == "reduce" and combiner(op) == "add" and op.attrs["dims"] == row.attrs["dims"]
    return _Known(exact, _Nan.ROW if summed and floats and nan else _Nan.NOWHERE)
