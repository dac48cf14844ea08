"""Eigenvectors and singular vectors on GPUs by Jacobi's method, judged by what they must satisfy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gpu.block_races import Races, checked
from support.gpu_program import gpu_program, run_gpu_program
from support.solvers import DTYPES, adjoint, values

import aotc
from aotc.diagnostics import CompileError
from aotc.frontend.importer import import_model
from aotc.ir.loop.printer import print_kernel
from aotc.ir.semantics.run import interpret
from aotc.lowering.passes.parallelize_gpu.parallelize_gpu import parallelize_gpu
from aotc.lowering.plans.linalg.gpu_jacobi import JACOBI_BYTES, JACOBI_LANE_BYTES, jacobi_layout
from aotc.options import Options
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cudasim


@pytest.fixture(autouse=True)
def _wide_numbers():
    with jax.enable_x64(True):
        yield


def hermitian(*shape, dtype, seed=0):
    x = values(*shape, dtype=dtype, seed=seed)
    return (x + adjoint(x)) / 2


def run(function, x):
    return run_gpu_program(*gpu_program(function, [x]), [x])


def norm(x):
    return max(np.linalg.norm(x.astype("complex128"), 2, axis=(-2, -1)).max(), np.finfo(x.dtype).tiny)


def is_small(x, eps, scale, n):
    assert np.isfinite(x).all()
    assert np.abs(x).max() <= 4 * (n + 4) * eps * scale


def check_eigen(x, function=jnp.linalg.eigh):
    w, v = run(function, x)
    n, eps = x.shape[-1], np.finfo(w.dtype).eps
    is_small(x @ v - v * w[..., None, :], eps, norm(x), n)
    is_small(adjoint(v) @ v - np.eye(n), eps, 1, n)
    is_small(w - np.linalg.eigvalsh(x.astype("complex128")), eps, norm(x), n)
    assert (np.diff(w) >= 0).all()


def check_singular(x, full):
    u, s, vt = run(lambda x: jnp.linalg.svd(x, full_matrices=full), x)
    k, n, eps = s.shape[-1], max(x.shape[-2:]), np.finfo(s.dtype).eps
    assert u.shape[-1] == (x.shape[-2] if full else k)
    assert vt.shape[-2] == (x.shape[-1] if full else k)
    is_small((u[..., :k] * s[..., None, :]) @ vt[..., :k, :] - x, eps, norm(x), n)
    is_small(adjoint(u) @ u - np.eye(u.shape[-1]), eps, 1, n)
    is_small(vt @ adjoint(vt) - np.eye(vt.shape[-2]), eps, 1, n)
    is_small(s - np.linalg.svd(x.astype("complex128"), compute_uv=False), eps, norm(x), n)
    assert (np.diff(s) <= 0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 2, 3, 8])
def test_eigh_on_gpus_satisfies_its_equations(n, dtype):
    check_eigen(hermitian(2, n, n, dtype=dtype))


@pytest.mark.parametrize("lower", [True, False])
def test_eigh_reads_only_one_triangle(lower):
    x = hermitian(5, 5, dtype="complex64")
    other = np.triu(np.full((5, 5), np.nan), 1)
    given = x + (other if lower else other.T).astype("complex64")
    w, v = run(lambda x: jax.lax.linalg.eigh(x, lower=lower, symmetrize_input=False)[::-1], given)
    is_small(x @ v - v * w[None, :], np.finfo("f").eps, norm(x), 5)


EIGEN = {
    "zeros": np.zeros((4, 4)),
    "identity": np.eye(5),
    "opposite pairs": np.array([[0, 2.0], [2.0, 0]]),
    "one of rank one": np.ones((6, 6)),
    "far apart": np.diag([1e15, 1, 1e-15, -1e15]),
    "large": hermitian(4, 4, dtype="float64") * 1e306,
    "tiny": hermitian(4, 4, dtype="float64") * 1e-310,
}


@pytest.mark.parametrize("name", EIGEN)
def test_eigh_of_degenerate_matrices_satisfies_its_equations(name):
    check_eigen(EIGEN[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3, 3), (7, 4), (2, 4, 7), (6, 1)])
def test_svd_on_gpus_satisfies_its_equations(shape, dtype):
    for full in (False, True):
        check_singular(values(*shape, dtype=dtype), full)


SINGULAR = {
    "zeros": np.zeros((5, 3)),
    "rank one": np.outer(np.arange(6.0), np.ones(4)),
    "equal columns": np.repeat(values(6, 2, dtype="float64"), 2, 1),
    "rows of zeros": np.concatenate([values(2, 5, dtype="float64"), np.zeros((3, 5))]),
    "diagonal": np.diag([1e300, 1.0, 1e-300, -2]),
    "tiny": values(4, 4, dtype="float64") * 1e-310,
}


@pytest.mark.parametrize("name", SINGULAR)
def test_svd_of_degenerate_matrices_satisfies_its_equations(name):
    check_singular(SINGULAR[name], full=True)
    check_singular(SINGULAR[name].T, full=False)


def test_columns_beyond_the_registers_use_shared_memory(monkeypatch):
    """They are read again for each turn."""
    monkeypatch.setattr(type(JACOBI_LANE_BYTES), "__setattr__", object.__setattr__)
    monkeypatch.setattr(JACOBI_LANE_BYTES, "default", 8)
    assert not jacobi_layout(4, 70, 8, 4).in_registers
    check_singular(values(70, 4, dtype="float64"), full=False)
    check_singular(values(70, 3, dtype="complex64"), full=False)


@pytest.mark.parametrize("count", [1, 2, 7, 16, 33, 64, 150])
@pytest.mark.parametrize("size", [4, 8, 16])
def test_each_pair_of_columns_is_rotated_once_per_sweep(count, size):
    held = jacobi_layout(count, count, size, 0)
    m = 2 * held.pairs - 1
    places = [(k or m, (m - k) % m) for k in range(held.pairs)]
    met = []
    for _ in range(m):
        met += [frozenset(pair) for pair in places]
        places = [tuple(p if p > m - 1 else (p + 1) % m for p in pair) for pair in places]
    assert len(met) == len(set(met)) == m * (m + 1) // 2
    assert held.padded_count >= count
    assert held.warps <= 32 or held.shared_memory_bytes > JACOBI_BYTES.value


@pytest.mark.parametrize("rows", [4, 16, 31, 64, 100, 2000])
def test_neighbouring_columns_use_different_memory_banks(rows):
    for size in (4, 8, 16):
        held = jacobi_layout(3, rows, size, 3)
        assert held.pitch * size % 16 == 0
        own = {(group, held.pitch * group * size // 16 % 8 + lane) for group in (0, 1) for lane in range(held.lanes)}
        if held.lanes == 4:
            assert len({place % 8 for _, place in own}) == 8


def test_eigenvalues_and_singular_values_alone_match_numpy():
    x = hermitian(3, 6, 6, dtype="float32")
    np.testing.assert_allclose(run(jnp.linalg.eigvalsh, x)[0], np.linalg.eigvalsh(x), atol=1e-5)
    s = run(lambda x: jnp.linalg.svd(x, compute_uv=False), x)[0]
    np.testing.assert_allclose(s, np.linalg.svd(x, compute_uv=False), atol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_matrices_with_nan_give_nan_and_others_are_unaffected(bad):
    x = hermitian(2, 4, 4, dtype="float32")
    x[1, 2, 2] = bad
    for function in (jnp.linalg.eigh, jnp.linalg.svd):
        results = run(function, x)
        assert all(np.isfinite(v[0]).all() for v in results)
        assert all(np.isnan(v[1]).all() for v in results)


def test_large_decompositions_run_on_the_host():
    for function, shape in ((jnp.linalg.eigh, (160, 160)), (jnp.linalg.svd, (300, 3)), (jnp.linalg.svd, (200, 120))):
        with pytest.raises(Exception, match="is not supported"):
            gpu_program(function, [jax.ShapeDtypeStruct(shape, "float32")], host_fallback=False)


def test_a_decomposition_beyond_the_shared_memory_limit_is_refused():
    x = jax.ShapeDtypeStruct((64, 64), "float32")
    with pytest.raises(CompileError, match=r"syevd needs 2.,... bytes of shared memory, and a block has 4,096"):
        aotc.compile(jnp.linalg.eigh, x, target="cuda:sm_90", shared_memory_limit=4096)


@pytest.mark.parametrize("n", [2, 5, 9])
@pytest.mark.parametrize("function", [jnp.linalg.eigh, jnp.linalg.svd])
def test_threads_of_jacobi_rotations_do_not_race(function, n):
    _, variant = gpu_program(function, [hermitian(n, n, dtype="complex64")])
    kernel = next(k for k in variant.kernels if "lapack" in k.name)
    races, random = Races(), np.random.default_rng(0)
    arrays = [random.normal(size=x.shape).astype(to_numpy(x.dtype)) for x in (*kernel.inputs, *kernel.outputs)]
    checked(races)(print_kernel(kernel), arrays, {})
    assert races.found == []


@pytest.mark.parametrize("shape", [(6, 4), (4, 6), (5, 5)])
def test_the_reference_of_gpu_svd_satisfies_its_equations(shape):
    """Decompositions of tall matrices, and the QR factors of what they find."""
    x = values(*shape, dtype="complex128")
    module = import_model(lambda x: jnp.linalg.svd(x), x)
    spread = parallelize_gpu(module, Options(target="cuda:sm_90"))
    u, s, vt = interpret(spread, x)
    k = min(shape)
    np.testing.assert_allclose((u[:, :k] * s) @ vt[:k], x, atol=1e-12)
    np.testing.assert_allclose(adjoint(u) @ u, np.eye(shape[0]), atol=1e-12)
