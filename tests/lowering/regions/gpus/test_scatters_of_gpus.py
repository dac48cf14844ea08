"""Scatters on GPUs: the same result in whatever order updates are applied."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS, integers, normal
from support.gpu_program import check_gpu, gpu_program, run_gpu_program

from aotc.ir.loop.ir import Store, walk
from aotc.lowering.threshold import Limit

lax = jax.lax
X, U, J = normal(60), normal(40, 5, 6), integers(40, low=-4, high=7)
I = integers(60, low=-2, high=12)  # noqa: E741
DTYPES = ("float16", "bfloat16", "float32", "float64", "complex64", "int32", "int8", "uint16", "uint64")
ACROSS = lax.ScatterDimensionNumbers((0, 1), (), (1, 0))
SEGMENTS = {name: getattr(jax.ops, f"segment_{name}") for name in ("sum", "max", "min", "prod")}


@pytest.fixture(autouse=True)
def _wide_numbers():
    with jax.enable_x64(True):
        yield


def is_spread(variant):
    """Does each kernel with atomic stores have a grid item for each update?"""
    return any(isinstance(s, Store) and s.atomic for k in variant.kernels for s in walk(k.body))


@pytest.mark.parametrize("dtype", DTYPES)
def test_segment_sums_on_gpus_match_jax(dtype):
    x = jnp.asarray(X * 3, dtype)
    assert is_spread(check_gpu(lambda x, i: jax.ops.segment_sum(x, i, 10), [x, I], factor=4))
    check_gpu(lambda x, i: jnp.ones(1000, x.dtype).at[i].add(x), [x, I], factor=4)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int8", "uint32"])
@pytest.mark.parametrize("name", ["max", "min", "prod"])
def test_segment_extrema_on_gpus_match_jax(name, dtype):
    variant = check_gpu(lambda x, i: SEGMENTS[name](x, i, 10), [(X * 3).astype(dtype), I], factor=4)
    assert is_spread(variant) == (name != "prod")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_scatters_of_nan_and_infinity_match_jax(name, dtype):
    large = np.finfo(dtype).max
    x = np.array([np.inf, -np.inf, np.nan, -0.0, 1, large, np.inf, 3, 1, 0.0, 2, -large, -np.inf, 7, 1, 2, 3, 4], dtype)
    i = np.array([0, 1, 2, 3, 4, 5, 1, 0, 2, 3, 4, 5, 6, 6, 7, 7, 7, 9], "int32")
    check_gpu(lambda x, i: SEGMENTS[name](x, i, 10), [x, i])


def test_segment_sums_are_exact_for_terms_of_different_magnitude():
    x = np.r_[np.full(20, 2.0**-30), 1.0, np.full(20, 2.0**60), 1.5].astype("float32")
    i = np.r_[np.zeros(21), np.ones(21)].astype("int32")
    program = gpu_program(lambda x, i: jax.ops.segment_sum(x, i, 2), [x, i])
    (got,) = run_gpu_program(*program, [x, i])
    want = [np.float32(x[i == k].astype("float64").sum()) for k in range(2)]
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_results_are_independent_of_the_order_of_updates(dtype):
    x = (normal(300) * np.exp(normal(300, seed=3) * 5)).astype(dtype)
    i = integers(300, low=0, high=7)
    program = gpu_program(lambda x, i: jax.ops.segment_sum(x, i, 7), [x, i])
    order = np.random.default_rng(1).permutation(300)
    one, other = (run_gpu_program(*program, list(args))[0] for args in ((x, i), (x[order], i[order])))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize("kind", ["add", "set", "max", "mul"])
@pytest.mark.parametrize("mode", ["drop", "clip", "fill"])
def test_scatters_of_windows_in_each_mode_match_jax(kind, mode):
    x = normal(4, 5, 6)
    check_gpu(lambda x, i, u: getattr(x.at[i], kind)(u, mode=mode), [x, J, U], factor=4)
    check_gpu(lambda x, i, u: getattr(x.at[:, i], kind)(u, mode=mode), [x, J, U.reshape(40, 5, 6)[:, :4].swapaxes(0, 1)], factor=4)  # noqa: E501
    check_gpu(
        lambda x, i, u: getattr(x.at[i[:, 0], :, i[:, 1]], kind)(u, mode=mode),
        [x, integers(40, 2, low=-1, high=5), U[:, :, 0]],
        factor=4,
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("scatter", [lax.scatter_add, lax.scatter, lax.scatter_min], ids=["add", "set", "min"])
def test_partly_overlapping_scatter_windows_match_jax(scatter, level):
    args = [normal(9, 11), integers(30, 2, low=-1, high=9), normal(3, 4, 30)]
    check_gpu(lambda x, i, u: scatter(x, i, u, ACROSS), args, level, factor=4)


@pytest.mark.parametrize("size", [1, 2, 7, 64])
def test_scatters_of_symbolic_sizes_match_jax(size):
    def function(x, i, u):
        return x.at[i].add(u), x.at[i].set(u), x.at[i].max(u)

    b, n = jax.export.symbolic_shape("b, n")
    types = [jax.ShapeDtypeStruct(s, d) for s, d in (((n, 3), "float32"), ((b,), "int32"), ((b, 3), "float32"))]
    program = gpu_program(jax.export.export(jax.jit(function))(*types).serialize())
    args = [normal(5, 3), integers(size, low=-1, high=6), normal(size, 3)]
    for got, want in zip(run_gpu_program(*program, args), jax.jit(function)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["sum", "max", "min"])
def test_many_updates_of_few_elements_use_shared_memory(name, monkeypatch):
    few = Limit(99, "updates", "a test")
    monkeypatch.setattr("aotc.lowering.plans.gpu_scatters.CROWDED_UPDATES", few)
    x, i = normal(5000), integers(5000, low=-1, high=9)
    variant = check_gpu(lambda x, i: SEGMENTS[name](x, i, 8), [x, i], factor=4)
    assert any(isinstance(s, Store) and s.buffer.space == "shared" for k in variant.kernels for s in walk(k.body))


def is_sorted(variant):
    """Does no kernel apply updates in order?"""
    return any("sort" in k.name or "runs" in k.name for k in variant.kernels)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64", "complex64", "int8", "uint64"])
def test_segment_products_are_sorted_and_match_jax(dtype):
    x = jnp.asarray(X, dtype)
    assert is_sorted(check_gpu(lambda x, i: jnp.ones(10, x.dtype).at[i].multiply(x), [x, I], factor=8))
    check_gpu(lambda x, i: jnp.ones(10, x.dtype).at[i].multiply(x), [x, I * 0], factor=40)


def test_scatters_with_a_combiner_of_several_ops_are_sorted():
    def scatter(x, i, u):
        numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
        return lax.scatter_apply(x, i[:, None], lambda y: y * 2 + 1, numbers, update_shape=u)

    assert is_sorted(check_gpu(lambda x, i: scatter(x, i, (60, 3)), [normal(10, 3), I], factor=8))


PAIRS = """func.func @main(
    %x: tensor<9xf32>, %n: tensor<9xi32>, %i: tensor<60x1xi32>, %u: tensor<60xf32>, %m: tensor<60xi32>
) -> (tensor<9xf32>, tensor<9xi32>) {
  %0:2 = "stablehlo.scatter"(%x, %n, %i, %u, %m) ({
  ^bb0(%a: tensor<f32>, %k: tensor<i32>, %b: tensor<f32>, %l: tensor<i32>):
    %p = stablehlo.compare GE, %a, %b : (tensor<f32>, tensor<f32>) -> tensor<i1>
    %v = stablehlo.select %p, %a, %b : tensor<i1>, tensor<f32>
    %w = stablehlo.select %p, %k, %l : tensor<i1>, tensor<i32>
    stablehlo.return %v, %w : tensor<f32>, tensor<i32>
  }) {scatter_dimension_numbers = #stablehlo.scatter<inserted_window_dims = [0],
      scatter_dims_to_operand_dims = [0], index_vector_dim = 1>}
    : (tensor<9xf32>, tensor<9xi32>, tensor<60x1xi32>, tensor<60xf32>, tensor<60xi32>)
    -> (tensor<9xf32>, tensor<9xi32>)
  return %0#0, %0#1 : tensor<9xf32>, tensor<9xi32>
}"""


def test_segment_argmax_matches_jax():
    """Equal ones are many, of which the first stays: the order of updates is kept."""
    x, n = np.zeros(9, "float32"), np.full(9, -1, "int32")
    u, m = np.round(X[:60] * 2), np.arange(60, dtype="int32")
    program = gpu_program(PAIRS)
    assert is_sorted(program[1])
    got = run_gpu_program(*program, [x, n, I[:, None], u, m])
    for row, value, number in zip(I, u, m):
        if 0 <= row < 9 and value > x[row]:
            x[row], n[row] = value, number
    np.testing.assert_array_equal(got[0], x)
    np.testing.assert_array_equal(got[1], n)
