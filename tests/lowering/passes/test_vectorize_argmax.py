"""Places of the largest and the smallest, found by their values: ties, NaN, infinities, every type and level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import LEVELS, check, integers, normal

from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk
from aotc.lowering.passes.vectorize_argmax import argmax_or_argmin_of

pytestmark = pytest.mark.cpu

PLACES = {"argmax": jnp.argmax, "argmin": jnp.argmin}
DTYPES = ("float16", "bfloat16", "float32", "float8_e4m3fn", "int8", "int32", "uint8", "uint32")


def hard_rows():
    """Rows with ties, of infinities, with NaN at every place, with zeros of both signs."""
    inf, nan = np.inf, np.nan
    zeros = [0.0, -0.0, 0, -0.0, 0]
    rows = [[1, 3, 3, 2, 3], [-inf] * 5, [inf] * 5, [nan, 1, 2, inf, nan], [-inf, 2, nan, nan, 5], zeros]
    return np.array(rows, "float32")


def combiner(function, *args):
    """The combiner of the first reduction of two operands."""
    functions = import_model(jax.jit(function), *args).functions.values()
    return next(op for f in functions for op in walk(f.body) if op.name == "reduce" and len(op.results) == 2).regions[0]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_of_every_dtype_matches_jax(dtype, name, level):
    x = integers(300, low=0, high=9).reshape(12, 25)
    check(lambda x: PLACES[name](x, -1), [np.asarray(jnp.asarray(x, dtype))], level)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", PLACES)
def test_argmax_with_ties_and_nan_matches_jax(name, level):
    check(lambda x: PLACES[name](x, -1), [hard_rows()], level)


@pytest.mark.parametrize("shape", [(1,), (1, 1), (7, 1), (3, 17), (2, 3, 1000), (70_001,), (2, 70_001)])
@pytest.mark.parametrize("name", PLACES)
def test_argmax_of_every_shape_matches_jax(shape, name):
    check(lambda x: (PLACES[name](x, -1), PLACES[name](x)), [normal(*shape)], 2)


def test_argmax_of_a_computed_value_matches_jax():
    def function(x):
        y = jnp.exp(x) * 2
        i = y.argmax(-1)
        return i, jnp.take_along_axis(y, i[:, None], 1), y.max(-1)

    check(function, [normal(6, 50)], 2)


@pytest.mark.parametrize("sign", [1, -1])
def test_differently_written_argmax_combiners_match_jax(sign):
    """The first of the largest, with fewer words; the last is another thing, and so is one that passes NaN over."""

    def pairs(choose):
        def function(x):
            i = lax.broadcasted_iota("int32", x.shape, 1)

            def combine(a, b):
                stays = choose(sign * a[0], sign * b[0])
                return lax.select(stays, a[0], b[0]), lax.select(stays, a[1], b[1])

            return lax.reduce((x, i), (np.float32(-np.inf * sign), np.int32(0)), combine, (1,))

        return function

    first = pairs(lambda a, b: (a >= b) | (a != a))
    x = hard_rows() * np.float32(1)
    check(lambda x: first(x)[1], [x], 2)
    assert argmax_or_argmin_of(combiner(pairs(lambda a, b: (a > b) | (a != a)), x)) == ""
    assert argmax_or_argmin_of(combiner(pairs(lambda a, b: a >= b), x)) == ""
    for function in (pairs(lambda a, b: (a > b) | (a != a)), pairs(lambda a, b: a >= b)):
        check(lambda x, f=function: f(x)[1], [normal(5, 40)], 2)


@pytest.mark.parametrize("name", PLACES)
def test_the_combiners_of_jax_are_recognized(name):
    assert argmax_or_argmin_of(combiner(lambda x: PLACES[name](x, -1), hard_rows())) == name.removeprefix("arg")
