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
def test_mhlo_top_k_compiles_as_an_op_and_as_a_call(suffix, sign):
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
def test_ops_that_only_mhlo_has_match_numpy(line, function):
    (got,) = run(ONE.format(line), X)
    np.testing.assert_allclose(got, function(X.astype(np.float64)), rtol=1e-6)


def test_mhlo_erf_and_its_inverse_match_scipy():
    place, inverse = ERF_INV_AT
    x = np.full((4, 8), place, np.float32)
    (got,) = run(ONE.format(f"stablehlo.custom_call @mhlo.erf_inv(%x) : {OF_ONE}"), x)
    np.testing.assert_allclose(got, inverse, rtol=1e-6)
    (back,) = run(ONE.format("mhlo.erf %x : tensor<4x8xf32>"), got)
    np.testing.assert_allclose(back, place, rtol=1e-6)


@pytest.mark.parametrize("name", ["erf_inv", "erfc", "lgamma", "digamma", "atan", "square", "bessel_i1e"])
@pytest.mark.parametrize(
    "form",
    [
        f'"mhlo.NAME"(%x) : {OF_ONE}', "mhlo.NAME %x : tensor<4x8xf32>", f"mhlo.NAME %x : {OF_ONE}",
        'mhlo.NAME %x {note = 1 : i32} : tensor<4x8xf32> loc("mhlo.NAME"("a.py":1:2))',
    ],
)  # fmt: skip
def test_mhlo_ops_that_jaxlib_lacks_become_chlo_ops(name, form):
    x, of_chlo = np.abs(X) / 4, f"chlo.{name} %x : tensor<4x8xf32> -> tensor<4x8xf32>"
    (got,), (want,) = (run(ONE.format(line), x) for line in (form.replace("NAME", name), of_chlo))
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("types", ["(tensor<4x8xf32>) -> tensor<4x8xi1>", "tensor<4x8xf32> -> tensor<4x8xi1>"])
def test_binary_and_predicate_mhlo_ops_match_numpy(types):
    text = f"""func.func @main(%x: tensor<4x8xf32>) -> (tensor<4x8xf32>, tensor<4x8xi1>) {{
      %0 = "mhlo.next_after"(%x, %x) : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>
      %1 = mhlo.is_inf %0 : {types}
      return %0, %1 : tensor<4x8xf32>, tensor<4x8xi1>
    }}"""
    same, infinite = run(text, X)
    np.testing.assert_array_equal(same, X)
    assert not infinite.any()


def test_each_model_of_a_bundle_is_modernized():
    text = ONE.format(f'"mhlo.square"(%x) : {OF_ONE}')
    module = aotc.load(aotc.compile({"a": text, "b": text.replace("square", "conj")}))
    np.testing.assert_array_equal(module.a(X), X * X)
    np.testing.assert_array_equal(module.b(X), X)


@pytest.mark.parametrize("line", ['"mhlo.expm1"(%x) : ' + OF_ONE, "mhlo.expm1 %x : tensor<4x8xf32>"])
def test_an_op_of_neither_dialect_is_refused_with_a_hint(line):
    with pytest.raises(CompileError, match=r"'mhlo\.expm1'") as caught:
        aotc.compile(ONE.format(line))
    assert "try: an op of StableHLO or CHLO: this jaxlib has no mhlo.expm1" in str(caught.value)


def test_a_token_argument_is_not_passed_in_a_call():
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


OLD = """module @jit_f {
  func.func public @main(%arg0: tensor<4xf32>, %arg1: tensor<1x6x6x1xf32>) -> (tensor<4x3xf32>, tensor<1x3x3x1xf32>) {
    // broadcast_dimensions = dense<7> : tensor<1xi64> in a comment is not a list
    %0 = "stablehlo.broadcast_in_dim"(%arg0) {broadcast_dimensions = dense<1> : tensor<1xi64>,
        note = "strides = dense<1> : tensor<2xi64>"} : (tensor<4xf32>) -> tensor<3x4xf32>
    %1 = "stablehlo.transpose"(%0) {permutation = dense<[1, 0]> : tensor<2xi64>} : (tensor<3x4xf32>) -> tensor<4x3xf32>
    %2 = "stablehlo.reverse"(%1) {dimensions = dense<[]> : tensor<0xi64>} : (tensor<4x3xf32>) -> tensor<4x3xf32>
    %3 = "stablehlo.slice"(%2) {start_indices = dense<0> : tensor<2xi64>, limit_indices = dense<
        [4, 3]> : tensor<2xi64>, strides = dense<1> : tensor<2xi64>} : (tensor<4x3xf32>) -> tensor<4x3xf32>
    %4 = stablehlo.constant dense<0.000000e+00> : tensor<f32>
    %5 = "stablehlo.reduce_window"(%arg1, %4) ({
    ^bb0(%arg2: tensor<f32>, %arg3: tensor<f32>):
      %6 = stablehlo.add %arg2, %arg3 : tensor<f32>
      stablehlo.return %6 : tensor<f32>
    }) {window_dimensions = dense<[1, 2, 2, 1]> : tensor<4xi64>, window_strides = dense<[1, 2, 2, 1]> : tensor<4xi64>,
        padding = dense<0> : tensor<4x2xi64>} : (tensor<1x6x6x1xf32>, tensor<f32>) -> tensor<1x3x3x1xf32>
    return %3, %5 : tensor<4x3xf32>, tensor<1x3x3x1xf32>
  }
}
"""


def test_attribute_lists_of_2023_text_are_read(tmp_path):
    x, image = np.float32([1, 2, 3, 4]), RNG.standard_normal((1, 6, 6, 1)).astype(np.float32)
    (tmp_path / "old.mlir").write_text(OLD)
    for model in (OLD, OLD.encode(), tmp_path / "old.mlir"):
        transposed, pooled = run(model, x, image)
        np.testing.assert_array_equal(transposed, np.broadcast_to(x[:, None], (4, 3)))
        np.testing.assert_allclose(pooled, image.reshape(1, 3, 2, 3, 2, 1).sum((2, 4)), rtol=1e-6)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("tensor<2xi64>} : (tensor<3x4", "tensor<3xi64>} : (tensor<3x4", "<model>:6:.*does not match type"),
        ("stablehlo.add %arg2", "stablehlo.nothing %arg2", "<model>:13:.*stablehlo.nothing"),
    ],
)
def test_errors_in_2023_text_state_their_line(old, new, message):
    assert OLD.count(old) == 1
    with pytest.raises(CompileError, match=message):
        aotc.compile(OLD.replace(old, new))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('"mhlo.bitcast"(%x) : ' + OF_ONE, r"<model>:2:\d+: error: mhlo\.bitcast on .* is not supported"),
        ("scf.execute_region -> tensor<4x8xf32> {\n%t = arith.constant dense<0.0> : tensor<4x8xf32>\n"
         "scf.yield %t : tensor<4x8xf32>\n}\n%u = mhlo.add %x, %x : tensor<4x8xf32>\n"
         "%v = builtin.unrealized_conversion_cast %u : tensor<4x8xf32> to !mhlo.token",
         r"<model>:\d+:\d+: error: builtin\.unrealized_conversion_cast makes a value of MHLO's type"),
    ],
)  # fmt: skip
def test_ops_of_mhlo_without_a_form_in_stablehlo_are_refused(line, message):
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(ONE.format(line))
    assert "try:" in str(error.value)


MHLO = """module attributes {tf.versions = {bad_consumers = [], min_consumer = 0 : i32, producer = 1087 : i32}} {
  func.func @main(%x: tensor<?x4xf32> {tf._user_specified_name = "x"}, %w: tensor<4x8xf32> {tf.bound_input = "w"},
                  %b: tensor<8xf32> {tf.aliasing_output = 1 : i64}) -> tuple<tensor<?x8xf32>, tensor<8xf32>>
      attributes {tf.entry_function = {control_outputs = "", inputs = "x,w,b", outputs = "y,c"}} {
    %zero = mhlo.constant dense<0.0> : tensor<f32>
    %0 = "mhlo.dot_general"(%x, %w) {dot_dimension_numbers = #mhlo.dot<lhs_contracting_dimensions = [1],
        rhs_contracting_dimensions = [0]>, precision_config = [#mhlo<precision DEFAULT>, #mhlo<precision DEFAULT>]}
        : (tensor<?x4xf32>, tensor<4x8xf32>) -> tensor<?x8xf32>
    %s = shape.shape_of %0 : tensor<?x8xf32> -> tensor<2xindex>
    %1 = "mhlo.dynamic_broadcast_in_dim"(%b, %s) {broadcast_dimensions = dense<1> : tensor<1xi64>}
        : (tensor<8xf32>, tensor<2xindex>) -> tensor<?x8xf32>
    %2 = mhlo.add %0, %1 : tensor<?x8xf32>
    %3 = "mhlo.dynamic_broadcast_in_dim"(%zero, %s) {broadcast_dimensions = dense<> : tensor<0xi64>}
        : (tensor<f32>, tensor<2xindex>) -> tensor<?x8xf32>
    %4 = mhlo.maximum %2, %3 : tensor<?x8xf32>
    %5 = "mhlo.fusion"(%4) ({
    ^bb0(%a: tensor<?x8xf32>):
      %9 = mhlo.multiply %a, %a : tensor<?x8xf32>
      mhlo.return %9 : tensor<?x8xf32>
    }) : (tensor<?x8xf32>) -> tensor<?x8xf32>
    %6 = mhlo.copy %5 : tensor<?x8xf32>
    %7 = mhlo.reduce(%6 init: %zero) applies mhlo.add across dimensions = [0]
        : (tensor<?x8xf32>, tensor<f32>) -> tensor<8xf32>
    %8 = "mhlo.tuple"(%6, %7) : (tensor<?x8xf32>, tensor<8xf32>) -> tuple<tensor<?x8xf32>, tensor<8xf32>>
    return %8 : tuple<tensor<?x8xf32>, tensor<8xf32>>
  }
}
"""


def test_a_tensorflow_layer_in_mhlo_matches_numpy():
    module = aotc.load(aotc.compile(MHLO, opt_level=1))
    assert "donated" in repr(module)
    w, b = (RNG.standard_normal(shape).astype(np.float32) for shape in ((4, 8), (8,)))
    for rows in (1, 4):
        y, total = module(X[:rows, :4], w, b.copy())
        want = np.maximum(X[:rows, :4].astype(np.float64) @ w + b, 0) ** 2
        np.testing.assert_allclose(y, want, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(total, want.sum(0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "function"),
    [("acos", np.arccos), ("asin", np.arcsin), ("atanh", np.arctanh), ("asinh", np.arcsinh),
     ("abs", np.abs), ("cosine", np.cos), ("exponential_minus_one", np.expm1)],
)  # fmt: skip
def test_mhlo_functions_match_xla_and_numpy(name, function):
    x = np.clip(X / 4, -0.9, 0.9)
    text = ONE.format(f'"mhlo.{name}"(%x) : {OF_ONE}')
    (got,) = run(text, x)
    np.testing.assert_allclose(run_xla(fetch(text), [x])[0], got, rtol=2e-5)
    np.testing.assert_allclose(got, function(x.astype(np.float64)), rtol=2e-6)


def test_mhlo_bounds_are_checked_at_a_call():
    t = "tensor<?x2xf32, #mhlo.type_extensions<bounds = [3, ?]>>"
    text = f"func.func @main(%x: {t}) -> {t} {{\n %0 = mhlo.copy %x : {t}\n return %0 : {t}\n}}"
    module = aotc.load(aotc.compile(text, opt_level=1))
    x = np.ones((4, 2), np.float32)
    np.testing.assert_array_equal(module(x[:3]), x[:3])
    with pytest.raises(aotc.CallError, match="4 of an argument, of which the type allows 3"):
        module(x)


BOUNDED = """func.func @main(%x: tensor<4x8xf32>, %n: tensor<i32>)
    -> (tensor<4xf32>, tensor<4x?xf32, #stablehlo.bounds<?, 8>>) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %0 = stablehlo.set_dimension_size %x, %n, dim = 1
      : (tensor<4x8xf32>, tensor<i32>) -> tensor<4x?xf32, #stablehlo.bounds<?, 8>>
  %1 = stablehlo.add %0, %0 : tensor<4x?xf32, #stablehlo.bounds<?, 8>>
  %2 = stablehlo.reduce(%1 init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<4x?xf32, #stablehlo.bounds<?, 8>>, tensor<f32>) -> tensor<4xf32>
  return %2, %1 : tensor<4xf32>, tensor<4x?xf32, #stablehlo.bounds<?, 8>>
}"""


def test_set_dimension_size_keeps_the_first_elements():
    module = aotc.load(aotc.compile(BOUNDED, opt_level=1))
    for n in (8, 5, 1, 0):
        total, doubled = module(X, np.int32(n))
        np.testing.assert_array_equal(doubled, 2 * X[:, :n])
        np.testing.assert_allclose(total, 2 * X[:, :n].sum(1), rtol=1e-5, atol=1e-6)
    for n in (9, -1):
        with pytest.raises(aotc.CallError):
            module(X, np.int32(n))


def test_set_dimension_size_beyond_the_dim_is_refused():
    text = """func.func @main(%x: tensor<4xf32>) -> tensor<?xf32, #stablehlo.bounds<4>> {
      %n = stablehlo.constant dense<5> : tensor<i32>
      %0 = stablehlo.set_dimension_size %x, %n, dim = 0
          : (tensor<4xf32>, tensor<i32>) -> tensor<?xf32, #stablehlo.bounds<4>>
      return %0 : tensor<?xf32, #stablehlo.bounds<4>>
    }"""
    with pytest.raises(CompileError, match="set_dimension_size of 4 elements to 5"):
        aotc.compile(text)


def test_bounds_of_arguments_are_checked_at_a_call():
    t = "tensor<?x2xf32, #stablehlo.bounds<3, ?>>"
    text = f"func.func @main(%x: {t}) -> {t} {{\n %0 = stablehlo.negate %x : {t}\n return %0 : {t}\n}}"
    module = aotc.load(aotc.compile(text, opt_level=1))
    for rows in (0, 1, 3):
        x = np.ones((rows, 2), np.float32)
        np.testing.assert_array_equal(module(x), -x)
    with pytest.raises(aotc.CallError, match="4 of an argument, of which the type allows 3"):
        module(np.ones((4, 2), np.float32))


TENSORFLOW = """module attributes {tf.versions = {producer = 1 : i32}, mhlo.is_dynamic = true} {
  func.func @main(%arg0: tensor<?x4xf32> {tf._user_specified_name = "x", tf_saved_model.index_path = ["x"]})
      -> (tensor<?x4xf32> {tf_saved_model.index_path = ["y"]}, tensor<?xf32>, tensor<2x4xf32>)
      attributes {tf.entry_function = {control_outputs = "", inputs = "x", outputs = "y"}} {
    %two = stablehlo.constant dense<2.0> : tensor<f32>
    %0 = shape.shape_of %arg0 : tensor<?x4xf32> -> tensor<2xindex>
    %1 = arith.index_cast %0 : tensor<2xindex> to tensor<2xi32>
    %2 = stablehlo.dynamic_broadcast_in_dim %two, %1, dims = [] : (tensor<f32>, tensor<2xi32>) -> tensor<?x4xf32>
    %3 = stablehlo.multiply %arg0, %2 : tensor<?x4xf32>
    %n = shape.num_elements %0 : tensor<2xindex> -> index
    %4 = tensor.from_elements %n : tensor<1xindex>
    %5 = stablehlo.dynamic_reshape %3, %4 : (tensor<?x4xf32>, tensor<1xindex>) -> tensor<?xf32>
    %6 = shape.const_shape [2, 4] : tensor<2xindex>
    %7 = stablehlo.dynamic_broadcast_in_dim %two, %6, dims = [] : (tensor<f32>, tensor<2xindex>) -> tensor<2x4xf32>
    return %3, %5, %7 : tensor<?x4xf32>, tensor<?xf32>, tensor<2x4xf32>
  }
}
"""
REACTANT = """module @reactant_f attributes {mhlo.num_partitions = 1 : i64, mhlo.num_replicas = 1 : i64} {
  func.func @main(%arg0: tensor<4xf32> {enzymexla.memory_effects = [], tf.aliasing_output = 0 : i32}) -> tensor<4xf32>
      attributes {enzymexla.memory_effects = ["read"]} {
    %cst = arith.constant dense<2.000000e+00> : tensor<4xf32>
    %0 = stablehlo.multiply %arg0, %cst {enzymexla.guaranteed_symmetric = [#enzymexla<guaranteed NOTGUARANTEED>]}
        : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def test_a_tensorflow_model_with_shape_ops_matches_numpy():
    module = aotc.load(aotc.compile(TENSORFLOW, opt_level=1))
    for rows in (1, 4):
        doubled, flat, twos = module(X[:rows, :4])
        np.testing.assert_array_equal(doubled, 2 * X[:rows, :4])
        np.testing.assert_array_equal(flat, doubled.reshape(-1))
        np.testing.assert_array_equal(twos, np.full((2, 4), 2, np.float32))


def test_a_reactant_model_donates_its_argument():
    module = aotc.load(aotc.compile(REACTANT, opt_level=1))
    assert "donated" in repr(module)
    np.testing.assert_array_equal(module(X[0, :4].copy()), 2 * X[0, :4])
    np.testing.assert_array_equal(run_xla(fetch(REACTANT), [X[0, :4]])[0], 2 * X[0, :4])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (ONE.format('"ttir.relu"(%x) : ' + OF_ONE), "ttir.relu on"),
        (ONE.format("stablehlo.negate %x : tensor<4x8xf32>").replace("8xf32>", "8xf32, #ttnn.layout<1>>"),
         "has an encoding of a dialect that is not registered"),
    ],
)  # fmt: skip
def test_producer_specific_ops_are_refused_with_a_hint(text, message):
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(text)
    assert "try:" in str(error.value)
