"""Unary functions on every 257th f32 number, and on every f16 and bf16 number: within ``docs/accuracy.md``."""

import pytest

pytest.importorskip("numba")
pytest.importorskip("mpmath")

import numpy as np
from conformance import sampled
from conformance.dense import FUNCTIONS, chunks, measure, quick_errors
from conformance.edges import EdgeCase, bound_of, errors

pytestmark = pytest.mark.cpu


def test_every_unary_function_has_a_reference():
    assert {o.name for o in sampled.functions("f32", 1)} == set(FUNCTIONS)


def test_a_stride_reaches_all_exponents_and_low_bits():
    bits = next(chunks(4099)).view(np.uint32)
    assert np.unique(bits >> 23).size == 512
    assert np.unique(bits & 255).size == 256


def test_errors_in_64_bits_are_those_in_long_double():
    want = np.array([1.0, 1.5, 3e38, 4e38, np.inf, -np.inf, np.nan, 1e-40, 0.0, -2.0**128 * (1 - 2.0**-25)])
    for move in (0, 1, -3):
        with np.errstate(all="ignore"):
            got = np.nextafter(want.astype(np.float32), np.float32(move)) if move else want.astype(np.float32)
        np.testing.assert_array_equal(quick_errors(got, want), errors(got, want.astype(np.longdouble)))


@pytest.mark.slow
def test_errors_of_f32_numbers_at_a_stride():
    beyond = [
        f"{f.operation.name} of {f.where!r}: {f.error:.4g} ulp, {f.count} such"
        for f in measure()
        if f.error > bound_of(EdgeCase(f.operation, "f32")).ulp
    ]
    assert not beyond, "\n".join([*beyond, sampled.repeat()])
