"""Sizes that do not fit are an error of the call, before any work: op, line, arguments and numbers are named."""

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.semantics.run import interpret
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu


def f32(*shape):
    return np.arange(1, 1 + np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def i32(*values):
    return np.array(values, np.int32)


def loaded(text):
    return aotc.load(aotc.compile(text.encode(), verify_each=True))


def main(arguments, result, *lines):
    body = "\n  ".join(lines)
    return f"func.func @main({arguments}) -> {result} {{\n  {body}\n}}"


VECTOR = "tensor<?xf32>"
SCATTER = """func.func @main(%x: tensor<?x?xf32>, %i: tensor<?x2xi32>, %u: tensor<?x2xf32>) -> tensor<?x?xf32> {
  %n = stablehlo.get_dimension_size %i, dim = 0 : (tensor<?x2xi32>) -> tensor<i32>
  %v = stablehlo.reshape %n : (tensor<i32>) -> tensor<1xi32>
  %c = stablehlo.constant dense<2> : tensor<1xi32>
  %o = stablehlo.constant dense<1> : tensor<1xi32>
  %k = stablehlo.dynamic_iota %v, dim = 0 : (tensor<1xi32>) -> tensor<?xi32>
  %s = stablehlo.concatenate %v, %c, %o, dim = 0 : (tensor<1xi32>, tensor<1xi32>, tensor<1xi32>) -> tensor<3xi32>
  %r = stablehlo.dynamic_broadcast_in_dim %k, %s, dims = [0] : (tensor<?xi32>, tensor<3xi32>) -> tensor<?x2x1xi32>
  %j = stablehlo.dynamic_reshape %i, %s : (tensor<?x2xi32>, tensor<3xi32>) -> tensor<?x2x1xi32>
  %p = stablehlo.concatenate %r, %j, dim = 2 : (tensor<?x2x1xi32>, tensor<?x2x1xi32>) -> tensor<?x2x2xi32>
  %y = "stablehlo.scatter"(%x, %p, %u) <{scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0, 1],
    scatter_dims_to_operand_dims = [0, 1], index_vector_dim = 2>}> ({
    ^bb0(%a: tensor<f32>, %b: tensor<f32>):
      stablehlo.return %b : tensor<f32>
    }) : (tensor<?x?xf32>, tensor<?x2x2xi32>, tensor<?x2xf32>) -> tensor<?x?xf32>
  return %y : tensor<?x?xf32>
}"""
UPDATE = main(
    "%x: tensor<?xf32>, %u: tensor<?xf32>, %i: tensor<i32>",
    VECTOR,
    "%y = stablehlo.dynamic_update_slice %x, %u, %i : (tensor<?xf32>, tensor<?xf32>, tensor<i32>) -> tensor<?xf32>",
    "return %y : tensor<?xf32>",
)
SLICE = main(
    "%x: tensor<?xf32>",
    "tensor<4xf32>",
    "%y = stablehlo.slice %x [0:4] : (tensor<?xf32>) -> tensor<4xf32>",
    "return %y : tensor<4xf32>",
)
DYNAMIC_SLICE = main(
    "%x: tensor<?xf32>, %i: tensor<i32>",
    "tensor<4xf32>",
    "%y = stablehlo.dynamic_slice %x, %i, sizes = [4] : (tensor<?xf32>, tensor<i32>) -> tensor<4xf32>",
    "return %y : tensor<4xf32>",
)
GATHER = main(
    "%x: tensor<?x?xf32>, %i: tensor<?x?x1xi32>",
    "tensor<?x?x3xf32>",
    '%y = "stablehlo.gather"(%x, %i) <{dimension_numbers = #stablehlo.gather<offset_dims = [2], '
    "operand_batching_dims = [0], start_indices_batching_dims = [0], start_index_map = [1], index_vector_dim = 2>, "
    "slice_sizes = array<i64: 1, 3>}> : (tensor<?x?xf32>, tensor<?x?x1xi32>) -> tensor<?x?x3xf32>",
    "return %y : tensor<?x?x3xf32>",
)
TOP_K = main(
    "%x: tensor<?xf32>",
    "(tensor<5xf32>, tensor<5xi32>)",
    "%y:2 = chlo.top_k(%x, k = 5) : tensor<?xf32> -> (tensor<5xf32>, tensor<5xi32>)",
    "return %y#0, %y#1 : tensor<5xf32>, tensor<5xi32>",
)
SOLVE = main(
    "%a: tensor<?x?xf32>, %b: tensor<?x?xf32>",
    "tensor<?x?xf32>",
    '%y = "stablehlo.triangular_solve"(%a, %b) <{left_side = true, lower = true, unit_diagonal = false, '
    "transpose_a = #stablehlo<transpose NO_TRANSPOSE>}> : (tensor<?x?xf32>, tensor<?x?xf32>) -> tensor<?x?xf32>",
    "return %y : tensor<?x?xf32>",
)
WRONG = {
    "scatter": (
        SCATTER, [f32(8, 8), np.zeros((0, 2), np.int32), f32(3, 2)],
        r"scatter at <model>:11:8: 0 places for 3 updates \(dimension 0 of arg2 is 3, dimension 0 of arg1 is 0\)",
    ),
    "an update longer than its operand": (
        UPDATE, [f32(3), f32(5), np.int32(0)],
        r"stablehlo.dynamic_update_slice at <model>:2:8: an update of 5 elements in 3 "
        r"\(dimension 0 of arg1 is 5, dimension 0 of arg0 is 3\)",
    ),
    "slice": (SLICE, [f32(2)], r"a slice up to 4 of 2 elements \(dimension 0 of arg0 is 2\)"),
    "dynamic_slice": (DYNAMIC_SLICE, [f32(2), np.int32(0)], "a slice of 4 elements from 2"),
    "slices of a gather": (GATHER, [f32(2, 2), i32(0, 1).reshape(2, 1, 1)], "a slice of 3 elements from 2"),
    "batches of a gather": (GATHER, [f32(2, 4), i32(0, 1, 2).reshape(3, 1, 1)], "batches of 3 and 2|batches of 2 and"),
    "top_k": (TOP_K, [f32(3)], "the largest 5 of 3 elements"),
    "a matrix that is not square": (SOLVE, [f32(3, 2), f32(3, 1)], "a square matrix with 2 and 3|with 3 and 2"),
    "another right side": (SOLVE, [f32(3, 3), f32(2, 1)], "sizes must be equal: 2 and 3"),
}  # fmt: skip
RIGHT = {
    "scatter": (SCATTER, [f32(8, 8), np.zeros((0, 2), np.int32), f32(0, 2)]),
    "update": (UPDATE, [f32(5), f32(3), np.int32(9)]),
    "slice": (SLICE, [f32(4)]),
    "dynamic_slice": (DYNAMIC_SLICE, [f32(6), np.int32(9)]),
    "gather": (GATHER, [f32(2, 4), i32(0, 9).reshape(2, 1, 1)]),
    "top_k": (TOP_K, [f32(5)]),
    "solve": (SOLVE, [f32(2, 2), f32(2, 3)]),
}


@pytest.mark.parametrize("name", WRONG)
def test_calls_with_wrong_sizes_are_refused(name):
    text, arguments, message = WRONG[name]
    with pytest.raises(CallError, match=message):
        loaded(text).invoke("main", *arguments)
    with pytest.raises(AssertionFailed, match=message):
        interpret(import_model(text), *arguments)


@pytest.mark.parametrize("name", RIGHT)
def test_calls_with_fitting_sizes_agree_with_the_reference(name):
    text, arguments = RIGHT[name]
    for found, wanted in zip(loaded(text).invoke("main", *arguments), interpret(import_model(text), *arguments)):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_failed_size_check_modifies_no_array():
    donated = UPDATE.replace("%x: tensor<?xf32>", "%x: tensor<?xf32> {tf.aliasing_output = 0 : i32}")
    x, out = f32(3), np.full(3, 7, np.float32)
    for _ in range(2):
        with pytest.raises(CallError, match="an update of 5 elements in 3"):
            loaded(donated).invoke("main", x, f32(5), np.int32(0), out=[out], donate=True)
    np.testing.assert_array_equal(x, f32(3))
    np.testing.assert_array_equal(out, np.full(3, 7, np.float32))


def test_a_runtime_size_of_one_is_broadcast():
    text = main(
        "%x: tensor<?xf32>", "tensor<2x4xf32>",
        "%y = stablehlo.broadcast_in_dim %x, dims = [1] : (tensor<?xf32>) -> tensor<2x4xf32>",
        "%z = stablehlo.negate %y : tensor<2x4xf32>", "return %z : tensor<2x4xf32>",
    )  # fmt: skip
    module = loaded(text)
    for size in (1, 4):
        np.testing.assert_array_equal(module.invoke("main", f32(size))[0], np.broadcast_to(-f32(size), (2, 4)))
    with pytest.raises(CallError, match="broadcast of size 3 to size 4"):
        module.invoke("main", f32(3))


def test_padding_between_no_elements_adds_none():
    text = main(
        "%x: tensor<?xf32>, %y: tensor<?xf32>", VECTOR, "%z = stablehlo.constant dense<0.0> : tensor<f32>",
        "%p = stablehlo.pad %x, %z, low = [0], high = [0], interior = [1]"
        " : (tensor<?xf32>, tensor<f32>) -> tensor<?xf32>",
        "%a = stablehlo.add %p, %y : tensor<?xf32>", "return %a : tensor<?xf32>",
    )  # fmt: skip
    module = loaded(text)
    for size, wanted in ((3, [2, 2, 5, 4, 8]), (1, [2]), (0, [])):
        np.testing.assert_array_equal(module.invoke("main", f32(size), f32(len(wanted)))[0], wanted)
    with pytest.raises(CallError, match="sizes must be equal"):
        module.invoke("main", f32(3), f32(4))


def test_a_callee_is_checked_for_each_entry():
    call = "func.call @f(%x, %y) : (tensor<?xf32>, tensor<?xf32>) -> tensor<?xf32>"
    public = "(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {\n%0 = CALL\n%1 = CALL\n"
    public += "return %1 : tensor<?xf32>\n}"
    text = (
        "module { func.func private @f(%x: tensor<?xf32>, %y: tensor<?xf32>) -> tensor<?xf32> {\n"
        " %a = stablehlo.add %x, %y : tensor<?xf32>\n return %a : tensor<?xf32> }\n"
        + "".join(f"func.func public @{n}{public}\n" for n in ("one", "two")).replace("CALL", call)
        + "}"
    )
    module = loaded(text)
    for name in ("one", "two"):
        np.testing.assert_array_equal(module.invoke(name, f32(3), f32(3))[0], 2 * f32(3))
        unequal = f"{name}: error: stablehlo.add at <model>:2:7: sizes must be equal: 2 and 3"
        with pytest.raises(CallError, match=unequal):
            module.invoke(name, f32(3), f32(2))


LOOP = """func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>, %n: tensor<i32>) -> tensor<?xf32> {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %r:2 = stablehlo.while(%i = %zero, %s = %x) : tensor<i32>, tensor<?xf32>
    cond {
      %t = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.return %t : tensor<i1>
    } do {
      %j = stablehlo.add %i, %one : tensor<i32>
      ASSERTION
      stablehlo.return %j, %y : tensor<i32>, tensor<?xf32>
    }
  return %r#1 : tensor<?xf32>
}"""
OF_SIZES = """%d = stablehlo.get_dimension_size %y, dim = 0 : (tensor<?xf32>) -> tensor<i32>
      %nine = stablehlo.constant dense<9> : tensor<i32>
      %t = stablehlo.compare LT, %d, %nine : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%t, %d) {error_message = "too long: {0}", has_side_effect = true}
        : (tensor<i1>, tensor<i32>) -> ()"""
OF_DATA = """%t = stablehlo.compare LT, %j, %one : (tensor<i32>, tensor<i32>) -> tensor<i1>
      stablehlo.custom_call @shape_assertion(%t, %j) {error_message = "at {0}", has_side_effect = true}
        : (tensor<i1>, tensor<i32>) -> ()"""


def test_size_checks_in_a_loop_hold_even_without_iterations():
    module = loaded(LOOP.replace("ASSERTION", OF_SIZES))
    np.testing.assert_array_equal(module.invoke("main", f32(3), -f32(3), np.int32(2))[0], -f32(3))
    np.testing.assert_array_equal(module.invoke("main", f32(3), -f32(3), np.int32(0))[0], f32(3))
    for sizes, message in (((3, 2), "stablehlo.while at <model>:4:10: sizes must be equal"), ((9, 9), "too long: 9")):
        with pytest.raises(CallError, match=message):
            module.invoke("main", f32(sizes[0]), f32(sizes[1]), np.int32(0))


def test_an_assertion_on_data_in_a_loop_fails():
    """It was left out without a word."""
    module = loaded(LOOP.replace("ASSERTION", OF_DATA))
    np.testing.assert_array_equal(module.invoke("main", f32(3), -f32(3), np.int32(0))[0], f32(3))
    with pytest.raises(CallError, match="at 1"):
        module.invoke("main", f32(3), -f32(3), np.int32(1))


def test_branches_with_different_result_sizes_fail():
    text = main(
        "%x: tensor<?xf32>, %y: tensor<?xf32>, %p: tensor<i1>", VECTOR,
        '%r = "stablehlo.if"(%p) ({ stablehlo.return %x : tensor<?xf32> }, { stablehlo.return %y : tensor<?xf32> })'
        " : (tensor<i1>) -> tensor<?xf32>",
        "return %r : tensor<?xf32>",
    )  # fmt: skip
    module = loaded(text)
    np.testing.assert_array_equal(module.invoke("main", f32(3), -f32(3), np.bool_(False))[0], -f32(3))
    with pytest.raises(CallError, match=r"stablehlo\.if at <model>:2:8: sizes must be equal: 2 and 3"):
        module.invoke("main", f32(3), f32(2), np.bool_(True))


def test_impossible_sizes_are_refused_at_compile_time():
    text = main(
        "%x: tensor<?xf32>, %u: tensor<5xf32>, %i: tensor<i32>", VECTOR,
        "%s = stablehlo.slice %x [0:4] : (tensor<?xf32>) -> tensor<?xf32>",
        "%y = stablehlo.dynamic_update_slice %s, %u, %i : (tensor<?xf32>, tensor<5xf32>, tensor<i32>) -> tensor<?xf32>",
        "return %y : tensor<?xf32>",
    )  # fmt: skip
    with pytest.raises(CompileError, match="an update of 5 elements in 4"):
        aotc.compile(text.encode())
