"""Choose the convolutions that run on tensor cores, and those whose input the TMA copies by windows (im2col mode).

TMA is the tensor memory accelerator of Hopper GPUs. Its limits are those of ``cuTensorMapEncodeIm2col``.
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.tiling import FP8, FP8_PAIRS, Window
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.contractions import conv_padding, conv_pixels, kernel_sizes
from aotc.lowering.plans.gpu_matmul_tiles import is_for_tensor_cores
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_SUMS = {("bf16", "bf16"): "f32", ("f16", "f16"): "f32", ("f32", "f32"): "f32", ("i8", "i8"): "i32"}
_SUMS |= {("f64", "f64"): "f64", **dict.fromkeys(FP8_PAIRS.values(), "f32")}
# Limits by the number of spatial dims, from the CUDA driver API, cuTensorMapEncodeIm2col: the distance of a corner of
# the bounding box from the array, and the offset of a tap.
_CORNERS = {1: 1 << 15, 2: 1 << 7, 3: 1 << 4}
_OFFSETS = {1: 1 << 16, 2: 1 << 8, 3: 1 << 5}

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
    """Return the dtype in which tensor cores sum a ``matmul`` or ``conv``, or None if they do not support its dtypes.

    The sum is stored as it is, or rounded to the result's dtype. With precision ``DEFAULT``, f32 operands may be
    rounded to TF32. Sums of 8-bit floats are not exact on tensor cores; ops of higher precision widen them first.
    """
    lhs, rhs, result = *(v.type.dtype for v in op.operands), op.result.type.dtype
    dtype = _SUMS.get((lhs, rhs))
    if dtype is None or op.attrs.get("feature_groups", 1) != 1:
        return None
    if dtype == "i32":
        return dtype if result == "i32" else None
    rounds = lhs not in ("f32", *FP8) or op.attrs.get("precision", "DEFAULT") == "DEFAULT"
    return dtype if result in (dtype, "f32", "bf16", "f16", *FP8) and rounds else None


def conv_on_tensor_cores(op: Op) -> bool:
    """Return True if tensor cores support this ``conv`` and it is large enough for them."""
    taps, channels, columns = kernel_sizes(op)
    rows = product(conv_pixels(op))
    return sum_dtype_of(op) is not None and is_for_tensor_cores((), rows, columns, product((*taps, channels)))


def is_depthwise(op: Op) -> bool:
    """Return True if ``op`` convolves each channel separately, with few taps."""
    taps, channels, _ = kernel_sizes(op)
    count = product(taps)
    return op.attrs["feature_groups"] > 1 and channels == 1 and isinstance(count, int) and TESTED_TAPS.holds(count)


def im2col_window_of(op: Op, target: Target) -> Window | None:
    """Return the im2col window of a ``conv`` whose input the TMA copies, or None.

    8-bit weights must be stored with their terms contiguous. If the taps along the last spatial dim are adjacent in
    memory, their channels can be *merged*: copied as the channels of a single tap. That is done if it at least halves
    the number of slices, or if it is the only possibility.
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
    windows = [w for w in (window, merged) if _is_copied_by_tma(w, shape, size, by_terms, columns)]
    if len(windows) == 2 and 2 * merged.slices(128 // size) > window.slices(128 // size):
        return window
    return windows[-1] if windows else None


def _is_copied_by_tma(window: Window, shape: tuple[Dim, ...], size: int, by_terms: bool, columns: Dim) -> bool:
    """Return True if the TMA can copy image and weights: contiguous lines of 16 bytes, or multiples, that are long."""
    _, channels = window.copied
    width = static(shape[-1])
    step = window.strides[-1] if window.merged else 1
    lines = [channels if by_terms else columns, window.channels * step, width * window.channels]
    if any(n * size % 16 for n in lines) or THIN_CHANNELS.holds(channels * size):
        return False
    if not window.merged:
        return _fits_tensor_map(window, shape)
    is_contiguous = (window.low[-1], window.high[-1], window.gaps[-1]) == (0, 0, 1) and width >= step
    flat = replace(window, taps=window.copied[0], strides=(*window.strides[:-1], 1), merged=False)
    return is_contiguous and _fits_tensor_map(flat, (*shape[:-1], window.pixels[-1]))


def _fits_tensor_map(window: Window, shape: tuple[Dim, ...]) -> bool:
    """Return True if a tensor map can describe ``window`` over an input of ``shape``."""
    rank = len(window.taps)
    rows = zip(window.taps, window.strides, window.gaps, window.low, window.pixels, shape, strict=True)
    return all(
        pixels > 0 and isinstance(extent, int) and WINDOW_STEPS.holds(stride) and (taps - 1) * gap < _OFFSETS[rank]
        and low <= _CORNERS[rank] and abs((pixels - 1) * stride - low - extent + 1) < _CORNERS[rank]
        for taps, stride, gap, low, pixels, extent in rows
    )  # fmt: skip
