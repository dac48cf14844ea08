"""MLIR's ``arith`` and ``tensor`` ops, as tt-mlir, Reactant and torch-mlir write them, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(1)


def run(text, *arrays):
    result = aotc.load(aotc.compile(text, opt_level=1))(*arrays)
    return [np.asarray(r) for r in (result if isinstance(result, tuple) else (result,))]


def unsigned(function):
    """Return ``function`` of the bits of i32 arrays; results that are not comparisons are i32 too."""

    def of_bits(a, b):
        result = function(a.view(np.uint32), b.view(np.uint32))
        return result if result.dtype == bool else result.view(np.int32)

    return of_bits


INTEGERS = {
    "addi": np.add, "subi": np.subtract, "muli": np.multiply, "maxsi": np.maximum, "minsi": np.minimum,
    "andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor,
    "divsi": lambda a, b: np.trunc(a / b).astype(np.int32), "remsi": np.fmod,
    "floordivsi": np.floor_divide, "ceildivsi": lambda a, b: np.ceil(a / b).astype(np.int32),
    "divui": unsigned(np.floor_divide), "remui": unsigned(np.remainder), "maxui": unsigned(np.maximum),
    "minui": unsigned(np.minimum),
    "ceildivui": unsigned(lambda a, b: a // b + (a % b != 0).astype(np.uint32)),
}  # fmt: skip
COMPARISONS = {
    "eq": np.equal, "ne": np.not_equal, "slt": np.less, "sle": np.less_equal, "sgt": np.greater,
    "sge": np.greater_equal,
    "ult": unsigned(np.less), "ule": unsigned(np.less_equal), "ugt": unsigned(np.greater),
    "uge": unsigned(np.greater_equal),
}  # fmt: skip
SHIFTS = {
    "shli": np.left_shift, "shrsi": np.right_shift,
    "shrui": unsigned(np.right_shift),
}  # fmt: skip
FLOATS = {
    "addf": np.add, "subf": np.subtract, "mulf": np.multiply, "divf": np.divide, "remf": np.fmod,
    "maximumf": np.maximum, "minimumf": np.minimum, "maxnumf": np.fmax, "minnumf": np.fmin,
}  # fmt: skip


def either_nan(a, b):
    return np.isnan(a) | np.isnan(b)


ORDERED = {
    "oeq": np.equal, "ogt": np.greater, "oge": np.greater_equal, "olt": np.less, "ole": np.less_equal,
    "une": np.not_equal,
    "false": lambda a, b: np.zeros(a.shape, bool), "true": lambda a, b: np.ones(a.shape, bool),
    "ord": lambda a, b: ~either_nan(a, b), "uno": either_nan,
    "one": lambda a, b: (a != b) & ~either_nan(a, b), "ueq": lambda a, b: (a == b) | either_nan(a, b),
    "ugt": lambda a, b: (a > b) | either_nan(a, b), "uge": lambda a, b: (a >= b) | either_nan(a, b),
    "ult": lambda a, b: (a < b) | either_nan(a, b), "ule": lambda a, b: (a <= b) | either_nan(a, b),
}  # fmt: skip


def binary(names, element, prefix="", result=None):
    """Return a function of two tensors of 64 elements with one result per op."""
    out = result or element
    lines = [f"%{k} = arith.{prefix}{name} %a, %b : tensor<64x{element}>" for k, name in enumerate(names)]
    types = ", ".join([f"tensor<64x{out}>"] * len(names))
    values = ", ".join(f"%{k}" for k in range(len(names)))
    head = f"func.func @main(%a: tensor<64x{element}>, %b: tensor<64x{element}>) -> ({types}) {{"
    return "\n".join([head, *lines, f"return {values} : {types}", "}"])


def check(text, functions, a, b):
    for name, got in zip(functions, run(text, a, b), strict=True):
        with np.errstate(invalid="ignore"):
            want = functions[name](a, b)
        np.testing.assert_array_equal(got, want, err_msg=name)


def test_integer_arith_ops_match_numpy():
    a, b = (RNG.integers(-50, 50, 64).astype(np.int32) for _ in range(2))
    b[b == 0] = 7
    check(binary(INTEGERS, "i32"), INTEGERS, a, b)
    check(binary([f"{n}," for n in COMPARISONS], "i32", "cmpi ", "i1"), COMPARISONS, a, b)
    check(binary(SHIFTS, "i32"), SHIFTS, a, np.abs(b) % 32)


def test_float_arith_ops_match_numpy():
    a, b = (RNG.standard_normal(64).astype(np.float32) for _ in range(2))
    a[:5] = [np.nan, np.inf, -0.0, 1, np.nan]
    b[:5] = [1, np.nan, 0.0, 1, np.nan]
    check(binary(FLOATS, "f32"), FLOATS, a, b)
    check(binary([f"{n}," for n in ORDERED], "f32", "cmpf ", "i1"), ORDERED, a, b)


def test_boolean_arith_ops_are_modulo_two():
    a, b = (RNG.integers(0, 2, 64).astype(bool) for _ in range(2))
    functions = {
        "addi": np.logical_xor, "subi": np.logical_xor, "muli": np.logical_and, "andi": np.logical_and,
        "maxui": np.maximum, "minui": np.minimum, "maxsi": np.minimum, "minsi": np.maximum,
    }  # fmt: skip
    check(binary(functions, "i1"), functions, a, b)
    order = {
        "ult": np.less, "ule": np.less_equal, "ugt": np.greater, "uge": np.greater_equal,
        "slt": np.greater, "sle": np.greater_equal, "sgt": np.less, "sge": np.less_equal, "eq": np.equal,
    }  # fmt: skip
    check(binary([f"{n}," for n in order], "i1", "cmpi "), order, a, b)


HALVES = """func.func @main(%a: tensor<64xi32>, %b: tensor<64xi32>)
    -> (tensor<64xi32>, tensor<64xi1>, tensor<64xi32>, tensor<64xi1>, tensor<64xi32>, tensor<64xi32>, tensor<64xi32>,
        tensor<64xi32>) {
  %0:2 = arith.addui_extended %a, %b : tensor<64xi32>, tensor<64xi1>
  %1:2 = arith.subui_extended %a, %b : tensor<64xi32>, tensor<64xi1>
  %2:2 = arith.mulsi_extended %a, %b : tensor<64xi32>
  %3:2 = arith.mului_extended %a, %b : tensor<64xi32>
  return %0#0, %0#1, %1#0, %1#1, %2#0, %2#1, %3#0, %3#1 : tensor<64xi32>, tensor<64xi1>, tensor<64xi32>, tensor<64xi1>,
    tensor<64xi32>, tensor<64xi32>, tensor<64xi32>, tensor<64xi32>
}"""


def test_arith_carries_and_high_halves_match_python():
    a, b = (RNG.integers(-(1 << 31), 1 << 31, 64).astype(np.int32) for _ in range(2))
    x, y = (v.view(np.uint32).astype(np.uint64) for v in (a, b))
    total, signed, unsigned_ = x + y, a.astype(np.int64) * b, x * y
    want = [
        total.astype(np.int32), total >> np.uint64(32) != 0, (x - y).astype(np.int32), x < y,
        signed.astype(np.int32), (signed >> 32).astype(np.int32),
        unsigned_.astype(np.int32), (unsigned_ >> np.uint64(32)).astype(np.int32),
    ]  # fmt: skip
    for got, expected in zip(run(HALVES, a, b), want, strict=True):
        np.testing.assert_array_equal(got, expected)


CONVERSIONS = {
    ("extsi", "i1", "i32"): lambda x: -x.astype(np.int32),
    ("extui", "i1", "i32"): lambda x: x.astype(np.int32),
    ("sitofp", "i1", "f32"): lambda x: -x.astype(np.float32),
    ("uitofp", "i1", "f32"): lambda x: x.astype(np.float32),
    ("extsi", "i8", "i32"): lambda x: x.astype(np.int32),
    ("extui", "i8", "i32"): lambda x: x.view(np.uint8).astype(np.int32),
    ("uitofp", "i8", "f32"): lambda x: x.view(np.uint8).astype(np.float32),
    ("trunci", "i32", "i8"): lambda x: x.astype(np.int8),
    ("trunci", "i32", "i1"): lambda x: x % 2 == 1,
    ("index_cast", "i32", "index"): lambda x: x.astype(np.int64),
    ("index_castui", "i32", "index"): lambda x: x.view(np.uint32).astype(np.int64),
    ("fptosi", "f32", "i32"): lambda x: np.trunc(x).astype(np.int32),
    ("fptoui", "f32", "i32"): lambda x: np.trunc(x).astype(np.int32),
    ("truncf", "f32", "f16"): lambda x: x.astype(np.float16),
    ("bitcast", "f32", "i32"): lambda x: x.view(np.int32),
}
DTYPES = {"i1": bool, "i8": np.int8, "i32": np.int32, "f32": np.float32}


@pytest.mark.parametrize("row", CONVERSIONS, ids="-".join)
def test_arith_conversions_match_numpy(row):
    name, source, target = row
    x = RNG.integers(0 if source in ("i1", "f32") else -100, 2 if source == "i1" else 100, 16).astype(DTYPES[source])
    x = x + np.float32(0.375) if source == "f32" else x
    text = f"""func.func @main(%x: tensor<16x{source}>) -> tensor<16x{target}> {{
      %0 = arith.{name} %x : tensor<16x{source}> to tensor<16x{target}>
      return %0 : tensor<16x{target}>
    }}"""
    (got,) = run(text, x)
    want = CONVERSIONS[row](x)
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got, want)


CONSTANTS = """func.func @main(%x: tensor<2x2xf32>) -> (tensor<2x2xf32>, tensor<2xbf16>, tensor<3xi1>) {
  %cst = arith.constant dense<[[1.5, 2.5], [3.5, 4.5]]> : tensor<2x2xf32>
  %cst_0 = arith.constant dense<0.125> : tensor<2xbf16>
  %cst_1 = arith.constant dense<[true, false, true]> : tensor<3xi1>
  %0 = stablehlo.add %x, %cst : tensor<2x2xf32>
  return %0, %cst_0, %cst_1 : tensor<2x2xf32>, tensor<2xbf16>, tensor<3xi1>
}"""


def test_constants_of_tt_mlir_and_reactant_are_read():
    x = np.float32([[1, 2], [3, 4]])
    for got, want in zip(run(CONSTANTS, x), run_xla(fetch(CONSTANTS), [x]), strict=True):
        np.testing.assert_array_equal(got, want)


TORCH = """func.func @main(%x: tensor<?x4xf32>, %w: tensor<4xf32>)
    -> (tensor<?x?xf32>, tensor<?x4xf32>, tensor<2xi64>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %two = arith.constant 2 : i64
  %three = arith.constant 3 : i64
  %minus = arith.constant -1 : i64
  %d0 = tensor.dim %x, %c0 : tensor<?x4xf32>
  %d1 = tensor.dim %x, %c1 : tensor<?x4xf32>
  %n0 = arith.index_cast %d0 : index to i64
  %n1 = arith.index_cast %d1 : index to i64
  %rows = arith.muli %n0, %two : i64
  %half = arith.divsi %n1, %two : i64
  %same = arith.ceildivui %n1, %three : i64
  %bad = arith.cmpi eq, %half, %minus : i64
  %columns = arith.select %bad, %same, %half : i64
  %shape = tensor.from_elements %rows, %columns : tensor<2xi64>
  %0 = stablehlo.dynamic_reshape %x, %shape : (tensor<?x4xf32>, tensor<2xi64>) -> tensor<?x?xf32>
  %wide = tensor.from_elements %d0, %d1 : tensor<2xindex>
  %1 = stablehlo.dynamic_broadcast_in_dim %w, %wide, dims = [1] : (tensor<4xf32>, tensor<2xindex>) -> tensor<?x4xf32>
  %2 = stablehlo.add %x, %1 : tensor<?x4xf32>
  %last = tensor.extract %shape[%c1] : tensor<2xi64>
  %up = arith.floordivsi %minus, %last : i64
  %both = tensor.from_elements %last, %up : tensor<2xi64>
  return %0, %2, %both : tensor<?x?xf32>, tensor<?x4xf32>, tensor<2xi64>
}"""


def test_torch_mlir_sizes_stay_symbolic():
    module = aotc.load(aotc.compile(TORCH, opt_level=1))
    w = np.float32([1, 2, 3, 4])
    for rows in (1, 3, 6):
        x = RNG.standard_normal((rows, 4)).astype(np.float32)
        reshaped, added, both = module(x, w)
        np.testing.assert_array_equal(reshaped, x.reshape(2 * rows, 2))
        np.testing.assert_array_equal(added, x + w)
        assert both.tolist() == [2, -1]
    assert "f32[2*d0, 2]" in repr(module)


def test_a_cast_to_a_static_size_checks_the_size():
    text = """func.func @main(%x: tensor<?xf32>) -> tensor<4xf32> {
      %0 = tensor.cast %x : tensor<?xf32> to tensor<4xf32>
      return %0 : tensor<4xf32>
    }"""
    module = aotc.load(aotc.compile(text, opt_level=1))
    x = np.float32([1, 2, 3, 4])
    np.testing.assert_array_equal(module(x), x)
    with pytest.raises(aotc.CallError, match="4"):
        module(x[:3])


def test_scalars_pass_through_private_functions():
    text = """module {
      func.func private @twice(%n: index) -> index {
        %two = arith.constant 2 : index
        %0 = arith.muli %n, %two : index
        return %0 : index
      }
      func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {
        %c0 = arith.constant 0 : index
        %d = tensor.dim %x, %c0 : tensor<?xf32>
        %n = func.call @twice(%d) : (index) -> index
        %s = tensor.from_elements %n : tensor<1xindex>
        %y = stablehlo.concatenate %x, %x, dim = 0 : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xf32>
        %0 = stablehlo.dynamic_reshape %y, %s : (tensor<?xf32>, tensor<1xindex>) -> tensor<?xf32>
        return %0 : tensor<?xf32>
      }
    }"""
    x = np.float32([1, 2, 3])
    np.testing.assert_array_equal(run(text, x)[0], np.concatenate([x, x]))


def body(lines):
    return (
        "func.func @main(%x: tensor<2x2xf32>, %k: tensor<i64>) -> tensor<i64> {\n%c5 = arith.constant 5 : index\n"
        "%cm = arith.constant -1 : index\n%t = arith.constant true\n%r = arith.constant 1 : i64\n"
        f"{lines}\n%z = tensor.from_elements %r : tensor<i64>\nreturn %z : tensor<i64>\n}}"
    )


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("%d = tensor.dim %x, %c5 : tensor<2x2xf32>", "tensor.dim 5 of"),
        ("%k0 = tensor.extract %k[] : tensor<i64>\n%i = arith.index_cast %k0 : i64 to index\n"
         "%d = tensor.dim %x, %i : tensor<2x2xf32>", "is not a constant"),
        ("%d = tensor.extract %x[%c5, %c5] : tensor<2x2xf32>", "element 5 of"),
        ("%d = tensor.extract %x[%cm, %c5] : tensor<2x2xf32>", "element -1 of"),
        ("%d = arith.divsi %t, %t : i1", "arith.divsi on i1"),
        ("%f = arith.constant 1.0 : f32\n%d = arith.truncf %f upward : f32 to f16", "rounding mode"),
        ("%f = arith.constant 1.0 : f32\n%d = arith.flush_denormals %f : f32", "arith.flush_denormals"),
        ("%d:2 = arith.mulsi_extended %r, %r : i64", "arith.mulsi_extended"),
    ],
)  # fmt: skip
def test_unsupported_arith_and_tensor_ops_are_refused(lines, message):
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(body(lines))
    assert "try:" in str(error.value)
