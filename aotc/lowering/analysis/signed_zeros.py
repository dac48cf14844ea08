"""Find float values that are never -0.0: for them, ``x + 0.0`` has the same bits as ``x``."""

from __future__ import annotations

import numpy as np

from aotc.ir.opset import NEVER_NEGATIVE_ZERO, SELECTIONS
from aotc.ir.tensor.ir import Op, Region, Value, walk
from aotc.lowering.analysis.parallel_scatters import is_overwriting_scatter
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.analysis.thresholds import SPLAT_ELEMENTS
from aotc.vmfb.dtypes import kind_of


def values_without_negative_zeros(region: Region) -> set[Value]:
    """Return the values of ``region`` and of all regions in it whose elements are never -0.0.

    A sum is -0.0 only if both of its terms are. A carried value of a loop qualifies if its initial value does, and if
    its next value does under the assumption that all qualifying ones do (induction over the iterations). The analysis
    starts with the assumption that all carried values qualify, and drops those that fail until none does.
    """
    loops = [op for op in walk(region) if op.name == "while"]
    assumed = {(op, n) for op in loops for n, v in enumerate(op.operands) if kind_of(v.type.dtype) in "fc"}
    while True:
        qualifying = {v for op, n in assumed for v in (*(r.params[n] for r in op.regions), op.results[n])}
        _visit_for_negative_zeros(region, qualifying)
        ends = {(op, n): (op.operands[n], op.regions[1].results[n]) for op, n in assumed}
        failing = {
            state
            for state, values in ends.items()
            if not all(_is_free_of_negative_zeros(v, qualifying) for v in values)
        }
        if not failing:
            return qualifying
        assumed -= failing


def _visit_for_negative_zeros(region: Region, qualifying: set[Value]) -> None:
    """Add the results of ops that are never -0.0 to ``qualifying``; nested regions come before their op."""
    for op in region.ops:
        for inner in op.regions:
            _visit_for_negative_zeros(inner, qualifying)
        if op.name == "case":
            qualifying.update(
                v
                for n, v in enumerate(op.results)
                if all(_is_free_of_negative_zeros(r.results[n], qualifying) for r in op.regions)
            )
        elif op.name != "while" and _makes_no_negative_zeros(op, qualifying):
            qualifying.update(op.results)


def _is_free_of_negative_zeros(v: Value, qualifying: set[Value]) -> bool:
    return v in qualifying or kind_of(v.type.dtype) not in "fc"


def _makes_no_negative_zeros(op: Op, qualifying: set[Value]) -> bool:
    """Return True if ``op`` produces no -0.0, given that the values ``qualifying`` contain none."""
    fit = [_is_free_of_negative_zeros(v, qualifying) for v in op.operands]
    match op.name:
        case "constant":
            return SPLAT_ELEMENTS.holds(op.attrs["value"].size) and not _has_negative_zero(op.attrs["value"])
        case "add":
            return any(fit)
        case "scatter":
            return all(fit) if is_overwriting_scatter(op) else fit[0] and combiner_op_name(op) == "add"
        case "convert":
            return kind_of(op.operands[0].type.dtype) not in "fc"  # a float may be rounded to -0.0
    if op.name in NEVER_NEGATIVE_ZERO:
        return kind_of(op.result.type.dtype) == "f"
    return op.name in SELECTIONS and all(fit)


def _has_negative_zero(array: np.ndarray) -> bool:
    parts = (array.real, array.imag) if np.iscomplexobj(array) else (array,)
    return any(bool(((p == 0) & np.signbit(p)).any()) for p in parts)
