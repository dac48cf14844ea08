"""Bounded dynamism as torch_xla writes it: sizes below ``#stablehlo.bounds`` through static ops, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest

import aotc
from aotc.diagnostics import CompileError

pytestmark = pytest.mark.ir

RNG = np.random.default_rng(5)
X = RNG.standard_normal((8, 4)).astype(np.float32)
B = "tensor<?x4xf32, #stablehlo.bounds<8, ?>>"


def load(line, result, arguments=f"%x: {B}", names="%0"):
    text = f"func.func @main({arguments}) -> ({result}) {{\n{line}\nreturn {names} : {result}\n}}"
    return aotc.load(aotc.compile(text, opt_level=1))


def shaped(shape, bounds):
    return f"tensor<{shape}xf32, #stablehlo.bounds<{bounds}>>"


@pytest.mark.parametrize(
    ("op", "result", "function"),
    [
        ("reshape %x", shaped("?", "32"), lambda x: x.reshape(-1)),
        ("reshape %x", shaped("?x2x2", "8, ?, ?"), lambda x: x.reshape(-1, 2, 2)),
        ("broadcast_in_dim %x, dims = [0, 1]", shaped("?x4x3", "8, ?, ?"), lambda x: np.stack([x] * 3, -1)),
        ("slice %x [0:8, 1:3]", shaped("?x2", "8, ?"), lambda x: x[:, 1:3]),
        ("transpose %x, dims = [1, 0]", shaped("4x?", "?, 8"), lambda x: x.T),
        ("reverse %x, dims = [0]", B, lambda x: x[::-1]),
    ],
)
def test_static_ops_keep_the_size_of_a_bounded_dim(op, result, function):
    signature = B if op.startswith("reverse") else f"({B}) -> {result}"
    module = load(f"%0 = stablehlo.{op} : {signature}", result)
    for rows in (0, 1, 5, 8):
        np.testing.assert_array_equal(module(X[:rows]), function(X[:rows]))


def test_a_slice_beyond_a_bounded_dim_is_refused():
    module = load(f"%0 = stablehlo.slice %x [0:3, 0:4] : ({B}) -> tensor<3x4xf32>", "tensor<3x4xf32>")
    np.testing.assert_array_equal(module(X[:5]), X[:3])
    with pytest.raises(aotc.CallError, match=r"stablehlo\.slice"):
        module(X[:2])


def test_a_dim_may_grow_up_to_its_bound():
    module = load(
        f"""%0 = stablehlo.set_dimension_size %x, %n, dim = 0 : (tensor<8x4xf32>, tensor<i32>) -> {B}
        %1 = stablehlo.add %0, %0 : {B}
        %k = stablehlo.get_dimension_size %1, dim = 0 : ({B}) -> tensor<i32>
        %2 = stablehlo.set_dimension_size %1, %m, dim = 0 : ({B}, tensor<i32>) -> {B}
        %c = stablehlo.constant dense<8> : tensor<i32>
        %3 = stablehlo.set_dimension_size %2, %c, dim = 0 : ({B}, tensor<i32>) -> tensor<8x4xf32>""",
        f"tensor<i32>, {B}, tensor<8x4xf32>", "%x: tensor<8x4xf32>, %n: tensor<i32>, %m: tensor<i32>", "%k, %2, %3",
    )  # fmt: skip
    for n, m in ((5, 3), (3, 6), (0, 8), (8, 8), (8, 0)):
        size, grown, whole = module(X, np.int32(n), np.int32(m))
        assert size == n
        assert grown.shape == (m, 4)
        assert whole.shape == (8, 4)
        common = min(n, m)
        np.testing.assert_array_equal(grown[:common], 2 * X[:common])
        np.testing.assert_array_equal(whole[:common], 2 * X[:common])
    for n, m in ((9, 1), (1, 9), (-1, 1), (1, -1)):
        with pytest.raises(aotc.CallError):
            module(X, np.int32(n), np.int32(m))


def test_bounds_of_inner_results_are_checked_at_a_call():
    wide = shaped("?x4", "9, ?")
    module = load(f"%0 = stablehlo.concatenate %x, %y, dim = 0 : ({B}, tensor<2x4xf32>) -> {wide}", wide,
                  f"%x: {B}, %y: tensor<2x4xf32>")  # fmt: skip
    np.testing.assert_array_equal(module(X[:7], X[:2]), np.concatenate([X[:7], X[:2]]))
    with pytest.raises(aotc.CallError, match="a size of 10 in its result, of which the type allows 9"):
        module(X, X[:2])


@pytest.mark.parametrize(
    ("op", "result", "message"),
    [
        ("broadcast_in_dim %s, dims = [] : (tensor<f32>)", B, "nothing states a size"),
        (f"reshape %x : ({B})", shaped("?x0", "8, ?"), "do not follow from the elements"),
    ],
)
def test_results_of_unstated_size_are_refused(op, result, message):
    with pytest.raises(CompileError, match=message):
        load(f"%0 = stablehlo.{op} -> {result}", result, f"%x: {B}, %s: tensor<f32>")
