"""Convolutions in the loop IR: a matmul whose rows are output pixels and whose terms are taps and input channels.

A *tap* is a position in the kernel's window. For output pixel p (``row``), tap t and channel c (``k``), A is::

    x[image, p * stride + t * gap - low, ..., c]            0 in the padding

and B is ``w[..., t, c, col]``, or ``w[..., col, t, c]``. :func:`window_operands` recognizes this form, so that a
template may copy whole patches of x (im2col), which no array contains.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from aotc.ir.dims.algebra import Dim, maximum, minimum, product, sym
from aotc.ir.loop.forms.matmul import LoopProduct, split_select
from aotc.ir.loop.forms.offsets import delinearize
from aotc.ir.loop.forms.tiling import Window
from aotc.ir.loop.ir import Apply, Buffer, Const, Index, Load, Scalar
from aotc.vmfb.dtypes import kind_of

Place = tuple[Dim, ...]


def patch_place(
    taps: Sequence[Dim], strides: Sequence[int], gaps: Sequence[int], low: Sequence[Dim], pixels: Sequence[Dim],
    channels: Dim, row: Dim, k: Dim,
) -> Place:  # fmt: skip
    """Return the index of the input element for term ``k`` of output ``row``.

    ``pixels`` are the number of images and the output pixels of each spatial dim.
    """
    image, *pixel = delinearize(row, pixels)
    *tap, channel = delinearize(k, (*taps, channels))
    steps = zip(pixel, strides, tap, gaps, low, strict=True)
    return (image, *(i * stride + t * gap - before for i, stride, t, gap, before in steps), channel)


def padded_element(
    load: Callable[[Place], Scalar], place: Place, shape: Sequence[Dim], padding: Sequence[tuple[Dim, Dim]], dtype: str
) -> Scalar:
    """Return the element at index ``place`` of an input of ``shape``, or 0 if that is in the ``padding``."""
    index, tests = list(place), []
    for d, (low, high) in enumerate(padding, start=1):
        at, extent = place[d], shape[d]
        if low != 0:
            tests.append(Apply("ge", (Index(at), Index(0)), "i1"))
        if high != 0:
            tests.append(Apply("lt", (Index(at), Index(extent)), "i1"))
        if low != 0 or high != 0:
            index[d] = maximum(minimum(at, extent - 1), 0)
    if not tests:
        return load(place)
    inside = reduce(lambda a, b: Apply("and", (a, b), "i1"), tests)
    zero = Const(0.0 if kind_of(dtype) == "f" else 0, dtype)
    return Apply("select", (inside, load(tuple(index)), zero), dtype)


@dataclass(frozen=True, slots=True)
class WindowOperands:
    """Operands of a convolution: input, kernel, and whether the terms of the kernel are contiguous in memory."""

    x: Buffer
    w: Buffer
    transposed: bool


def window_operands(product_: LoopProduct, window: Window) -> WindowOperands | None:
    """Return the operands of ``product_`` as a convolution by ``window``, or None if it is not one."""
    (_, left), right = split_select(product_.left), product_.right
    if not isinstance(left, Load) or not isinstance(right, Load):
        return None
    x, w, (z, parts), (k, terms) = left.buffer, right.buffer, product_.batch, product_.k
    row = sym(product_.row[0], 0, product_.row[1])
    term: Dim = sym(k, 0, terms)
    if parts != window.parts or terms * parts != product(window.taps) * window.channels:
        return None
    if len(x.shape) != len(window.taps) + 2 or x.shape[-1] != window.channels:
        return None
    if z and parts != 1:
        term = sym(z, 0, parts) * terms + term
    pixels = (x.shape[0], *window.pixels)
    place = patch_place(
        window.taps, window.strides, window.gaps, window.low, pixels, window.channels, row, term
    )  # fmt: skip
    padding = tuple(zip(window.low, window.high, strict=True))
    if padded_element(lambda at: Load(x, at), place, x.shape, padding, x.dtype) != product_.left:
        return None
    *tap, channel = delinearize(term, (*window.taps, window.channels))
    col = sym(product_.col[0], 0, product_.col[1])
    for transposed, index in enumerate(((*tap, channel, col), (*tap[:-1], col, tap[-1], channel))):
        if right.index == index:
            return WindowOperands(x, w, bool(transposed))
    return None
