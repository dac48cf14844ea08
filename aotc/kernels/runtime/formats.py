"""Number formats that Numba lacks: small floats as codes in unsigned integers, and integers of 2 and 4 bits.

A value of a small float (f16, bf16, f8...) is its code, so that copies keep its bits. ``from_bf16`` returns the f32
value of a code, and ``bf16`` rounds an f32 to a code, to nearest, ties to even. The other formats have functions with
their own names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numba import (
    boolean,
    complex64,
    complex128,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    njit,
    uint8,
    uint16,
    uint32,
    uint64,
)
from numba.extending import intrinsic

from aotc.ir.opset.elementwise_scalars import total_order_key
from aotc.kernels.runtime.rounding import round_even
from aotc.vmfb.dtypes import limits, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS, FloatFormat

i1, i8, i16, i32, i64 = boolean, int8, int16, int32, int64
u8, u16, u32, u64 = uint8, uint16, uint32, uint64
f32, f64, c64, c128 = float32, float64, complex64, complex128
inf, nan = float("inf"), float("nan")


@intrinsic
def bits_as(typing_context, value, kind):
    """Return the bits of a number as another number of the same width: ``bits_as(x, u32)``."""
    target = kind.instance_type

    def codegen(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], context.get_value_type(target))

    return target(value, kind), codegen


@njit
def i2(x):
    """Return the low 2 bits of an integer as a signed number."""
    return int8(((int64(x) + 2) & 3) - 2)


@njit
def i4(x):
    """Return the low 4 bits of an integer as a signed number."""
    return int8(((int64(x) + 8) & 15) - 8)


@njit
def u2(x):
    """Return the low 2 bits of an integer."""
    return uint8(int64(x) & 3)


@njit
def u4(x):
    """Return the low 4 bits of an integer."""
    return uint8(int64(x) & 15)


@njit
def nan_bits(code):
    """Return the f64 NaN with these bits."""
    return bits_as(uint64(code), float64)


@njit
def odd_f32(x):
    """Return an f64 rounded to odd as f32, so that a further rounding to fewer bits is correct."""
    near = float32(x)
    if float64(near) == x or x != x:
        return near
    bits = bits_as(near, uint32)
    if abs(float64(near)) > abs(x):
        bits = uint32(bits - 1)
    return bits_as(uint32(bits | 1), float32)


@njit
def odd_f64(x):
    """Return an integer of 64 bits as f64, with the bits that are lost marked in the last place."""
    magnitude = uint64(x) if x >= 0 else uint64(0) - uint64(x)
    if magnitude >> uint64(53):
        lost = magnitude & uint64(2047)
        magnitude = (magnitude >> uint64(11)) << uint64(11)
        magnitude |= uint64(2048) if lost else uint64(0)
    return float64(magnitude) if x >= 0 else -float64(magnitude)


@njit
def from_bf16(code):
    """Return the f32 value of a bf16."""
    return bits_as(uint32(uint32(code) << uint32(16)), float32)


@njit
def bf16(x):
    """Return the code of an f32 rounded to bf16; a NaN becomes quiet."""
    bits = uint64(bits_as(float32(x), uint32))
    if x != x:
        return uint16((bits >> uint64(16)) | uint64(64))
    return uint16((bits + uint64(0x7FFF) + ((bits >> uint64(16)) & uint64(1))) >> uint64(16))


def _rounding(form: FloatFormat) -> Callable[[Any], Any]:
    """Return the function that rounds an f32 to the code of a format with these exponent and mantissa bits."""
    least, mantissa, sign_code, largest = form.least_exponent, form.mantissa_bits, form.sign, form.largest
    finite, signless, overflow, nan_code = form.special == "finite", form.special == "fnuz", form.overflow, form.nan
    per_unit = 1 << mantissa

    @njit
    def encode_rounded(x):
        bits = int64(bits_as(float32(x), uint32))
        sign = sign_code if bits >> 31 else 0
        if x != x:
            return nan_code if finite or signless else nan_code | sign
        size = abs(float64(x))
        if size == inf:
            return nan_code if signless else overflow | sign
        exponent = max((bits_as(size, int64) >> 52) - 1023, least)
        unit = bits_as((exponent - mantissa + 1023) << 52, float64)
        code = (exponent - least) * per_unit + int64(round_even(size / unit))
        if code > largest:
            return nan_code if signless else overflow | sign
        return 0 if signless and code == 0 else code | sign

    return encode_rounded


@njit
def _power_of_two_code(x):
    """Return the code of an f32 rounded to a power of two, midpoints up; 255 for NaN, 0 and negative numbers."""
    bits = int64(bits_as(float32(x), uint32))
    if x != x or x <= 0 or x == inf:
        return 255
    half = 1 << 22
    if bits <= half:
        return 0
    return min((bits + half) >> 23, 255)


def _all_codes(dtype: str) -> np.ndarray:
    bits = sum(SMALL_FLOATS[dtype][:2]) + (SMALL_FLOATS[dtype].special != "power")
    return np.arange(256, dtype=np.uint8) & np.uint8((1 << bits) - 1)


def _decoder(dtype: str) -> Callable[[Any], Any]:
    values = _all_codes(dtype).view(to_numpy(dtype)).astype(np.float32)

    @njit
    def value(code):
        return values[code]

    return value


def _encoder(dtype: str) -> Callable[[Any], Any]:
    form = SMALL_FLOATS[dtype]
    rounded = _power_of_two_code if form.special == "power" else _rounding(form)

    @njit
    def code(x):
        return uint8(rounded(x))

    return code


def _ordering(dtype: str) -> Callable[[Any], Any]:
    keys = total_order_key(_all_codes(dtype).view(to_numpy(dtype))).astype(np.int64)

    @njit
    def key(code):
        return keys[code]

    return key


def _neighbours(dtype: str) -> Callable[[Any, Any], Any]:
    codes = _all_codes(dtype).view(to_numpy(dtype))
    ends = [np.full_like(codes, end) for end in limits(dtype)]
    lower, upper = (np.nextafter(codes, end).view(np.uint8) for end in ends)
    value = _decoder(dtype)
    nan_code = SMALL_FLOATS[dtype].nan

    @njit
    def neighbour(code, other):
        x, y = value(code), value(other)
        if x != x or y != y:
            return uint8(nan_code)
        if x == y:
            return uint8(other)
        return upper[code] if x < y else lower[code]

    return neighbour


_half_code = _rounding(FloatFormat(5, 10, 15, "ieee"))

@njit
def from_f16(code):
    """Return the f32 value of an f16."""
    code = int64(code)
    sign, exponent, mantissa = (code >> 15) << 31, (code >> 10) & 31, code & 1023
    if exponent == 0:
        size = float32(mantissa) * float32(2.0**-24)
        return -size if sign else size
    wide = 255 if exponent == 31 else exponent + 112
    return bits_as(uint32(sign | (wide << 23) | (mantissa << 13)), float32)


@njit
def f16(x):
    """Return the code of an f32 rounded to f16."""
    return uint16(_half_code(x))


@njit
def order_f64(x):
    """Return an integer that orders f64 numbers in IEEE total order."""
    bits = bits_as(x, int64)
    return bits ^ 0x7FFFFFFFFFFFFFFF if bits < 0 else bits


@njit
def order_f32(x):
    """Return an integer that orders f32 numbers in IEEE total order."""
    bits = int64(bits_as(x, int32))
    return bits ^ 0x7FFFFFFF if bits < 0 else bits


@njit
def order_f16(code):
    """Return an integer that orders f16 numbers in IEEE total order."""
    bits = int64(int16(code))
    return bits ^ 0x7FFF if bits < 0 else bits


order_bf16 = order_f16


@njit
def _order_key_of_neighbour(order, x, y, top):
    """Return the order key of the neighbour of ``x`` towards ``y``."""
    size = order if order >= 0 else -1 - order
    if size == 0:
        return (1, y > x)
    if (x < y) == (order >= 0):
        return (size + 1, order >= 0)
    return (size - 1, order >= 0)


@njit
def next_after_f32(x, y):
    """Return the neighbour of an f32 towards another."""
    if x != x or y != y:
        return float32(nan)
    if x == y:
        return y
    size, positive = _order_key_of_neighbour(order_f32(x), x, y, 31)
    return bits_as(uint32(size if positive else size | 0x80000000), float32)


@njit
def next_after_f64(x, y):
    """Return the neighbour of an f64 towards another."""
    if x != x or y != y:
        return nan
    if x == y:
        return y
    size, positive = _order_key_of_neighbour(order_f64(x), x, y, 63)
    value = bits_as(size, float64)
    return value if positive else -value


def _next_of_16_bits(decode: Callable[..., Any], not_a_number: int) -> Callable[..., Any]:
    """Return the function that computes the neighbour of a 16-bit float towards another."""

    @njit
    def next_after(code, other):
        x, y = decode(code), decode(other)
        if x != x or y != y:
            return uint16(not_a_number)
        if x == y:
            return uint16(other)
        size, positive = _order_key_of_neighbour(order_f16(code), x, y, 15)
        return uint16(size if positive else size | 0x8000)

    return next_after


next_after_f16 = _next_of_16_bits(from_f16, 0x7E00)
next_after_bf16 = _next_of_16_bits(from_bf16, 0x7FC0)


def small_float_functions() -> dict[str, Any]:
    """Return the functions of all floats of fewer than 16 bits: ``f8E5M2``, ``from_f8E5M2``, ``order_f8E5M2``..."""
    found: dict[str, Any] = {}
    for name in SMALL_FLOATS:
        found |= {name: _encoder(name), f"from_{name}": _decoder(name), f"order_{name}": _ordering(name)}
        found[f"next_after_{name}"] = _neighbours(name)
    return found
