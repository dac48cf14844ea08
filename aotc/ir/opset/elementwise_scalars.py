"""The scalar functions: a table of their NumPy meanings and facts about them.

A reference takes arrays of any shape, in their computation type (small floats as f32); the caller rounds the result to
the op's dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from aotc.ir.opset import elementwise_complex as complex_
from aotc.ir.opset.spec import cast_array
from aotc.vmfb.dtypes import DTYPES, from_numpy, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS


@dataclass(frozen=True, slots=True)
class ScalarOp:
    """One scalar function: its meaning, and facts for passes, the loop IR, kernels and tools.

    Parameters
    ----------
    name : str
        The op's name, in the tensor IR and in the loop IR.
    arity : int
        Number of operands.
    kinds : str
        The kind letters (``b i u f c``) of valid operands.
    result : str
        The result's type: ``same``, ``bool``, ``real`` (of a complex), ``complex`` (of a real), ``select`` (type of the
        last operand) or ``given`` (by the op's own result type).
    reference : callable
        ``reference(*arrays) -> array``, the NumPy meaning; see the module docstring.
    symbol : str
        Its Python operator in the text of the loop IR: binary, or a prefix.
    total : bool
        The function compares floats in the total order of IEEE 754, for which Python has no operator.
    on_bool : str
        The equivalent function on i1, if it has another name.
    commutes : bool
        The operands can be exchanged: passes write a constant as the second one.
    neutral : str
        The neutral operand: ``zero``, ``one``, ``ones`` (all bits), ``lowest`` or ``largest`` of the type. A reduction
        may start from it, so a function with a neutral operand is associative.
    accumulates : bool
        A store of the loop IR may combine a value with the old element by it. ``max_number`` may leave an arbitrary
        number if one was NaN.
    atomic : bool
        GPUs have an atomic instruction of it for integers in memory.
    widens : bool
        On a small float the function means the same as on f32. False if its meaning depends on the bits of the format.
    smooth : bool
        Continuous and without poles: slightly different operands never give a completely different result, or NaN.
    hides_nan : bool
        The result may be a float although an operand is NaN.
    signs_no_zero : bool
        A real result is never -0.0, for any operand.
    approximates : str
        The name of the function that this one approximates to at least 10 bits of f32, which is enough for bf16.
    of_loops : bool
        Only the loop IR has this function.
    counts_bits : bool
        The function examines bits from the highest down, so that the result depends on the width of the type.
    work : int
        Scalar operations per element, roughly.
    vector_work : int
        Vector operations per vector of elements, as ``benchmarks/costs/cost_model.py`` measured it.
    tolerance : float
        Units in the last place by which two good results may differ.
    """

    name: str
    arity: int
    kinds: str
    result: str
    reference: Callable[..., np.ndarray]
    symbol: str = ""
    total: bool = False
    on_bool: str = ""
    commutes: bool = False
    neutral: str = ""
    accumulates: bool = False
    atomic: bool = False
    widens: bool = True
    smooth: bool = False
    hides_nan: bool = False
    signs_no_zero: bool = False
    approximates: str = ""
    of_loops: bool = False
    counts_bits: bool = False
    work: int = 1
    vector_work: int = 1
    tolerance: float = 4.0


Array = np.ndarray


def _float_bits(x: Array) -> int:
    return x.dtype.itemsize * 8


def _is_int(x: Array) -> bool:
    return x.dtype.kind in "iu"


def _by_real_or_complex(real: Callable[..., Array], of_complex: Callable[..., Array]) -> Callable[..., Array]:
    """Return a function that calls ``of_complex`` for complex arrays, else ``real``."""
    return lambda *args: of_complex(*args) if args[0].dtype.kind == "c" else real(*args)


def _sign_of(x: Array) -> Array:
    return np.where(np.isnan(x) | (x == 0), x, np.copysign(1, x)) if x.dtype.kind == "f" else np.sign(x)


def _scipy_function(name: str) -> Callable[[Array], Array]:
    def call(x: Array) -> Array:
        import scipy.special

        return getattr(scipy.special, name)(x)

    return call


def _log_gamma(x: Array) -> Array:
    import scipy.special

    return np.where(np.isinf(x), np.inf, scipy.special.gammaln(x)).astype(x.dtype)  # SciPy has -inf at -inf


def _digamma(x: Array) -> Array:
    import scipy.special

    return np.where((x == 0) | np.isneginf(x), np.nan, scipy.special.psi(x)).astype(x.dtype)  # SciPy has -inf at 0


def _round_afz(x: Array) -> Array:
    return np.copysign(np.trunc(np.abs(x) + (np.abs(x) - np.trunc(np.abs(x)) >= 0.5)), x)


def _popcnt(x: Array) -> Array:
    return np.bitwise_count(x.view(f"u{x.dtype.itemsize}"))


def _clz(x: Array) -> Array:
    rest, count = x.view(f"u{x.dtype.itemsize}").astype(np.uint64), np.zeros(x.shape, np.int64)
    for _ in range(_float_bits(x)):
        count += rest != 0
        rest = rest >> np.uint64(1)
    return _float_bits(x) - count


def _divide_scalars(a: Array, b: Array) -> Array:
    if not _is_int(a):
        return np.true_divide(a, b)
    quotient = np.floor_divide(a, np.where(b == 0, 1, b).astype(b.dtype))
    if a.dtype.kind == "i":
        inexact = quotient * b != a
        quotient = np.where(inexact & ((a < 0) != (b < 0)), quotient + 1, quotient)
        lowest = np.iinfo(a.dtype).min
        quotient = np.where((a == lowest) & (b == -1), a, quotient)
    return np.where(b == 0, np.array(-1, np.int64).astype(a.dtype), quotient).astype(a.dtype)


def _remainder_of_scalars(a: Array, b: Array) -> Array:
    if not _is_int(a):
        return np.fmod(a, b)
    safe = np.where((b == 0) | ((b == -1) if a.dtype.kind == "i" else False), 1, b).astype(b.dtype)
    return np.where(b == 0, a, np.fmod(a, safe)).astype(a.dtype)


def _power_of_scalars(a: Array, b: Array) -> Array:
    """Return ``a ** b``; of integers modulo two to the number of bits, by squaring.

    An integer with a negative exponent gives 0, except for the bases 1 and -1.
    """
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


def _maximum(a: Array, b: Array) -> Array:
    """Return the larger operand; +0 is larger than -0, unlike in NumPy, which may return either zero."""
    found = np.maximum(a, b)
    return np.where((a == 0) & (b == 0), a + b, found) if found.dtype.kind == "f" else found


def _minimum(a: Array, b: Array) -> Array:
    found = np.minimum(a, b)
    return np.where((a == 0) & (b == 0), -(-a - b), found) if found.dtype.kind == "f" else found


def _shift_function(op: Callable[[Array, Array], Array], kind: str, fill: bool) -> Callable:
    def call(a: Array, b: Array) -> Array:
        bits, dtype = _float_bits(a), np.dtype(f"{kind}{a.dtype.itemsize}")
        over = (b.astype(np.int64) >= bits) | (b.astype(np.int64) < 0)
        left = np.asarray(a, order="C").view(dtype)
        if fill:
            return op(left, np.where(over, bits - 1, b).astype(dtype)).view(a.dtype)
        shifted = op(left, np.where(over, 0, b).astype(dtype))
        return np.where(over, 0, shifted).astype(dtype).view(a.dtype)

    return call


def total_order_key(x: Array) -> Array:
    """Map floats to signed integers whose order is the IEEE total order of the floats.

    In formats that encode NaN in place of -0, this NaN is below all numbers.
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


def _total_order_comparison(compare: Callable[[Array, Array], Array]) -> Callable:
    return lambda a, b: compare(total_order_key(a), total_order_key(b))


def _complex_of(a: Array, b: Array) -> Array:
    result = np.empty(np.broadcast(a, b).shape, np.result_type(a.dtype, np.complex64))
    result.real, result.imag = a, b
    return result


def convert(x: Array, dtype: str) -> Array:
    """Convert ``x`` to ``dtype`` as StableHLO defines: floats saturate to the range of integers, NaN becomes 0."""
    source, target = DTYPES[from_numpy(x.dtype)], DTYPES[dtype]
    numpy_type = to_numpy(dtype)
    with np.errstate(all="ignore"):
        if target.kind == "b":
            return np.asarray(x.astype(np.float64) != 0 if source.kind == "f" else x.real != 0)
        if source.kind == "c" and target.kind != "c":
            return convert(np.asarray(x.real), dtype)
        if source.kind == "f" and target.kind in "iu":
            return _saturate_to_integer(x.astype(np.float64), target.kind == "i", target.bits).astype(numpy_type)
        if target.kind in "iu" and target.bits < 8:
            return _wrap_small(x.astype(np.int64), target.kind == "i", target.bits).astype(numpy_type)
        if source.bits < 8 and source.kind in "iu":
            x = x.astype(np.int8 if source.kind == "i" else np.uint8)
        return cast_array(x, dtype)


def _saturate_to_integer(x: Array, signed: bool, bits: int) -> Array:
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    wide = np.int64 if signed else np.uint64
    inside = np.where(np.isnan(x) | (x <= low) | (x >= float(high)), 0, x).astype(wide)
    inside = np.where(x <= low, wide(low), inside)
    return np.where(x >= float(high), wide(high), inside)


def _wrap_small(x: Array, signed: bool, bits: int) -> Array:
    low = x & ((1 << bits) - 1)
    return np.where(low >= (1 << (bits - 1)), low - (1 << bits), low) if signed else low


def exponent_bits_rounded(dtype: str) -> int:
    """Return the number of exponent bits of the float type in which ``reduce_precision`` rounds ``dtype``."""
    return {"f64": 11, "f32": 8, "bf16": 8, "f8E8M0FNU": 8}.get(dtype, 5)


def reduce_precision(x: Array, exponent_bits: int, mantissa_bits: int, own_exponent: int) -> Array:
    """Round f32 or f64 values to ``exponent_bits`` and ``mantissa_bits``.

    The values come from a float type with ``own_exponent`` exponent bits. Rounding acts on the bits, so it also rounds
    subnormals of f16; they are flushed to zero only if the result has fewer exponent bits.
    """
    own_mantissa = 23 if x.dtype == np.float32 else 52
    unsigned = np.dtype(f"u{x.dtype.itemsize}").type
    bits = np.asarray(x, order="C").view(unsigned)
    if mantissa_bits < own_mantissa:
        drop = own_mantissa - mantissa_bits
        half = unsigned((1 << (drop - 1)) - 1)
        last = (bits >> unsigned(drop)) & unsigned(1)
        bits = (bits + half + last) & ~unsigned((1 << drop) - 1)
    result = bits.view(x.dtype)
    if own_exponent == 5:
        step = x.dtype.type(2.0 ** (-14 - min(mantissa_bits, 10)))
        small = np.where(np.abs(x) < 2.0**-14, x, 0)
        result = np.where(np.abs(x) < 2.0**-14, np.copysign(np.rint(small / step) * step, x), result)
    kept = min(exponent_bits, own_exponent)
    bias = (1 << (kept - 1)) - 1
    result = np.where(np.abs(result) >= np.ldexp(1.0, bias + 1), np.copysign(np.inf, x), result)
    if exponent_bits < own_exponent:
        result = np.where(np.abs(result) < np.ldexp(1.0, 1 - bias), np.copysign(0, x), result)
    return np.where(np.isnan(x), x, result).astype(x.dtype)


def _logical_function(boolean: Callable, other: Callable) -> Callable:
    return lambda a, b: boolean(a, b) if a.dtype == bool else other(a, b)


_DEAR = 16  # the work of a function that is a formula of many operations, or a division

SCALARS: dict[str, ScalarOp] = {row.name: row for row in (
    ScalarOp("neg", 1, "iufc", "same", np.negative, symbol="-", tolerance=0, smooth=True),
    ScalarOp("abs", 1, "iufc", "real", np.abs, tolerance=0, smooth=True, signs_no_zero=True),
    ScalarOp("sign", 1, "iufc", "same", _by_real_or_complex(_sign_of, complex_.sign), tolerance=0),
    ScalarOp("exp", 1, "fc", "same", np.exp, work=_DEAR, vector_work=10, smooth=True, signs_no_zero=True),
    ScalarOp("expm1", 1, "fc", "same", _by_real_or_complex(np.expm1, complex_.exponential_minus_one), work=_DEAR,
             vector_work=17, smooth=True),
    ScalarOp("log", 1, "fc", "same", np.log, work=_DEAR, vector_work=13),
    ScalarOp("log1p", 1, "fc", "same", _by_real_or_complex(np.log1p, complex_.logarithm_of_one_plus), work=_DEAR,
             vector_work=11),
    ScalarOp("sqrt", 1, "fc", "same", np.sqrt, work=_DEAR, vector_work=4),
    ScalarOp("rsqrt", 1, "fc", "same", _by_real_or_complex(lambda x: 1 / np.sqrt(x), complex_.reciprocal_root),
             work=_DEAR,
             vector_work=7),
    ScalarOp("cbrt", 1, "fc", "same", _by_real_or_complex(np.cbrt, complex_.cube_root), work=_DEAR, vector_work=217,
             smooth=True),
    ScalarOp("sin", 1, "fc", "same", np.sin, work=_DEAR, vector_work=87, smooth=True),
    ScalarOp("cos", 1, "fc", "same", np.cos, work=_DEAR, vector_work=87, smooth=True),
    ScalarOp("tan", 1, "fc", "same", np.tan, work=_DEAR, vector_work=89),
    ScalarOp("tanh", 1, "fc", "same", np.tanh, work=_DEAR, vector_work=9, smooth=True),
    ScalarOp("logistic", 1, "fc", "same", _by_real_or_complex(lambda x: 1 / (1 + np.exp(-x)), complex_.logistic),
             work=_DEAR,
             vector_work=14, smooth=True),
    ScalarOp("erf", 1, "f", "same", _scipy_function("erf"), work=_DEAR, vector_work=9, smooth=True),
    ScalarOp("erfc", 1, "f", "same", _scipy_function("erfc"), work=_DEAR, vector_work=20, smooth=True),
    ScalarOp("erf_inv", 1, "f", "same", _scipy_function("erfinv"), work=_DEAR, vector_work=36),
    ScalarOp("lgamma", 1, "f", "same", _log_gamma, work=_DEAR, vector_work=216),
    ScalarOp("digamma", 1, "f", "same", _digamma, work=_DEAR, vector_work=216),
    *(ScalarOp(name, 1, "c", "same", reference, work=_DEAR, vector_work=180) for name, reference in (
        ("acos", np.arccos), ("acosh", np.arccosh), ("asin", np.arcsin), ("asinh", np.arcsinh), ("atan", np.arctan),
        ("atanh", np.arctanh))),
    ScalarOp("floor", 1, "f", "same", np.floor, tolerance=0),
    ScalarOp("ceil", 1, "f", "same", np.ceil, tolerance=0),
    ScalarOp("round_even", 1, "f", "same", np.rint, tolerance=0),
    ScalarOp("round_afz", 1, "f", "same", _round_afz, tolerance=0),
    ScalarOp("is_finite", 1, "f", "bool", np.isfinite),
    ScalarOp("not", 1, "biu", "same", np.invert, symbol="~"),
    ScalarOp("popcnt", 1, "iu", "same", _popcnt, counts_bits=True),
    ScalarOp("clz", 1, "iu", "same", _clz, counts_bits=True),
    ScalarOp("real", 1, "fc", "real", np.real, tolerance=0),
    ScalarOp("imag", 1, "fc", "real", np.imag, tolerance=0, hides_nan=True),
    ScalarOp("conj", 1, "fc", "same", np.conj, tolerance=0),
    ScalarOp("add", 2, "biufc", "same", _logical_function(np.logical_or, np.add),
              symbol="+", on_bool="or", commutes=True, neutral="zero", accumulates=True, atomic=True, smooth=True),
    ScalarOp("sub", 2, "iufc", "same", np.subtract, symbol="-", smooth=True),
    ScalarOp("mul", 2, "biufc", "same", _logical_function(np.logical_and, np.multiply),
              symbol="*", on_bool="and", commutes=True, neutral="one", accumulates=True, smooth=True),
    ScalarOp("div", 2, "iufc", "same", _by_real_or_complex(_divide_scalars, complex_.divide), work=_DEAR,
             vector_work=2, smooth=True),
    ScalarOp("rem", 2, "iuf", "same", _remainder_of_scalars, work=_DEAR, vector_work=90),
    ScalarOp("pow", 2, "iufc", "same", _by_real_or_complex(_power_of_scalars, complex_.power), work=_DEAR,
             vector_work=200, hides_nan=True),
    ScalarOp("max", 2, "biufc", "same", _by_real_or_complex(_maximum, np.maximum),
              on_bool="or", neutral="lowest", accumulates=True, atomic=True, tolerance=0, smooth=True),
    ScalarOp("min", 2, "biufc", "same", _by_real_or_complex(_minimum, np.minimum),
              on_bool="and", neutral="largest", accumulates=True, atomic=True, tolerance=0, smooth=True),
    ScalarOp("max_number", 2, "f", "same", np.fmax, accumulates=True, tolerance=0, hides_nan=True, of_loops=True),
    ScalarOp("atan2", 2, "fc", "same", _by_real_or_complex(np.arctan2, complex_.atan2), work=_DEAR, vector_work=76),
    ScalarOp("and", 2, "biu", "same", np.bitwise_and, symbol="&", commutes=True, atomic=True, neutral="ones"),
    ScalarOp("or", 2, "biu", "same", np.bitwise_or, symbol="|", commutes=True, atomic=True, neutral="zero"),
    ScalarOp("xor", 2, "biu", "same", np.bitwise_xor, symbol="^", commutes=True, atomic=True),
    ScalarOp("shl", 2, "iu", "same", _shift_function(np.left_shift, "u", False)),
    ScalarOp("shr_arith", 2, "iu", "same", _shift_function(np.right_shift, "i", True), counts_bits=True),
    ScalarOp("shr_logic", 2, "iu", "same", _shift_function(np.right_shift, "u", False), counts_bits=True),
    ScalarOp("next_after", 2, "f", "same", np.nextafter, widens=False, tolerance=0),
    ScalarOp("complex", 2, "f", "complex", _complex_of, tolerance=0),
    ScalarOp("eq", 2, "biufc", "bool", np.equal, symbol="=="),
    ScalarOp("ne", 2, "biufc", "bool", np.not_equal, symbol="!="),
    ScalarOp("lt", 2, "biuf", "bool", np.less, symbol="<"),
    ScalarOp("le", 2, "biuf", "bool", np.less_equal, symbol="<="),
    ScalarOp("gt", 2, "biuf", "bool", np.greater, symbol=">"),
    ScalarOp("ge", 2, "biuf", "bool", np.greater_equal, symbol=">="),
    ScalarOp("eq_total", 2, "f", "bool", _total_order_comparison(np.equal), symbol="==", total=True, widens=False),
    ScalarOp("ne_total", 2, "f", "bool", _total_order_comparison(np.not_equal), symbol="!=", total=True, widens=False),
    ScalarOp("lt_total", 2, "f", "bool", _total_order_comparison(np.less), symbol="<", total=True, widens=False),
    ScalarOp("le_total", 2, "f", "bool", _total_order_comparison(np.less_equal), symbol="<=", total=True, widens=False),
    ScalarOp("gt_total", 2, "f", "bool", _total_order_comparison(np.greater), symbol=">", total=True, widens=False),
    ScalarOp("ge_total", 2, "f", "bool", _total_order_comparison(np.greater_equal), symbol=">=", total=True,
             widens=False),
    ScalarOp("select", 3, "biufc", "select", np.where, tolerance=0, smooth=True, hides_nan=True),
    ScalarOp("convert", 1, "biufc", "given", convert, tolerance=0),
)}  # fmt: skip


def _small_float_conversion(row: ScalarOp) -> ScalarOp:
    name = f"short_{row.name}"
    return replace(row, name=name, approximates=row.name, of_loops=True, kinds="f", work=2, tolerance=2.0**14)


SCALARS |= {
    row.name: row for row in (_small_float_conversion(SCALARS[name]) for name in ("div", "exp", "logistic", "tanh"))
}
SCALARS["decay"] = replace(SCALARS["exp"], name="decay", kinds="f", vector_work=8, of_loops=True)  # of at most 60
