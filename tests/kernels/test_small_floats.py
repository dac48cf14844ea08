"""Floats of 4, 6 and 8 bits: every code decoded, roundings at every midpoint, every op beside XLA or ml_dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor_run import interpret
from aotc.vmfb.dtypes import DTYPES, limits, to_numpy
from aotc.vmfb.float_formats import SMALL_FLOATS

pytestmark = pytest.mark.cpu

SMALL = list(SMALL_FLOATS)
FEW = ["f6E3M2FN", "f8E5M2", "f8E4M3FN", "f8E4M3FNUZ", "f8E8M0FNU"]  # one of each way with specials
QUICK = [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in SMALL]
WIDE = ("f16", "bf16", "f32", "f64")
INTEGERS = ("i2", "i4", "i8", "i16", "i32", "i64", "u2", "u4", "u8", "u16", "u32", "u64")


def mlir_name(dtype: str) -> str:
    return {"c64": "complex<f32>"}.get(dtype, "ui" + dtype[1:] if dtype[0] == "u" else dtype)


def codes(dtype: str) -> np.ndarray:
    """Return every value of a small float."""
    return np.arange(1 << DTYPES[dtype].bits, dtype=np.uint8).view(to_numpy(dtype))


def tensor(a: np.ndarray, dtype: str = "") -> str:
    names = {np.dtype(to_numpy(n)): n for n in DTYPES}
    return f"tensor<{''.join(f'{n}x' for n in a.shape)}{mlir_name(dtype or names[a.dtype])}>"


def program(lines: Sequence[str], arguments: Sequence[np.ndarray], results: Sequence[str]) -> str:
    """Return a module whose ``%0``, ``%1``... of types ``results`` are its results; arguments are ``%a``, ``%b``..."""
    given = ", ".join(f"%{'abc'[n]}: {tensor(a)}" for n, a in enumerate(arguments))
    names = ", ".join(f"%{n}" for n in range(len(results)))
    types = ", ".join(results)
    body = "\n".join(lines)
    return f"module {{ func.func public @main({given}) -> ({types}) {{\n{body}\nreturn {names} : {types} }} }}"


def run(text: str, *arrays: np.ndarray, level: int = 2) -> list[np.ndarray]:
    return aotc.load(aotc.compile(text.encode(), opt_level=level, verify_each=True)).invoke("main", *arrays)


def same(got: np.ndarray, want: np.ndarray, what: Any = "") -> None:
    """Compare bits; any NaN equals any other."""
    assert (got.shape, got.dtype) == (want.shape, want.dtype), what
    if got.dtype.kind in "biu":
        np.testing.assert_array_equal(got, want, err_msg=str(what))
        return
    wide = [x.astype(np.float64) if x.dtype.kind != "c" else x for x in (got, want)]
    unlike = np.ascontiguousarray(got).view(f"u{got.itemsize}") != np.ascontiguousarray(want).view(f"u{got.itemsize}")
    unlike &= ~(np.isnan(wide[0]) & np.isnan(wide[1]))
    places = np.argwhere(unlike)[:5]
    assert not unlike.any(), (what, int(unlike.sum()), [(got[tuple(p)], want[tuple(p)], tuple(p)) for p in places])


@cache
def table(dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Return the sorted finite values in f64 without -0, and their codes."""
    every = codes(dtype)
    wide = every.astype(np.float64)
    keep = np.isfinite(wide) & ~((wide == 0) & np.signbit(wide))
    order = np.argsort(wide[keep], kind="stable")
    return wide[keep][order], np.flatnonzero(keep)[order]


def nearest(x: np.ndarray, dtype: str) -> np.ndarray:
    """Round f64 ``x`` by search in the table of all values: no arithmetic in common with any implementation."""
    form = SMALL_FLOATS[dtype]
    values, their = table(dtype)
    with np.errstate(all="ignore"):
        above = np.clip(np.searchsorted(values, x), 1, len(values) - 1)
        low, high = values[above - 1], values[above]
        middle = low + (high - low) / 2
        to_high = (x > middle) | ((x == middle) & (their[above] % 2 == 0))
        if form.special == "power":  # rounds halfway up, and all that is above the least to the next
            to_high = (x >= middle) | ((low == values[0]) & (x > low))
        code = np.where(to_high, their[above], their[above - 1])
        top = values[-1] + (values[-1] - values[-2]) / 2
        if form.special == "power":
            top = values[-1] * 1.5
        too_large = (np.abs(x) >= top) if form.special != "fn" else (np.abs(x) > top)
    if form.special == "power":
        code = np.where(x <= values[0], 0, np.where(too_large, 255, code))
        return np.where(np.isnan(x) | (x <= 0), 255, code).astype(np.uint8).view(to_numpy(dtype))
    sign = np.where(np.signbit(x), form.sign, 0)
    if form.special == "fnuz":
        code = np.where(too_large | np.isnan(x), form.nan, code)
    else:
        code = np.where(too_large, form.overflow, code & (form.sign - 1)) | sign
        nan = form.nan if form.special == "finite" else form.nan | sign
        code = np.where(np.isnan(x), nan, code)
    return code.astype(np.uint8).view(to_numpy(dtype))


def interesting(dtypes: Sequence[str]) -> np.ndarray:
    """Return f64 numbers: all values of the types, the midpoints between them, and the neighbours of both."""
    found: list[np.ndarray] = [np.array([0.0, -0.0, np.inf, -np.inf, np.nan, -np.nan, 1e-300, -1e300])]
    for dtype in dtypes:
        values, _ = table(dtype)
        top = values[-1] + (values[-1] - values[-2]) / 2
        middle = np.concatenate([values, (values[1:] + values[:-1]) / 2, [top, -top, 1.5 * values[-1]]])
        found += [np.nextafter(middle, np.inf), middle, np.nextafter(middle, -np.inf)]
        narrow = middle.astype(np.float32)
        found += [np.nextafter(narrow, np.float32(s)).astype(np.float64) for s in (np.inf, -np.inf)]
    return np.concatenate(found)


def convert_all(x: np.ndarray, source: str, targets: Sequence[str], level: int = 2) -> list[np.ndarray]:
    types = [f"tensor<{x.size}x{mlir_name(t)}>" for t in targets]
    lines = [f"%{n} = stablehlo.convert %a : ({tensor(x, source)}) -> {t}" for n, t in enumerate(types)]
    return run(program(lines, [x], types), x, level=level)


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
    "maximum": np.maximum, "minimum": np.minimum,
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
            if dtype == "f8E8M0FNU":  # its range is that of f32, in which ops are computed: they may underflow to 0
                exact = exact.astype(np.float32).astype(np.float64)
            want = nearest(exact, dtype)
            if op in ("maximum", "minimum"):  # NumPy leaves open which zero it takes
                zeros = (x == 0) & (y == 0)
                assert np.array_equal(found.astype(np.float64)[zeros], want.astype(np.float64)[zeros])
                want = np.where(zeros, found, want)
                reference = np.where(zeros, found, reference)
            same(found, want, op)
            same(reference, want, f"{op} of the interpreter")
    key = total_order(dtype)
    ranks = key[a.view(np.uint8)], key[b.view(np.uint8)]
    for (kind, c), found, reference in zip(comparisons, got[len(BINARY) :], referenced[len(BINARY) :], strict=True):
        want = ORDER[c](x, y) if kind == "FLOAT" else ORDER[c](*ranks)
        np.testing.assert_array_equal(found, want, err_msg=f"{kind} {c}")
        np.testing.assert_array_equal(reference, want, err_msg=f"{kind} {c} of the interpreter")


def total_order(dtype: str) -> np.ndarray:
    """Return the rank of each code: numbers by value, -0 below 0, NaN outermost (that of fnuz at the bottom)."""
    form, count = SMALL_FLOATS[dtype], 1 << DTYPES[dtype].bits
    if form.special == "power":
        return np.arange(count)
    negative = list(range(count - 1, form.sign - 1, -1))
    if form.special == "fnuz":
        negative = [form.sign, *negative[:-1]]
    rank = np.empty(count, int)
    rank[[*negative, *range(form.sign)]] = np.arange(count)
    return rank


UNARY = {
    "abs": np.abs, "negate": np.negative, "exponential": np.exp, "exponential_minus_one": np.expm1, "log": np.log,
    "log_plus_one": np.log1p, "sqrt": np.sqrt, "cbrt": np.cbrt, "sine": np.sin, "cosine": np.cos, "tanh": np.tanh,
    "floor": np.floor, "ceil": np.ceil, "round_nearest_even": np.rint, "rsqrt": lambda x: 1 / np.sqrt(x),
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
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
            angles = op in ("sine", "cosine") and np.abs(wide) > 1e15  # Payne and Hanek's reduction is not done
            want = nearest(UNARY[op](wide), dtype)
            same(np.where(angles, want, found), want, op)
    np.testing.assert_array_equal(finite, np.isfinite(wide))
    assert shorter.dtype == x.dtype
    small = np.isfinite(wide) & (np.abs(wide) >= 2.0**-14) & (np.abs(wide) < 2.0**15)
    mantissa, exponent = np.frexp(wide[small])
    same(shorter[small], nearest(np.ldexp(np.rint(mantissa * 4) / 4, exponent), dtype), "reduce_precision")


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


def values_of(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Return values of which sums and products of a few are exact in f32."""
    rng = np.random.default_rng(seed)
    if dtype == "f8E8M0FNU":
        return np.exp2(rng.integers(-4, 5, shape)).astype(to_numpy(dtype))
    return (rng.integers(-4, 5, shape) / 2).astype(to_numpy(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_movement_keeps_every_bit(dtype, level):
    every = codes(dtype)
    a = np.resize(every[np.random.default_rng(1).permutation(every.size)], (6, 8)).copy()
    at = np.array([[2, 3], [0, 1], [5, 7]], np.int32)
    t, whole = mlir_name(dtype), tensor(a)
    bits = DTYPES[dtype].bits
    lines = [
        f"%0 = stablehlo.transpose %a, dims = [1, 0] : ({whole}) -> tensor<8x6x{t}>",
        f"%1 = stablehlo.slice %a [1:6:2, 2:8] : ({whole}) -> tensor<3x6x{t}>",
        f"%2 = stablehlo.reverse %a, dims = [0] : {whole}",
        f"%3 = stablehlo.concatenate %a, %a, dim = 1 : ({whole}, {whole}) -> tensor<6x16x{t}>",
        f"%4 = stablehlo.broadcast_in_dim %a, dims = [0, 2] : ({whole}) -> tensor<6x3x8x{t}>",
        f"%z = stablehlo.constant dense<1.0> : tensor<{t}>",
        "%5 = stablehlo.pad %a, %z, low = [1, 0], high = [0, 2], interior = [0, 1]"
        f" : ({whole}, tensor<{t}>) -> tensor<7x17x{t}>",
        f"%6 = \"stablehlo.gather\"(%a, %b) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1],"
        f" start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 1>}}>"
        f" : ({whole}, {tensor(at)}) -> tensor<3x{t}>",
        f"%c = stablehlo.constant dense<[{', '.join(['1.0', '2.0', '0.5'] * 2 + ['4.0', '1.0'])}]> : tensor<8x{t}>",
        f"%7 = stablehlo.reshape %c : (tensor<8x{t}>) -> tensor<2x4x{t}>",
        "%i = stablehlo.iota dim = 1 : tensor<6x8xi32>",
        "%two = stablehlo.constant dense<3> : tensor<6x8xi32>",
        "%p = stablehlo.compare LT, %i, %two : (tensor<6x8xi32>, tensor<6x8xi32>) -> tensor<6x8xi1>",
        f"%back = stablehlo.reverse %a, dims = [1] : {whole}",
        f"%8 = stablehlo.select %p, %a, %back : tensor<6x8xi1>, {whole}",
        "%s = stablehlo.constant dense<2> : tensor<i32>",
        "%9 = stablehlo.dynamic_slice %a, %s, %s, sizes = [3, 4]"
        f" : ({whole}, tensor<i32>, tensor<i32>) -> tensor<3x4x{t}>",
        "%10 = stablehlo.dynamic_update_slice %a, %9, %s, %s"
        f" : ({whole}, tensor<3x4x{t}>, tensor<i32>, tensor<i32>) -> {whole}",
    ]
    shapes = ("8x6", "3x6", "6x8", "6x16", "6x3x8", "7x17", "3", "2x4", "6x8", "3x4", "6x8")
    types = [f"tensor<{s}x{t}>" for s in shapes]
    if bits != 6:
        lines += [f"%11 = stablehlo.bitcast_convert %a : ({whole}) -> tensor<6x8xui{bits}>",
                  f"%12 = stablehlo.bitcast_convert %11 : (tensor<6x8xui{bits}>) -> {whole}"]  # fmt: skip
        types += [f"tensor<6x8xui{bits}>", whole]
    got = run(program(lines, [a, at], types), a, at, level=level)
    one = np.array(1.0).astype(a.dtype)
    padded = np.full((7, 17), one)
    padded[1:, 0:15:2] = a
    constant = np.array([1, 2, 0.5, 1, 2, 0.5, 4, 1]).astype(a.dtype).reshape(2, 4)
    chosen = np.where(np.arange(8) < 3, a, a[:, ::-1])
    updated = a.copy()
    updated[2:5, 2:6] = a[2:5, 2:6]
    want = [a.T, a[1:6:2, 2:8], a[::-1], np.concatenate([a, a], 1), np.repeat(a[:, None], 3, 1), padded,
            a[tuple(at.T)], constant, chosen, a[2:5, 2:6], updated, a.view(np.uint8), a]  # fmt: skip
    for n, (x, y) in enumerate(zip(got, want)):
        assert x.shape == y.shape
        assert x.tobytes() == np.ascontiguousarray(y).tobytes(), lines[n]


def region(op: str, t: str) -> str:
    return f"""({{ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>):
      %r = stablehlo.{op} %x, %y : tensor<{t}>
      stablehlo.return %r : tensor<{t}> }})"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_reductions_scatter_and_sort(dtype, level):
    a, update = values_of(dtype, 6, 8), values_of(dtype, 3, 8, seed=1)
    at = np.array([[4], [0], [4]], np.int32)
    t, whole = mlir_name(dtype), tensor(a)
    lines = [f"%z = stablehlo.constant dense<1.0> : tensor<{t}>"]
    for n, op in enumerate(("add", "maximum", "minimum")):
        lines.append(f'%{n} = "stablehlo.reduce"(%a, %z) {region(op, t)} {{dimensions = array<i64: 1>}}'
                     f" : ({whole}, tensor<{t}>) -> tensor<6x{t}>")  # fmt: skip
    lines.append(f'%3 = "stablehlo.reduce_window"(%a, %z) {region("maximum", t)}'
                 f" {{window_dimensions = array<i64: 2, 3>}} : ({whole}, tensor<{t}>) -> tensor<5x6x{t}>")  # fmt: skip
    lines.append('%4 = "stablehlo.scatter"(%a, %b, %c) <{scatter_dimension_numbers = #stablehlo.scatter<'
                 "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],"
                 " index_vector_dim = 1>}> "
                 f"{region('maximum', t)} : ({whole}, {tensor(at)}, {tensor(update)}) -> {whole}")  # fmt: skip
    lines.append(f"""%5 = "stablehlo.sort"(%a) ({{ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>):
      %r = stablehlo.compare LT, %x, %y, TOTALORDER : (tensor<{t}>, tensor<{t}>) -> tensor<i1>
      stablehlo.return %r : tensor<i1> }}) {{dimension = 1 : i64, is_stable = true}} : ({whole}) -> {whole}""")
    lines.append(f"%6 = stablehlo.iota dim = 1 : tensor<6x5x{t}>")
    types = [f"tensor<{s}x{t}>" for s in ("6", "6", "6", "5x6", "6x8", "6x8", "6x5")]
    text = program(lines, [a, at, update], types)
    got = run(text, a, at, update, level=level)
    wide = a.astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (2, 3)).max((2, 3))
    scattered = wide.copy()
    for k, row in zip(at[:, 0], update.astype(np.float64)):
        scattered[k] = np.maximum(scattered[k], row)
    want = [wide.sum(1) + 1, np.maximum(wide.max(1), 1), np.minimum(wide.min(1), 1), np.maximum(windows, 1), scattered,
            np.sort(wide, 1), np.broadcast_to(np.arange(5.0), (6, 5))]  # fmt: skip
    for n, (x, y, z) in enumerate(zip(got, want, interpret(import_model(text), a, at, update), strict=True)):
        if n == 6 and dtype == "f8E8M0FNU":
            x, y, z = x[:, 1:], y[:, 1:], z[:, 1:]  # it has no 0
        same(x, nearest(y, dtype), lines[n + 1])
        same(z, nearest(y, dtype), f"the interpreter's {lines[n + 1]}")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_products_sum_in_f32_and_round_once(dtype, level):
    lhs, rhs = values_of(dtype, 33, 40), values_of(dtype, 40, 50, seed=1)
    image, kernel = values_of(dtype, 2, 9, 9, 8, seed=2), values_of(dtype, 3, 3, 8, 16, seed=3)
    t = mlir_name(dtype)
    lines = []
    for n, result in enumerate((t, "f32", "bf16")):
        lines.append(f"%{n} = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]"
                     f" : ({tensor(lhs)}, {tensor(rhs)}) -> tensor<33x50x{result}>")  # fmt: skip
    got = run(program(lines, [lhs, rhs], [f"tensor<33x50x{r}>" for r in (t, "f32", "bf16")]), lhs, rhs, level=level)
    exact = lhs.astype(np.float64) @ rhs.astype(np.float64)
    same(got[0], nearest(exact, dtype))
    same(got[1], exact.astype(np.float32))
    same(got[2], exact.astype(ml_dtypes.bfloat16))
    line = (f"%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {{}}"
            f" {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}"
            f" : ({tensor(image)}, {tensor(kernel)}) -> tensor<2x7x7x16x{t}>")  # fmt: skip
    (found,) = run(program([line], [image, kernel], [f"tensor<2x7x7x16x{t}>"]), image, kernel, level=level)
    patches = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (3, 3), (1, 2))
    same(found, nearest(np.einsum("nijcuv,uvco->nijo", patches, kernel.astype(np.float64)), dtype))


@pytest.mark.parametrize("dtype", QUICK)
def test_top_k_takes_the_last_in_total_order(dtype):
    every = codes(dtype)
    x = every[np.random.default_rng(3).permutation(every.size)].copy()
    types = [f"tensor<7x{mlir_name(dtype)}>", "tensor<7xi32>"]
    line = f"%0, %1 = chlo.top_k(%a, k = 7) : {tensor(x)} -> ({', '.join(types)})"
    values, places = run(program([line], [x], types), x)
    order = np.argsort(-total_order(dtype)[x.view(np.uint8)])[:7]
    assert values.tobytes() == x[order].tobytes()
    assert places.tolist() == order.tolist()


FUNCTIONS = {
    "sort": lambda x: (jnp.sort(x), jnp.argsort(x, 0)),
    "scan": lambda x: lax.scan(lambda c, row: (jnp.maximum(c, row), c), x[0], x),
    "while": lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.minimum(v, v[::-1]), x),
    "cond": lambda x: lax.cond(x[0, 0] > x[1, 1], lambda v: v, lambda v: v[::-1], x),
    "largest": lambda x: (x.max(0), x.min(), jnp.argmax(x, 1)),
    "at": lambda x: (x.at[jnp.array([1, 1, 3])].max(x[:3]), jnp.take(x, jnp.array([2, 0, 9]), 0, mode="clip")),
    "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype),
    "windows": lambda x: lax.cummax(x, axis=1),
    "clip": lambda x: jnp.clip(x, x.dtype.type(1), x.dtype.type(2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["f8E4M3FN", "f8E5M2", *(
    pytest.param(n, marks=pytest.mark.slow) for n in ("f8E3M4", "f8E4M3", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2FNUZ")
)])  # fmt: skip
def test_functions_of_jax(dtype, name):
    x = np.exp2(np.random.default_rng(5).integers(-1, 3, (6, 7))).astype(to_numpy(dtype))
    for level in (0, 2):
        check(FUNCTIONS[name], (x,), level)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_short_floats_do_not_stop_at_a_power_of_two(dtype):
    x = np.ones((2, 3000), dtype)
    for level in (0, 2):
        check(lambda x: lax.reduce(x, x.dtype.type(0), lax.add, (1,)), (x,), level)
        check(lambda x: lax.reduce(x[:, :10] * 2, x.dtype.type(1), lax.mul, (1,)), (x,), level)
