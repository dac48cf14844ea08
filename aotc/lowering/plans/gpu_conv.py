"""Convolutions that a GPU's tensor memory accelerator copies by windows, and products that tensor cores are for."""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.tiling import FP8, FP8_PAIRS, Window
from aotc.ir.opset.dim_attributes import padding_of
from aotc.ir.tensor.ir import Op
from aotc.lowering.plans.gpu_matmul_tiles import is_for_tensor_cores
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_SUMS = {("bf16", "bf16"): "f32", ("f16", "f16"): "f32", ("f32", "f32"): "f32", ("i8", "i8"): "i32"}
_SUMS |= {("f64", "f64"): "f64", **dict.fromkeys(FP8_PAIRS.values(), "f32")}
_CORNERS = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}  # how far a box may begin or end from the array, by spatial dims
_OFFSETS = {1: 1 << 16, 2: 1 << 8, 3: 1 << 5}  # of a tap: CUDA driver API, cuTensorMapEncodeIm2col

THIN_CHANNELS = Limit(
    31,
    "bytes of the channels of one pixel, at most, that are too few for a copy by windows",
    "a copy fills rows of 128 bytes, of which the product would use less than a quarter",
)
TESTED_TAPS = Limit(
    9,
    "taps of a depthwise convolution, at most, that tests for each element whether it is padding",
    "the alternative, a padded copy of the input, takes as long as all that the convolution reads and writes",
)
WINDOW_STEPS = Limit(
    8,
    "stride, in elements, at most, from one pixel to the next along a dim that is copied by windows",
    "CUDA driver API, cuTensorMapEncodeIm2col: elementStrides",
)


def sum_dtype_of(op: Op) -> str | None:
    """Return in what tensor cores add up a ``matmul`` or ``conv``; None if they are not for what it multiplies.

    The sum has the result's dtype, or one that it is rounded to; and f32 may be rounded to TF32. Sums of floats of 8
    bits are not exact, so products of more precision are of what those were widened to.
    """
    lhs, rhs, result = *(v.type.dtype for v in op.operands), op.result.type.dtype
    dtype = _SUMS.get((lhs, rhs))
    if dtype is None or op.attrs.get("feature_groups", 1) != 1:
        return None
    if dtype == "i32":
        return dtype if result == "i32" else None
    rounds = lhs not in ("f32", *FP8) or op.attrs.get("precision", "DEFAULT") == "DEFAULT"
    return dtype if result in (dtype, "f32", "bf16", "f16", *FP8) and rounds else None


def kernel_sizes(op: Op) -> tuple[tuple[Dim, ...], Dim, Dim]:
    """Return the taps, the channels and the columns of the kernel of a ``conv``."""
    *taps, channels, columns = op.operands[1].type.shape
    if op.attrs.get("rhs_transposed", False):
        *taps, columns, last, channels = op.operands[1].type.shape
        taps.append(last)
    return tuple(taps), channels, columns


def conv_pixels(op: Op) -> tuple[Dim, ...]:
    """Return how many images there are, and how many pixels the result of a ``conv`` has along each dim."""
    return op.result.type.shape[1 if "parts" in op.attrs else 0 : -1]


def conv_padding(op: Op) -> tuple[tuple[Dim, Dim], ...]:
    """Return the padding of each spatial dim of a ``conv``."""
    return padding_of(op.attrs, op.operands[0].type.rank - 2)


def conv_on_tensor_cores(op: Op) -> bool:
    """Do tensor cores compute this ``conv``?"""
    taps, channels, columns = kernel_sizes(op)
    rows = product(conv_pixels(op))
    return sum_dtype_of(op) is not None and is_for_tensor_cores((), rows, columns, product((*taps, channels)))


def is_depthwise(op: Op) -> bool:
    """Has each channel a ``conv`` of its own, of few taps?"""
    taps, channels, _ = kernel_sizes(op)
    count = product(taps)
    return op.attrs["feature_groups"] > 1 and channels == 1 and isinstance(count, int) and TESTED_TAPS.holds(count)


def window_of(op: Op, target: Target) -> Window | None:
    """Return the window of a ``conv`` that ``target`` copies by windows; None for others, as those that warps multiply.

    Its kernel has to lie as products take it: i8 by terms. Channels of all taps of the last dim are copied as those of
    one where that makes no more than half as many slices.
    """
    if target.cpu != "sm_90a" or not conv_on_tensor_cores(op) or op.operands[0].type.dtype == "f64":
        return None
    taps, channels, columns = kernel_sizes(op)
    _, *pixels = conv_pixels(op)
    padding, shape = conv_padding(op), op.operands[0].type.shape[1:-1]
    sizes = (*taps, channels, columns, *pixels, *shape, *(d for pair in padding for d in pair))
    if not all(isinstance(d, int) for d in sizes) or not 1 <= len(taps) <= len(_CORNERS) or 0 in sizes[: len(taps)]:
        return None
    low, high = (tuple(static(pair[side]) for pair in padding) for side in range(2))
    window = Window(
        tuple(map(static, taps)), op.attrs["strides"], op.attrs["rhs_dilation"], low, high,
        tuple(map(static, pixels)), static(channels), op.attrs.get("parts", 1),
    )  # fmt: skip
    size = size_of(op.operands[0].type.dtype)
    by_terms = op.attrs.get("rhs_transposed", False) or size == 1
    merged = replace(window, merged=True)
    found = [w for w in (window, merged) if _is_copied(w, shape, size, by_terms, columns)]
    if len(found) == 2 and 2 * merged.turns(128 // size) > window.turns(128 // size):
        return window
    return found[-1] if found else None


def _is_copied(window: Window, shape: tuple[Dim, ...], size: int, by_terms: bool, columns: Dim) -> bool:
    """Do lines of both operands of ``window`` begin at whole 16 bytes, and fill most of what copies bring?"""
    _, channels = window.copied
    width = static(shape[-1])
    step = window.strides[-1] if window.merged else 1
    lines = [channels if by_terms else columns, window.channels * step, width * window.channels]
    if any(n * size % 16 for n in lines) or THIN_CHANNELS.holds(channels * size):
        return False
    if not window.merged:
        return _fits(window, shape)
    lies = (window.low[-1], window.high[-1], window.gaps[-1]) == (0, 0, 1) and width >= step
    flat = replace(window, taps=window.copied[0], strides=(*window.strides[:-1], 1), merged=False)
    return lies and _fits(flat, (*shape[:-1], window.pixels[-1]))


def _fits(window: Window, shape: tuple[Dim, ...]) -> bool:
    """Can a tensor map describe it?"""
    rank = len(window.taps)
    rows = zip(window.taps, window.strides, window.gaps, window.low, window.pixels, shape, strict=True)
    return all(
        pixels > 0 and isinstance(extent, int) and WINDOW_STEPS.holds(stride) and (taps - 1) * gap < _OFFSETS[rank]
        and low <= _CORNERS[rank] and abs((pixels - 1) * stride - low - extent + 1) < _CORNERS[rank]
        for taps, stride, gap, low, pixels, extent in rows
    )  # fmt: skip
