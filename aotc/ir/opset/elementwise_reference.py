"""The NumPy meaning of every scalar function, on arrays of any shape.

Operands arrive in their natural precision (small floats as f32); the caller
rounds the result to the op's dtype.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from aotc.ir.opset.spec import round_small
from aotc.vmfb.dtypes import DTYPES, from_numpy, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

Array = np.ndarray


def _bits(x: Array) -> int:
    return x.dtype.itemsize * 8


def _is_int(x: Array) -> bool:
    return x.dtype.kind in "iu"


def _sign(x: Array) -> Array:
    if x.dtype.kind == "c":
        return np.where(x == 0, 0, np.where(np.isnan(x), np.nan, x / np.abs(x)))
    return np.where(np.isnan(x) | (x == 0), x, np.copysign(1, x)) if x.dtype.kind == "f" else np.sign(x)


def _logistic(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _special(name: str) -> Callable[[Array], Array]:
    def call(x: Array) -> Array:
        import scipy.special

        return getattr(scipy.special, name)(x)

    return call


def _complex_cbrt(x: Array) -> Array:
    return np.cbrt(x) if x.dtype.kind == "f" else np.power(x, 1 / 3)


def _round_afz(x: Array) -> Array:
    return np.copysign(np.trunc(np.abs(x) + (np.abs(x) - np.trunc(np.abs(x)) >= 0.5)), x)


def _popcnt(x: Array) -> Array:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}"))


def _clz(x: Array) -> Array:
    rest, count = x.view(f"u{x.dtype.itemsize}").astype(np.uint64), np.zeros(x.shape, np.int64)
    for _ in range(_bits(x)):
        count += rest != 0
        rest = rest >> np.uint64(1)
    return _bits(x) - count


def _div(a: Array, b: Array) -> Array:
    if not _is_int(a):
        return np.true_divide(a, b)
    quotient = np.floor_divide(a, np.where(b == 0, 1, b).astype(b.dtype))
    if a.dtype.kind == "i":
        inexact = quotient * b != a
        quotient = np.where(inexact & ((a < 0) != (b < 0)), quotient + 1, quotient)
        lowest = np.iinfo(a.dtype).min
        quotient = np.where((a == lowest) & (b == -1), a, quotient)
    return np.where(b == 0, np.array(-1, np.int64).astype(a.dtype), quotient).astype(a.dtype)


def _rem(a: Array, b: Array) -> Array:
    if not _is_int(a):
        return np.fmod(a, b)
    safe = np.where((b == 0) | ((b == -1) if a.dtype.kind == "i" else False), 1, b).astype(b.dtype)
    return np.where(b == 0, a, np.fmod(a, safe)).astype(a.dtype)


def _pow(a: Array, b: Array) -> Array:
    if not _is_int(a):
        return np.power(a, b)
    exponent = np.where(b < 0, 0, b).astype(np.uint64)
    result, base = np.ones(np.broadcast(a, b).shape, a.dtype), np.array(np.broadcast_to(a, np.broadcast(a, b).shape))
    for _ in range(64):
        if not exponent.any():
            break
        result = np.where(exponent & np.uint64(1), result * base, result).astype(a.dtype)
        base, exponent = (base * base).astype(a.dtype), exponent >> np.uint64(1)
    if a.dtype.kind == "i":
        odd = np.where(b % 2 != 0, a, 1)
        result = np.where(b < 0, np.where(a == 1, 1, np.where(a == -1, odd, 0)), result)
    return result.astype(a.dtype)


def _ordered(pick_first: Callable[[Array, Array], Array], real: Callable[[Array, Array], Array]) -> Callable:
    def call(a: Array, b: Array) -> Array:
        if a.dtype.kind != "c":
            return real(a, b)
        first = np.where(a.real == b.real, pick_first(a.imag, b.imag), pick_first(a.real, b.real))
        return np.where(first, a, b)

    return call


def _atan2(a: Array, b: Array) -> Array:
    if a.dtype.kind == "f":
        return np.arctan2(a, b)
    return -1j * np.log((b + 1j * a) / np.sqrt(b * b + a * a))


def _shift(op: Callable[[Array, Array], Array], kind: str, fill: bool) -> Callable:
    def call(a: Array, b: Array) -> Array:
        bits, dtype = _bits(a), np.dtype(f"{kind}{a.dtype.itemsize}")
        over = (b.astype(np.int64) >= bits) | (b.astype(np.int64) < 0)
        left = np.asarray(a, order="C").view(dtype)
        if fill:
            return op(left, np.where(over, bits - 1, b).astype(dtype)).view(a.dtype)
        shifted = op(left, np.where(over, 0, b).astype(dtype))
        return np.where(over, 0, shifted).astype(dtype).view(a.dtype)

    return call


def total_order_key(x: Array) -> Array:
    """Return signed integers that order like the floats ``x`` in IEEE total order.

    The NaN of a format that has it in place of -0 stands below all numbers.
    """
    form = SMALL_FLOATS.get(from_numpy(x.dtype))
    if form is not None:
        code = np.asarray(x, order="C").view(np.uint8).astype(np.int16)
        if form.special == "power":
            return code
        size = code & (form.sign - 1)
        below = np.where(code == form.sign, -form.sign, -size) if form.special == "fnuz" else -1 - size
        return np.where(code & form.sign, below, size).astype(np.int16)
    bits = np.asarray(x, order="C").view(f"i{x.dtype.itemsize}")
    return np.where(bits < 0, np.bitwise_xor(bits, np.iinfo(bits.dtype).max), bits).astype(bits.dtype)


def _total(compare: Callable[[Array, Array], Array]) -> Callable:
    return lambda a, b: compare(total_order_key(a), total_order_key(b))


def _complex(a: Array, b: Array) -> Array:
    result = np.empty(np.broadcast(a, b).shape, np.result_type(a.dtype, np.complex64))
    result.real, result.imag = a, b
    return result


def convert(x: Array, dtype: str) -> Array:
    """Return ``x`` as ``dtype`` as StableHLO converts: floats to integers saturate, NaN gives 0."""
    source, target = DTYPES[from_numpy(x.dtype)], DTYPES[dtype]
    numpy_type = to_numpy(dtype)
    with np.errstate(all="ignore"):
        if target.kind == "b":
            return np.asarray(x.astype(np.float32) != 0 if source.kind == "f" else x.real != 0)
        if source.kind == "c" and target.kind != "c":
            return convert(np.asarray(x.real), dtype)
        if source.kind == "f" and target.kind in "iu":
            return _saturate(x.astype(np.float64), target.kind == "i", target.bits).astype(numpy_type)
        if target.kind in "iu" and target.bits < 8:
            return _wrap_small(x.astype(np.int64), target.kind == "i", target.bits).astype(numpy_type)
        if source.bits < 8 and source.kind in "iu":
            x = x.astype(np.int8 if source.kind == "i" else np.uint8)
        if dtype in SMALL_FLOATS and source.name != dtype:
            return round_small(x, dtype)
        return np.asarray(x.astype(numpy_type))


def _saturate(x: Array, signed: bool, bits: int) -> Array:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    wide = np.int64 if signed else np.uint64
    inside = np.where(np.isnan(x) | (x <= low) | (x >= float(high)), 0, x).astype(wide)
    inside = np.where(x <= low, wide(low), inside)
    return np.where(x >= float(high), wide(high), inside)


def _wrap_small(x: Array, signed: bool, bits: int) -> Array:
    low = x & ((1 << bits) - 1)
    return np.where(low >= (1 << (bits - 1)), low - (1 << bits), low) if signed else low


def reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int) -> Array:
    """Round f32/f64 ``x`` to a float of the given exponent and mantissa bits."""
    own_mantissa, own_exponent = (23, 8) if x.dtype == np.float32 else (52, 11)
    unsigned = np.dtype(f"u{x.dtype.itemsize}").type
    bits = np.asarray(x, order="C").view(unsigned)
    if mantissa_bits < own_mantissa:
        drop = own_mantissa - mantissa_bits
        half = unsigned((1 << (drop - 1)) - 1)
        last = (bits >> unsigned(drop)) & unsigned(1)
        bits = (bits + half + last) & ~unsigned((1 << drop) - 1)
    result = bits.view(x.dtype)
    if exponent_bits < own_exponent:
        bias = (1 << (exponent_bits - 1)) - 1
        largest = np.ldexp(2 - 2.0**-mantissa_bits, bias)
        smallest = np.ldexp(1.0, 1 - bias)
        result = np.where(np.abs(result) > largest, np.copysign(np.inf, x), result)
        result = np.where(np.abs(result) < smallest, np.copysign(0, x), result)
    return np.where(np.isnan(x), x, result).astype(x.dtype)


def _logical(boolean: Callable, other: Callable) -> Callable:
    return lambda a, b: boolean(a, b) if a.dtype == bool else other(a, b)


REFERENCES: dict[str, Callable[..., Array]] = {
    "neg": np.negative, "abs": np.abs, "sign": _sign, "exp": np.exp, "expm1": np.expm1, "log": np.log,
    "log1p": np.log1p, "sqrt": np.sqrt, "rsqrt": lambda x: 1 / np.sqrt(x), "cbrt": _complex_cbrt, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "tanh": np.tanh, "logistic": _logistic, "erf": _special("erf"),
    "erfc": _special("erfc"), "erf_inv": _special("erfinv"), "floor": np.floor, "ceil": np.ceil,
    "round_even": np.rint, "round_afz": _round_afz, "is_finite": np.isfinite, "not": np.invert, "popcnt": _popcnt,
    "clz": _clz, "real": np.real, "imag": np.imag, "conj": np.conj,
    "add": _logical(np.logical_or, np.add), "sub": np.subtract, "mul": _logical(np.logical_and, np.multiply),
    "div": _div, "rem": _rem, "pow": _pow,
    "max": _ordered(np.greater_equal, np.maximum), "min": _ordered(np.less_equal, np.minimum), "atan2": _atan2,
    "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "shl": _shift(np.left_shift, "u", False),
    "shr_arith": _shift(np.right_shift, "i", True), "shr_logic": _shift(np.right_shift, "u", False),
    "next_after": np.nextafter, "complex": _complex,
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
    "eq_total": _total(np.equal), "ne_total": _total(np.not_equal), "lt_total": _total(np.less),
    "le_total": _total(np.less_equal), "gt_total": _total(np.greater), "ge_total": _total(np.greater_equal),
    "select": np.where, "convert": convert,
}  # fmt: skip
