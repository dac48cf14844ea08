"""Floats of 4, 6 and 8 bits in movement, reductions, products and whole functions, beside XLA or ml_dtypes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check
from support.small_floats import QUICK, codes, mlir_name, nearest, program, run, same, tensor, total_order

from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.vmfb.dtypes import DTYPES, to_numpy

pytestmark = pytest.mark.cpu


def values_of(dtype: str, *shape: int, seed: int = 0) -> np.ndarray:
    """Return values of which sums and products of a few are exact in f32."""
    rng = np.random.default_rng(seed)
    if dtype == "f8E8M0FNU":
        return np.exp2(rng.integers(-4, 5, shape)).astype(to_numpy(dtype))
    return (rng.integers(-4, 5, shape) / 2).astype(to_numpy(dtype))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_movement_keeps_every_bit(dtype, level):
    every = codes(dtype)
    a = np.resize(every[np.random.default_rng(1).permutation(every.size)], (6, 8)).copy()
    at = np.array([[2, 3], [0, 1], [5, 7]], np.int32)
    t, whole = mlir_name(dtype), tensor(a)
    bits = DTYPES[dtype].bits
    lines = [
        f"%0 = stablehlo.transpose %a, dims = [1, 0] : ({whole}) -> tensor<8x6x{t}>",
        f"%1 = stablehlo.slice %a [1:6:2, 2:8] : ({whole}) -> tensor<3x6x{t}>",
        f"%2 = stablehlo.reverse %a, dims = [0] : {whole}",
        f"%3 = stablehlo.concatenate %a, %a, dim = 1 : ({whole}, {whole}) -> tensor<6x16x{t}>",
        f"%4 = stablehlo.broadcast_in_dim %a, dims = [0, 2] : ({whole}) -> tensor<6x3x8x{t}>",
        f"%z = stablehlo.constant dense<1.0> : tensor<{t}>",
        "%5 = stablehlo.pad %a, %z, low = [1, 0], high = [0, 2], interior = [0, 1]"
        f" : ({whole}, tensor<{t}>) -> tensor<7x17x{t}>",
        f"%6 = \"stablehlo.gather\"(%a, %b) <{{dimension_numbers = #stablehlo.gather<collapsed_slice_dims = [0, 1],"
        f" start_index_map = [0, 1], index_vector_dim = 1>, slice_sizes = array<i64: 1, 1>}}>"
        f" : ({whole}, {tensor(at)}) -> tensor<3x{t}>",
        f"%c = stablehlo.constant dense<[{', '.join(['1.0', '2.0', '0.5'] * 2 + ['4.0', '1.0'])}]> : tensor<8x{t}>",
        f"%7 = stablehlo.reshape %c : (tensor<8x{t}>) -> tensor<2x4x{t}>",
        "%i = stablehlo.iota dim = 1 : tensor<6x8xi32>",
        "%two = stablehlo.constant dense<3> : tensor<6x8xi32>",
        "%p = stablehlo.compare LT, %i, %two : (tensor<6x8xi32>, tensor<6x8xi32>) -> tensor<6x8xi1>",
        f"%back = stablehlo.reverse %a, dims = [1] : {whole}",
        f"%8 = stablehlo.select %p, %a, %back : tensor<6x8xi1>, {whole}",
        "%s = stablehlo.constant dense<2> : tensor<i32>",
        "%9 = stablehlo.dynamic_slice %a, %s, %s, sizes = [3, 4]"
        f" : ({whole}, tensor<i32>, tensor<i32>) -> tensor<3x4x{t}>",
        "%10 = stablehlo.dynamic_update_slice %a, %9, %s, %s"
        f" : ({whole}, tensor<3x4x{t}>, tensor<i32>, tensor<i32>) -> {whole}",
    ]
    shapes = ("8x6", "3x6", "6x8", "6x16", "6x3x8", "7x17", "3", "2x4", "6x8", "3x4", "6x8")
    types = [f"tensor<{s}x{t}>" for s in shapes]
    if bits != 6:
        lines += [f"%11 = stablehlo.bitcast_convert %a : ({whole}) -> tensor<6x8xui{bits}>",
                  f"%12 = stablehlo.bitcast_convert %11 : (tensor<6x8xui{bits}>) -> {whole}"]  # fmt: skip
        types += [f"tensor<6x8xui{bits}>", whole]
    got = run(program(lines, [a, at], types), a, at, level=level)
    one = np.array(1.0).astype(a.dtype)
    padded = np.full((7, 17), one)
    padded[1:, 0:15:2] = a
    constant = np.array([1, 2, 0.5, 1, 2, 0.5, 4, 1]).astype(a.dtype).reshape(2, 4)
    chosen = np.where(np.arange(8) < 3, a, a[:, ::-1])
    updated = a.copy()
    updated[2:5, 2:6] = a[2:5, 2:6]
    want = [a.T, a[1:6:2, 2:8], a[::-1], np.concatenate([a, a], 1), np.repeat(a[:, None], 3, 1), padded,
            a[tuple(at.T)], constant, chosen, a[2:5, 2:6], updated, a.view(np.uint8), a]  # fmt: skip
    for n, (x, y) in enumerate(zip(got, want)):
        assert x.shape == y.shape
        assert x.tobytes() == np.ascontiguousarray(y).tobytes(), lines[n]


def region(op: str, t: str) -> str:
    return f"""({{ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>):
      %r = stablehlo.{op} %x, %y : tensor<{t}>
      stablehlo.return %r : tensor<{t}> }})"""


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_reductions_scatter_and_sort(dtype, level):
    a, update = values_of(dtype, 6, 8), values_of(dtype, 3, 8, seed=1)
    at = np.array([[4], [0], [4]], np.int32)
    t, whole = mlir_name(dtype), tensor(a)
    lines = [f"%z = stablehlo.constant dense<1.0> : tensor<{t}>"]
    for n, op in enumerate(("add", "maximum", "minimum")):
        lines.append(f'%{n} = "stablehlo.reduce"(%a, %z) {region(op, t)} {{dimensions = array<i64: 1>}}'
                     f" : ({whole}, tensor<{t}>) -> tensor<6x{t}>")  # fmt: skip
    lines.append(f'%3 = "stablehlo.reduce_window"(%a, %z) {region("maximum", t)}'
                 f" {{window_dimensions = array<i64: 2, 3>}} : ({whole}, tensor<{t}>) -> tensor<5x6x{t}>")  # fmt: skip
    lines.append('%4 = "stablehlo.scatter"(%a, %b, %c) <{scatter_dimension_numbers = #stablehlo.scatter<'
                 "update_window_dims = [1], inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],"
                 " index_vector_dim = 1>}> "
                 f"{region('maximum', t)} : ({whole}, {tensor(at)}, {tensor(update)}) -> {whole}")  # fmt: skip
    lines.append(f"""%5 = "stablehlo.sort"(%a) ({{ ^bb0(%x: tensor<{t}>, %y: tensor<{t}>):
      %r = stablehlo.compare LT, %x, %y, TOTALORDER : (tensor<{t}>, tensor<{t}>) -> tensor<i1>
      stablehlo.return %r : tensor<i1> }}) {{dimension = 1 : i64, is_stable = true}} : ({whole}) -> {whole}""")
    lines.append(f"%6 = stablehlo.iota dim = 1 : tensor<6x5x{t}>")
    types = [f"tensor<{s}x{t}>" for s in ("6", "6", "6", "5x6", "6x8", "6x8", "6x5")]
    text = program(lines, [a, at, update], types)
    got = run(text, a, at, update, level=level)
    wide = a.astype(np.float64)
    windows = np.lib.stride_tricks.sliding_window_view(wide, (2, 3)).max((2, 3))
    scattered = wide.copy()
    for k, row in zip(at[:, 0], update.astype(np.float64)):
        scattered[k] = np.maximum(scattered[k], row)
    want = [wide.sum(1) + 1, np.maximum(wide.max(1), 1), np.minimum(wide.min(1), 1), np.maximum(windows, 1), scattered,
            np.sort(wide, 1), np.broadcast_to(np.arange(5.0), (6, 5))]  # fmt: skip
    for n, (x, y, z) in enumerate(zip(got, want, interpret(import_model(text), a, at, update), strict=True)):
        if n == 6 and dtype == "f8E8M0FNU":
            x, y, z = x[:, 1:], y[:, 1:], z[:, 1:]  # it has no 0
        same(x, nearest(y, dtype), lines[n + 1])
        same(z, nearest(y, dtype), f"the interpreter's {lines[n + 1]}")


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", QUICK)
def test_products_sum_in_f32_and_round_once(dtype, level):
    lhs, rhs = values_of(dtype, 33, 40), values_of(dtype, 40, 50, seed=1)
    image, kernel = values_of(dtype, 2, 9, 9, 8, seed=2), values_of(dtype, 3, 3, 8, 16, seed=3)
    t = mlir_name(dtype)
    lines = []
    for n, result in enumerate((t, "f32", "bf16")):
        lines.append(f"%{n} = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]"
                     f" : ({tensor(lhs)}, {tensor(rhs)}) -> tensor<33x50x{result}>")  # fmt: skip
    got = run(program(lines, [lhs, rhs], [f"tensor<33x50x{r}>" for r in (t, "f32", "bf16")]), lhs, rhs, level=level)
    exact = lhs.astype(np.float64) @ rhs.astype(np.float64)
    same(got[0], nearest(exact, dtype))
    same(got[1], exact.astype(np.float32))
    same(got[2], exact.astype(ml_dtypes.bfloat16))
    line = (f"%0 = stablehlo.convolution(%a, %b) dim_numbers = [b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f], window = {{}}"
            f" {{batch_group_count = 1 : i64, feature_group_count = 1 : i64}}"
            f" : ({tensor(image)}, {tensor(kernel)}) -> tensor<2x7x7x16x{t}>")  # fmt: skip
    (found,) = run(program([line], [image, kernel], [f"tensor<2x7x7x16x{t}>"]), image, kernel, level=level)
    patches = np.lib.stride_tricks.sliding_window_view(image.astype(np.float64), (3, 3), (1, 2))
    same(found, nearest(np.einsum("nijcuv,uvco->nijo", patches, kernel.astype(np.float64)), dtype))


@pytest.mark.parametrize("dtype", QUICK)
def test_top_k_takes_the_last_in_total_order(dtype):
    every = codes(dtype)
    x = every[np.random.default_rng(3).permutation(every.size)].copy()
    types = [f"tensor<7x{mlir_name(dtype)}>", "tensor<7xi32>"]
    line = f"%0, %1 = chlo.top_k(%a, k = 7) : {tensor(x)} -> ({', '.join(types)})"
    values, places = run(program([line], [x], types), x)
    order = np.argsort(-total_order(dtype)[x.view(np.uint8)])[:7]
    assert values.tobytes() == x[order].tobytes()
    assert places.tolist() == order.tolist()


FUNCTIONS = {
    "sort": lambda x: (jnp.sort(x), jnp.argsort(x, 0)),
    "scan": lambda x: lax.scan(lambda c, row: (jnp.maximum(c, row), c), x[0], x),
    "while": lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.minimum(v, v[::-1]), x),
    "cond": lambda x: lax.cond(x[0, 0] > x[1, 1], lambda v: v, lambda v: v[::-1], x),
    "largest": lambda x: (x.max(0), x.min(), jnp.argmax(x, 1)),
    "at": lambda x: (x.at[jnp.array([1, 1, 3])].max(x[:3]), jnp.take(x, jnp.array([2, 0, 9]), 0, mode="clip")),
    "softmax": lambda x: jax.nn.softmax(x.astype(jnp.float32)).astype(x.dtype),
    "windows": lambda x: lax.cummax(x, axis=1),
    "clip": lambda x: jnp.clip(x, x.dtype.type(1), x.dtype.type(2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("dtype", ["f8E4M3FN", "f8E5M2", *(
    pytest.param(n, marks=pytest.mark.slow) for n in ("f8E3M4", "f8E4M3", "f8E4M3FNUZ", "f8E4M3B11FNUZ", "f8E5M2FNUZ")
)])  # fmt: skip
def test_functions_of_jax(dtype, name):
    x = np.exp2(np.random.default_rng(5).integers(-1, 3, (6, 7))).astype(to_numpy(dtype))
    for level in (0, 2):
        check(FUNCTIONS[name], (x,), level)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_short_floats_do_not_stop_at_a_power_of_two(dtype):
    x = np.ones((2, 3000), dtype)
    for level in (0, 2):
        check(lambda x: lax.reduce(x, x.dtype.type(0), lax.add, (1,)), (x,), level)
        check(lambda x: lax.reduce(x[:, :10] * 2, x.dtype.type(1), lax.mul, (1,)), (x,), level)
