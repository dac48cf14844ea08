"""MLIR's ``scf`` and ``cf`` ops next to StableHLO, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.ir

X = np.float32([1, -2, 3, 4])


def load(text):
    return aotc.load(aotc.compile(text, opt_level=1))


FOR = """func.func @main(%x: tensor<4xf32>, %low: index, %high: index, %step: index) -> (tensor<4xf32>, index) {
  %zero = arith.constant 0 : index
  %0:2 = scf.for %i = %low to %high step %step iter_args(%a = %x, %n = %zero) -> (tensor<4xf32>, index) {
    %1 = stablehlo.add %a, %x : tensor<4xf32>
    %2 = arith.addi %n, %i : index
    scf.yield %1, %2 : tensor<4xf32>, index
  }
  return %0#0, %0#1 : tensor<4xf32>, index
}"""


@pytest.mark.parametrize("bounds", [(0, 4, 1), (3, 4, 1), (4, 4, 1), (5, 4, 1), (-3, 4, 2)])
def test_scf_for_matches_python(bounds):
    total, counts = load(FOR)(X, *map(np.int64, bounds))
    iterations = range(*bounds)
    np.testing.assert_array_equal(total, X * (1 + len(iterations)))
    assert counts == sum(iterations)


def test_a_negative_bound_of_an_unsigned_loop_is_large():
    text = FOR.replace("scf.for", "scf.for unsigned")
    with pytest.raises(CompileError, match="step of 0"):
        load(text.replace("step %step", "step %zero"))
    total, _ = load(text)(X, np.int64(-2), np.int64(-1), np.int64(1))
    np.testing.assert_array_equal(total, X * 2)
    total, _ = load(text)(X, np.int64(-1), np.int64(2), np.int64(1))
    np.testing.assert_array_equal(total, X)


WHILE = """func.func @main(%x: tensor<4xf32>, %n: i32) -> (i32, tensor<4xf32>) {
  %one = arith.constant 1 : i32
  %limit = arith.constant 100 : i32
  %0:2 = scf.while (%i = %n, %a = %x) : (i32, tensor<4xf32>) -> (i32, tensor<4xf32>) {
    %1 = arith.muli %i, %i : i32
    %2 = arith.cmpi slt, %1, %limit : i32
    scf.condition(%2) FORWARDED : i32, tensor<4xf32>
  } do {
  ^bb0(%j: i32, %b: tensor<4xf32>):
    %3 = stablehlo.add %b, %x : tensor<4xf32>
    %4 = arith.addi %j, %one : i32
    scf.yield %4, %3 : i32, tensor<4xf32>
  }
  return %0#0, %0#1 : i32, tensor<4xf32>
}"""


@pytest.mark.parametrize("start", [0, 7, 10, 40])
@pytest.mark.parametrize("forwarded", ["%i, %a", "%1, %a"])
def test_scf_while_tests_before_the_first_iteration(start, forwarded):
    i, a = start, X
    while True:
        square = i * i
        handed = i if forwarded[1] == "i" else square
        if not square < 100:
            break
        i, a = handed + 1, a + X
    count, total = load(WHILE.replace("FORWARDED", forwarded))(X, np.int32(start))
    assert count == handed
    np.testing.assert_array_equal(total, a)


def test_scf_while_may_change_its_types():
    text = """func.func @main(%n: i32) -> f32 {
      %one = arith.constant 1.0 : f32
      %0 = scf.while (%i = %n) : (i32) -> f32 {
        %1 = arith.sitofp %i : i32 to f32
        %2 = arith.cmpf olt, %1, %limit : f32
        scf.condition(%2) %1 : f32
      } do {
      ^bb0(%b: f32):
        %3 = arith.addf %b, %one : f32
        %4 = arith.fptosi %3 : f32 to i32
        scf.yield %4 : i32
      }
      return %0 : f32
    }""".replace("%one = ", "%limit = arith.constant 5.0 : f32\n      %one = ")
    module = load(text)
    assert [float(module(np.int32(n))) for n in (0, 5, 9)] == [5, 5, 9]


IF = """func.func @main(%x: tensor<4xf32>, %n: i64) -> tensor<4xf32> {
  %c3 = arith.constant 3 : i64
  %p = arith.cmpi sgt, %n, %c3 : i64
  %0 = scf.if %p -> (tensor<4xf32>) {
    %1 = stablehlo.negate %x : tensor<4xf32>
    scf.yield %1 : tensor<4xf32>
  } else {
    %k = arith.index_cast %n : i64 to index
    %2 = scf.index_switch %k -> tensor<4xf32>
    case 2 {
      %3 = stablehlo.abs %x : tensor<4xf32>
      scf.yield %3 : tensor<4xf32>
    }
    case -5 {
      %4 = stablehlo.sqrt %x : tensor<4xf32>
      scf.yield %4 : tensor<4xf32>
    }
    default {
      scf.yield %x : tensor<4xf32>
    }
    scf.yield %2 : tensor<4xf32>
  }
  %5 = scf.execute_region -> tensor<4xf32> {
    %6 = stablehlo.add %0, %x : tensor<4xf32>
    scf.yield %6 : tensor<4xf32>
  }
  return %5 : tensor<4xf32>
}"""


def test_scf_if_and_index_switch_match_numpy():
    module = load(IF)
    with np.errstate(invalid="ignore"):
        wanted = {4: -X, 2: np.abs(X), -5: np.sqrt(X), 0: X, 3: X}
    for n, value in wanted.items():
        np.testing.assert_array_equal(module(X, np.int64(n)), value + X)


def test_assertions_in_branches_are_checked():
    text = """func.func @main(%x: tensor<4xf32>, %p: i1, %q: i1) -> tensor<4xf32> {
      scf.if %p {
        cf.assert %q, "q must hold {0}"
      }
      return %x : tensor<4xf32>
    }"""
    module = load(text)
    for p, q in ((True, True), (False, False), (False, True)):
        np.testing.assert_array_equal(module(X, np.bool_(p), np.bool_(q)), X)
    with pytest.raises(aotc.CallError, match=r"q must hold \{0\}"):
        module(X, np.bool_(True), np.bool_(False))


def test_branches_of_different_sizes_are_refused():
    text = """func.func @main(%x: tensor<?xf32>, %y: tensor<?xf32>, %p: i1) -> tensor<?xf32> {
      %0 = scf.if %p -> (tensor<?xf32>) {
        scf.yield %x : tensor<?xf32>
      } else {
        scf.yield %y : tensor<?xf32>
      }
      return %0 : tensor<?xf32>
    }"""
    module = load(text)
    np.testing.assert_array_equal(module(X, -X, np.bool_(False)), -X)
    with pytest.raises(aotc.CallError, match="sizes"):
        module(X, X[:2], np.bool_(False))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("%0 = scf.forall (%i) in (4) shared_outs(%o = %x) -> (tensor<4xf32>) { scf.forall.in_parallel {} }",
         "scf.forall on"),
        ("cf.br ^bb1\n^bb1:\n%0 = stablehlo.abs %x : tensor<4xf32>", "cf.br on"),
        ("%0 = scf.execute_region -> tensor<4xf32> {\ncf.br ^bb1\n^bb1:\nscf.yield %x : tensor<4xf32>\n}",
         "scf.execute_region of 2 blocks"),
        ('%0 = "stablehlo.map"(%x) ({\n^bb0(%a: tensor<f32>):\n%c0 = arith.constant 0 : index\n'
         "%c1 = arith.constant 1 : index\n%1 = scf.for %i = %c0 to %c1 step %c1 iter_args(%b = %a) -> (tensor<f32>) {\n"
         "scf.yield %b : tensor<f32>\n}\nstablehlo.return %1 : tensor<f32>\n}) {dimensions = array<i64: 0>} "
         ": (tensor<4xf32>) -> tensor<4xf32>", "scf.for in the computation of another op"),
    ],
)  # fmt: skip
def test_unsupported_control_flow_is_refused(lines, message):
    with pytest.raises(CompileError, match=message) as error:
        aotc.compile(f"func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {{\n{lines}\nreturn %0 : tensor<4xf32>\n}}")
    assert "try:" in str(error.value)
