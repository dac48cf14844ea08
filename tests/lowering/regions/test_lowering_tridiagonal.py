"""Tridiagonal systems that may be singular, as inverse iteration solves them, beside XLA."""

import jax
import jax.scipy.linalg as jsl
import numpy as np
import pytest
from jax import export
from jax._src.lax import linalg as lax_linalg
from support.differential import LEVELS
from support.solvers import DTYPES, values

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret

pytestmark = pytest.mark.cpu

TOLERANCE = {"float32": 2e-3, "complex64": 2e-3, "float64": 1e-10, "complex128": 1e-10}


@pytest.fixture(autouse=True)
def wide_types():
    """64-bit types, for these tests only."""
    with jax.enable_x64(True):
        yield


@jax.jit
def solve(low, diagonal, high, b):
    return lax_linalg.tridiagonal_solve(low, diagonal, high, b, perturb_singular=True)


def system(shape, count, dtype, case):
    """Three diagonals and right-hand sides; some systems are singular or fall apart."""
    low, diagonal, high = (values(*shape, dtype=dtype, seed=s) for s in (1, 2, 3))
    if case == "singular":
        diagonal[..., 0] = high[..., 0] = 0
    if case == "triangular":
        low[...] = 0
        diagonal[..., -1] = 0
    return [low, diagonal, high, values(*shape, count, dtype=dtype, seed=4)]


def close(got, want, dtype):
    scale = np.abs(want).max(initial=1e-30)
    np.testing.assert_allclose(got / scale, want / scale, rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("case", ["regular", "singular", "triangular"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [((5,), 2), ((3, 7), 1), ((1,), 2), ((2,), 3), ((2, 2, 30), 4)])
def test_perturbed_tridiagonal_solves_match_xla(shape, dtype, case):
    """The sign of a complex zero decides how a singular system is perturbed; there only sizes are compared."""
    args = system(*shape, dtype, case)
    want = np.asarray(solve(*args))
    imported = import_model(solve, *args)
    assert "tridiagonal_solve_perturbed" in [op.name for op in imported.functions["main"].body.ops]
    (reference,) = interpret(imported, *args)
    close(reference, want, dtype)
    got = aotc.load(aotc.compile(solve, *args, verify_each=True))(*args)
    if case == "singular" and np.dtype(dtype).kind == "c":
        assert 0.1 < np.abs(got).max() / np.abs(want).max() < 10
    else:
        close(got, want, dtype)


@pytest.mark.parametrize("level", LEVELS)
def test_eigh_tridiagonal_matches_xla(level):
    d, e = np.arange(6.0), np.linspace(1, 2, 5)
    data = aotc.compile(jax.jit(lambda d, e: jsl.eigh_tridiagonal(d, e)), d, e, opt_level=level)
    w, v = aotc.load(data)(d, e)
    matrix = np.diag(d) + np.diag(e, 1) + np.diag(e, -1)
    np.testing.assert_allclose(w, np.linalg.eigvalsh(matrix), atol=1e-12)
    np.testing.assert_allclose(matrix @ v, v * w, atol=1e-12)
    np.testing.assert_allclose(v.T @ v, np.eye(6), atol=1e-12)


def test_tridiagonal_solves_of_symbolic_and_empty_sizes_match_xla():
    k, n, m = export.symbolic_shape("k, n, m")
    line, sides = jax.ShapeDtypeStruct((k, n), "float64"), jax.ShapeDtypeStruct((k, n, m), "float64")
    module = aotc.load(aotc.compile(solve, line, line, line, sides))
    for shape, count in (((2, 5), 3), ((1, 1), 1), ((3, 2), 2), ((2, 100), 1)):
        args = system(shape, count, "float64", "regular")
        close(module(*args), np.asarray(solve(*args)), "float64")
    for shape, count in (((0,), 2), ((3,), 0)):
        args = system(shape, count, "float64", "regular")
        assert aotc.load(aotc.compile(solve, *args))(*args).shape == (*shape, count)
