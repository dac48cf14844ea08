"""Compute a convolution of few output channels by tiles with pixels as columns and output channels as rows.

A tile whose columns are output channels computes at least 16 of them in f32 (AVX-512), even if the convolution has only
one. Pixels of a row can fill all columns. They must be adjacent in memory, so input channels become a spatial dim::

    %2 = conv %x, %w : f32[1, 62, 62, 3]                        // %x: f32[1, 64, 64, 8], %w: f32[3, 3, 8, 3]

    %3 = ... %x with its channels first : f32[1, 8, 64, 64, 1]
    %4 = ... %w with its channels first : f32[8, 3, 3, 1, 3]
    %5 = conv %3, %4 {cols = 32} : f32[1, 1, 62, 62, 3]         // "valid" along the 8 channels
    %2 = reshape %5

The sums have exactly the same terms: an infinite pixel affects only the windows that contain it.
"""

from __future__ import annotations

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, F32, I8_QUADS, I32, TileForm
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.cost_model.work import estimated_dim
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.cpu_tiles import best_tile
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_SINGLE = {BF16_PAIRS: F32, I8_QUADS: I32}
"""The form that multiplies one term at a time, by the form of several."""


def with_pixels_as_columns(op: Op, form: TileForm, target: Target, b: Builder) -> Value | None:
    """Return the result of ``conv`` ``op`` with pixels as columns of tiles, or None if other tiles take less time.

    Parameters
    ----------
    op : Op
        A convolution of [N, space, C] by [space, C, O].
    form : TileForm
        The form of the tiles whose columns are output channels.
    """
    lhs, rhs = op.operands
    images, *space, channels = lhs.type.shape
    if op.attrs["feature_groups"] != 1 or op.attrs["strides"][-1] != 1:
        return None
    if not is_static((*space, channels, *rhs.type.shape)) or form.dot_product_dtype in target.matrices:
        return None
    single = _SINGLE.get(form, form)
    cols = _pixel_tile_columns(op, single, target)
    if not cols or not _are_pixel_columns_faster(op, form, cols, target):
        return None
    x, w = b.convert(lhs, single.left), b.convert(rhs, single.left)
    dims, attrs = len(space), {**op.attrs, "cols": cols}
    shape = op.result.type.shape
    if channels != 1:
        x = b.reshape(b.transpose(x, (0, dims + 1, *range(1, dims + 1))), (images, channels, *space, 1))
        kernel = rhs.type.shape[:-2]
        w = b.transpose(w, (dims, *range(dims), dims + 1))
        w = b.reshape(w, (channels, *kernel, 1, shape[-1]))
        attrs |= {name: (1, *op.attrs[name]) for name in ("strides", "rhs_dilation")}
        shape = (images, 1, *shape[1:])
    result = b.make("conv", (x, w), attrs, TensorType(single.out, shape))
    return b.convert(b.reshape(result, op.result.type.shape), op.result.type.dtype)


PIXEL_SUMS = BlockSize(
    6,
    "vectors of sums in a tile of pixels, at least, that keep the multiplier busy",
    "a multiplication takes four cycles, and one or two begin per cycle",
)


def _pixel_tile_columns(op: Op, form: TileForm, target: Target) -> int:
    """Return the columns of a tile, 0 if a row has fewer pixels than a vector; the last tile may overlap another."""
    *_, pixels, outputs = map(static, op.result.type.shape[-2:])
    lanes = target.vector_bytes // size_of(form.out)
    terms = product(op.operands[1].type.shape[:-1])
    most = min(best_tile(outputs, pixels, terms, form, target)[1], pixels) // lanes
    if not most:
        return 0
    times = {n: -(-pixels // (n * lanes)) * max(n * outputs, PIXEL_SUMS.value) for n in range(1, most + 1)}
    return lanes * min(times, key=lambda n: (times[n], -n))


NARROW_GAIN = Limit(
    130,
    "percent of the time with pixels as columns, up to which output channels stay the columns",
    "ops fused into the convolution become a kernel of their own",
)
CHANNELS_FIRST = BlockSize(
    32,
    "multiplications in the time of moving one element of the input to channels-first order",
    "a third of a nanosecond, at a hundred multiplications per nanosecond",
)
QUAD_RATE = BlockSize(
    4,
    "multiplications of i8 or bf16 by group instructions in the time of one that takes a single term",
    "four terms of i8 in a step",
)


def _are_pixel_columns_faster(op: Op, form: TileForm, cols: int, target: Target) -> bool:
    """Return True if tiles with pixels as columns are much faster than with output channels as columns."""
    lhs, rhs = op.operands
    *terms, outputs = rhs.type.shape
    pixels = static(op.result.type.shape[-2])
    lanes = target.vector_bytes // size_of(form.out)
    rows = estimated_dim(product(op.result.type.shape[:-2])) * static(product(terms))
    rate = QUAD_RATE.value if form in _SINGLE else 1
    now = rows * pixels * (-(-static(outputs) // lanes) * lanes) // rate
    loads = 2 if outputs == 1 else 1  # a tile of one row loads a vector for each multiplication
    then = rows * -(-pixels // cols) * cols * static(outputs) * loads
    then += estimated_dim(product(lhs.type.shape)) * CHANNELS_FIRST.value if lhs.type.shape[-1] != 1 else 0
    return not NARROW_GAIN.holds(100 * now // max(then, 1))
