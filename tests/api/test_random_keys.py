"""Typed random keys of JAX as arguments of calls, as bound values, and on a device."""

import jax
import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

X = np.arange(6, dtype="float32")
KEY = jax.random.key(7)


def noisy(key, x):
    return x + jax.random.normal(key, x.shape)


@pytest.fixture(scope="module")
def module():
    return aotc.compile(noisy, KEY, X).load()


def test_a_typed_key_is_accepted_as_an_argument(module):
    want = np.asarray(jax.jit(noisy)(KEY, X))
    np.testing.assert_allclose(module(KEY, X), want, rtol=1e-5)
    np.testing.assert_array_equal(module(jax.random.key_data(KEY), X), module(KEY, X))
    np.testing.assert_array_equal(module.invoke("main", KEY, X)[0], module(KEY, X))
    np.testing.assert_array_equal(module.submit("main", KEY, X)[0].result(), module(KEY, X))


def test_a_typed_key_can_be_bound_and_put(module):
    np.testing.assert_array_equal(module.bind(key=KEY)(X), module(KEY, X))
    np.testing.assert_array_equal(module.put(KEY).numpy(), jax.random.key_data(KEY))


@pytest.mark.parametrize("key", [jax.random.key(0, impl="rbg"), jax.random.split(KEY, 3)], ids=["rbg", "three keys"])
def test_a_key_of_another_implementation_is_refused(module, key):
    with pytest.raises(aotc.CallError, match=r"argument 0 \(key\) has the wrong shape"):
        module(key, X)
