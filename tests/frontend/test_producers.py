"""Models in the manner of other producers than JAX: each compiles and gives what NumPy gives."""

from __future__ import annotations

import inspect

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.mlir import fetch
from aotc.frontend.xla import run_xla

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(0)
X = RNG.standard_normal((4, 8)).astype(np.float32)
ERF_INV_AT = (0.25, 0.22531206)  # a value and its inverse error function, by mpmath.erfinv


def run(text, *arrays):
    result = aotc.load(aotc.compile(text, opt_level=1))(*arrays)
    return [np.asarray(r) for r in (result if isinstance(result, tuple) else (result,))]


def largest(x, k, sign=1):
    order = np.argsort(-sign * x, axis=-1, kind="stable")[..., :k]
    return np.take_along_axis(x, order, -1), order.astype(np.int32)


PAIR = "(tensor<4x3xf32>, tensor<4x3xi32>)"
TOP_K_TUPLE = f"""
module @from_torch_xla {{
  func.func private @order(%a: tensor<f32>, %b: tensor<f32>, %i: tensor<i32>, %j: tensor<i32>) -> tensor<i1> {{
    %0 = stablehlo.compare DIRECTION, %a, %b, TOTALORDER : (tensor<f32>, tensor<f32>) -> tensor<i1>
    return %0 : tensor<i1>
  }}
  func.func @main(%x: tensor<4x8xf32>) -> {PAIR} {{
    %0 = stablehlo.custom_call @TopK(%x) {{called_computations = [@order]}}
        : (tensor<4x8xf32>) -> tuple<tensor<4x3xf32>, tensor<4x3xi32>>
    %1 = stablehlo.get_tuple_element %0[0] : (tuple<tensor<4x3xf32>, tensor<4x3xi32>>) -> tensor<4x3xf32>
    %2 = stablehlo.get_tuple_element %0[1] : (tuple<tensor<4x3xf32>, tensor<4x3xi32>>) -> tensor<4x3xi32>
    return %1, %2 : tensor<4x3xf32>, tensor<4x3xi32>
  }}
}}
"""
TOP_K_VALUES = TOP_K_TUPLE.replace(", %i: tensor<i32>, %j: tensor<i32>", "")
TOP_K_BARE = TOP_K_TUPLE.replace(" {called_computations = [@order]}", "").replace("DIRECTION", "GT")


@pytest.mark.parametrize(
    ("text", "sign"),
    [
        (TOP_K_TUPLE.replace("DIRECTION", "GT"), 1),
        (TOP_K_TUPLE.replace("DIRECTION", "LT"), -1),
        (TOP_K_VALUES.replace("DIRECTION", "LT"), -1),
        (TOP_K_BARE, 1),
    ],
)
def test_a_top_k_call_returns_a_tuple_in_its_comparators_order(text, sign):
    for got, want in zip(run(text, X), largest(X, 3, sign), strict=True):
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(("suffix", "sign"), [("", 1), (", largest = true", 1), (", largest = false", -1)])
def test_mhlo_top_k_as_an_op_and_as_a_call(suffix, sign):
    op = f"%0:2 = mhlo.topk(%x, k = 3{suffix}) : tensor<4x8xf32> -> {PAIR}"
    call = f"%0:2 = stablehlo.custom_call @mhlo.topk(%x) {{mhlo.attributes = {{k = 3 : i64{suffix}}}, "
    call += f"mhlo.version = 1 : i64}} : (tensor<4x8xf32>) -> {PAIR}"
    for line in (op, call):
        text = f"func.func @main(%x: tensor<4x8xf32>) -> {PAIR} {{\n {line}\n return %0#0, %0#1 : {PAIR[1:-1]}\n}}"
        for got, want in zip(run(text, X), largest(X, 3, sign), strict=True):
            np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("message", "old", "new"),
    [
        ("computation @order, which the module does not define", "private @order", "private @other"),
        ("has 2 operands, expected 1", "@TopK(%x) {", "@TopK(%x, %x) {"),
    ],
)
def test_a_damaged_top_k_call_is_refused(message, old, new):
    text = TOP_K_TUPLE.replace("DIRECTION", "GT").replace(old, new)
    with pytest.raises(CompileError, match=message):
        aotc.compile(text.replace("(tensor<4x8xf32>) -> tuple", "(tensor<4x8xf32>, tensor<4x8xf32>) -> tuple")
                     if "%x, %x" in new else text)  # fmt: skip


ONE = "func.func @main(%x: tensor<4x8xf32>) -> tensor<4x8xf32> {{\n %0 = {}\n return %0 : tensor<4x8xf32>\n}}"
OF_ONE = "(tensor<4x8xf32>) -> tensor<4x8xf32>"


@pytest.mark.parametrize(
    ("line", "function"),
    [
        ("mhlo.copy %x : tensor<4x8xf32>", lambda x: x),
        ("mhlo.tan %x : tensor<4x8xf32>", np.tan),
        ('"mhlo.sinh"(%x) : ' + OF_ONE, np.sinh),
        ('"mhlo.cosh"(%x) : ' + OF_ONE, np.cosh),
        (f"stablehlo.custom_call @mhlo.copy(%x) : {OF_ONE}", lambda x: x),
        (f"stablehlo.custom_call @mhlo.tan(%x) : {OF_ONE}", np.tan),
    ],
)
def test_ops_that_only_mhlo_has(line, function):
    (got,) = run(ONE.format(line), X)
    np.testing.assert_allclose(got, function(X.astype(np.float64)), rtol=1e-6)


def test_mhlo_erf_and_its_inverse():
    place, inverse = ERF_INV_AT
    x = np.full((4, 8), place, np.float32)
    (got,) = run(ONE.format(f"stablehlo.custom_call @mhlo.erf_inv(%x) : {OF_ONE}"), x)
    np.testing.assert_allclose(got, inverse, rtol=1e-6)
    (back,) = run(ONE.format("mhlo.erf %x : tensor<4x8xf32>"), got)
    np.testing.assert_allclose(back, place, rtol=1e-6)


def test_a_token_among_the_arguments_takes_no_place_in_a_call():
    text = """func.func @main(%t: !stablehlo.token, %a: tensor<2xf32>, %u: !stablehlo.token, %b: tensor<2xf32>)
        -> (!stablehlo.token, tensor<2xf32>) {
      %0 = stablehlo.after_all %t, %u : !stablehlo.token
      %1 = stablehlo.subtract %a, %b : tensor<2xf32>
      return %0, %1 : !stablehlo.token, tensor<2xf32>
    }"""
    module = aotc.load(aotc.compile(text))
    a, b = np.float32([1, 2]), np.float32([5, 7])
    names = list(inspect.signature(module.main).parameters)
    assert names == ["arg1", "arg3"]
    for got in (module(a, b), module(**dict(zip(names, (a, b)))), module(a, **{names[1]: b})):
        np.testing.assert_array_equal(got, a - b)


FOREIGN = """module attributes {tt.system = #tt.grid<2x2>, ttcore.version = 1 : i32} {
  func.func @main(%x: tensor<4x8xf32> {tt.kind = #tt.kind<input>, tf.name = "x"})
      -> (tensor<4x8xf32> {tt.kind = #tt.kind<output>}) {
    %0 = stablehlo.add %x, %x {tt.nested = {a = [#tt.z<3>], b = 1 : i32}, tt.type = !tt.layout<1>} : tensor<4x8xf32>
    return %0 : tensor<4x8xf32>
  }
}
"""


def test_foreign_attributes_reach_neither_the_compiler_nor_the_oracle():
    np.testing.assert_array_equal(run(FOREIGN, X)[0], X + X)
    np.testing.assert_array_equal(run_xla(fetch(FOREIGN), [X])[0], X + X)
