"""State of loops that change places from one iteration to the next."""

from __future__ import annotations

import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("n", [3, 4097])
def test_two_pairs_of_swapped_states_match_jax(n):
    """The copies that save the old state must outlive the copies that follow them."""
    import jax

    def f(x):
        a, b = np.arange(3, dtype="f"), np.arange(3, 6, dtype="f")
        c, d = np.arange(6, 9, dtype="f"), np.arange(9, 12, dtype="f")

        def step(i, s):
            x, a, b, c, d = s
            return x * 0.5 + a.sum() - d[0], b, a, d, c

        return jax.lax.fori_loop(0, 5, step, (x, a, b, c, d))

    x = np.linspace(0, 1, n).astype("f")
    got = aotc.load(aotc.compile(jax.jit(f), x)).invoke("main", x)
    for g, w in zip(got, jax.tree.leaves(jax.jit(f)(x)), strict=True):
        np.testing.assert_allclose(g, w, rtol=1e-5)


def test_random_bits_of_a_large_array_match_jax():
    """ThreeFry in JAX rotates its key schedule through the state of a loop."""
    import jax

    key = np.array([0, 1234], "uint32")
    f = jax.jit(lambda k: jax.random.bits(k, (1000,)))
    np.testing.assert_array_equal(aotc.load(aotc.compile(f, key)).invoke("main", key)[0], f(key))


def test_a_branch_on_one_element_matches_jax():
    """The condition of a branch in a loop may be a reshape of one element of higher rank."""
    import jax

    key = np.array([3, 1], "uint32")
    f = jax.jit(lambda k: jax.random.gamma(k, np.float32(0.7)))
    np.testing.assert_allclose(aotc.load(aotc.compile(f, key)).invoke("main", key)[0], f(key), rtol=1e-6)
