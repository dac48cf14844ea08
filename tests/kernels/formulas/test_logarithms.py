"""Logarithms on NumPy, where they take another power of two, and over all kinds of floats."""

import numpy as np
import pytest
from kernels.formulas.test_scalar_math import INF, LONG, REFERENCE, Algebra, NoFma, evaluate, ulps

from aotc.kernels.formulas.math import MAX_ULP

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("bits", [32, 64])
@pytest.mark.parametrize("algebra", [Algebra, NoFma])
def test_logarithms_where_another_power_of_two_is_taken(bits, algebra):
    m = algebra(bits)
    low, high = (-149, 127) if bits == 32 else (-1074, 1023)
    with np.errstate(all="ignore"):
        ends = np.multiply.outer(np.array([0.75, 1, 1.4142135623730951, 1.5]), np.exp2(np.arange(low, high + 1.0)))
        ends = ends.ravel().astype(m.kind)
        ends = np.concatenate([ends, np.nextafter(ends, m.kind(0)), np.nextafter(ends, m.kind(INF))])
        ends = ends[(ends > 0) & (ends < INF)]
        for name, x in (("log", ends), ("log1p", np.concatenate([ends, ends[ends >= 2.0**-24] - m.kind(1)]))):
            x = x[x > -1]
            want = REFERENCE[name](LONG(x))
            assert ulps(evaluate(name, bits, x, algebra=algebra), want).max() <= MAX_ULP[name][bits == 64], name


@pytest.mark.parametrize("algebra", [Algebra, NoFma])
def test_logarithms_of_32_bits_over_all_floats(algebra):
    """One float of 4001, with every exponent, sign and kind of number among them."""
    m = algebra(32)
    x = np.arange(0, 1 << 32, 4001).astype(np.uint32).view(np.float32)
    with np.errstate(all="ignore"):
        for name in ("log", "log1p"):
            got, want = evaluate(name, 32, x, algebra=algebra), REFERENCE[name](np.float64(x))
            numbers = np.isfinite(want) & (np.abs(want) > np.finfo(m.kind).tiny)
            assert ulps(got[numbers], want[numbers]).max() <= MAX_ULP[name][0]
            np.testing.assert_array_equal(got[~numbers], want[~numbers].astype(m.kind))


@pytest.mark.parametrize("bits", [32, 64])
def test_the_logarithm_of_no_number_is_none_whatever_its_bits(bits):
    m = Algebra(bits)
    positive = (0x7FC00000 if bits == 32 else 0x7FF8 << 48) + np.arange(4096)
    nans = m.from_bits(np.concatenate([positive, positive + np.iinfo(m.integer).min]))
    with np.errstate(all="ignore"):
        assert all(np.isnan(evaluate(name, bits, nans)).all() for name in ("log", "log1p"))
