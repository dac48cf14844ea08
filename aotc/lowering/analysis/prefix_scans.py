"""Recognize prefix scans among ``reduce_window`` ops: each window reaches from one end of a dim to an element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aotc.ir.opset import SCALARS
from aotc.ir.opset.dim_attributes import dims_of, pairs_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import kind_of, limits, to_numpy


@dataclass(frozen=True, slots=True)
class Scan:
    """Prefix scan along ``dim``; a ``reverse`` scan starts at the high end."""

    dim: int
    reverse: bool


SHORT_SCAN = Limit(
    16,
    "elements of a scan, at most, that is computed as independent windows",
    "windows are unrolled and independent of each other; each step of a scan depends on the one before",
)


def scan_of(op: Op) -> Scan | None:
    """Return the scan that ``op`` computes; None for other windows, and for scans too short to gain from it."""
    if op.name != "reduce_window":
        return None
    a, shape = op.attrs, op.operands[0].type.shape
    if any(s != 1 for key in ("strides", "base_dilations", "window_dilations") for s in a[key]):
        return None
    moved = windowed_dims(op)
    if len(moved) != 1 or 0 in shape:
        return None
    (dim,) = moved
    n = shape[dim]
    if dims_of(a, "window")[dim] != n or SHORT_SCAN.holds(n):
        return None
    match tuple(pairs_of(a)[dim]):
        case (low, 0) if low == n - 1:
            return Scan(dim, reverse=False)
        case (0, high) if high == n - 1:
            return Scan(dim, reverse=True)
    return None


def windowed_dims(op: Op) -> list[int]:
    """Return the dims with windows of several elements or with padding."""
    widths = zip(dims_of(op.attrs, "window"), pairs_of(op.attrs), strict=True)
    return [d for d, (length, padding) in enumerate(widths) if length != 1 or tuple(padding) != (0, 0)]


def has_neutral_start(op: Op, makers: Mapping[Value, Op]) -> bool:
    """Return True if the combiner of ``op`` is a single op and the initial value its neutral element."""
    name = combiner_op_name(op)
    init = op.operands[-1]
    value = splat_of(init, makers)
    if name is None or value is None:
        return False
    neutral = neutral_value(name, init.type.dtype)
    return neutral is not None and bool(value == neutral)


def combiner_op_name(op: Op) -> str | None:
    """Return the name of the combiner of a reduction of one operand, if it is a single op on both params; else None."""
    region = op.regions[0]
    one = len(op.results) == 1 and len(region.ops) == 1 and set(region.ops[0].operands) == set(region.params)
    return region.ops[0].name if one and region.results == region.ops[0].results else None


def neutral_value(name: str, dtype: str) -> np.ndarray | None:
    """Return the neutral element of the op ``name`` for ``dtype``, or None if it has none."""
    row, kind = SCALARS.get(name), kind_of(dtype)
    value: float
    match row.neutral if row else "":
        case "zero" if dtype != "f8E8M0FNU":  # this dtype has no 0
            value = 0
        case "one":
            value = 1
        case "ones" if kind in "biu":
            value = True if kind == "b" else -1
        case "lowest" if kind != "c":
            value = limits(dtype)[0]
        case "largest" if kind != "c":
            value = limits(dtype)[1]
        case _:
            return None
    return np.array(value).astype(to_numpy(dtype))
