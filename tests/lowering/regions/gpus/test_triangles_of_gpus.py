"""Cholesky factors and triangular solves on GPUs: a block of threads for each matrix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal
from support.gpu_program import check_gpu, gpu_program, run_gpu_program

lax = jax.lax


@pytest.fixture(autouse=True)
def _wide_numbers():
    with jax.enable_x64(True):
        yield


def matrices(*shape, dtype="float32"):
    x = normal(*shape, shape[-1]).astype(dtype)
    if np.dtype(dtype).kind == "c":
        x = x + 1j * normal(*shape, shape[-1], seed=5).astype(dtype)
    n = shape[-1]
    return (x @ x.swapaxes(-1, -2).conj() / n + 2 * np.eye(n)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
@pytest.mark.parametrize("shape", [(13,), (2, 37)])
@pytest.mark.parametrize("upper", [False, True])
def test_cholesky_on_gpus_matches_jax(shape, dtype, upper):
    check_gpu(lambda a: jax.scipy.linalg.cholesky(a, lower=not upper), [matrices(*shape, dtype=dtype)], factor=8)


@pytest.mark.parametrize("n", [40, 64, 69])
def test_cholesky_of_whole_tiles_matches_jax(n):
    check_gpu(jnp.linalg.cholesky, [matrices(n)], factor=8)


def test_cholesky_of_indefinite_matrices_is_nan():
    a = matrices(3, 20)
    a[1, 7, 7] = -1
    check_gpu(jnp.linalg.cholesky, [a], factor=8)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("transposed", [0, 1, 2])
def test_triangular_solves_on_gpus_match_jax(left, lower, transposed):
    a = matrices(2, 21, dtype="complex64")
    b = normal(2, *((21, 35) if left else (35, 21))).astype("complex64")

    def function(a, b):
        return lax.linalg.triangular_solve(
            a, b, left_side=left, lower=lower, transpose_a=transposed > 0, conjugate_a=transposed == 2
        )

    check_gpu(function, [a, b], factor=16)


def test_cholesky_of_symbolic_size_matches_numpy():
    (n,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(jnp.linalg.cholesky))(jax.ShapeDtypeStruct((n, n), "float32"))
    a = matrices(25)
    (got,) = run_gpu_program(*gpu_program(exported.serialize()), [a])
    np.testing.assert_allclose(got, np.linalg.cholesky(a), rtol=1e-5, atol=1e-5)
