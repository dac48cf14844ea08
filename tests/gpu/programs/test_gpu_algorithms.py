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
ROWS = lax.ScatterDimensionNumbers((), (0,), (0,))
CASES = {
    "sum": (lambda x, i: (jax.ops.segment_sum(x, i, 1990), jax.ops.segment_sum(x, i % 7, 7)), [X, I]),
    "max": (lambda x, i: (jax.ops.segment_max(x, i, 1990), jax.ops.segment_min(x, i % 7, 7)), [X, I]),
    "rows": (lambda x, i, u: (x.at[i].add(u), x.at[i].set(u)), [normal(9000, 30), I[:3000], normal(3000, 30)]),
    "wide rows": (lambda x, i, u: x.at[i].add(u), [normal(9000, 64), I[:3000] // 9, normal(3000, 64)]),
    "gradients of pools": (
        jax.grad(lambda x: (lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") ** 2).sum()),
        [normal(4, 31, 32, 16)],
    ),
    "products": (lambda x, i: jax.ops.segment_prod(1 + x / 1000, i, 1990), [X, I]),
    "no products": (
        lambda x, i: lax.scatter_apply(x, i[:, None], lambda y: y / 2 + 1, ROWS, update_shape=i.shape), [X[:2000], I]
    ),
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
def test_sort_and_cumsum_of_symbolic_length_match_numpy(size):
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


@pytest.mark.parametrize("shape", [(300, 16, 16), (9, 100, 61), (3, 61, 100), (2, 256, 256)])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_factors(shape, dtype):
    """By residuals: pivots of nearly equal elements may differ."""
    x = normal(*shape).astype(dtype) * (1 + 1j if dtype == "complex64" else 1)

    def function(a):
        factors, _, order = lax.linalg.lu(a)
        return factors, order, *jnp.linalg.qr(a)

    packed, order, q, r = aotc.load(aotc.compile(function, x, target="cuda:sm_90")).invoke("main", x)
    k = min(shape[1:])
    low = np.tril(packed[..., :k], -1) + np.eye(shape[1], k)
    bound = 1e-5 * np.abs(x).max() * sum(shape[1:])
    assert np.abs(low).max() <= 1.5
    assert np.abs(low @ np.triu(packed[..., :k, :]) - np.take_along_axis(x, order[..., None], 1)).max() <= bound
    assert np.abs(q @ r - x).max() <= bound
    assert np.abs(q.conj().swapaxes(1, 2) @ q - np.eye(k)).max() <= 1e-5 * k


@pytest.mark.parametrize("n", [5, 64, 100])
def test_vectors_of_symmetric_matrices(n):
    """By residuals, of eigenvectors and of singular vectors."""
    x = normal(20, n, n)
    x = x + x.swapaxes(1, 2)
    function = lambda x: (*jnp.linalg.eigh(x), *jnp.linalg.svd(x))
    w, v, u, s, vt = aotc.load(aotc.compile(function, x, target="cuda:sm_90")).invoke("main", x)
    bound = 1e-6 * n * np.linalg.norm(x, 2, axis=(1, 2)).max()
    assert np.abs(x @ v - v * w[:, None]).max() <= bound
    assert np.abs((u * s[:, None]) @ vt - x).max() <= bound
    for q in (v, u, vt):
        assert np.abs(q @ q.swapaxes(1, 2) - np.eye(n)).max() <= 1e-6 * n
