"""MLIR's ``shape`` ops, as lowerings of TensorFlow, MHLO and torch-mlir write them, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(3)


def array(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def load(text):
    return aotc.load(aotc.compile(text, opt_level=1))


TENSORFLOW_ADD = """func.func @main(%x: tensor<?x?xf32>, %y: tensor<?xf32>) -> tensor<?x?xf32> {
  %s = shape.shape_of %x : tensor<?x?xf32> -> tensor<2xindex>
  %t = shape.shape_of %y : tensor<?xf32> -> tensor<1xindex>
  %w = shape.cstr_broadcastable %s, %t : tensor<2xindex>, tensor<1xindex>
  %v = shape.const_witness true
  %u = shape.assuming_all %w, %v
  %0 = shape.assuming %u -> (tensor<?x?xf32>) {
    %b = shape.broadcast %s, %t : tensor<2xindex>, tensor<1xindex> -> tensor<?xindex>
    %c = tensor.cast %b : tensor<?xindex> to tensor<2xindex>
    %1 = stablehlo.dynamic_broadcast_in_dim %x, %c, dims = [0, 1]
        : (tensor<?x?xf32>, tensor<2xindex>) -> tensor<?x?xf32>
    %2 = stablehlo.dynamic_broadcast_in_dim %y, %c, dims = [1] : (tensor<?xf32>, tensor<2xindex>) -> tensor<?x?xf32>
    %3 = stablehlo.add %1, %2 : tensor<?x?xf32>
    shape.assuming_yield %3 : tensor<?x?xf32>
  }
  return %0 : tensor<?x?xf32>
}"""
CHLO_ADD = """func.func @main(%x: tensor<?x?xf32>, %y: tensor<?xf32>) -> tensor<?x?xf32> {
  %0 = chlo.broadcast_add %x, %y : (tensor<?x?xf32>, tensor<?xf32>) -> tensor<?x?xf32>
  return %0 : tensor<?x?xf32>
}"""


@pytest.mark.parametrize("text", [TENSORFLOW_ADD, CHLO_ADD])
def test_sizes_of_one_are_broadcast_at_run_time(text):
    module = load(text)
    for x, y in ((array(2, 3), array(3)), (array(2, 1), array(3)), (array(2, 3), array(1)), (array(2, 0), array(1)),
                 (array(2, 1), array(0)), (array(1, 1), array(1))):  # fmt: skip
        np.testing.assert_array_equal(module(x, y), x + y)
    with pytest.raises(aotc.CallError, match=r"sizes (3 and 2|2 and 3) cannot be broadcast together"):
        module(array(2, 3), array(2))


def test_a_static_size_decides_an_unknown_result_size():
    text = CHLO_ADD.replace("tensor<?xf32>", "tensor<3xf32>").replace("-> tensor<?x?xf32>", "-> tensor<?x3xf32>")
    module = load(text.replace("return %0 : tensor<?x?xf32>", "return %0 : tensor<?x3xf32>"))
    y = array(3)
    for x in (array(2, 3), array(2, 1)):
        np.testing.assert_array_equal(module(x, y), x + y)
    with pytest.raises(aotc.CallError, match="cannot be broadcast"):
        module(array(2, 2), y)


SIZES = """func.func @main(%x: tensor<?x4xf32>, %y: tensor<?xf32>)
    -> (tensor<11xindex>, tensor<3xi1>, tensor<?xindex>) {
  %c0 = arith.constant 0 : index
  %c1 = arith.constant 1 : index
  %s = shape.shape_of %x : tensor<?x4xf32> -> !shape.shape
  %e = shape.to_extent_tensor %s : !shape.shape -> tensor<2xindex>
  %t = shape.shape_of %y : tensor<?xf32> -> tensor<1xindex>
  %a = shape.get_extent %e, %c0 : tensor<2xindex>, index -> index
  %b = shape.get_extent %e, %c1 : tensor<2xindex>, index -> index
  %f = shape.from_extents %a, %c1 : index, index
  %g = shape.to_extent_tensor %f : !shape.shape -> tensor<2xindex>
  %cc = shape.concat %g, %t : tensor<2xindex>, tensor<1xindex> -> tensor<?xindex>
  %r = shape.rank %cc : tensor<?xindex> -> index
  %any = "shape.any"(%e, %g) : (tensor<2xindex>, tensor<2xindex>) -> tensor<2xindex>
  %last = shape.get_extent %any, %c1 : tensor<2xindex>, index -> index
  %cs = shape.const_size 5
  %cone = shape.const_size 1
  %ci = shape.size_to_index %cs : !shape.size
  %is = shape.index_to_size %ci
  %d = shape.dim %x, %c0 : tensor<?x4xf32>, index -> index
  %add = shape.add %d, %ci : index, index -> index
  %mul = shape.mul %d, %b : index, index -> index
  %div = shape.div %mul, %ci : index, index -> index
  %max = shape.max %is, %cs : !shape.size, !shape.size -> !shape.size
  %maxi = shape.size_to_index %max : !shape.size
  %min = shape.min %s, %f : !shape.shape, !shape.shape -> !shape.shape
  %mins = shape.get_extent %min, %cone : !shape.shape, !shape.size -> !shape.size
  %mini = shape.size_to_index %mins : !shape.size
  %n = shape.num_elements %e : tensor<2xindex> -> index
  %p = shape.reduce(%e, %c1) : tensor<2xindex> -> index {
    ^bb0(%i: index, %ex: index, %acc: index):
      %q = shape.mul %ex, %acc : index, index -> index
      %q1 = shape.add %q, %i : index, index -> index
      shape.yield %q1 : index
  }
  %h, %tl = "shape.split_at"(%cc, %c1) : (tensor<?xindex>, index) -> (tensor<?xindex>, tensor<?xindex>)
  %0 = tensor.from_elements %a, %b, %r, %last, %add, %mul, %div, %maxi, %mini, %n, %p : tensor<11xindex>
  %ib = shape.is_broadcastable %e, %t : tensor<2xindex>, tensor<1xindex>
  %eq = shape.shape_eq %e, %g : tensor<2xindex>, tensor<2xindex>
  %ne = shape.shape_eq %e, %t : tensor<2xindex>, tensor<1xindex>
  %1 = tensor.from_elements %ib, %eq, %ne : tensor<3xi1>
  return %0, %1, %tl : tensor<11xindex>, tensor<3xi1>, tensor<?xindex>
}"""


def test_shape_arithmetic_matches_numpy():
    module = load(SIZES)
    for rows, length in ((2, 4), (3, 2), (1, 1)):
        numbers, tests, tail = module(array(rows, 4), array(length))
        elements = rows * 4
        assert numbers.tolist() == [rows, 4, 3, 4, rows + 5, elements, elements // 5, 5, 1, elements, elements + 1]
        assert tests.tolist() == [length in (1, 4), False, False]
        assert tail.tolist() == [1, length]


def test_constraints_are_checked_in_each_call():
    text = """func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>, %p: i1) -> tensor<?xf32> {
      %s = shape.shape_of %x : tensor<?xf32> -> tensor<1xindex>
      %t = shape.shape_of %y : tensor<?xf32> -> tensor<1xindex>
      %w = shape.cstr_eq %s, %t : tensor<1xindex>, tensor<1xindex>
      %v = shape.cstr_require %p, "p is {needed}"
      %u = shape.assuming_all %w, %v
      %0 = shape.assuming %u -> (tensor<?xf32>) {
        %1 = stablehlo.add %x, %y : tensor<?xf32>
        shape.assuming_yield %1 : tensor<?xf32>
      }
      return %0 : tensor<?xf32>
    }"""
    module = load(text)
    x = array(3)
    np.testing.assert_array_equal(module(x, x, np.bool_(True)), x + x)
    with pytest.raises(aotc.CallError, match=r"p is \{needed\}"):
        module(x, x, np.bool_(False))
    with pytest.raises(aotc.CallError, match="size"):
        module(x, x[:2], np.bool_(True))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%w = shape.const_witness false", "is always false"),
        ('%w = shape.cstr_require %f, "sizes fit"', "is always false: sizes fit"),
        ("%s = shape.const_shape [2] : tensor<1xindex>\n%t = shape.const_shape [3] : tensor<1xindex>\n"
         "%w = shape.cstr_broadcastable %s, %t : tensor<1xindex>, tensor<1xindex>", "sizes 2 and 3 cannot be"),
        ("%s = shape.const_shape [2] : tensor<1xindex>\n%t = shape.const_shape [3] : tensor<1xindex>\n"
         "%w = shape.cstr_eq %s, %t : tensor<1xindex>, tensor<1xindex>", "sizes 2 and 3 differ"),
        ("%s = shape.const_shape [2] : tensor<1xindex>\n%t = shape.const_shape [2, 3] : tensor<2xindex>\n"
         "%w = shape.cstr_eq %s, %t : tensor<1xindex>, tensor<2xindex>", "shapes of 1 and 2 sizes"),
        ("%s = shape.const_shape [2] : tensor<1xindex>\n%c5 = arith.constant 5 : index\n"
         "%e = shape.get_extent %s, %c5 : tensor<1xindex>, index -> index", "get_extent at 5 of a shape"),
        ("%s = shape.const_shape [2] : tensor<1xindex>\n"
         "%e = shape.get_extent %s, %n : tensor<1xindex>, index -> index", "is not a constant"),
        ('%v = "shape.value_of"(%z) : (!shape.value_shape) -> tensor<2xf32>', "shape.value_shape is not supported"),
    ],
)  # fmt: skip
def test_shapes_that_never_fit_are_refused(line, message):
    arguments = "%x: tensor<2xf32>, %n: index" + (", %z: !shape.value_shape" if "%z" in line else "")
    text = f"func.func @main({arguments}) -> tensor<2xf32> {{\n%f = arith.constant false\n{line}\n"
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(f"{text}return %x : tensor<2xf32>\n}}")
    assert "try:" in str(error.value)
