"""Products of sparse matrices by rows (CSR) beside JAX and the dense product."""

import jax
import numpy as np
import pytest
from jax.experimental import sparse
from support.differential import LEVELS, integers
from support.solvers import values

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret

pytestmark = pytest.mark.cpu

TARGET = "cpu_csr_sparse_dense_ffi"


def matrix(rows, cols, dtype):
    """A sparse matrix with empty rows."""
    dense = values(rows, cols, dtype=dtype) if np.dtype(dtype).kind in "fc" else integers(rows, cols, dtype=dtype)
    dense = np.where(integers(rows, cols, seed=3) > 4, dense, 0).astype(dtype)
    dense[rows // 2] = 0
    return dense


def product(data, columns, starts, dense, rows):
    shape = (rows, dense.shape[0])
    return sparse.BCSR((data, columns, starts), shape=shape) @ dense


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128", "int32"])
@pytest.mark.parametrize("shape", [(7, 5, 3), (7, 5, None), (1, 4, 2), (40, 30, 65)])
def test_csr_products_match_the_dense_product(level, dtype, shape):
    rows, cols, width = shape
    with jax.enable_x64(True):
        dense = matrix(rows, cols, dtype)
        made = sparse.BCSR.fromdense(dense)
        make = values if np.dtype(dtype).kind in "fc" else integers
        right = make(*([cols] if width is None else [cols, width]), dtype=dtype)
        args = [np.asarray(x) for x in (made.data, made.indices, made.indptr, right)]
        f = jax.jit(lambda *xs: product(*xs, rows))
        assert TARGET in f.lower(*args).as_text() or dtype == "int32"
        got = aotc.load(aotc.compile(f, *args, opt_level=level)).invoke("main", *args)[0]
        close = {"rtol": 1e-4, "atol": 1e-4} if dtype in ("float32", "complex64") else {"rtol": 1e-10, "atol": 1e-10}
        np.testing.assert_allclose(got, dense @ right, **close)
        imported = import_model(f, *args)
        assert dtype == "int32" or "csr_dot" in [op.name for op in imported.functions["main"].body.ops]
        np.testing.assert_allclose(interpret(imported, *args)[0], dense @ right, **close)


def test_csr_products_without_values_are_zero():
    args = [np.zeros(0, "float32"), np.zeros(0, "int32"), np.zeros(4, "int32"), np.ones((5, 2), "float32")]
    f = jax.jit(lambda *xs: product(*xs, 3))
    np.testing.assert_array_equal(aotc.load(aotc.compile(f, *args))(*args), np.zeros((3, 2)))


def test_csr_products_with_invalid_indices_stay_in_bounds():
    args = [np.ones(2, "float32"), np.array([9, -9], "int32"), np.array([-5, 100], "int32"), np.ones(5, "float32")]
    f = jax.jit(lambda *xs: product(*xs, 1))
    assert aotc.load(aotc.compile(f, *args))(*args).tolist() == [2]
