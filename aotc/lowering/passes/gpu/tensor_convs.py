"""Prepare convolutions for a GPU's tensor cores, which read zeros around their input, and its patches where they lie.

Before::

    %1 = pad %x, %zero {low = (0, 1, 1, 0), high = (0, 1, 1, 0), ...} : f32[1, 16, 16, 256]
    %2 = conv %1, %w {strides = (1, 1), ...} : f32[1, 14, 14, 256]                              // %w: f32[3, 3, 256, 256]
After::

    %1 = transpose %w {perm = (0, 1, 3, 2)} : f32[3, 3, 256, 256]
    %2 = conv %x, %1 {padding = ((1, 1), (1, 1)), rhs_transposed = True, parts = 4, ...} : f32[4, 1, 14, 14, 256]
    %3 = reduce %2, %zero {dims = (0,)} add : f32[1, 14, 14, 256]

Hopper's tensor cores take TF32 and i8 in one order, so their kernels are turned; and a convolution of few pixels and
many taps and channels is cut into several, whose sums are added up in order.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from aotc.ir.dims import product
from aotc.ir.tensor_ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.gpu.conv_windows import conv_on_tensor_cores, conv_pixels, kernel_sizes, window_of
from aotc.lowering.analysis.gpu.tensor_tiles import parts_of_sum
from aotc.lowering.passes.gpu.tensor_products import TAKEN, narrow
from aotc.lowering.passes.rewrite import Builder
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def prepare_conv(op: Op, b: Builder, target: Target) -> tuple[Value, ...]:
    """Append a ``conv`` as tensor cores take it, and return its result."""
    op = narrow(op, b)
    if not conv_on_tensor_cores(op):
        return b.append(op)
    op = _unpadded(op, b)
    turned = replace(op, attrs={**op.attrs, "rhs_transposed": True})
    short = size_of(op.operands[0].type.dtype) == 2
    kernel = op.operands[1].type.shape
    if not short:
        swapped = TensorType(op.operands[1].type.dtype, (*kernel[:-2], kernel[-1], kernel[-2]))
        turned = replace(turned, operands=(op.operands[0], Value("turned", swapped)))
    window = window_of(op if short else turned, target)
    if window is None:
        return b.append(op)
    if not short:
        rank = len(kernel)
        w = b.transpose(op.operands[1], (*range(rank - 2), rank - 1, rank - 2))
        op = replace(turned, operands=(op.operands[0], w))
    taps, channels, columns = kernel_sizes(op)
    kind = TAKEN.get(op.operands[0].type.dtype) if op.result.type.dtype in TAKEN else None
    shape, terms = (product(conv_pixels(op)), columns), product((*taps, channels))
    parts = parts_of_sum(shape, terms, kind, prod(window.taps)) if kind else 1
    size = size_of(op.operands[0].type.dtype)
    if parts == 1 or channels % (128 // size):
        return b.append(op)
    return (_in_parts(op, parts, b),)


def _in_parts(op: Op, parts: int, b: Builder) -> Value:
    """Return the sum of convolutions with ``parts`` runs of taps and channels."""
    each = b.make("conv", op.operands, {**op.attrs, "parts": parts}, TensorType("f32", (parts, *op.result.type.shape)))
    total = b.reduce(each, b.constant(0, TensorType("f32")), (0,), b.combiner("add", "f32"))
    return b.convert(total, op.result.type.dtype)


def _unpadded(op: Op, b: Builder) -> Op:
    """Return a convolution that reads the operand of a ``pad`` with zeros."""
    made = b.definitions.get(op.operands[0])
    if made is None or made.name != "pad" or "padding" in op.attrs:
        return op
    value = splat_of(made.operands[1], b.definitions)
    low, high = made.attrs["low"], made.attrs["high"]
    widths = (*low, *high)
    if value is None or value != 0 or any(made.attrs["interior"]) or not all(isinstance(n, int) for n in widths):
        return op
    if min(widths) < 0 or any(low[n] or high[n] for n in (0, -1)):
        return op
    padding = tuple(zip(low[1:-1], high[1:-1], strict=True))
    return replace(op, operands=(made.operands[0], op.operands[1]), attrs={**op.attrs, "padding": padding})
