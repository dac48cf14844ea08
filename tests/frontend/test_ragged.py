"""Products of ragged groups, as JAX's functions say them: the same as group by group, and no more work than that."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from vmfb.simulated_gpu import install
from vmfb.test_cuda import sim

import aotc
from aotc.frontend.calls.ragged import MOST_TILE_ROWS, TILE_ROWS, tile_rows
from aotc.frontend.importer import import_model

BF16 = ml_dtypes.bfloat16
TERMS = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
SIZES = {
    "even": (20, 20, 20, 20), "uneven": (1, 0, 62, 17), "rows left": (3, 30, 0, 9), "none": (0, 0, 0, 0),
    "all in the last": (0, 0, 0, 80), "all in the first": (80, 0, 0, 0),
}  # fmt: skip


def by_terms(x, y, sizes):
    return jax.lax.ragged_dot_general(x, y, sizes, TERMS)


def operands(rows=80, terms=24, columns=16, groups=4, dtype=np.float32):
    random = np.random.default_rng(0)
    x, w, y = (random.standard_normal(s) for s in ((rows, terms), (groups, terms, columns), (rows, columns)))
    return tuple(a.astype(np.float32).astype(dtype) for a in (x, w, y))


def wanted_rows(x, w, sizes):
    out, begin = np.zeros((len(x), w.shape[2])), 0
    for size, own in zip(sizes, w.astype("f8")):
        out[begin : begin + size] = x[begin : begin + size].astype("f8") @ own
        begin += size
    return out


def wanted_terms(x, y, sizes):
    ends = np.cumsum(sizes)
    return np.stack([x[e - s : e].astype("f8").T @ y[e - s : e].astype("f8") for s, e in zip(sizes, ends)])


def run(function, *arguments, target="cpu"):
    return aotc.load(aotc.compile(jax.jit(function), *arguments, target=target)).invoke("main", *arguments)


@pytest.mark.parametrize("name", SIZES)
def test_each_group_is_multiplied_by_its_own_matrix(name):
    (x, w, y), sizes = operands(), np.array(SIZES[name], np.int32)
    np.testing.assert_allclose(run(jax.lax.ragged_dot, x, w, sizes)[0], wanted_rows(x, w, sizes), atol=1e-5)
    np.testing.assert_allclose(run(by_terms, x, y, sizes)[0], wanted_terms(x, y, sizes), atol=1e-5)


@pytest.mark.parametrize(("rows", "groups"), [(1, 1), (5, 9), (7, 1), (300, 3), (64, 64)])
def test_ragged_dots_of_symbolic_sizes_match_numpy(rows, groups):
    x, w, y = operands(rows, groups=groups)
    sizes = np.random.default_rng(1).multinomial(rows, np.ones(groups) / groups).astype(np.int32)
    np.testing.assert_allclose(run(jax.lax.ragged_dot, x, w, sizes)[0], wanted_rows(x, w, sizes), atol=1e-5)
    np.testing.assert_allclose(run(by_terms, x, y, sizes)[0], wanted_terms(x, y, sizes), atol=1e-4)


@pytest.mark.parametrize(
    ("dtype", "result", "bound"), [(BF16, None, 5e-2), (BF16, jnp.float32, 1e-3), ("f2", None, 1e-2)]
)
def test_ragged_dots_of_short_floats_match_numpy(dtype, result, bound):
    (x, w, y), sizes = operands(dtype=dtype), np.array(SIZES["uneven"], np.int32)

    def both(x, w, y, sizes):
        given = {"preferred_element_type": result}
        return jax.lax.ragged_dot(x, w, sizes, **given), jax.lax.ragged_dot_general(x, y, sizes, TERMS, **given)

    rows, terms = run(both, x, w, y, sizes)
    assert rows.dtype == terms.dtype == (result or dtype)
    np.testing.assert_allclose(rows.astype("f8"), wanted_rows(x, w, sizes), atol=bound, rtol=1e-2)
    np.testing.assert_allclose(terms.astype("f8"), wanted_terms(x, y, sizes), atol=5 * bound, rtol=1e-2)


def test_ragged_dots_of_integers_match_numpy():
    random, sizes = np.random.default_rng(0), np.array(SIZES["uneven"], np.int32)
    x, w = random.integers(-9, 9, (80, 24)).astype(np.int32), random.integers(-9, 9, (4, 24, 16)).astype(np.int32)
    np.testing.assert_array_equal(run(jax.lax.ragged_dot, x, w, sizes)[0], wanted_rows(x, w, sizes))


def test_gradients_of_ragged_dots_match_numpy():
    """By the rows the matrices are read the other way round; by the matrices terms are ragged."""
    (x, w, _), sizes = operands(), np.array(SIZES["rows left"], np.int32)
    gradient = jax.grad(lambda x, w, s: (jax.lax.ragged_dot(x, w, s) ** 2).sum(), (0, 1))
    out = 2 * wanted_rows(x, w, sizes)
    dx, dw = run(gradient, x, w, sizes)
    np.testing.assert_allclose(dx, wanted_rows(out, w.transpose(0, 2, 1), sizes), atol=1e-3)
    np.testing.assert_allclose(dw, wanted_terms(x, out, sizes), atol=1e-3)


def test_nan_of_another_group_does_not_propagate():
    """What JAX writes for CPUs multiplies zeros with the infinities of other groups."""
    (x, w, y), sizes = operands(), np.array(SIZES["uneven"], np.int32)
    w[1], y[63:] = np.inf, np.nan
    want = wanted_rows(x, w[[0, 0, 2, 3]], sizes)
    np.testing.assert_allclose(run(jax.lax.ragged_dot, x, w, sizes)[0], want, atol=1e-5)
    found = run(by_terms, x, y, sizes)[0]
    np.testing.assert_allclose(found[:3], wanted_terms(x, y, sizes)[:3], atol=1e-5)
    assert np.isnan(found[3]).all()


def test_batched_ragged_dots_and_symbolic_sizes_match_numpy():
    (x, w, _), sizes = operands(), np.array(SIZES["uneven"], np.int32)
    batch = jax.vmap(jax.lax.ragged_dot)
    xs, ws, many = (np.stack([a, a]) for a in (x, w, sizes))
    for found in run(batch, xs, ws, many)[0]:
        np.testing.assert_allclose(found, wanted_rows(x, w, sizes), atol=1e-5)
    (n,) = jax.export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((n, 24), "f4"), (w.shape, "f4"), ((4,), "i4"))]
    module = aotc.load(aotc.compile(jax.jit(jax.lax.ragged_dot), *shapes))
    np.testing.assert_allclose(module.invoke("main", x, w, sizes)[0], wanted_rows(x, w, sizes), atol=1e-5)


def test_ragged_dots_multiply_only_started_tiles():
    shapes = [jax.ShapeDtypeStruct(s, d) for s, d in (((512, 64), "f4"), ((8, 64, 32), "f4"), ((8,), "i4"))]
    module = import_model(jax.jit(jax.lax.ragged_dot), *shapes)
    (product,) = (op for f in module.functions.values() for op in f.body.ops if op.name == "dot_general")
    tiles, rows, _ = product.operands[0].type.shape
    assert (tiles, rows) == (512 // 64 + 8, 64)


def test_ragged_dot_tiles_follow_the_group_size():
    assert [tile_rows(rows, 8) for rows in (1, 100, 512, 1 << 20)] == [TILE_ROWS, 16, 64, MOST_TILE_ROWS]


@sim
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:compute_80"])
def test_ragged_dots_on_a_simulated_gpu_match_numpy(target, monkeypatch):
    (x, w, _), sizes = operands(40, 16, 16, 3), np.array((17, 0, 20), np.int32)
    data = aotc.compile(jax.jit(jax.lax.ragged_dot), x, w, sizes, target=target)
    install(monkeypatch, data)
    found = aotc.load(data).invoke("main", x, w, sizes)[0]
    np.testing.assert_allclose(found, wanted_rows(x, w, sizes), atol=2e-2)
