"""Answers are kept, and only the last ones."""

import pytest

from aotc.ir.dims.algebra import floordiv, mod, sym
from aotc.support.memoize import memoized

pytestmark = pytest.mark.ir


def test_memoized_caches_only_the_last_results():
    asked = []

    @memoized
    def twice(number):
        asked.append(number)
        return 2 * number

    assert [twice(3), twice(3)] == [6, 6]
    assert asked == [3]
    for number in range(10, 10 + 4095):
        twice(number)
    assert twice(3) == 6
    assert asked.count(3) == 1
    for number in range(10_000, 10_000 + 4096):
        twice(number)
    assert twice(3) == 6
    assert asked.count(3) == 2


def test_symbols_with_different_bounds_are_cached_separately():
    short, long = sym("i", 0, 4), sym("i", 0, 8)
    assert short != long
    assert (floordiv(short, 4), mod(short, 4)) == (0, short)
    assert floordiv(long, 4) != 0
    assert mod(long, 4) != long
