"""Integers of 2 and 4 bits: every pair through every op, beside Python's integers wrapped to the width."""

from __future__ import annotations

import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import DTYPES, limits, to_numpy
from aotc.vmfb.host.machine import cpu_features

pytestmark = pytest.mark.cpu

SMALL = ("i2", "i4", "u2", "u4")
LEVELS = [0, 2]


def wrapped(value: int, dtype: str) -> int:
    bits, low = DTYPES[dtype].bits, limits(dtype)[0]
    rest = value & ((1 << bits) - 1)
    return rest - (1 << bits) if low < 0 and rest >> (bits - 1) else rest


def _quotient(a: int, b: int) -> int:
    return -1 if b == 0 else abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def _remainder(a: int, b: int) -> int:
    return a if b == 0 else a - b * _quotient(a, b)


def _power(a: int, b: int) -> int:
    if b >= 0:
        return a**b
    return {1: 1, -1: -1 if b % 2 else 1}.get(a, 0)


def _shifts(dtype: str) -> dict[str, Callable[[int, int], int]]:
    bits = DTYPES[dtype].bits
    mask = (1 << bits) - 1

    def inside(b: int) -> bool:
        return 0 <= b < bits

    def signed(a: int) -> int:
        return wrapped(a & mask, f"i{bits}")

    return {
        "shift_left": lambda a, b: a << b if inside(b) else 0,
        "shift_right_logical": lambda a, b: (a & mask) >> b if inside(b) else 0,
        "shift_right_arithmetic": lambda a, b: signed(a) >> (b if inside(b) else bits - 1),
    }


BINARY: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "divide": _quotient,
    "remainder": _remainder, "maximum": max, "minimum": min, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "power": _power,
}  # fmt: skip
ORDER = {
    "EQ": operator.eq, "NE": operator.ne, "LT": operator.lt, "LE": operator.le, "GT": operator.gt, "GE": operator.ge,
}  # fmt: skip


def every(dtype: str) -> np.ndarray:
    low, high = limits(dtype)
    return np.arange(low, high + 1, dtype=np.int64).astype(to_numpy(dtype))


def module(lines: list[str], parameters: str, types: list[str]) -> str:
    names = ", ".join(f"%{n}" for n in range(len(types)))
    given = ", ".join(types)
    body = "\n".join(lines)
    return f"module {{ func.func public @main({parameters}) -> ({given}) {{\n{body}\nreturn {names} : {given} }} }}"


def check(text: str, arrays: list[np.ndarray], want: list[list], names: list[str]) -> None:
    """Run at each level and in the interpreter; ``want`` are flat lists of Python numbers."""
    found = [aotc.load(aotc.compile(text.encode(), opt_level=n)).invoke("main", *arrays) for n in LEVELS]
    found.append(interpret(import_model(text), *arrays))
    for got in found:
        for name, g, w in zip(names, got, want, strict=True):
            assert [int(v) for v in g.reshape(-1)] == w, name


@pytest.mark.parametrize("dtype", SMALL)
def test_every_pair(dtype):
    x = every(dtype)
    a = np.repeat(x[:, None], x.size, 1)
    b = np.ascontiguousarray(a.T)
    t = f"tensor<{x.size}x{x.size}x{dtype.replace('u', 'ui')}>"
    i1 = f"tensor<{x.size}x{x.size}xi1>"
    ops = BINARY | _shifts(dtype)
    lines = [f"%{n} = stablehlo.{op} %a, %b : {t}" for n, op in enumerate(ops)]
    lines += [f"%{n} = stablehlo.compare {c}, %a, %b : ({t}, {t}) -> {i1}" for n, c in enumerate(ORDER, len(ops))]
    pairs = [(int(p), int(q)) for p, q in zip(a.reshape(-1), b.reshape(-1))]
    want = [[wrapped(f(p, q), dtype) for p, q in pairs] for f in ops.values()]
    want += [[int(f(p, q)) for p, q in pairs] for f in ORDER.values()]
    text = module(lines, f"%a: {t}, %b: {t}", [t] * len(ops) + [i1] * len(ORDER))
    check(text, [a, b], want, [*ops, *ORDER])


@pytest.mark.parametrize("dtype", SMALL)
def test_every_value(dtype):
    x, bits = every(dtype), DTYPES[dtype].bits
    t = f"tensor<{x.size}x{dtype.replace('u', 'ui')}>"
    mask = (1 << bits) - 1
    ops: dict[str, Callable[[int], int]] = {
        "not": lambda v: ~v, "popcnt": lambda v: (v & mask).bit_count(),
        "count_leading_zeros": lambda v: bits - (v & mask).bit_length(), "negate": lambda v: -v,
    }  # fmt: skip
    if dtype[0] == "i":
        ops |= {"abs": abs, "sign": lambda v: (v > 0) - (v < 0)}
    lines = [f"%{n} = stablehlo.{op} %a : {t}" for n, op in enumerate(ops)]
    values = [int(v) for v in x]
    want = [[wrapped(f(v), dtype) for v in values] for f in ops.values()]
    check(module(lines, f"%a: {t}", [t] * len(ops)), [x], want, list(ops))


@pytest.mark.parametrize("dtype", SMALL)
def test_conversions_wrap(dtype):
    others = [n for n, row in DTYPES.items() if row.kind in "iu"]
    lines, types = [], []
    x = every(dtype)
    t = f"tensor<{x.size}x{dtype.replace('u', 'ui')}>"
    for n, other in enumerate(others):
        types.append(f"tensor<{x.size}x{other.replace('u', 'ui')}>")
        lines.append(f"%{n} = stablehlo.convert %a : ({t}) -> {types[-1]}")
    check(module(lines, f"%a: {t}", types), [x], [[wrapped(int(v), o) for v in x] for o in others], others)
    wide = np.arange(-300, 300, dtype=np.int32)
    target = f"tensor<600x{dtype.replace('u', 'ui')}>"
    text = module([f"%0 = stablehlo.convert %a : (tensor<600xi32>) -> {target}"], "%a: tensor<600xi32>", [target])
    check(text, [wide], [[wrapped(int(v), dtype) for v in wide]], [dtype])
    floats = np.array([-1e9, -8.6, -2.5, -0.5, 0.5, 1.5, 2.9, 7.1, 15.9, 1e9, np.nan], np.float32)
    target = f"tensor<11x{dtype.replace('u', 'ui')}>"
    low, high = (int(v) for v in limits(dtype))
    want = [0 if np.isnan(v) else min(max(int(v), low), high) for v in floats]
    text = module([f"%0 = stablehlo.convert %a : (tensor<11xf32>) -> {target}"], "%a: tensor<11xf32>", [target])
    check(text, [floats], [want], [dtype])


@pytest.mark.parametrize("dtype", SMALL)
def test_reductions_products_and_sorts(dtype):
    x = np.resize(every(dtype), (6, 8)).copy()
    x = x.reshape(-1)[np.random.default_rng(0).permutation(48)].reshape(6, 8)
    e = dtype.replace("u", "ui")
    scalar, whole = f"tensor<{e}>", f"tensor<6x8x{e}>"
    lines = [f"%z = stablehlo.constant dense<1> : {scalar}"]
    for n, op in enumerate(("add", "multiply", "maximum", "minimum")):
        lines.append(f"""%{n} = "stablehlo.reduce"(%a, %z) ({{ ^bb0(%x: {scalar}, %y: {scalar}):
          %r = stablehlo.{op} %x, %y : {scalar}
          stablehlo.return %r : {scalar} }}) {{dimensions = array<i64: 1>}} : ({whole}, {scalar}) -> tensor<6x{e}>""")
    lines.append(f"""%4 = "stablehlo.sort"(%a) ({{ ^bb0(%x: {scalar}, %y: {scalar}):
      %r = stablehlo.compare LT, %x, %y : ({scalar}, {scalar}) -> tensor<i1>
      stablehlo.return %r : tensor<i1> }}) {{dimension = 1 : i64}} : ({whole}) -> {whole}""")
    lines.append(f"%t = stablehlo.transpose %a, dims = [1, 0] : ({whole}) -> tensor<8x6x{e}>")
    dot = f"stablehlo.dot_general %a, %t, contracting_dims = [1] x [0] : ({whole}, tensor<8x6x{e}>)"
    lines += [f"%5 = {dot} -> tensor<6x6x{e}>", f"%6 = {dot} -> tensor<6x6xi32>"]
    lines.append(f"%7 = stablehlo.iota dim = 0 : tensor<4x{e}>")
    wide = x.astype(np.int64)
    product = wide @ wide.T
    ends = np.maximum(wide.max(1), 1), np.minimum(wide.min(1), 1)
    exact = [wide.sum(1) + 1, wide.prod(1), *ends, np.sort(wide, 1), product]
    want = [[wrapped(int(v), dtype) for v in w.reshape(-1)] for w in (*exact, np.arange(4))]
    want.insert(6, [int(v) for v in product.reshape(-1)])
    types = [f"tensor<6x{e}>"] * 4 + [whole, f"tensor<6x6x{e}>", "tensor<6x6xi32>", f"tensor<4x{e}>"]
    check(module(lines, f"%a: {whole}", types), [x], want, [f"result {n}" for n in range(8)])


@pytest.mark.parametrize("target", ["cpu:x86-64-v2", "cpu:x86-64-v3", "cpu:x86-64-v4"])
@pytest.mark.parametrize("source", ["float32", "float64", "bfloat16", "float16"])
def test_floats_that_no_integer_holds(source, target):
    """What lies beyond a type is its nearest value, and NaN is 0, in vectors too."""
    if not cpu_features().issuperset(TARGETS[target].features):
        pytest.skip(f"this processor does not run {target}")
    ends = [2.0**n + d for n in (2, 3, 7, 8, 15, 16, 31, 32) for d in (-1, -0.5, 0, 0.5, 128)]
    with jax.enable_x64(True):
        x = np.array([*ends, *(-e for e in ends), 0, -0.0, 0.999, 1e30, -1e30, np.inf, -np.inf, np.nan, 1e-40])
        x = np.asarray(jnp.asarray(np.tile(x, 3), source))
        for dtype in ("int4", "uint4", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"):
            convert = jax.jit(lambda x, dtype=dtype: x.astype(dtype))
            (found,) = aotc.load(aotc.compile(convert, x, target=target)).invoke("main", x)
            np.testing.assert_array_equal(found.astype("int64"), np.asarray(convert(x)).astype("int64"), dtype)
