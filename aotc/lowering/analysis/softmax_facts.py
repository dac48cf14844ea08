"""Facts about softmax that allow cheaper ops: the exponents are at most 0, and the sum of a row propagates NaN.

``exp(x - max(x))`` is at most 1, so ``exp`` can be the cheaper ``decay``. If an element of a row is NaN, so are its
exponential and the sum of the row, whatever the maximum is. The maximum may then ignore NaN (``max_number``), provided
that all results that depend on it are NaN through the sum::

    %t = reduce %x (max)                    max_number: ignores NaN, one instruction instead of three
    %d = sub %x, (broadcast %t)
    %e = exp %d                             decay: the operand is at most 0
    %s = reduce %e (add)                    NaN if %x has a NaN
    %p = div %e, (broadcast %s)             NaN in the whole row
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

from aotc.ir.opset import ELEMENTWISE, NAN_KEEPING
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.long_rows import (
    LongRow,
    broadcasts_row_scalar,
    dependent_reduction_pairs,
    is_reshape_like,
    value_before_conversions,
)
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.vmfb.dtypes import kind_of

_WIDE = ("f32", "f64")


def softmax_facts(region: Region) -> dict[Value, str]:
    """Return the cheaper ops of the loop IR that may replace ops of ``region``, by the results of these."""
    if all(op.name != "reduce" for op in region.ops):
        return {}
    makers = {v: op for op in region.ops for v in op.results}
    cheaper = {op.result: "max_number" for op in region.ops if _may_ignore_nan_in_maximum(op, region, makers)}
    for row in dependent_reduction_pairs(region):
        lone = row.is_softmax and len(row.steps) == 1 and row.difference.result.type.dtype in _WIDE
        if lone and row.first.operands[0] is row.difference.operands[0] and _is_row_maximum(row, makers):
            cheaper[row.steps[0].result] = "decay"
    return cheaper


def _is_row_maximum(row: LongRow, makers: Mapping[Value, Op]) -> bool:
    """Return True if the subtracted value is the maximum of the row, or the larger of that and constants."""
    value = row.centre
    while value is not row.first.result:
        op = makers.get(value)
        if op is None or not (op.name == "max" or is_reshape_like(op)):
            return False
        others = [v for v in op.operands if splat_of(v, makers) is None]
        if len(others) != 1:
            return False
        (value,) = others
    return True


# --- rows with a NaN -------------------------------------------------------------


class _NanElements(IntEnum):
    """Elements of a value that are certainly NaN if an element of its row of ``x`` is NaN."""

    NOWHERE = 0
    THERE = 1  # the same element
    ROW = 2  # the whole row


@dataclass(frozen=True, slots=True)
class _ValueFacts:
    """Facts about a value in rows with a NaN: if it is ``exact`` despite a wrong maximum, and its NaN elements."""

    exact: bool = True
    nan: _NanElements = _NanElements.NOWHERE


def _may_ignore_nan_in_maximum(op: Op, region: Region, makers: Mapping[Value, Op]) -> bool:
    """Return True if ignoring NaN in the maximum ``op`` does not change any result of ``region``.

    In a row with a NaN, each result must not depend on the maximum, or be NaN in the whole row: computed by arithmetic
    from the sum of the row, which in turn is computed by arithmetic from the element that is NaN.
    """
    if op.name != "reduce" or combiner_op_name(op) != "max" or op.result.type.dtype not in _WIDE:
        return False
    rows = {op.operands[0], value_before_conversions(op.operands[0], makers)}
    facts = dict.fromkeys(rows, _ValueFacts(nan=_NanElements.THERE)) | {op.result: _ValueFacts(exact=False)}
    for other in region.ops:
        operand_facts = [facts.get(v, _ValueFacts()) for v in other.operands]
        if not all(k.exact for k in operand_facts) and not _computes_within_rows(other, op):
            return False
        result_facts = _softmax_facts_of_op(other, op, operand_facts)
        facts |= {v: result_facts for v in other.results if v not in facts}
    return all(k.exact or k.nan is _NanElements.ROW for k in (facts.get(v, _ValueFacts()) for v in region.results))


def _computes_within_rows(op: Op, row: Op) -> bool:
    """Return True if ``op`` computes its results for each row that ``row`` reduces from values of this row only."""
    whole = op.name == "reduce" and op.attrs["dims"] == row.attrs["dims"]
    return op.name in ELEMENTWISE or is_reshape_like(op) or broadcasts_row_scalar(op, row) or whole


def _softmax_facts_of_op(op: Op, row: Op, operands: Sequence[_ValueFacts]) -> _ValueFacts:
    """Return the facts about the results of ``op`` from the facts about its operands."""
    exact, nan = all(k.exact for k in operands), max((k.nan for k in operands), default=_NanElements.NOWHERE)
    floats = all(kind_of(v.type.dtype) == "f" for v in (*op.operands, *op.results))
    if (op.name in NAN_KEEPING and floats) or is_reshape_like(op) or broadcasts_row_scalar(op, row):
        return _ValueFacts(exact, nan)
    summed = op.name == "reduce" and combiner_op_name(op) == "add" and op.attrs["dims"] == row.attrs["dims"]
    return _ValueFacts(exact, _NanElements.ROW if summed and floats and nan else _NanElements.NOWHERE)
