"""Sums of every kind: a term goes through no more additions than ``docs/accuracy.md`` says."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

from conformance.sampled import SEED, repeat
from conformance.sums import COMPOSED, HALF_UNIT, NARROW, SUMS, difficult, excess, measured_height, relative_error

import aotc

pytestmark = pytest.mark.cpu

COMPLEX = ("complex64", "complex128")


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("kind", SUMS, ids=lambda s: s.name)
def test_the_height_of_a_sum(kind, dtype):
    with jax.enable_x64(True):
        for n in kind.lengths:
            assert measured_height(kind, n, dtype) <= kind.height(n) + 0.5, n


@pytest.mark.parametrize("dtype", [*HALF_UNIT, *NARROW, *COMPLEX])
@pytest.mark.parametrize("kind", SUMS, ids=lambda s: s.name)
def test_errors_of_random_and_difficult_sums(kind, dtype):
    n = 64 if dtype.startswith("float8") else 1000 if dtype in NARROW else kind.lengths[-1]
    n = min(n, kind.lengths[-1])
    number = np.dtype(getattr(ml_dtypes, dtype, dtype))
    terms = 2 * n if dtype in COMPLEX and kind.name.startswith(("dot", "conv")) else n  # of a part
    if kind.name == "dot_general, vectors" and dtype in COMPLEX:
        pytest.skip("parts of products: test_products_of_complex_vectors")
    with jax.enable_x64(True):
        for name, x in difficult(kind.shape(n), number, SEED).items():
            assert relative_error(kind, x) <= kind.height(terms) + 1, f"{name}; {repeat()}"


@pytest.mark.parametrize("dtype", COMPLEX)
def test_products_of_complex_vectors(dtype):
    random, n = np.random.default_rng(SEED), 1000
    a, b = (v.astype(dtype) for v in random.normal(size=(2, n)) + 1j * random.normal(size=(2, n)))
    with jax.enable_x64(True):
        got = np.asarray(aotc.load(aotc.compile(jnp.dot, a, b)).invoke("main", a, b)[0])
    a, b = a.astype(np.clongdouble), b.astype(np.clongdouble)
    sizes = (np.abs(a.real * b.real) + np.abs(a.imag * b.imag)).sum()
    assert abs(got.real - (a * b).sum().real) <= 2 * n * HALF_UNIT[got.real.dtype.name] * sizes, repeat()


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int32", "uint64"])
@pytest.mark.parametrize("kind", [s for s in SUMS if s.name != "convolution"], ids=lambda s: s.name)
def test_sums_of_integers_are_exact_modulo_their_range(kind, dtype):
    limits, n = np.iinfo(dtype), kind.lengths[1]
    x = np.random.default_rng(SEED).integers(limits.min, limits.max, kind.shape(n), dtype, endpoint=True)
    with jax.enable_x64(True):
        got = np.asarray(aotc.load(aotc.compile(kind.function, x)).invoke("main", x)[0])
    exact = kind.exact(x.astype(object))
    wrapped = np.vectorize(lambda v: int(v) % (limits.max - limits.min + 1), otypes=[object])(exact)
    np.testing.assert_array_equal(got.astype(object) % (int(limits.max) - int(limits.min) + 1), wrapped, repeat())


def test_a_sum_of_more_ones_than_f32_counts_one_by_one():
    """Added one by one they stay at 2**24."""
    x = np.ones((1 << 24) + 16, np.float32)
    for function in (jnp.sum, lambda x: jnp.cumsum(x)[-1], lambda x: x @ x):
        (got,) = aotc.load(aotc.compile(function, x)).invoke("main", x)
        assert got == x.size


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("row", COMPOSED, ids=lambda row: row.name)
def test_errors_of_functions_made_of_sums(row, dtype):
    with jax.enable_x64(True):
        for n in (10, 1000):
            for name, x in difficult((4, n), np.dtype(dtype), SEED).items():
                assert excess(row, x) <= 1, f"{name}, {n}; {repeat()}"
