"""Quantized types across ops: to and from floats, in regions, calls and constants; what has no meaning."""

from __future__ import annotations

import numpy as np
import pytest
from support.differential import LEVELS
from support.quantized import AXIS, CENTERED, WIDE, A, numbers, quantized, tensor

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.frontend.quantized.types import parse_quantization
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu


def run(text: str, *arrays: np.ndarray, level: int = 2) -> list[np.ndarray]:
    return aotc.load(aotc.compile(text.encode(), opt_level=level)).invoke("main", *arrays)


def integers(t: str, *shape: int, seed: int = 0) -> np.ndarray:
    q = parse_quantization(t)
    return np.random.default_rng(seed).integers(q.low, q.high + 1, shape).astype(to_numpy(q.storage))


@pytest.mark.parametrize("t", [
    A, AXIS, WIDE, "!quant.uniform<u8:f32, 0.5:128>", "!quant.uniform<i4:f32, 0.25:-3>", "!quant.uniform<u4:f32, 3.0>",
    "!quant.uniform<i16:f32, 1.0e-3:100>", "!quant.uniform<i8<-127:127>:f32, 0.01>", "!quant.uniform<i8:f16, 0.05:3>",
    "!quant.uniform<i8:bf16, 0.05:3>", "!quant.uniform<i32:f64, 0.5:1000>", "!quant.uniform<i2:f32, 0.5>",
])  # fmt: skip
def test_quantize_and_dequantize_round_like_numpy(t):
    q = parse_quantization(t)
    floats = to_numpy(q.expressed)
    x = (np.random.default_rng(2).standard_normal((50, 4)) * 4 * max(q.scales) * min(q.high, 100)).astype(floats)
    x[0] = [np.inf, -np.inf, np.nan, 0]
    there, plain = tensor(t, 50, 4), f"tensor<50x4x{q.expressed}>"
    text = f"""module {{ func.func public @main(%a: {plain}) -> ({there}, {plain}) {{
      %0 = stablehlo.uniform_quantize %a : ({plain}) -> {there}
      %1 = stablehlo.uniform_dequantize %0 : ({there}) -> {plain}
      return %0, %1 : {there}, {plain} }} }}"""
    for level in (0, 2):
        got, back = run(text, x, level=level)
        want = quantized(x, t)
        assert got.dtype == want.dtype == to_numpy(q.storage)
        np.testing.assert_array_equal(got.astype(np.int64), want.astype(np.int64))
        np.testing.assert_array_equal(back, numbers(want, t))


REGIONS = f"""module {{ func.func public @main(%a: tensor<6x4x{A}>, %n: tensor<i32>)
    -> (tensor<6x{A}>, tensor<6x4x{A}>, tensor<6x4x{A}>, tensor<6x4x{A}>, tensor<6x4xi1>) {{
  %z = stablehlo.constant() {{value = dense<-30> : tensor<i8>}} : () -> tensor<{A}>
  %0 = "stablehlo.reduce"(%a, %z) ({{ ^bb0(%x: tensor<{A}>, %y: tensor<{A}>):
    %m = stablehlo.maximum %x, %y : tensor<{A}>
    stablehlo.return %m : tensor<{A}> }}) {{dimensions = array<i64: 1>}}
    : (tensor<6x4x{A}>, tensor<{A}>) -> tensor<6x{A}>
  %1 = "stablehlo.sort"(%a) ({{ ^bb0(%x: tensor<{A}>, %y: tensor<{A}>):
    %m = stablehlo.compare LT, %x, %y : (tensor<{A}>, tensor<{A}>) -> tensor<i1>
    stablehlo.return %m : tensor<i1> }}) {{dimension = 1 : i64}} : (tensor<6x4x{A}>) -> tensor<6x4x{A}>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %2:2 = stablehlo.while(%i = %n, %v = %a) : tensor<i32>, tensor<6x4x{A}>
    cond {{
      %zero = stablehlo.constant dense<0> : tensor<i32>
      %c = stablehlo.compare GT, %i, %zero : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %c : tensor<i1>
    }} do {{
      %j = stablehlo.subtract %i, %one : tensor<i32>
      %w = func.call @half(%v) : (tensor<6x4x{A}>) -> tensor<6x4x{A}>
      stablehlo.return %j, %w : tensor<i32>, tensor<6x4x{A}>
    }}
  %3 = "stablehlo.case"(%n) ({{ stablehlo.return %a : tensor<6x4x{A}> }}, {{
    %k = stablehlo.negate %a : tensor<6x4x{A}>
    stablehlo.return %k : tensor<6x4x{A}> }}) : (tensor<i32>) -> tensor<6x4x{A}>
  %4 = stablehlo.compare GT, %a, %3 : (tensor<6x4x{A}>, tensor<6x4x{A}>) -> tensor<6x4xi1>
  return %0, %1, %2#1, %3, %4 : tensor<6x{A}>, tensor<6x4x{A}>, tensor<6x4x{A}>, tensor<6x4x{A}>, tensor<6x4xi1> }}
  func.func private @half(%v: tensor<6x4x{A}>) -> tensor<6x4x{A}> {{
    %i = stablehlo.constant dense<-20> : tensor<6x4xi8>
    %h = stablehlo.bitcast_convert %i : (tensor<6x4xi8>) -> tensor<6x4x{A}>
    %w = stablehlo.multiply %v, %h : tensor<6x4x{A}>
    return %w : tensor<6x4x{A}> }} }}"""


@pytest.mark.parametrize("level", LEVELS)
def test_quantized_regions_calls_and_constants_match_numpy(level):
    a, n = integers(A, 6, 4), np.array(3, np.int32)
    largest, ordered, halved, chosen, above = run(REGIONS, a, n, level=level)
    np.testing.assert_array_equal(largest, np.maximum(a.max(1), -30))
    np.testing.assert_array_equal(ordered, np.sort(a, 1))
    want = a
    for _ in range(3):
        want = quantized(numbers(want, A) * np.float32(0.05 * 10), A)
    np.testing.assert_array_equal(halved, want)
    negated = quantized(-numbers(a, A), A)
    np.testing.assert_array_equal(chosen, negated)
    np.testing.assert_array_equal(above, a > negated)


def test_quantized_region_sums_round_at_each_step():
    text = f"""module {{ func.func public @main(%a: tensor<3x9x{A}>, %z: tensor<{A}>) -> tensor<3x{A}> {{
      %0 = "stablehlo.reduce"(%a, %z) ({{ ^bb0(%x: tensor<{A}>, %y: tensor<{A}>):
        %m = stablehlo.add %x, %y : tensor<{A}>
        stablehlo.return %m : tensor<{A}> }}) {{dimensions = array<i64: 1>}}
        : (tensor<3x9x{A}>, tensor<{A}>) -> tensor<3x{A}>
      return %0 : tensor<3x{A}> }} }}"""
    a, z = integers(A, 3, 9, seed=4), np.array(-30, np.int8)
    want = np.full(3, z)
    for column in a.T:
        want = quantized(numbers(want, A) + numbers(column, A), A)
    np.testing.assert_array_equal(run(text, a, z)[0], want)


BLOCKS = "!quant.uniform<i8:f32:{0:2}, {1.0, 2.0}>"


@pytest.mark.parametrize(("argument", "body", "message"), [
    (A, f"%0 = stablehlo.custom_call @f(%a) : (tensor<4x{A}>) -> tensor<4x{A}>", "dequantize before|takes integers"),
    (BLOCKS, "", "one scale for a tensor or one for each index"),
    ("!quant.uniform<i7:f32, 0.5>", "", "store it in i2, i4, i8"),
])  # fmt: skip
def test_invalid_quantized_programs_are_refused(argument, body, message):
    t = f"tensor<4x{argument}>"
    with pytest.raises(CompileError, match=message):
        import_model(f"module {{ func.func public @main(%a: {t}) -> {t} {{\n{body}\nreturn %a : {t} }} }}")


def test_a_region_with_another_quantization_is_refused():
    text = f"""module {{ func.func public @main(%a: tensor<3x9x{CENTERED}>, %z: tensor<{WIDE}>) -> tensor<3x{WIDE}> {{
      %0 = "stablehlo.reduce"(%a, %z) ({{ ^bb0(%x: tensor<{WIDE}>, %y: tensor<{WIDE}>):
        %m = stablehlo.add %x, %y : tensor<{WIDE}>
        stablehlo.return %m : tensor<{WIDE}> }}) {{dimensions = array<i64: 1>}}
        : (tensor<3x9x{CENTERED}>, tensor<{WIDE}>) -> tensor<3x{WIDE}>
      return %0 : tensor<3x{WIDE}> }} }}"""
    with pytest.raises(CompileError, match="quantized differently"):
        import_model(text)
