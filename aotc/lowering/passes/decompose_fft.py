"""Decompose every ``fft`` into transforms along one axis (``dft``), and ops for real signals and long axes.

Before: ``%1 = fft %x {kind = "RFFT", length = (8, 100)}`` on ``f32[8, 100]``. After: even and odd samples become one
complex signal of 50 points; its ``dft`` gives the spectrum of the real signal; then a ``dft`` along the other axis.

Lengths with a prime factor above 13 become convolutions with a chirp (L. Bluestein, "A linear filtering approach to the
computation of discrete Fourier transform", 1970). Lengths above ``DFT_POINTS`` become two shorter transforms with a
multiplication between them (D. Bailey, "FFTs in external or hierarchical memory", 1990: four steps).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.fft_tables import (
    chirp,
    chirp_spectrum,
    nearest_factors,
    radices,
    real_twiddles,
    smooth_size,
    twiddles,
    unit_roots,
)
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import resolve_targets
from aotc.vmfb.dtypes import COMPLEX_OF, real_of

DFT_POINTS = Limit(
    1 << 13,
    "points of a transform computed in one piece",
    "two buffers of 8192 complex f64 are 256 KiB, which fit an L2 cache",
)


def decompose_fft(module: Module, options: Options) -> Module:
    """Return ``module`` with every ``fft`` as ``dft`` ops, elementwise ops and movement ops."""
    packs = any(target.kind != "cpu" for target in resolve_targets(options.target))
    return rewrite_module(module, lambda op, b: _decompose_fft_rule(op, b, packs), ("fft",))


def _decompose_fft_rule(op: Op, b: Builder, packs: bool) -> Sequence[Value] | None:
    """Return the result of an ``fft`` as transforms along one axis each, or None for other ops."""
    if op.name != "fft":
        return None
    (x,), kind, length, t = op.operands, op.attrs["kind"], op.attrs["length"], op.result.type
    if 0 in (*x.type.shape, *t.shape):
        return (b.constant(0, t),)
    axes = range(t.rank - len(length), t.rank)
    inverse = kind in ("IFFT", "IRFFT")
    if kind == "RFFT":
        whole = None if packs else _real_dft_of_one_op(x, length[-1], b)
        x = whole or _real_dft(x, length[-1], b)
    for axis, n in zip(axes, length):
        if kind in ("FFT", "IFFT") or axis != t.rank - 1:
            x = _dft_along_axis(x, axis, n, inverse, 1 / n if inverse else 1.0, b)
    return (_inverse_real_dft(x, length[-1], b) if kind == "IRFFT" else x,)


def _dft_along_axis(x: Value, axis: int, n: int, inverse: bool, scale: float, b: Builder) -> Value:
    """Return the DFT of ``x`` along ``axis`` of length ``n``, multiplied by ``scale``."""
    if n == 1:
        return x if scale == 1 else _multiply_by_vector(x, np.array([scale]), axis, b)
    factors = radices(n)
    if not factors:
        return _chirp_dft(x, axis, n, inverse, scale, b)
    if not DFT_POINTS.holds(n):
        return _four_step_dft(x, axis, n, inverse, scale, b)
    part = real_of(x.type.dtype)
    table = b.constant(twiddles(factors, inverse), TensorType(part, twiddles(factors, inverse).shape))
    attrs = {"axis": axis, "radices": factors, "inverse": inverse, "scale": scale, "real": False}
    return b.make("dft", (x, table), attrs)


def _multiply_by_vector(x: Value, values: np.ndarray, axis: int, b: Builder) -> Value:
    """Return ``x`` times a vector along ``axis``."""
    dims = tuple(range(axis, axis + values.ndim))
    vector = b.constant(values, TensorType(x.type.dtype, values.shape))
    return b.make("mul", (x, b.broadcast(vector, dims, x.type.shape)))


def _four_step_dft(x: Value, axis: int, n: int, inverse: bool, scale: float, b: Builder) -> Value:
    """Return the DFT of a long axis by the four-step algorithm: the signal is a matrix, with twiddles between.

    The columns are transformed, multiplied by twiddle factors, and then the rows are transformed. The result is the
    transpose of the matrix.
    """
    rows, columns = nearest_factors(n)
    shape = x.type.shape
    matrix = b.reshape(x, (*shape[:axis], rows, columns, *shape[axis + 1 :]))
    matrix = _dft_along_axis(matrix, axis, rows, inverse, 1.0, b)
    matrix = _multiply_by_vector(matrix, unit_roots(np.outer(np.arange(rows), np.arange(columns)), n, inverse), axis, b)
    matrix = _dft_along_axis(matrix, axis + 1, columns, inverse, scale, b)
    order = list(range(matrix.type.rank))
    order[axis], order[axis + 1] = axis + 1, axis
    return b.reshape(b.transpose(matrix, order), shape)


def _chirp_dft(x: Value, axis: int, n: int, inverse: bool, scale: float, b: Builder) -> Value:
    """Return the transform as a convolution, ``conj(c) * (c x)`` with the chirp c, at a length that factors well."""
    size = smooth_size(2 * n - 1)
    wave = chirp(n, inverse)
    zero = b.constant(0, TensorType(x.type.dtype))
    padded = b.pad(_multiply_by_vector(x, wave, axis, b), zero, high={axis: size - n})
    spectrum = _dft_along_axis(padded, axis, size, False, 1.0, b)
    product = _multiply_by_vector(spectrum, chirp_spectrum(n, size, inverse), axis, b)
    back = _dft_along_axis(product, axis, size, True, 1.0, b)
    return _multiply_by_vector(b.slice_dim(back, axis, 0, n), wave * (scale / size), axis, b)


def _reversed_conjugate(x: Value, b: Builder) -> Value:
    """Return the conjugate of ``x`` reversed along its last axis."""
    return b.make("conj", (b.make("reverse", (x,), {"dims": (x.type.rank - 1,)}),))


def _join_complex_parts(values: Sequence[Value], b: Builder) -> Value:
    return b.make("concatenate", values, {"dim": values[0].type.rank - 1})


def _complex_from_parts(re: Value, im: Value, b: Builder) -> Value:
    """Return the complex numbers with the given real and imaginary parts."""
    return b.make("complex", (re, im), {}, TensorType(COMPLEX_OF[re.type.dtype], re.type.shape))


def _real_dft_of_one_op(x: Value, n: int, b: Builder) -> Value | None:
    """Return ``n // 2 + 1`` elements of a real signal's spectrum by one ``dft``; None if ``n`` prevents it."""
    half = n // 2
    factors = radices(half) if n % 2 == 0 and half > 1 else ()
    if not factors or not DFT_POINTS.holds(half):
        return None
    table = real_twiddles(factors)
    roots = b.constant(table, TensorType(x.type.dtype, table.shape))
    attrs = {"axis": x.type.rank - 1, "radices": factors, "inverse": False, "scale": 1.0, "real": True}
    return b.make("dft", (x, roots), attrs)


def _real_dft(x: Value, n: int, b: Builder) -> Value:
    """Return the first ``n // 2 + 1`` elements of the spectrum of a real signal."""
    last, half = x.type.rank - 1, n // 2
    if n % 2:
        spectrum = _dft_along_axis(_complex_from_parts(x, b.constant(0, x.type), b), last, n, False, 1.0, b)
        return b.slice_dim(spectrum, last, 0, half + 1)
    pairs = _complex_from_parts(b.slice_dim(x, last, 0, n, 2), b.slice_dim(x, last, 1, n, 2), b)
    spectrum = _dft_along_axis(pairs, last, half, False, 1.0, b)
    around = _join_complex_parts((spectrum, b.slice_dim(spectrum, last, 0, 1)), b)
    other = _reversed_conjugate(around, b)
    even = b.make("add", (around, other))
    odd = _multiply_by_vector(b.make("sub", (around, other)), -1j * unit_roots(np.arange(half + 1), n, False), last, b)
    return _multiply_by_vector(b.make("add", (even, odd)), np.array([0.5]), last, b)


def _inverse_real_dft(x: Value, n: int, b: Builder) -> Value:
    """Return the real signal of ``n`` samples whose spectrum begins with ``x``.

    The imaginary parts of points that must be real (the first; the middle one if ``n`` is even) are ignored.
    """
    last, half = x.type.rank - 1, n // 2
    ends = np.ones(half + 1)
    ends[0] = 0
    if n % 2 == 0:
        ends[half] = 0
    im = b.make("imag", (x,))
    x = _complex_from_parts(b.make("real", (x,)), _multiply_by_vector(im, ends, last, b), b)
    if n % 2:
        whole = _join_complex_parts((x, _reversed_conjugate(b.slice_dim(x, last, 1, half + 1), b)), b) if half else x
        return b.make("real", (_dft_along_axis(whole, last, n, True, 1 / n, b),))
    other = _reversed_conjugate(x, b)
    even = b.make("add", (x, other))
    odd = _multiply_by_vector(b.make("sub", (x, other)), 1j * unit_roots(np.arange(half + 1), n, True), last, b)
    pairs = b.slice_dim(_multiply_by_vector(b.make("add", (even, odd)), np.array([0.5]), last, b), last, 0, half)
    signal = _dft_along_axis(pairs, last, half, True, 1 / half, b)
    column = (*signal.type.shape, 1)
    parts = [b.reshape(b.make("real", (signal,)), column), b.reshape(b.make("imag", (signal,)), column)]
    return b.reshape(_join_complex_parts(parts, b), (*x.type.shape[:-1], n))
