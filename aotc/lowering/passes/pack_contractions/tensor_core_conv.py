"""Prepare convolutions for a GPU's tensor cores: their kernels read zeros for padding and copy patches of the input.

Before::

    %1 = pad %x, %zero {low = (0, 1, 1, 0), high = (0, 1, 1, 0), ...} : f32[1, 16, 16, 256]
    %2 = conv %1, %w {strides = (1, 1), ...} : f32[1, 14, 14, 256]                          // %w: f32[3, 3, 256, 256]
After::

    %1 = transpose %w {perm = (0, 3, 1, 2)} : f32[3, 256, 3, 256]
    %2 = conv %x, %1 {padding = ((1, 1), (1, 1)), rhs_transposed = True, parts = 4, ...} : f32[4, 1, 14, 14, 256]
    %3 = reduce %2, %zero {dims = (0,)} add : f32[1, 14, 14, 256]

A depthwise convolution, which tensor cores do not compute, gets the attribute ``padding``, too.

Hopper's tensor cores require i8 operands with contiguous terms, so i8 kernels are transposed; so are constant f32
kernels. If a pixel has few channels, the channels of all taps of the last dim are copied together: they are contiguous
once the padding of that dim is stored, and zero channels extend pixels to the alignment of copies. A convolution whose
windows do not overlap is a plain matmul of its patches. A convolution of few pixels with many taps and channels is
split into several (split-K), whose results are added in order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod

from aotc.ir.dims.algebra import Dim, is_static, mod, product, static
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.contractions import conv_padding, conv_pixels, kernel_sizes
from aotc.lowering.passes.pack_contractions.tensor_core_matmul import (
    narrow_matmul,
    prepare_tensor_core_matmul,
    tensor_core_dtype,
    widen_fp8_matmul,
)
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.gpu_conv import conv_on_tensor_cores, im2col_window_of, is_depthwise
from aotc.lowering.plans.gpu_matmul_tiles import is_faster_transposed, split_k_parts
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def prepare_tensor_core_conv(op: Op, b: Builder, target: Target) -> tuple[Value, ...]:
    """Append a ``conv`` in the form for tensor cores, and return its result."""
    op = widen_fp8_matmul(narrow_matmul(op, b, target), b, target)
    if not target.has_ampere or not conv_on_tensor_cores(op):
        return b.append(_pad_as_attribute(op, b) if is_depthwise(op) else op)
    op = _pad_as_attribute(op, b)
    if (product_ := _single_window_conv_as_matmul(op, b)) is not None:
        (out,) = prepare_tensor_core_matmul(product_, b, target)
        return (b.reshape(out, op.result.type.shape),)
    changes = _best_layout_changes(op, target, _is_conv_kernel_transposed(op, b))
    if changes is None:
        return _matmul_of_conv_patches(op, b, target) if _windows_partition_input(op) else b.append(op)
    op = _conv_with_layout_changes(op, changes, b)
    window = im2col_window_of(op, target)
    assert window is not None
    taps, channels, columns = kernel_sizes(op)
    kind = tensor_core_dtype(op)
    shape, terms = (product(conv_pixels(op)), columns), product((*taps, channels))
    parts = split_k_parts(shape, terms, kind, prod(window.taps)) if kind else 1
    taps_, width = window.copied
    even = width % (128 // size_of(op.operands[0].type.dtype)) == 0 or prod(taps_) % parts == 0
    return (_split_conv_terms(op, parts, b),) if parts > 1 and even else b.append(op)


def _is_conv_kernel_transposed(op: Op, b: Builder) -> bool:
    """Return True if the kernel is to be transposed so that the terms of a sum are contiguous.

    Tensor cores require this order for i8, and are faster with it for f32.
    """
    w, (taps, channels, columns) = op.operands[1], kernel_sizes(op)
    size = size_of(w.type.dtype)
    if size != 4 or b.is_precomputable(w):
        return size in (1, 4)
    count = product(taps)
    shape, terms = (product(conv_pixels(op)), columns), product((*taps, channels))
    return isinstance(count, int) and is_faster_transposed(shape, terms, count)


def _best_layout_changes(op: Op, target: Target, transposed: bool) -> _OperandLayoutChanges | None:
    """Return the layout changes with which a GPU can copy the input by windows; None if no changes allow it.

    Changes are made only if they at least halve the number of slices.
    """
    depth = 128 // size_of(op.operands[0].type.dtype)
    candidates = (
        replace(changes, transposed=transposed) for changes in (_OperandLayoutChanges(), _window_alignment_changes(op))
    )
    windows = [(im2col_window_of(_conv_with_layout_changes(op, changes), target), changes) for changes in candidates]
    slices = [(window.slices(depth), changes) for window, changes in windows if window is not None]
    if len(slices) == 2 and 2 * slices[1][0] > slices[0][0]:
        return slices[0][1]
    return slices[-1][1] if slices else None


def _windows_partition_input(op: Op) -> bool:
    """Return True if the windows partition the input, so that each element is read once."""
    taps, _, _ = kernel_sizes(op)
    shape = op.operands[0].type.shape[1:-1]
    return (
        tuple(op.attrs["strides"]) == taps
        and all(gap == 1 for gap in op.attrs["rhs_dilation"])
        and all(pair == (0, 0) for pair in conv_padding(op))
        and all(mod(extent, tap) == 0 for extent, tap in zip(shape, taps, strict=True))
    )


def _single_window_conv_as_matmul(op: Op, b: Builder) -> Op | None:
    """Rewrite a convolution with a single window as a matmul, else return None.

    The gradient of a kernel of one tap has this form: its terms are images and pixels, in any order.
    """
    (x, w), (taps, channels, columns) = op.operands, kernel_sizes(op)
    last = len(taps) + 1
    x_before = _operand_of_inverse_transpose(x, (last, *range(1, last), 0), b)
    w_before = _operand_of_inverse_transpose(w, (last - 1, *range(last - 1), last), b)
    if x_before is None or w_before is None or op.attrs.get("rhs_transposed") or taps != x.type.shape[1:-1]:
        return None
    if any(pair != (0, 0) for pair in conv_padding(op)) or any(d != 1 for d in conv_pixels(op)[1:]):
        return None
    terms, rows = product((*taps, channels)), x.type.shape[0]
    operands = b.reshape(x_before, (terms, rows)), b.reshape(w_before, (terms, columns))
    attrs = {"lhs_transposed": True, "rhs_transposed": False}
    attrs |= {name: op.attrs[name] for name in ("precision",) if name in op.attrs}
    return b.op("matmul", operands, attrs, (TensorType(op.result.type.dtype, (rows, columns)),), "", ())


def _operand_of_inverse_transpose(v: Value, perm: tuple[int, ...], b: Builder) -> Value | None:
    """Return the operand of the transpose that computes ``v`` if ``perm`` is its inverse, else None."""
    maker = b.definitions.get(v)
    if maker is None or maker.name != "transpose":
        return None
    return maker.operands[0] if tuple(maker.attrs["perm"][p] for p in perm) == tuple(range(len(perm))) else None


def _matmul_of_conv_patches(op: Op, b: Builder, target: Target) -> tuple[Value, ...]:
    """Append the matmul of a convolution's patches, one per row, with its kernel; return the result."""
    (x, w), (taps, channels, columns) = op.operands, kernel_sizes(op)
    images, *pixels = conv_pixels(op)
    rank = len(taps)
    split = b.reshape(x, (images, *(d for pair in zip(pixels, taps, strict=True) for d in pair), channels))
    moved = b.transpose(split, (0, *range(1, 2 * rank, 2), *range(2, 2 * rank + 1, 2), 2 * rank + 1))
    rows, terms = product((images, *pixels)), product((*taps, channels))
    operands = b.reshape(moved, (rows, terms)), b.reshape(w, (terms, columns))
    attrs = {"lhs_transposed": False, "rhs_transposed": False}
    attrs |= {name: op.attrs[name] for name in ("precision",) if name in op.attrs}
    whole = b.op("matmul", operands, attrs, (TensorType(op.result.type.dtype, (rows, columns)),), "", ())
    (out,) = prepare_tensor_core_matmul(whole, b, target)
    return (b.reshape(out, op.result.type.shape),)


@dataclass(frozen=True, slots=True)
class _OperandLayoutChanges:
    """Changes to the operands of a convolution that allow copies by windows (im2col mode of the TMA).

    Attributes
    ----------
    wide : bool
        The padding of the last spatial dim is stored, so that the channels of all its taps are contiguous.
    channels : int
        The number of zero channels added to both operands.
    columns : int
        The padding added to the end of the last spatial dim; it adds no outputs.
    transposed : bool
        The kernel is stored with the terms of a sum contiguous.
    """

    wide: bool = False
    channels: int = 0
    columns: int = 0
    transposed: bool = False


def _window_alignment_changes(op: Op) -> _OperandLayoutChanges:
    """Return padding and channel changes that align each window of a few-channel convolution to 16 bytes."""
    taps, channels, _ = kernel_sizes(op)
    if not taps or not isinstance(channels, int):
        return _OperandLayoutChanges()
    step, size = op.attrs["strides"][-1], size_of(op.operands[0].type.dtype)
    more = next(n for n in range(16) if (channels + n) * step * size % 16 == 0)
    width = op.operands[0].type.shape[-2] + sum(conv_padding(op)[-1])
    last = width - (taps[-1] - 1) * op.attrs["rhs_dilation"][-1] - 1
    idle = (n for n in range(step) if mod((width + n) * (channels + more) * size, 16) == 0)
    column = next((n for n in idle if (last + n) // step == last // step), 0)
    return _OperandLayoutChanges(wide=True, channels=more, columns=column)


def _conv_with_layout_changes(op: Op, changes: _OperandLayoutChanges, b: Builder | None = None) -> Op:
    """Return the convolution ``op`` after layout changes ``changes``; without a builder only its types are computed."""
    x, w = op.operands
    attrs, rank = dict(op.attrs), w.type.rank
    if changes.wide:
        *others, (low, high) = conv_padding(op)
        attrs["padding"] = (*others, (0, 0))
        more = {rank - 1: changes.channels}
        x = _pad_tensor_core_input(x, {rank - 2: low}, {rank - 2: high + changes.columns, **more}, b)
        w = _pad_tensor_core_input(w, {}, {rank - 2: changes.channels}, b)
    if changes.transposed:
        perm = (*range(rank - 3), rank - 1, rank - 3, rank - 2)
        shape = tuple(w.type.shape[d] for d in perm)
        w = Value("w", TensorType(w.type.dtype, shape)) if b is None else b.transpose(w, perm)
        attrs["rhs_transposed"] = True
    return replace(op, operands=(x, w), attrs=attrs)


def _pad_tensor_core_input(x: Value, low: Mapping[int, Dim], high: Mapping[int, Dim], b: Builder | None) -> Value:
    """Return ``x`` padded with zeros; without a builder, a value of the padded type only."""
    if b is not None:
        return b.pad(x, None, low, high)
    shape = (extent + low.get(d, 0) + high.get(d, 0) for d, extent in enumerate(x.type.shape))
    return Value("x", TensorType(x.type.dtype, tuple(shape)))


def _split_conv_terms(op: Op, parts: int, b: Builder) -> Value:
    """Return the convolution split into ``parts`` ranges of taps and channels, with the sum of their results."""
    each = b.make("conv", op.operands, {**op.attrs, "parts": parts}, TensorType("f32", (parts, *op.result.type.shape)))
    total = b.reduce(each, b.constant(0, TensorType("f32")), (0,), b.combiner("add", "f32"))
    return b.convert(total, op.result.type.dtype)


def _pad_as_attribute(op: Op, b: Builder) -> Op:
    """Return ``op`` with a ``pad`` of zeros before it replaced by the attribute ``padding``."""
    definition = b.definitions.get(op.operands[0])
    if definition is None or definition.name != "pad" or "padding" in op.attrs:
        return op
    value = splat_of(definition.operands[1], b.definitions)
    widths = [dims_of(definition.attrs, name) for name in ("low", "high", "interior")]
    if value is None or value != 0 or not all(map(is_static, widths)):
        return op
    low, high, interior = ([static(n) for n in of_each] for of_each in widths)
    if min((*low, *high)) < 0 or any(interior) or any(low[n] or high[n] for n in (0, -1)):
        return op
    padding = tuple(zip(low[1:-1], high[1:-1], strict=True))
    return replace(op, operands=(definition.operands[0], op.operands[1]), attrs={**op.attrs, "padding": padding})
