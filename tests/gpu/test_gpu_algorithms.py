"""Scatters, scans, sorts, factors and transforms on the GPU of this machine, at sizes that take several kernels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import close, integers, normal

import aotc

pytestmark = pytest.mark.cuda

lax = jax.lax
N = 100_003
X, I = normal(N), integers(N, low=-3, high=2000)  # noqa: E741
TIES = integers(N, low=0, high=50).astype("float32")
TIES[::97], TIES[::89], TIES[::83] = np.nan, -0.0, np.inf
CASES = {
    "sum": (lambda x, i: (jax.ops.segment_sum(x, i, 1990), jax.ops.segment_sum(x, i % 7, 7)), [X, I]),
    "max": (lambda x, i: (jax.ops.segment_max(x, i, 1990), jax.ops.segment_min(x, i % 7, 7)), [X, I]),
    "rows": (lambda x, i, u: (x.at[i].add(u), x.at[i].set(u)), [normal(9000, 30), I[:3000], normal(3000, 30)]),
    "scan": (lambda x: (jnp.cumsum(x), lax.cummax(x, reverse=True), jnp.cumsum(x[:99_999].reshape(-1, 9), 0)), [X]),
    "sort": (lambda x: (jnp.sort(x), jnp.argsort(x), jnp.argsort(x[:99_999].reshape(-1, 3), 0)), [TIES]),
    "keys": (lambda x, i: lax.sort((i % 9, x, jnp.arange(N)), num_keys=2), [TIES, I]),
    "top_k": (lambda x: (*lax.top_k(x, 100), *lax.top_k(x, 50_000), *lax.top_k(x[:99_999].reshape(3, -1), 5)), [TIES]),
    "fft": (lambda x: jnp.fft.fft(x[:98_304].reshape(24, 4096)), [X]),
}


@pytest.mark.parametrize("name", CASES)
def test_algorithms(name):
    function, args = CASES[name]
    got = aotc.load(aotc.compile(function, *args, target="cuda:sm_90")).invoke("main", *args)
    want = jax.tree.leaves(jax.jit(function)(*args))
    close([np.asarray(x) for x in got], want, factor=40)


@pytest.mark.parametrize("size", [1, 100, 5000, 300_000])
def test_sorts_of_unknown_length(size):
    (n,) = jax.export.symbolic_shape("n")
    both = jax.jit(lambda x: (jnp.sort(x), jnp.cumsum(x)))
    exported = jax.export.export(both)(jax.ShapeDtypeStruct((n,), "float32"))
    x = normal(size)
    got = aotc.load(aotc.compile(exported, target="cuda:sm_90")).invoke("main", x)
    np.testing.assert_array_equal(got[0], np.sort(x))
    np.testing.assert_allclose(got[1], np.cumsum(x, dtype="float64"), rtol=1e-3, atol=1e-2)


def test_solvers():
    x = normal(5, 150, 150)
    a = x @ x.swapaxes(1, 2) / 150 + 2 * np.eye(150, dtype="float32")

    def function(a, b):
        return jnp.linalg.cholesky(a), lax.linalg.triangular_solve(jnp.tril(a), b, left_side=True, lower=True)

    args = [a, normal(5, 150, 70)]
    got = aotc.load(aotc.compile(function, *args, target="cuda:sm_90")).invoke("main", *args)
    close([np.asarray(v) for v in got], jax.tree.leaves(jax.jit(function)(*args)), factor=40)
