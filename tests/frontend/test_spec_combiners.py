"""Computations over scalars that hold loops, calls and constants: no frontend writes them, the specification has them.

XLA on the CPU ends the process on some of these; the expected values are NumPy's.
"""

import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret

pytestmark = [pytest.mark.cpu]

LOOP = """
     %i0 = stablehlo.constant dense<0> : tensor<i32>
     %n = stablehlo.constant dense<2> : tensor<i32>
     %one = stablehlo.constant dense<1> : tensor<i32>
     %w:2 = stablehlo.while(%i = %i0, %v = %a) : tensor<i32>, tensor<f32>
      cond {
        %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %half = stablehlo.constant dense<0.5> : tensor<f32>
        %m = stablehlo.multiply %b, %half : tensor<f32>
        %s = stablehlo.add %v, %m : tensor<f32>
        %j = stablehlo.add %i, %one : tensor<i32>
        stablehlo.return %j, %s : tensor<i32>, tensor<f32>
      }
"""
"""``%w#1`` is ``%a + %b``, in two steps."""

REDUCE = """
func.func @main(%x: tensor<5x4xf32>, %z: tensor<f32>) -> tensor<4xf32> {
  %r = stablehlo.reduce(%x init: %z) across dimensions = [0] : (tensor<5x4xf32>, tensor<f32>) -> tensor<4xf32>
   reducer(%a: tensor<f32>, %b: tensor<f32>) {
     LOOP
     stablehlo.return %w#1 : tensor<f32>
   }
  return %r : tensor<4xf32>
}"""

WINDOW = """
func.func @main(%x: tensor<6xf32>, %z: tensor<f32>) -> tensor<4xf32> {
  %r = "stablehlo.reduce_window"(%x, %z) <{window_dimensions = array<i64: 3>}> ({
   ^bb0(%a: tensor<f32>, %b: tensor<f32>):
     LOOP
     stablehlo.return %w#1 : tensor<f32>
  }) : (tensor<6xf32>, tensor<f32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}"""

SCATTER = """
func.func @main(%x: tensor<4xf32>, %at: tensor<6x1xi32>, %u: tensor<6xf32>) -> tensor<4xf32> {
  %r = "stablehlo.scatter"(%x, %at, %u) <{scatter_dimension_numbers = #stablehlo.scatter<
      inserted_window_dims = [0], scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}> ({
   ^bb0(%a: tensor<f32>, %b: tensor<f32>):
     LOOP
     stablehlo.return %w#1 : tensor<f32>
  }) : (tensor<4xf32>, tensor<6x1xi32>, tensor<6xf32>) -> tensor<4xf32>
  return %r : tensor<4xf32>
}"""

SORT = """
func.func @main(%x: tensor<6xi32>) -> tensor<6xi32> {
  %r = "stablehlo.sort"(%x) <{dimension = 0 : i64, is_stable = true}> ({
   ^bb0(%a: tensor<i32>, %b: tensor<i32>):
     %z = stablehlo.constant dense<0> : tensor<i32>
     %one = stablehlo.constant dense<1> : tensor<i32>
     %w:3 = stablehlo.while(%p = %a, %q = %b, %c = %z) : tensor<i32>, tensor<i32>, tensor<i32>
      cond {
        %t = stablehlo.or %p, %q : tensor<i32>
        %g = stablehlo.compare NE, %t, %z : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %g : tensor<i1>
      } do {
        %p1 = stablehlo.and %p, %one : tensor<i32>
        %q1 = stablehlo.and %q, %one : tensor<i32>
        %d = stablehlo.subtract %p1, %q1 : tensor<i32>
        %e = stablehlo.add %c, %d : tensor<i32>
        %p2 = stablehlo.shift_right_logical %p, %one : tensor<i32>
        %q2 = stablehlo.shift_right_logical %q, %one : tensor<i32>
        stablehlo.return %p2, %q2, %e : tensor<i32>, tensor<i32>, tensor<i32>
      }
     %l = stablehlo.compare LT, %w#2, %z : (tensor<i32>, tensor<i32>) -> tensor<i1>
     stablehlo.return %l : tensor<i1>
   }) : (tensor<6xi32>) -> tensor<6xi32>
  return %r : tensor<6xi32>
}"""

MAP = """
func.func @main(%x: tensor<7xf32>, %k: tensor<7xi32>) -> tensor<7xf32> {
  %r = "stablehlo.map"(%x, %k) <{dimensions = array<i64: 0>}> ({
   ^bb0(%a: tensor<f32>, %n: tensor<i32>):
     %i0 = stablehlo.constant dense<0> : tensor<i32>
     %one = stablehlo.constant dense<1> : tensor<i32>
     %w:2 = stablehlo.while(%i = %i0, %v = %a) : tensor<i32>, tensor<f32>
      cond {
        %p = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
        stablehlo.return %p : tensor<i1>
      } do {
        %s = stablehlo.add %v, %v : tensor<f32>
        %j = stablehlo.add %one, %i : tensor<i32>
        stablehlo.return %j, %s : tensor<i32>, tensor<f32>
      }
     %y = func.call @less_one(%w#1) : (tensor<f32>) -> tensor<f32>
     stablehlo.return %y : tensor<f32>
   }) : (tensor<7xf32>, tensor<7xi32>) -> tensor<7xf32>
  return %r : tensor<7xf32>
}
func.func private @less_one(%x: tensor<f32>) -> tensor<f32> {
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %y = stablehlo.subtract %x, %one : tensor<f32>
  return %y : tensor<f32>
}"""

X = np.arange(20, dtype=np.float32).reshape(5, 4) - 7
BITS = np.array([7, 1, 255, 6, 0, 3], np.int32)
PLACES = np.array([[0], [3], [0], [9], [1], [0]], np.int32)
TIMES = np.array([0, 1, 5, 2, -1, 3, 9], np.int32)
DOUBLED = np.arange(7, dtype=np.float32)

CASES = {
    "reduce": (REDUCE, (X, np.float32(3)), X.sum(0) + 3),
    "reduce_window": (WINDOW, (X[0].repeat(2)[:6], np.float32(0)), np.convolve(X[0].repeat(2)[:6], [1, 1, 1], "valid")),
    "scatter": (SCATTER, (X[0], PLACES, np.arange(6, dtype=np.float32)), X[0] + np.float32([7, 4, 0, 1])),
    "sort": (SORT, (BITS,), np.array([0, 1, 6, 3, 7, 255], np.int32)),
    "map": (MAP, (DOUBLED, TIMES), DOUBLED * np.float32(2) ** np.maximum(TIMES, 0) - 1),
}


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("name", CASES)
def test_a_loop_in_a_combiner_runs_per_element(name, level):
    text, arrays, want = CASES[name]
    module = aotc.load(aotc.compile(text.replace("LOOP", LOOP).encode(), opt_level=level, verify_each=True))
    np.testing.assert_allclose(module.invoke("main", *arrays)[0], want)


@pytest.mark.parametrize("name", CASES)
def test_the_reference_interpreter_runs_loops_in_combiners(name):
    text, arrays, want = CASES[name]
    np.testing.assert_allclose(interpret(import_model(text.replace("LOOP", LOOP)), *arrays)[0], want)
