"""Complex products beside XLA: the same bits, and a number times its conjugate is real."""

import numpy as np
import pytest

pytest.importorskip("numba")

import jax
import jax.numpy as jnp

import aotc

pytestmark = pytest.mark.cpu


def numbers(kind, seed):
    random = np.random.default_rng(seed)
    return (random.normal(size=(8, 999)) + 1j * random.normal(size=(8, 999))).astype(kind)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
@pytest.mark.parametrize("function", [lambda z, w: z * w, lambda z, w: jax.lax.cumprod(z, 0)], ids=["mul", "cumprod"])
def test_products_have_the_bits_of_xla(kind, function):
    args = numbers(kind, 0), numbers(kind, 1)
    with jax.enable_x64(True):
        got = aotc.load(aotc.compile(function, *args)).invoke("main", *args)[0]
        optimized = {"xla_backend_optimization_level": 3}  # whose products are fused with their sums
        want = jax.jit(function, compiler_options=optimized)(*args)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["complex64", "complex128"])
def test_a_number_times_its_conjugate_is_real(kind):
    z = numbers(kind, 2)
    with jax.enable_x64(True):
        module = aotc.load(aotc.compile(lambda z: (z * jnp.conj(z), jnp.conj(z) * z), z))
    for product in module.invoke("main", z):
        np.testing.assert_array_equal(product.imag, 0)
        np.testing.assert_array_less(0, product.real)
