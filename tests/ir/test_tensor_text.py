"""The text form: round trips of what importing never makes, and errors that name the line."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import floordiv, maximum, sym
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.ir.tensor.text import parse_dim, parse_module, print_module

pytestmark = pytest.mark.ir

B = sym("b")


def constant(name, value):
    return Op("constant", (), (Value(name, TensorType(*value)),), {"value": value_of(value)})


def value_of(value):
    return value


def module_of(*ops, params=(), results=(), **functions):
    body = Region(tuple(params), tuple(ops), tuple(results))
    return Module({"main": Function("main", body, True), **functions})


def round_trip(module):
    constants = {}
    text = print_module(module, constants)
    again = parse_module(text, constants)
    assert print_module(again, {}) == text
    return again, text, constants


def dispatch_module(dtype="f32"):
    """Return a module with a fused private function that is dispatched."""
    t = TensorType("f32", (B, 2 * B + 1))
    x, y, inner, doubled = Value("x", t), Value("y", t), Value("p", t), Value("d", t)
    attrs = {"kind": "loop", "root": 'add "quoted" // here', "sizes": (1, 2), "cost": 1.5, "flag": True}
    kernel = Function(
        "main_loop_0", Region((inner,), (Op("add", (inner, inner), (doubled,)),), (doubled,)), False, attrs
    )
    z = Value("z", TensorType(dtype, t.shape))
    loc = Loc("m.mlir", 3, 4, "jit(f)/add", "train.py:41")
    call = Op("dispatch", (x,), (z,), {"callee": "main_loop_0"}, (), loc)
    return module_of(call, params=(x, y), results=(z, y), main_loop_0=kernel)


def test_dispatches_and_private_functions_round_trip():
    module = dispatch_module()
    assert verify(module) == []
    again, text, _ = round_trip(module)
    kernel = again.functions["main_loop_0"]
    assert kernel.attrs == module.functions["main_loop_0"].attrs
    assert not kernel.public
    assert "f32[b, 2*b + 1]" in text
    (op,) = again.functions["main"].body.ops
    assert (op.loc.name, op.loc.source) == ("jit(f)/add", "train.py:41")
    x = np.ones((2, 5), np.float32)
    np.testing.assert_array_equal(interpret(again, x, x)[0], 2 * x)


def test_a_dispatch_must_match_its_callee():
    findings = verify(dispatch_module("f64"))
    assert len(findings) == 1
    assert "main_loop_0" in findings[0].message


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        ("f32", np.array([math.inf, -math.inf, math.nan, -0.0, 1e-45, 3.4e38], np.float32)),
        ("f64", np.array(0.1)),
        ("bf16", np.array([1.5, math.nan, -0.0], ml_dtypes.bfloat16)),
        ("f8E4M3FN", np.array([1.5, 448.0], ml_dtypes.float8_e4m3fn)),
        ("i4", np.array([-8, 7], ml_dtypes.int4)),
        ("i1", np.array([True, False])),
        ("u64", np.array([2**64 - 1], np.uint64)),
        ("i64", np.array([-(2**63)])),
        ("c64", np.array([1 + 2j, complex(math.nan, -math.inf)], np.complex64)),
        ("f32", np.zeros((0, 3), np.float32)),
        ("f32", np.arange(1000, dtype=np.float32).reshape(10, 100)),
        ("bf16", np.arange(100).astype(ml_dtypes.bfloat16)),
    ],
)
def test_constants_round_trip_bit_for_bit(dtype, value):
    v = Value("c", TensorType(dtype, value.shape))
    module = module_of(Op("constant", (), (v,), {"value": value}), results=(v,))
    again, text, constants = round_trip(module)
    found = again.functions["main"].body.ops[0].attrs["value"]
    assert found.dtype == value.dtype
    assert found.shape == value.shape
    assert found.tobytes() == value.tobytes()
    assert bool(constants) == (value.size > 16)
    assert ("sha256:" in text) == bool(constants)
    full = parse_module(print_module(module, full=True))
    assert full.functions["main"].body.ops[0].attrs["value"].tobytes() == value.tobytes()


def test_nested_regions_and_captures_round_trip():
    text = """module @main {
func public @main(%x: f32[b], %n: i32[]) {
  %zero = constant {value = dense("i32", (), [0])} : i32[]
  %0, %1 = while %zero, %x : i32[], f32[b] {
    region(%i: i32[], %v: f32[b]) {
      %t = lt %i, %n : i1[]
      yield %t
    }
    region(%j: i32[], %w: f32[b]) {
      %one = constant {value = dense("i32", (), [1])} : i32[]
      %next = add %j, %one : i32[]
      %y = case %j : f32[b] {
        region() {
          %a = add %w, %x : f32[b]
          yield %a
        }
        region() {
          yield %w
        }
      }
      yield %next, %y
    }
  }
  return %1
}
}
"""
    module = parse_module(text)
    assert verify(module) == []
    assert print_module(module) == text
    x = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(interpret(module, x, np.int32(4))[0], 2 * x)


def test_values_with_equal_names_are_renamed():
    t = TensorType("f32", (3,))
    a, b, c = Value("v", t), Value("v", t), Value("v", t)
    again, _, _ = round_trip(module_of(Op("neg", (a,), (b,)), Op("sub", (b, a), (c,)), params=(a,), results=(c,)))
    x = np.ones(3, np.float32)
    np.testing.assert_array_equal(interpret(again, x)[0], -2 * x)


def test_messages_with_braces_and_slashes_round_trip():
    test = Value("t", TensorType("i1"))
    attrs = {"message": 'size {0} : "x"  // must {be} = 1 } : f32[2] {'}
    again, _, _ = round_trip(module_of(Op("assert", (test,), (), attrs), params=(test,)))
    assert again.functions["main"].body.ops[0].attrs == attrs


@pytest.mark.parametrize(
    "dim",
    [
        3,
        B,
        2 * B + 1,
        floordiv(B + 3, 4),
        B % 7,
        maximum(B, sym("n")),
        (B + 1) * (sym("n") - 2),
        floordiv(B, 2) * 3 - B,
    ],
)
def test_dims_in_text_parse_back(dim):
    assert parse_dim(str(dim)) == dim


@pytest.mark.parametrize("text", ["", "1.5", "f(b)", "'x'", "b +", "b ** 2"])
def test_invalid_dims_are_refused(text):
    with pytest.raises((ValueError, SyntaxError)):
        parse_dim(text)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("%1 = add %x, %unknown : f32[2]", "unknown"),
        ("%1 = add %x, %x", "results but 0 types"),
        ("what is this", "expected"),
        ("%1 = neg %x {a = import} : f32[2]", "line cannot be read"),
        ('%1 = constant {value = dense("f32", (99,), "sha256:00")} : f32[99]', "sha256:00"),
    ],
)
def test_invalid_lines_are_reported_with_their_line(line, message):
    text = f"module @main {{\nfunc public @main(%x: f32[2]) {{\n  {line}\n  return %x\n}}\n}}\n"
    with pytest.raises(CompileError, match=message) as error:
        parse_module(text, path="bad.txt")
    assert error.value.findings[0].loc.line == 3


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("%1 = add %x, %y : f32[2]", "add"),
        ("%1 = transpose %x {perm = (0, 0)} : f32[2]", "perm"),
        ("%1 = neg %x : f32[3]", "f32\\[2\\]"),
        ("%1 = neg %x, %x : f32[2]", "neg"),
        ("%1 = frobnicate %x : f32[2]", "frobnicate"),
        ('%1 = call %x {callee = "nobody"} : f32[2]', "nobody"),
        ("%1 = reverse %x : f32[2]", "dims"),
        ("%1 = reduce %x, %x {dims = (0,)} : f32[]", "reduce"),
    ],
)
def test_the_verifier_finds_invalid_ops(body, message):
    text = f"module @main {{\nfunc public @main(%x: f32[2], %y: f32[3]) {{\n  {body}\n  return %x\n}}\n}}\n"
    findings = verify(parse_module(text))
    assert findings
    assert any(__import__("re").search(message, f.message) for f in findings)


def test_a_value_of_an_inner_region_is_not_visible_outside():
    t = TensorType("f32")
    pred, inner, out = Value("p", TensorType("i32")), Value("i", t), Value("o", t)
    source = Op("constant", (), (inner,), {"value": np.float32(1).reshape(())})
    case = Op("case", (pred,), (out,), {}, (Region((), (source,), (inner,)),))
    again = Value("again", t)
    findings = verify(module_of(case, Op("neg", (inner,), (again,)), params=(pred,), results=(again,)))
    assert any("before its use" in f.message for f in findings)
