"""Models that JAX lowered for CUDA: its calls of GPU solvers compile for the CPU and give JAX's answers."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.lax import linalg as lax_linalg
from support.lapack import agree
from support.solvers import positive, values

import aotc

pytestmark = pytest.mark.cpu


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield


def svd(full, algorithm=None, uv=True):
    def function(x):
        return lax_linalg.svd(x, full_matrices=full, compute_uv=uv, algorithm=algorithm)

    return function


def rebuilt(function):
    """The product of the three factors, and the singular values: factors may differ in sign."""

    def product(x):
        u, s, vt = function(x)
        k = s.shape[-1]
        return (u[..., :k] * s[..., None, :]) @ vt[..., :k, :], s

    return product


QR = lax_linalg.SvdAlgorithm.QR
SQUARE, TALL, WIDE = (4, 4), (6, 4), (3, 5)
CASES = {
    "getrf": (jnp.linalg.solve, SQUARE, SQUARE),
    "getrf_tall": (lax_linalg.lu, TALL),
    "getrf_wide": (lax_linalg.lu, WIDE),
    "geqrf": (jnp.linalg.qr, TALL),
    "ormqr": (lambda x, c: lax_linalg.ormqr(*lax_linalg.geqrf(x), c, left=True, transpose=True), TALL, TALL),
    "gesvdj": (svd(False), TALL),
    "gesvdj_full": (svd(True), WIDE),
    "gesvdj_values": (svd(False, uv=False), TALL),
    "gesvd": (rebuilt(svd(False, QR)), WIDE),
    "gesvd_full": (rebuilt(svd(True, QR)), TALL),
    "gesvd_values": (svd(False, QR, uv=False), TALL),
    "hybrid_eig": (lambda x: lax_linalg.eig(x, compute_left_eigenvectors=True), SQUARE),
    "hybrid_eigvals": (jnp.linalg.eigvals, SQUARE),
    "hybrid_geqp3": (lambda x: lax_linalg.geqp3(x, jnp.zeros((*x.shape[:-2], x.shape[-1]), "int32")), TALL),
    "sparse_gtsv2": (lambda x, b: lax_linalg.tridiagonal_solve(x[..., 0], x[..., 1] + 4, x[..., 2], b), SQUARE, SQUARE),
}


def check(function, target, *args):
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    assert any(target in name for name in re.findall(r"custom_call @(\w+)", text))
    got = aotc.load(aotc.compile(text)).invoke("main", *args)
    agree(got, jax.tree.leaves(jax.jit(function)(*args)))


@pytest.mark.parametrize("dtype", ["float64", "complex128", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_gpu_solver_calls_run_as_lapack(name, dtype):
    function, *shapes = CASES[name]
    args = [values(2, *shape, dtype=dtype, seed=n) for n, shape in enumerate(shapes)]
    check(function, name.partition("_")[0], *args)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_gpu_calls_on_hermitian_matrices_match_jax(dtype):
    a = positive(2, 4, 4, dtype=dtype)
    check(jnp.linalg.cholesky, "potrf", a)
    check(jnp.linalg.eigvalsh, "syevd", a)
    check(lambda x: lax_linalg.tridiagonal(x, lower=True), "sytrd", a)


def test_gpu_syrk_calls_match_numpy():
    a, c = values(3, 5, dtype="float64"), values(3, 3, dtype="float64")
    check(lambda a, c: lax_linalg.symmetric_product(a, c, alpha=2.0, beta=0.5), "syrk", a, c @ c.T)


def test_gpu_lu_pivot_calls_match_jax():
    pivots = np.array([[2, 1, 3], [5, 5, 2]], "int32")
    check(lambda p: lax_linalg.lu_pivots_to_permutation(p, 6), "lu_pivots", pivots)


def test_geev_packs_the_vectors_of_a_real_matrix():
    """jaxlib emits it only beside a CUDA of its own; by columns, as all of them."""
    matrix, vector = "tensor<4x4xf64>", "tensor<4xcomplex<f64>>"
    layout = "dense<[0, 1]> : tensor<2xindex>"
    results = f"({matrix}, {vector}, {matrix}, {matrix}, tensor<i32>)"
    text = f"""func.func @main(%a: {matrix}) -> ({vector}, {matrix}) {{
      %0:5 = stablehlo.custom_call @cusolver_geev_ffi(%a) {{
        api_version = 4 : i32, backend_config = {{left = false, right = true}}, operand_layouts = [{layout}],
        result_layouts = [{layout}, dense<0> : tensor<1xindex>, {layout}, {layout}, dense<> : tensor<0xindex>]
      }} : ({matrix}) -> {results}
      return %0#1, %0#3 : {vector}, {matrix}
    }}"""
    a = values(4, 4, dtype="float64")
    found, packed = aotc.load(aotc.compile(text)).invoke("main", a)
    vectors = np.empty((4, 4), "complex128")
    for k in range(4):
        if found[k].imag == 0:
            vectors[:, k] = packed[:, k]
        else:
            first = k if found[k].imag > 0 else k - 1
            pair = packed[:, first] + 1j * packed[:, first + 1]
            vectors[:, k] = pair if found[k].imag > 0 else np.conj(pair)
    np.testing.assert_allclose(a @ vectors, vectors * found, atol=1e-12)
