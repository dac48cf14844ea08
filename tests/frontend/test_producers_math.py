"""MLIR's ``math`` ops next to StableHLO, against NumPy in float64."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(4)
EDGES = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-40, 2.0, 8.0, 1000.0, 0.5, -1.5, 2.5])
X = np.concatenate([EDGES, RNG.standard_normal(52).astype(np.float32)])
UNIT = np.clip(X, -0.99, 0.99)
ERF = np.float64([-0.9953222650189527, -0.5204998778130465, 0, 0.5204998778130465, 0.9953222650189527])  # mpmath.erf


def run(lines, types, *arrays):
    """Return the results of ``lines``, numbered from 0, of ``types``."""
    arguments = ", ".join(f"%{name}: tensor<{len(a)}x{NAMES[a.dtype]}>" for name, a in zip("abc", arrays))
    values = ", ".join(f"%r{n}" for n in range(len(types)))
    text = f"func.func @main({arguments}) -> ({', '.join(types)}) {{\n{lines}\nreturn {values} : {', '.join(types)}\n}}"
    result = aotc.load(aotc.compile(text, opt_level=1))(*arrays)
    return [np.asarray(r) for r in (result if isinstance(result, tuple) else (result,))]


NAMES = {np.dtype(np.float32): "f32", np.dtype(np.int32): "i32", np.dtype(np.float16): "f16"}
UNARY = {
    "absf": np.abs, "cbrt": np.cbrt, "ceil": np.ceil, "cos": np.cos, "exp": np.exp, "exp2": np.exp2,
    "expm1": np.expm1, "floor": np.floor, "log": np.log, "log10": np.log10, "log1p": np.log1p, "log2": np.log2,
    "round": lambda x: np.trunc(x + np.copysign(0.5, x)), "roundeven": np.round, "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin, "sinh": np.sinh, "cosh": np.cosh, "sqrt": np.sqrt, "tan": np.tan, "tanh": np.tanh, "trunc": np.trunc,
    "atan": np.arctan, "asinh": np.arcsinh,
}  # fmt: skip
OF_UNIT = {"acos": np.arccos, "asin": np.arcsin, "atanh": np.arctanh}
TESTS = {"isfinite": np.isfinite, "isinf": np.isinf, "isnan": np.isnan}


def check_functions(functions, x):
    t = f"tensor<{len(x)}xf32>"
    lines = [f"%r{n} = math.{name} %a : {t}" for n, name in enumerate(functions)]
    with np.errstate(all="ignore"):
        for name, got in zip(functions, run("\n".join(lines), [t] * len(lines), x), strict=True):
            want = functions[name](x.astype(np.float64)).astype(np.float32)
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
            zeros = want == 0
            np.testing.assert_array_equal(np.signbit(got[zeros]), np.signbit(want[zeros]), err_msg=name)


def test_unary_math_ops_match_numpy():
    check_functions({**UNARY, "exp": np.exp}, np.where(np.abs(X) < 1e-38, np.copysign(0, X), X).astype(np.float32))
    check_functions(OF_UNIT, UNIT)


def test_logarithms_and_powers_of_the_base_are_exact():
    powers = np.float32([2.0**k for k in range(-20, 21)])
    logs, back = run("%r0 = math.log2 %a : tensor<41xf32>\n%r1 = math.exp2 %r0 : tensor<41xf32>",
                     ["tensor<41xf32>"] * 2, powers)  # fmt: skip
    np.testing.assert_array_equal(logs, np.arange(-20, 21))
    np.testing.assert_array_equal(back, powers)
    tens = np.float32([10.0**k for k in range(11)])
    np.testing.assert_array_equal(run("%r0 = math.log10 %a : tensor<11xf32>", ["tensor<11xf32>"], tens)[0], range(11))


def test_float_classification_ops_match_numpy():
    lines = [f"%r{n} = math.{name} %a : tensor<64xf32>" for n, name in enumerate([*TESTS, "isnormal"])]
    *got, normal = run("\n".join(lines), ["tensor<64xi1>"] * 4, X)
    for values, function in zip(got, TESTS.values(), strict=True):
        np.testing.assert_array_equal(values, function(X))
    np.testing.assert_array_equal(normal, np.isfinite(X) & (np.abs(X) >= np.finfo(np.float32).smallest_normal))


def test_math_ops_of_several_floats_match_numpy():
    t = "tensor<64xf32>"
    y = RNG.permutation(X)
    z = RNG.standard_normal(64).astype(np.float32)
    lines = (f"%r0 = math.copysign %a, %b : {t}\n%r1 = math.atan2 %a, %b : {t}\n%r2 = math.fma %a, %b, %c : {t}\n"
             f"%r3 = math.powf %c, %c : {t}\n%r4:2 = math.sincos %c : {t}\n%l = arith.constant dense<-0.5> : {t}\n"
             f"%h = arith.constant dense<0.75> : {t}\n%r6 = math.clampf %c to [%l, %h] : {t}")  # fmt: skip
    lines = lines.replace("%r4:2", "%s:2") + f"\n%r4 = arith.addf %s#0, %s#1 : {t}\n%r5 = math.erf %c : {t}"
    got = run(lines, [t] * 7, X, y, z)
    a, b, c = (v.astype(np.float64) for v in (X, y, z))
    np.testing.assert_array_equal(got[0].view(np.int32), np.copysign(X, y).view(np.int32))
    with np.errstate(all="ignore"):
        np.testing.assert_allclose(got[1], np.arctan2(a, b), rtol=1e-6, atol=1e-44)
        np.testing.assert_array_equal(got[2], (a * b + c).astype(np.float32))
        np.testing.assert_allclose(got[3], c**c, rtol=1e-5)
    np.testing.assert_allclose(got[4], np.sin(c) + np.cos(c), rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(got[6], np.clip(z, -0.5, 0.75))


def test_math_erf_matches_known_values():
    got = run("%r0 = math.erf %a : tensor<5xf32>", ["tensor<5xf32>"], np.float32([-2, -0.5, 0, 0.5, 2]))[0]
    np.testing.assert_allclose(got, ERF, rtol=1e-6)


def test_integer_math_ops_match_python():
    n = np.int32([0, 1, -1, 2, 3, 8, 12, -16, 1 << 30, -(1 << 31)])
    t = f"tensor<{len(n)}xi32>"
    lines = [f"%r{k} = math.{name} %a : {t}" for k, name in enumerate(("absi", "ctlz", "ctpop", "cttz"))]
    size, leading, ones, trailing = run("\n".join(lines), [t] * 4, n)
    bits = [format(int(v) & 0xFFFFFFFF, "032b") for v in n]
    np.testing.assert_array_equal(size[:-1], np.abs(n[:-1]))
    assert leading.tolist() == [len(b) - len(b.lstrip("0")) for b in bits]
    assert trailing.tolist() == [len(b) - len(b.rstrip("0")) for b in bits]
    assert ones.tolist() == [b.count("1") for b in bits]


def test_integer_powers_of_floats_match_numpy():
    x, n = np.float32([2, -2, -3, 0.5, 1.5]), np.int32([10, 3, -2, -4, 0])
    line = "%r0 = math.fpowi %a, %b : tensor<5xf32>, tensor<5xi32>"
    got = run(line, ["tensor<5xf32>"], x, n)[0]
    np.testing.assert_allclose(got, x.astype(np.float64) ** n, rtol=1e-7)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%r0 = math.ipowi %n, %n : i32", "math.ipowi on"),
        ("%r0 = math.fma %d, %d, %d : f64", "math.fma on f64"),
        ("%r0 = math.acos %f : f32", "math.acos on"),
    ],
)
def test_unsupported_math_ops_are_refused(line, message):
    text = f"func.func @main(%n: i32, %d: f64, %f: f32) -> i32 {{\n{line}\nreturn %n : i32\n}}"
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(text)
    assert "try:" in str(error.value)
