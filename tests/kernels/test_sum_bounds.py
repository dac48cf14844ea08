"""Sums of every kind: a term goes through no more additions than ``docs/accuracy.md`` says."""

import jax
import numpy as np
import pytest

pytest.importorskip("numba")

from conformance.sums import HALF_UNIT, SUMS, measured_height, relative_error

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("kind", SUMS, ids=lambda s: s.name)
def test_the_height_of_a_sum(kind, dtype):
    with jax.enable_x64(True):
        for n in kind.lengths:
            assert measured_height(kind, n, dtype) <= kind.height(n) + 0.5, n


@pytest.mark.parametrize("dtype", HALF_UNIT)
@pytest.mark.parametrize("kind", SUMS, ids=lambda s: s.name)
def test_errors_of_random_sums(kind, dtype):
    random, n = np.random.default_rng(0), kind.lengths[-1]
    shape = kind.shape(n)
    numbers = (random.normal(size=shape), random.normal(size=shape) * np.exp2(random.integers(-30, 30, shape)))
    with jax.enable_x64(True):
        for x in numbers:
            assert relative_error(kind, x.astype(dtype)) <= kind.height(n) + 1
