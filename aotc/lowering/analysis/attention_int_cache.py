"""Recognize keys and values from an integer (quantized) KV cache, and the scales that dequantize them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.attention_masks import ElementRead, Makers, earliest_read, uniform_number
from aotc.vmfb.dtypes import kind_of

Scale = ElementRead | float

INTEGERS = ("i8",)
"""The integer dtypes that attention kernels read directly."""


def narrow_read_before_widening(
    read: ElementRead, extents: Mapping[Dim, Dim], makers: Makers, axis: Dim
) -> tuple[ElementRead, Scale | None] | None:
    """Return the int8 read and the scale (or None) from which ``read`` is dequantized; else None.

    The scale must not vary along ``axis``, the axis of the elements of a key or value. A rounding to bf16 or f16 after
    the multiplication is ignored.
    """
    now, scale = earliest_read(read, extents, makers), None
    while now is not None and (op := makers.get(now.value)) is not None:
        if op.name == "convert" and kind_of(op.result.type.dtype) == "f":
            inner = earliest_read(replace(now, value=op.operands[0]), extents, makers)
            if inner is not None and inner.value.type.dtype in INTEGERS:
                return inner, scale
            if inner is None or kind_of(inner.value.type.dtype) != "f":
                return None
            now = inner
            continue
        if op.name != "mul" or scale is not None:
            return None
        sides = [earliest_read(replace(now, value=v), extents, makers) for v in op.operands]
        scales = [_scale_of_int8_read(v, x, axis, makers) for v, x in zip(op.operands, sides, strict=True)]
        at = next((n for n, x in enumerate(scales) if x is not None), None)
        if at is None:
            return None
        scale, now = scales[at], sides[1 - at]
    return None


def _scale_of_int8_read(value: Value, read: ElementRead | None, axis: Dim, makers: Makers) -> Scale | None:
    """Return a scale: a number, or a read that does not vary along ``axis``; None for another value."""
    number = uniform_number(value, makers)
    if number is not None:
        return number
    return read if read is not None and axis not in read.index else None
