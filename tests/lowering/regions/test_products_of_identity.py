"""Products with a part of the identity matrix: they are selections, and say NaN where the sum would."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = [pytest.mark.cpu]

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)


def part(rows, first, *digits, dtype="float32"):
    return jnp.eye(rows, dtype=dtype)[:, first : first + int(np.prod(digits))].reshape(rows, *digits)


SELECTIONS = {
    "rows": lambda x: jnp.einsum("bi,rij->brj", x, part(50, 7, 6, 5)),
    "less significant": lambda x: jnp.einsum("bj,rij->bir", x, part(50, 7, 5, 6)),
    "the identity on the left": lambda x: jnp.einsum("rij,bi->rjb", part(50, 7, 6, 5), x),
    "all digits": lambda x: jnp.einsum("rij,ij->r", part(50, 7, 4, 6), x),
    "all digits, turned": lambda x: jnp.einsum("rij,ji->r", part(50, 7, 6, 4), x),
    "the last rows": lambda x: jnp.einsum("bi,rij->brj", x, part(50, 20, 6, 5)),
    "the whole": lambda x: x @ jnp.eye(6, dtype=x.dtype),
    "a diagonal above": lambda x: x @ jnp.eye(6, 9, k=2, dtype=x.dtype),
    "rows are summed": lambda x: jnp.einsum("br,rij->bij", x, part(6, 2, 2, 2)),
    "rows are summed, a dim of one": lambda x: jnp.einsum("br,rijk->kbij", x, part(6, 1, 2, 1, 2)),
    "the middle of three": lambda x: jnp.einsum("bi,rkil->brlk", x, part(80, 2, 3, 6, 4)),
    "an outer dim": lambda x: jnp.einsum("bi,rij->brj", x, jnp.tile(part(30, 0, 6, 5)[:, :, :, None], 1)[..., 0]),
}
PRODUCTS = {
    "a diagonal that leaves the matrix": lambda x: x @ jnp.eye(6, 9, k=-2),
    "every second": lambda x: x @ (jnp.arange(6)[:, None] * 2 == jnp.arange(12)).astype("float32"),
    "two rows": lambda x: jnp.einsum("br,rij->bj", x, part(6, 0, 2, 3)),
    "not one": lambda x: x @ (2 * jnp.eye(6)),
}


def ops(function, *args):
    module = run_passes(import_model(jax.jit(function).lower(*args)), Options())
    return {op.name for f in module.functions.values() for op in walk(f.body)}


def same(function, x):
    got = aotc.load(aotc.compile(jax.jit(function), x, verify_each=True)).invoke("main", x)[0]
    np.testing.assert_array_equal(got, jax.jit(function)(x))


@pytest.mark.parametrize("name", SELECTIONS)
def test_matmuls_with_an_identity_become_selections(name):
    assert not {"matmul", "packed_matmul"} & ops(SELECTIONS[name], X)
    same(SELECTIONS[name], X)


@pytest.mark.parametrize("name", PRODUCTS)
def test_other_matmuls_remain(name):
    assert {"matmul", "packed_matmul"} & ops(PRODUCTS[name], X)
    same(PRODUCTS[name], X)


@pytest.mark.parametrize("name", SELECTIONS)
def test_infinities_and_nan_propagate_through_selections(name):
    x = X.copy()
    x[1, 2], x[3, 1], x[2, 0], x[0, 0] = np.inf, np.nan, -np.inf, -0.0
    same(SELECTIONS[name], x)


def test_a_zero_sum_of_a_selection_is_positive():
    x = np.full((2, 6), -0.0, np.float32)
    got = aotc.load(aotc.compile(jax.jit(SELECTIONS["the whole"]), x)).invoke("main", x)[0]
    assert not np.signbit(got).any()


@pytest.mark.parametrize("dtype", ["int32", "uint8", "float16", "bfloat16"])
def test_selections_of_each_dtype_match_xla(dtype):
    x = (np.arange(24).reshape(4, 6) % 7).astype(jnp.dtype(dtype))
    same(lambda x: jnp.einsum("bi,rij->brj", x, part(50, 7, 6, 5, dtype=dtype)), x)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_jacobians_by_all_weights_match_f64(level):
    """``jax.jacfwd`` pushes one tangent for each weight; XLA in f64 is the oracle."""
    random = np.random.default_rng(1)
    weights = [random.standard_normal(s) for s in ((5, 7), (7, 3))]
    x = random.standard_normal((2, 5))
    run = lambda weights, x: jax.jacfwd(lambda w, x: jnp.tanh(x @ w[0]) @ w[1])(weights, x)
    with jax.enable_x64(True):
        want = jax.tree.leaves(jax.jit(run)(weights, x))
    small = [w.astype(np.float32) for w in weights], x.astype(np.float32)
    module = aotc.load(aotc.compile(jax.jit(run), *small, opt_level=level))
    for got, exact in zip(module.invoke("main", *small[0], small[1]), want, strict=True):
        np.testing.assert_allclose(got, exact, rtol=1e-4, atol=1e-5)
