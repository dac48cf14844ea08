"""Reference implementations of register tiles and Fourier transforms: nested loops, one operation after the other."""

from __future__ import annotations

import math

from numba import float32, float64, int8, int32, njit, uint8

from aotc.kernels.runtime.formats import bits_as
from aotc.kernels.runtime.memory import flat


@njit
def offset_i8(x):
    """Return an i8 that is stored with an offset of 128."""
    return int32(x) + 128


@njit
def tile(out, a, b, types, shape, levels, group, adds):
    """Compute the matmul ``out[i, j] = sum_k a[i, k] * b[k, j]`` of a register tile of ``shape``.

    ``out`` is an array, its first element and the stride of rows; ``a`` has also the stride between the ``group`` terms
    of a step, ``b`` has the stride of columns and that of terms. ``types`` are the functions that read an element of
    each. The rows of ``levels`` are extent, and steps in ``a`` and ``b``, of the loops over ``k``, outermost first.
    """
    to, out_base, out_row = out
    left, a_base, a_row, a_inner = a
    right, b_base, b_column, b_inner = b
    (as_out, as_a, as_b), (rows, cols) = types, shape
    flat_out, flat_a, flat_b = flat(to), flat(left), flat(right)
    count = 1
    for level in levels:
        count *= level[0]
    for i in range(rows):
        for j in range(cols):
            place = out_base + i * out_row + j
            total = flat_out[place] if adds else as_out(0)
            for number in range(count):
                at_a, at_b, rest = a_base + i * a_row, b_base + j * b_column, number
                for n in range(len(levels) - 1, -1, -1):
                    k = rest % levels[n][0]
                    rest = rest // levels[n][0]
                    at_a += k * levels[n][1]
                    at_b += k * levels[n][2]
                for t in range(group):
                    term = as_out(as_a(flat_a[at_a + t * a_inner])) * as_out(as_b(flat_b[at_b + t * b_inner]))
                    total = as_out(total + term)
            flat_out[place] = total


@njit
def _f32_scale_at(panel, at):
    """Return the f32 at byte ``at``."""
    code = int32(0)
    for n in range(4):
        code = int32(code | int32(panel[at + n]) << (8 * n))
    return bits_as(code, float32)


@njit
def quantized_tile(out, a, b, as_a, shape, levels, form, adds):
    """Compute the matmul of a register tile whose right operand is a panel of quantized weights.

    Operands are as for :func:`tile`; ``b`` is the panel and its first byte. A group of the panel has the scales of its
    columns, then its terms (:mod:`aotc.ir.loop.forms.quantized`). The levels are the groups and the steps of a group;
    ``form`` is the bits of a term and the terms of a step.
    """
    to, out_base, out_row = out
    left, a_base, a_row, a_inner = a
    right, b_base = b
    (rows, cols), (bits, per) = shape, form
    flat_out, flat_a, flat_b = flat(to), flat(left), flat(right)
    (groups, a_group, chunk), (steps, a_step, _) = levels
    for i in range(rows):
        for j in range(cols):
            place = out_base + i * out_row + j
            total = flat_out[place] if adds else float32(0)
            for g in range(groups):
                panel = b_base + g * chunk
                scale = _f32_scale_at(flat_b, panel + 4 * j)
                for k in range(steps * per):
                    if bits == 8:
                        number = int8(flat_b[panel + 4 * cols + k * cols + j])
                    else:
                        pair = uint8(flat_b[panel + 4 * cols + (k // 2) * cols + j])
                        number = int8(int8(pair << 4 if k % 2 == 0 else pair) >> 4)
                    at_a = a_base + i * a_row + g * a_group + (k // per) * a_step + (k % per) * a_inner
                    total = float32(total + as_a(flat_a[at_a]) * (float32(number) * scale))
            flat_out[place] = total


@njit
def transform(x, out, points, width, stride, inverse, scale):
    """Write the discrete Fourier transforms of ``width`` neighbouring signals, by their definition."""
    unit = (2.0 if inverse else -2.0) * math.pi / points
    for w in range(width):
        for k in range(points):
            real = imag = 0.0
            for n in range(points):
                angle = unit * float64((k * n) % points)
                cosine, sine = math.cos(angle), math.sin(angle)
                value = x[n * stride + w]
                real += value.real * cosine - value.imag * sine
                imag += value.real * sine + value.imag * cosine
            out[k * stride + w] = complex(real * scale, imag * scale)


@njit
def real_transform(x, out, points, scale):
    """Write the first ``points // 2 + 1`` points of the discrete Fourier transform of a real signal."""
    unit = -2.0 * math.pi / points
    for k in range(points // 2 + 1):
        real = imag = 0.0
        for n in range(points):
            angle = unit * float64((k * n) % points)
            real += x[n] * math.cos(angle)
            imag += x[n] * math.sin(angle)
        out[k] = complex(real * scale, imag * scale)
