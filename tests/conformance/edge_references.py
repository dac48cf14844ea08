"""The elementwise ops of StableHLO and CHLO, the dtypes that each takes, and its value in long double or by mpmath."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mpmath
import numpy as np

from conformance.edge_rules import by_rule

DIGITS = 50
LONG, LONG_COMPLEX = np.longdouble, np.clongdouble
FLOAT = ("f32", "f64", "f16", "bf16", "f8E4M3FN", "f8E5M2")
COMPLEX = ("c64", "c128")
SIGNED = ("i8", "i16", "i32", "i64")
UNSIGNED = ("u8", "u16", "u32", "u64")
_PART = {"c64": "f32", "c128": "f64"}


@dataclass(frozen=True, slots=True)
class Operation:
    """An op: its spelling around its operands, its dtypes, and pairs of operands that only it needs."""

    name: str
    mlir: str
    arity: int
    dtypes: tuple[str, ...]
    result: str = "same"
    pairs: tuple[tuple[float, float], ...] = ()

    def result_of(self, dtype: str) -> str:
        """Return the dtype of the result."""
        match self.result:
            case "bool":
                return "i1"
            case "part":
                return _PART.get(dtype, dtype)
            case "whole":
                return {"f32": "c64", "f64": "c128"}[dtype]
        return dtype


def _op(name: str, spelling: str, arity: int, dtypes: tuple[str, ...], result: str = "same", **more: Any) -> Operation:
    return Operation(name, f'"{spelling}"({{}})', arity, dtypes, result, **more)


def _hlo(name: str, spelling: str, dtypes: tuple[str, ...], arity: int = 1, **more: Any) -> Operation:
    return _op(name, f"stablehlo.{spelling}", arity, dtypes, **more)


def _compare(direction: str) -> Operation:
    attribute = f"comparison_direction = #stablehlo<comparison_direction {direction}>"
    spelling = f'"stablehlo.compare"({{}}) <{{{{{attribute}}}}}>'
    kinds = FLOAT + SIGNED + UNSIGNED + (COMPLEX if direction in ("EQ", "NE") else ())
    return Operation(f"compare_{direction}", spelling, 2, kinds, "bool")


def _precision(exponent: int, mantissa: int) -> Operation:
    bits = f"exponent_bits = {exponent} : i32, mantissa_bits = {mantissa} : i32"
    name = f"reduce_precision_e{exponent}m{mantissa}"
    return Operation(name, f'"stablehlo.reduce_precision"({{}}) <{{{{{bits}}}}}>', 1, FLOAT)


_REMAINDERS = ((1e100, 3.0), (-1.7976931348623157e308, 0.998), (1e308, 5e-324 * 3), (2.0**60, 3.0), (7e-322, 1e-323))
_POWERS = ((10.0, 40.0), (10.0, -40.0), (1.0000001, 1e7), (0.99999, 1e6), (-2.0, 63.0), (-2.0, 0.5), (7.3, 300.0))

OPERATIONS: tuple[Operation, ...] = (
    *(_hlo(name, spelling, FLOAT + COMPLEX) for name, spelling in (
        ("exp", "exponential"), ("expm1", "exponential_minus_one"), ("log", "log"), ("log1p", "log_plus_one"),
        ("sqrt", "sqrt"), ("rsqrt", "rsqrt"), ("sin", "sine"), ("cos", "cosine"), ("tan", "tan"), ("tanh", "tanh"),
        ("logistic", "logistic"))),
    _hlo("cbrt", "cbrt", FLOAT),
    *(_op(name, f"chlo.{name}", 1, FLOAT) for name in ("erf", "erfc", "erf_inv", "lgamma", "digamma")),
    *(_op(name, f"chlo.{name}", 1, FLOAT + COMPLEX) for name in (
        "acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "sinh", "square", "conj")),
    _op("bessel_i1e", "chlo.bessel_i1e", 1, FLOAT[:4]),
    *(_op(name, f"chlo.{name}", 1, FLOAT, result="bool") for name in ("is_inf", "is_pos_inf", "is_neg_inf")),
    *(_hlo(name, spelling, FLOAT) for name, spelling in (
        ("floor", "floor"), ("ceil", "ceil"), ("round_even", "round_nearest_even"),
        ("round_afz", "round_nearest_afz"))),
    _hlo("is_finite", "is_finite", FLOAT, result="bool"),
    *(_hlo(name, spelling, FLOAT + SIGNED + UNSIGNED + COMPLEX) for name, spelling in (("neg", "negate"),)),
    _hlo("abs", "abs", FLOAT + SIGNED + COMPLEX, result="part"),
    _hlo("sign", "sign", FLOAT + SIGNED + COMPLEX),
    *(_hlo(name, name, FLOAT + COMPLEX, result="part") for name in ("real", "imag")),
    *(_hlo(name, spelling, SIGNED + UNSIGNED) for name, spelling in (
        ("not", "not"), ("popcnt", "popcnt"), ("clz", "count_leading_zeros"))),
    *(_hlo(name, spelling, FLOAT + SIGNED + UNSIGNED + COMPLEX, 2) for name, spelling in (
        ("add", "add"), ("sub", "subtract"), ("mul", "multiply"), ("div", "divide"))),
    _hlo("pow", "power", FLOAT + SIGNED + UNSIGNED + COMPLEX, 2, pairs=_POWERS),
    _hlo("rem", "remainder", FLOAT + SIGNED + UNSIGNED, 2, pairs=_REMAINDERS),
    *(_hlo(name, f"{name}imum", FLOAT + SIGNED + UNSIGNED, 2) for name in ("max", "min")),
    _hlo("atan2", "atan2", FLOAT, 2),
    _op("next_after", "chlo.next_after", 2, ("f32", "f64", "f16", "bf16")),
    _hlo("complex", "complex", ("f32", "f64"), 2, result="whole"),
    *(_hlo(name, spelling, SIGNED + UNSIGNED, 2) for name, spelling in (
        ("and", "and"), ("or", "or"), ("xor", "xor"), ("shl", "shift_left"), ("shr_arith", "shift_right_arithmetic"),
        ("shr_logic", "shift_right_logical"))),
    *(_compare(direction) for direction in ("EQ", "NE", "LT", "LE", "GT", "GE")),
    *(_precision(e, m) for e, m in ((8, 7), (5, 10), (4, 3), (5, 2), (11, 0), (8, 0), (11, 52))),
)  # fmt: skip

PRECISIONS = frozenset(o.name for o in OPERATIONS if o.name.startswith("reduce_precision"))


def _pairs(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    found = np.empty(a.shape, np.result_type(a.dtype, np.complex64))
    found.real, found.imag = a, b
    return found


def integer_power(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``a**b`` modulo the type's range; of a negative power what is left when it is rounded to 0."""
    bits = 8 * a.dtype.itemsize
    found = []
    for x, y in zip(a.tolist(), b.tolist(), strict=True):
        value = pow(x, y, 1 << bits) if y >= 0 else (x if y % 2 else 1) if abs(x) == 1 else 0
        found.append(value % (1 << bits))
    return np.array(found, np.uint64).astype(f"u{a.dtype.itemsize}").view(a.dtype)


EXACT: dict[str, Callable[..., np.ndarray]] = {
    "compare_EQ": np.equal, "compare_NE": np.not_equal, "compare_LT": np.less, "compare_LE": np.less_equal,
    "compare_GT": np.greater, "compare_GE": np.greater_equal, "is_finite": np.isfinite, "real": np.real,
    "imag": np.imag, "neg": np.negative, "complex": _pairs, "conj": np.conjugate,
    "next_after": np.nextafter, "is_inf": np.isinf, "is_pos_inf": lambda x: x == np.inf,
    "is_neg_inf": lambda x: x == -np.inf,
}  # fmt: skip
"""Ops whose results are bits, not rounded numbers; XLA takes subnormals for zeros in them."""


def _rounded_away(x: np.ndarray) -> np.ndarray:
    return np.copysign(np.floor(np.abs(x) + LONG(0.5)), x)


def _sign(x: np.ndarray) -> np.ndarray:
    return np.where(np.isnan(x) | (x == 0), x, np.copysign(LONG(1), x))


def _by_mpmath(function: Callable[[Any], Any]) -> Callable[[np.ndarray], np.ndarray]:
    """Return ``function`` of mpmath for arrays of real numbers; where it has no value, NaN."""

    def call(x: np.ndarray) -> np.ndarray:
        return np.array([_long(function, float(v)) for v in x], LONG)

    return call


def _long(function: Callable[[Any], Any], x: float) -> np.longdouble:
    with mpmath.workdps(DIGITS):
        value = function(mpmath.mpf(min(max(x, -_HUGE), _HUGE) if function in _STEEP else x))
        return LONG(str(value)) if isinstance(value, float) else LONG(mpmath.nstr(value, 30))


_HUGE, _STEEP = 1e4, (mpmath.erf, mpmath.erfc)  # mpmath has no value of these for the largest numbers


def _lgamma(x: Any) -> Any:
    if not mpmath.isfinite(x) or (x <= 0 and x == mpmath.floor(x)):
        return float("nan") if mpmath.isnan(x) else float("inf")
    return mpmath.log(abs(mpmath.gamma(x))) if x < 200 else mpmath.loggamma(x)


def _digamma(x: Any) -> Any:
    if mpmath.isnan(x) or (x <= 0 and (mpmath.isinf(x) or x == mpmath.floor(x))):
        return float("nan")
    return mpmath.log(x) - 1 / (2 * x) if x > 1e15 else mpmath.digamma(x)


def _bessel_i1e(x: Any) -> Any:
    if abs(x) > 1e6:  # mpmath's sums do not end here; the next term of this one is x**-3
        return mpmath.sign(x) / mpmath.sqrt(2 * mpmath.pi * abs(x)) * (1 - 3 / (8 * abs(x)) - 15 / (128 * x * x))
    return mpmath.besseli(1, x) * mpmath.exp(-abs(x))


def _within(function: Callable[[Any], Any], low: float, high: float) -> Callable[[Any], Any]:
    """Return ``function`` without the complex values that mpmath has outside of the domain."""
    return lambda x: function(x) if low <= x <= high else float("nan")


def _atanh(x: Any) -> Any:
    return float("inf") * float(x) if abs(x) == 1 else mpmath.atanh(x)


def _erf_inv(x: Any) -> Any:
    if not abs(x) <= 1:
        return float("nan")
    return float("inf") * float(x) if abs(x) == 1 else mpmath.erfinv(x)


REAL: dict[str, Callable[..., np.ndarray]] = {
    "exp": np.exp, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "sqrt": np.sqrt, "cbrt": np.cbrt,
    "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "erf": _by_mpmath(mpmath.erf), "erfc": _by_mpmath(mpmath.erfc),
    "erf_inv": _by_mpmath(_erf_inv), "lgamma": _by_mpmath(_lgamma), "floor": np.floor, "ceil": np.ceil,
    "round_even": np.rint, "round_afz": _rounded_away, "abs": np.abs, "sign": _sign, "add": np.add,
    "sub": np.subtract, "mul": np.multiply, "div": np.divide, "rem": np.fmod, "pow": np.power, "max": np.maximum,
    "min": np.minimum, "atan2": np.arctan2, "acos": _by_mpmath(_within(mpmath.acos, -1, 1)),
    "acosh": _by_mpmath(_within(mpmath.acosh, 1, math.inf)), "asin": _by_mpmath(_within(mpmath.asin, -1, 1)),
    "asinh": _by_mpmath(mpmath.asinh), "atan": _by_mpmath(mpmath.atan), "atanh": _by_mpmath(_within(_atanh, -1, 1)),
    "cosh": np.cosh, "sinh": np.sinh, "square": np.square, "digamma": _by_mpmath(_digamma),
    "bessel_i1e": _by_mpmath(_bessel_i1e),
}  # fmt: skip


def _near_0(function: Callable[[Any], Any], cube: float) -> Callable[[Any], Any]:
    """Return ``function``, near 0 by its series: mpmath loses the digits of ``log(1 + z) - log(1 - z)`` there."""
    third, fifth = mpmath.mpf(cube) / 3, mpmath.mpf(1) / 5
    return lambda z: z + third * z**3 + fifth * z**5 if abs(z) < 1e-8 else function(z)


_MP: dict[str, Callable[..., Any]] = {
    "exp": mpmath.exp, "expm1": mpmath.expm1, "log": mpmath.log, "log1p": mpmath.log1p, "sqrt": mpmath.sqrt,
    "rsqrt": lambda z: 1 / mpmath.sqrt(z), "sin": mpmath.sin, "cos": mpmath.cos, "tan": mpmath.tan,
    "tanh": mpmath.tanh, "logistic": lambda z: 1 / (1 + mpmath.exp(-z)), "abs": abs, "sign": lambda z: z / abs(z),
    "add": lambda a, b: a + b, "sub": lambda a, b: a - b, "mul": lambda a, b: a * b, "div": lambda a, b: a / b,
    "pow": lambda a, b: mpmath.exp(b * mpmath.log(a)), "cosh": mpmath.cosh, "sinh": mpmath.sinh,
    "square": lambda z: z * z, "acos": mpmath.acos,
    "acosh": mpmath.acosh, "asin": mpmath.asin, "asinh": mpmath.asinh, "atan": _near_0(mpmath.atan, -1),
    "atanh": _near_0(mpmath.atanh, 1),
}  # fmt: skip


def reference(operation: Operation, args: list[np.ndarray]) -> np.ndarray:
    """Return the result in long double, complex or not."""
    with np.errstate(all="ignore"):
        if args[0].dtype.kind != "c":
            return np.asarray(REAL[operation.name](*[a.astype(LONG) for a in args]))
        worth = counts(operation, args)
        rows = zip(*args, worth, strict=True)
        parts = np.array([_complex(operation.name, xs) if w else _NOTHING for *xs, w in rows], LONG)
    if operation.result == "part":
        return parts[:, 0]
    found = np.empty(len(parts), LONG_COMPLEX)
    found.real, found.imag = parts.T
    return found


_PHASE = 700.0
_NOTHING = (LONG(np.nan), LONG(np.nan))


def counts(operation: Operation, args: list[np.ndarray]) -> np.ndarray:
    """Tell which arguments have a known result.

    Of finite powers these are in range and have a moderate phase; products of parts do not overflow.
    """
    if operation.name == "mul" and args[0].dtype.kind == "c":
        a, b = ([np.where(np.isfinite(v), v, 0) for v in (x.real, x.imag)] for x in args)
        with np.errstate(all="ignore"):
            return np.isfinite([u * v for u in a for v in b]).all(0)
    if operation.name != "pow" or args[0].dtype.kind != "c":
        return np.ones(args[0].shape, bool)
    top = np.log(LONG(np.finfo(args[0].dtype).max)) - 1
    a, b = (x.astype(LONG_COMPLEX) for x in args)
    with np.errstate(all="ignore"):
        logarithm = b * np.log(a)
        return (np.abs(logarithm) < _PHASE) & (logarithm.real < top) | ~np.isfinite(a) | ~np.isfinite(b) | (a == 0)


def power_exponents(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``abs(b log a)``, with which the error of a complex power grows."""
    with np.errstate(all="ignore"):
        return np.abs(b.astype(LONG_COMPLEX) * np.log(a.astype(LONG_COMPLEX))).astype(np.float64)


def growth(name: str, args: list[np.ndarray]) -> np.ndarray:
    """Return what :attr:`conformance.edge_bounds.Bound.growing` is times; of digamma ``abs(digamma(1 - x) / y)``."""
    if name == "pow":
        return power_exponents(*args)
    x = args[0].astype(LONG)
    with np.errstate(all="ignore"):
        above = np.where(x < 0, np.log1p(np.abs(x)) + 1, 0)  # above digamma(1 - x)
        found = above / np.maximum(np.abs(REAL[name](x)), np.finfo(np.float64).tiny)
    return np.where(np.isfinite(found), found, 0).astype(np.float64)


CUTS = frozenset(("acos", "acosh", "asin", "asinh", "atan", "atanh"))
_AT_0 = frozenset(("log", "rsqrt", "sign", "pow"))
_AT_UNITS = frozenset(("atan", "atanh"))


def _beside(part: Any) -> Any:
    return mpmath.mpf(float(part)) if part else mpmath.mpf("1e-4000") * (-1 if np.signbit(part) else 1)


def _above_cuts(name: str, xs: Sequence[Any]) -> tuple[Sequence[Any], bool]:
    """Return arguments above cuts, as mpmath has no -0, and whether the result is the conjugate."""
    beneath = [np.signbit(x.imag) and x.imag == 0 for x in xs]
    below = beneath[0] if name == "pow" else any(beneath) and all(x.imag <= 0 for x in xs)
    return [x.conj() for x in xs] if below and name not in CUTS else xs, bool(below)


def _complex(name: str, xs: Sequence[Any]) -> tuple[Any, Any]:
    """Return the parts of a value: by mpmath, of infinities, NaN and poles by rule; NaN where neither has one."""
    at_pole = (name in _AT_0 and xs[0] == 0) or (name == "div" and xs[1] == 0)
    at_pole |= name in _AT_UNITS and abs(xs[0]) == 1 and 0 in (xs[0].real, xs[0].imag)
    if at_pole or not all(np.isfinite(x) for x in xs):
        value = by_rule(name, xs)
        return _NOTHING if value is None else (value.real, value.imag)
    xs, below = _above_cuts(name, xs)
    with mpmath.workdps(DIGITS):
        numbers = [mpmath.mpc(float(x.real), float(x.imag)) for x in xs]
        if name in CUTS:  # along both axes: a step to the side of the zero's sign
            below, numbers = False, [mpmath.mpc(_beside(x.real), _beside(x.imag)) for x in xs]
        try:
            value = mpmath.mpc(_MP[name](*numbers))
        except (ZeroDivisionError, ValueError, OverflowError):
            return _NOTHING
        real, imag = (LONG(mpmath.nstr(part, 30)) for part in (value.real, value.imag))
    return real, -imag if below else imag
