"""Checks come first: what a call does, and touches, when one fails."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import aotc
from aotc.ir.tensor.text import parse_module
from aotc.lowering.passes.advance_checks import advance_checks
from aotc.options import Options
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu

EFFECTS = """module @m {
func public @main(%x: f32[4]) {
  %y = exp %x : f32[4]
  %0 = custom_call %x {target = "first", has_side_effect = True} : f32[4]
  %1 = custom_call %x {target = "second", has_side_effect = True} : i1[]
  %2 = custom_call %x {target = "third", has_side_effect = True} : f32[4]
  assert %1 {message = "second says no"}
  %z = add %y, %2 : f32[4]
  return %z, %0
}
}"""


def test_calls_with_side_effects_keep_their_order():
    ops = advance_checks(parse_module(EFFECTS), Options()).functions["main"].body.ops
    assert [op.attrs.get("target", op.name) for op in ops] == ["first", "second", "assert", "exp", "third", "add"]


def checked_first(x, w):
    y = jnp.tanh(x @ w)
    checkify.check(x[0, 0] > 0, "x begins with {}", x[0, 0])
    return y, jnp.sort(x, 1)


def checked_in_between(x, w):
    y = jnp.tanh(x @ w)
    checkify.check(y[0, 0] > 0, "y begins with {}", y[0, 0])
    return y, jnp.sort(x, 1)


def checked_in_a_loop(x, w):
    def step(i, y):
        checkify.check(y[0, 0] > 0, "turn {} begins with {}", i, y[0, 0])
        return jnp.tanh(y @ w)

    return jax.lax.fori_loop(0, 3, step, x), jnp.sort(x, 1)


SHAPE_FROM_MEMORY = b"""
func.func @main(%x: tensor<4x4xf32>, %w: tensor<4x4xf32>) -> (tensor<?x4xf32>, tensor<4x4xf32>) {
  %y = stablehlo.exponential %x : tensor<4x4xf32>
  %s = stablehlo.slice %x [0:1, 0:1] : (tensor<4x4xf32>) -> tensor<1x1xf32>
  %n = stablehlo.convert %s : (tensor<1x1xf32>) -> tensor<1x1xi32>
  %a = stablehlo.reshape %n : (tensor<1x1xi32>) -> tensor<1xi32>
  %four = stablehlo.constant dense<4> : tensor<1xi32>
  %b = stablehlo.concatenate %a, %four, dim = 0 : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
  %r = stablehlo.dynamic_broadcast_in_dim %w, %b, dims = [0, 1] : (tensor<4x4xf32>, tensor<2xi32>) -> tensor<?x4xf32>
  return %r, %y : tensor<?x4xf32>, tensor<4x4xf32>
}"""


# a program, what does not run when it fails, what it says; x begins with -1, or with 3
CASES = {
    "first": (checked_first, ("matmul", "sort"), -1, "x begins with -1"),
    "in between": (checked_in_between, ("sort",), -1, "y begins with -"),
    "in a loop": (checked_in_a_loop, ("sort",), -1, "turn 0 begins with -1"),
    "a negative size": (SHAPE_FROM_MEMORY, ("exponential", "broadcast"), -1, "a size is negative: -1"),
    "a size that does not fit": (SHAPE_FROM_MEMORY, ("exponential", "broadcast"), 3, "broadcast of size 4 to size 3"),
}


@pytest.mark.parametrize("name", CASES)
def test_no_kernel_runs_after_a_failed_check(name, tmp_path):
    model, never, first, message = CASES[name]
    x, w, out = np.full((4, 4), 4, np.float32), np.eye(4, dtype=np.float32), np.full((2, 4, 4), 7, np.float32)
    arguments = () if isinstance(model, bytes) else (x, w)
    loaded = aotc.load(aotc.compile(model, *arguments, verify_each=True))._functions["main"]
    loaded.run([x, w], out=list(out))
    assert (out != 7).all()
    out[...] = 7
    x[0, 0] = first
    with pytest.raises(CallError, match=message):
        loaded.run([x, w], out=list(out))
    assert (out == 7).all()
    with pytest.raises(CallError, match=message):
        loaded.trace([x, w], tmp_path)
    ran = " ".join(path.name for path in tmp_path.iterdir())
    assert ran
    assert not any(kernel in ran for kernel in never)
