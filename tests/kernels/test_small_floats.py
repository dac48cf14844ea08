"""Floats of 4, 6 and 8 bits: every code decoded, roundings at every midpoint, every op on every code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from support.differential import LEVELS
from support.small_floats import (
    INTEGERS,
    QUICK,
    SMALL,
    WIDE,
    codes,
    convert_all,
    interesting,
    nearest,
    program,
    run,
    same,
    table,
    tensor,
    total_order,
)

from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.vmfb.dtypes import DTYPES, limits, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

pytestmark = pytest.mark.cpu


def test_table_of_formats_agrees_with_ml_dtypes():
    for name, form in SMALL_FLOATS.items():
        info, every = ml_dtypes.finfo(to_numpy(name)), codes(name)
        assert (info.bits, info.nmant) == (DTYPES[name].bits, form.mantissa_bits)
        assert every[form.largest] == info.max
        least = 0 if form.special == "power" else 1 << form.mantissa_bits
        assert float(every[least]) == 2.0 ** (form.least_exponent if least else -form.bias) == info.smallest_normal
        assert form.special == "finite" or np.isnan(every[form.nan])
        assert not np.isnan(every[form.largest].astype(np.float32))
        has_infinity = bool(np.isinf(every.astype(np.float32)).any())
        assert has_infinity == (form.special == "ieee") == (limits(name)[1] == np.inf)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("source", ["f16", "bf16", "f32", "f64"])
def test_floats_round_once_to_nearest_even(source, level):
    with np.errstate(all="ignore"):
        x = interesting(SMALL).astype(to_numpy(source))
        if source in ("f16", "bf16"):
            x = np.arange(1 << 16, dtype=np.uint16).view(to_numpy(source))
        for dtype, got in zip(SMALL, convert_all(x, source, SMALL, level), strict=True):
            same(got, nearest(x.astype(np.float64), dtype), (source, dtype))


@pytest.mark.parametrize("source", QUICK)
def test_every_code_converts_to_every_type(source):
    x = codes(source)
    wide = x.astype(np.float64)
    targets = [*SMALL, *WIDE, *INTEGERS, "i1", "c64"]
    for target, got in zip(targets, convert_all(x, source, targets), strict=True):
        if target == source:
            assert got.tobytes() == x.tobytes()
        elif target in SMALL_FLOATS:
            same(got, nearest(wide, target), target)
        elif target in WIDE:
            with np.errstate(over="ignore"):
                want = wide.astype(np.float32).astype(to_numpy(target))
            same(got, want, target)
        elif target == "i1":
            np.testing.assert_array_equal(got, wide != 0)
        elif target == "c64":
            np.testing.assert_array_equal(got.real, wide)
        else:
            low, high = limits(target)
            exact = [0 if np.isnan(v) else low if v <= low else high if v >= high else int(v) for v in wide]
            assert [int(v) for v in got] == exact, target


def every_integer(dtype: str) -> np.ndarray:
    """Return all integers of up to 16 bits; of wider ones those around what small floats can hold."""
    bits, (low, high) = DTYPES[dtype].bits, limits(dtype)
    if bits <= 16:
        return np.arange(low, high + 1, dtype=np.int64).astype(to_numpy(dtype))
    x = interesting(SMALL)
    x = x[np.isfinite(x) & (np.abs(x) < 2.0 ** min(bits - 2, 53))]
    x = x[(x > low) & (np.abs(x) < 2.0**50)].astype(np.int64)
    return np.concatenate([x - (low < 0), x, x + 1]).astype(to_numpy(dtype))


SOME_INTEGERS = [pytest.param(n, marks=() if n in ("i4", "u8", "i32", "u64") else pytest.mark.slow) for n in INTEGERS]


@pytest.mark.parametrize("source", [*SOME_INTEGERS, "i1"])
def test_integers_round_once(source):
    x = np.array([False, True]) if source == "i1" else every_integer(source)
    exact = x.astype(np.int64).astype(np.float64)
    for dtype, got in zip(SMALL, convert_all(x, source, SMALL), strict=True):
        same(got, nearest(exact, dtype), dtype)


def test_the_middle_between_two_large_powers_is_judged_from_the_whole_integer():
    x = np.array([3 * 2**52 - 1, 3 * 2**52], np.int64)
    (got,) = convert_all(x, "i64", ["f8E8M0FNU"])
    assert got.view(np.uint8).tolist() == [127 + 53, 127 + 54]


BINARY = {
    "add": np.add, "subtract": np.subtract, "multiply": np.multiply, "divide": np.divide, "remainder": np.fmod,
    "maximum": np.maximum, "minimum": np.minimum, "power": np.power, "atan2": np.arctan2,
}  # fmt: skip
ORDER = {
    "EQ": np.equal, "NE": np.not_equal, "LT": np.less, "LE": np.less_equal, "GT": np.greater, "GE": np.greater_equal,
}  # fmt: skip


@pytest.mark.parametrize("dtype", QUICK)
def test_arithmetic_on_every_pair(dtype):
    a = np.repeat(codes(dtype)[:, None], codes(dtype).size, 1)
    b = np.ascontiguousarray(a.T)
    t, i1 = tensor(a), tensor(a, "i1")
    lines = [f"%{n} = stablehlo.{op} %a, %b : {t}" for n, op in enumerate(BINARY)]
    comparisons = [(kind, c) for kind in ("FLOAT", "TOTALORDER") for c in ORDER]
    lines += [
        f"%{n} = stablehlo.compare {c}, %a, %b, {kind} : ({t}, {t}) -> {i1}"
        for n, (kind, c) in enumerate(comparisons, len(BINARY))
    ]
    text = program(lines, [a, b], [t] * len(BINARY) + [i1] * len(comparisons))
    got = run(text, a, b)
    referenced = interpret(import_model(text), a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        for op, found, reference in zip(BINARY, got, referenced):
            exact = BINARY[op](x, y)
            # the range of f8E8M0FNU is that of f32, in which ops are computed: they may underflow to 0; an angle a
            # little below a tie of the format is on it in f32
            if dtype == "f8E8M0FNU" or op == "atan2":
                exact = exact.astype(np.float32).astype(np.float64)
            want = nearest(exact, dtype)
            if op == "power":  # halfway between 0 and the least f32 either is half a unit off
                found, reference = (np.where(BINARY[op](x, y) == 2.0**-150, want, v) for v in (found, reference))
            if op in ("maximum", "minimum"):  # NumPy leaves open which zero it takes: +0 is above -0
                larger = np.signbit(x) & np.signbit(y) if op == "maximum" else np.signbit(x) | np.signbit(y)
                want = np.where((x == 0) & (y == 0), nearest(np.where(larger, -0.0, 0.0), dtype), want)
            same(found, want, op)
            same(reference, want, f"{op} of the interpreter")
    key = total_order(dtype)
    ranks = key[a.view(np.uint8)], key[b.view(np.uint8)]
    for (kind, c), found, reference in zip(comparisons, got[len(BINARY) :], referenced[len(BINARY) :], strict=True):
        want = ORDER[c](x, y) if kind == "FLOAT" else ORDER[c](*ranks)
        np.testing.assert_array_equal(found, want, err_msg=f"{kind} {c}")
        np.testing.assert_array_equal(reference, want, err_msg=f"{kind} {c} of the interpreter")


UNARY = {
    "abs": np.abs, "negate": np.negative, "exponential": np.exp, "exponential_minus_one": np.expm1, "log": np.log,
    "log_plus_one": np.log1p, "sqrt": np.sqrt, "cbrt": np.cbrt, "sine": np.sin, "cosine": np.cos, "tanh": np.tanh,
    "floor": np.floor, "ceil": np.ceil, "round_nearest_even": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)), "tan": np.tan, "real": np.positive, "imag": np.zeros_like,
    "round_nearest_afz": lambda x: np.copysign(np.floor(np.abs(x) + 0.5), x),
    "sign": lambda x: np.where(np.isnan(x), x, np.copysign(np.sign(x), x)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", QUICK)
def test_functions_of_every_code(dtype):
    x = codes(dtype)
    t = tensor(x)
    lines = [f"%{n} = stablehlo.{op} %a : {t}" for n, op in enumerate(UNARY)]
    n = len(UNARY)
    lines += [f"%{n} = stablehlo.is_finite %a : ({t}) -> {tensor(x, 'i1')}"]
    lines += [f"%{n + 1} = stablehlo.reduce_precision %a, format = e5m1 : {t}"]
    *got, finite, shorter = run(program(lines, [x], [t] * n + [tensor(x, "i1"), t]), x)
    wide = x.astype(np.float64)
    with np.errstate(all="ignore"):
        for op, found in zip(UNARY, got, strict=True):
            same(found, nearest(UNARY[op](wide), dtype), op)
    np.testing.assert_array_equal(finite, np.isfinite(wide))
    assert shorter.dtype == x.dtype
    small = np.isfinite(wide) & (np.abs(wide) >= 2.0**-14) & (np.abs(wide) < 2.0**15)
    mantissa, exponent = np.frexp(wide[small])
    same(shorter[small], nearest(np.ldexp(np.rint(mantissa * 4) / 4, exponent), dtype), "reduce_precision")


@pytest.mark.parametrize("dtype", QUICK)
def test_functions_of_chlo_of_every_code(dtype):
    pytest.importorskip("mpmath")
    from conformance.edge_references import REAL

    x, names = codes(dtype), ("conj", "square", "cosh", "sinh", "erf", "erfc", "erf_inv", "lgamma")
    t = tensor(x)
    got = run(program([f"%{n} = chlo.{op} %a : {t} -> {t}" for n, op in enumerate(names)], [x], [t] * len(names)), x)
    wide = x.astype(np.float64)
    for op, found in zip(names, got, strict=True):
        with np.errstate(all="ignore"):
            exact = wide if op == "conj" else REAL[op](wide.astype(np.longdouble)).astype(np.float64)
            if dtype == "f8E8M0FNU":
                exact = exact.astype(np.float32).astype(np.float64)
        if op in ("erf", "erf_inv"):  # mpmath has no -0
            exact = np.copysign(exact, wide)
        same(found, nearest(exact, dtype), op)


@pytest.mark.parametrize("dtype", QUICK)
def test_next_after_steps_to_the_neighbour(dtype):
    a = np.repeat(codes(dtype)[:, None], codes(dtype).size, 1)
    b = np.ascontiguousarray(a.T)
    t = tensor(a)
    text = program([f"%0 = chlo.next_after %a, %b : {t}, {t} -> {t}"], [a, b], [t])
    (got,) = run(text, a, b)
    x, y, found = (v.astype(np.float64) for v in (a, b, got))
    values, form = table(dtype)[0], SMALL_FLOATS[dtype]
    usual = np.isfinite(x) & ~np.isnan(y) & (x != y)
    place = np.searchsorted(values, np.where(usual, x, 0)) + np.where(x < y, 1, -1)
    inside = usual & (place >= 0) & (place < len(values))
    assert np.array_equal(found[inside], values[place[inside]])
    same(got[x == y], b[x == y])
    if form.special != "finite":
        assert np.isnan(found[np.isnan(x) | np.isnan(y)]).all()
