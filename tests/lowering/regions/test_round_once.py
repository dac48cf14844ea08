"""Short floats are rounded once: nearer to the exact results, and what is compared or has an end stays as it was."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import LEVELS

import aotc
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

X = np.linspace(-4, 4, 1001)


def run(function, x, level):
    """What a function gives at an optimization level, as f64."""
    (found,) = aotc.load(aotc.compile(jax.jit(function), x, opt_level=level)).invoke("main", x)
    return np.asarray(found).astype("float64")


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("level", [1, 2, 3])
def test_rounding_once_is_closer_to_the_exact_result(level, dtype):
    x = jnp.asarray(X, dtype)
    exact = np.asarray(gelu(np.asarray(x, "float64")))
    apart, once = (np.abs(run(gelu, x, n) - exact).max() for n in (0, level))
    assert once < apart


@pytest.mark.parametrize("level", LEVELS)
def test_a_value_compares_equal_to_its_own_maximum(level):
    """A product is compared with the largest of them: both are rounded."""
    x = jnp.asarray(X.reshape(7, 143), "bfloat16")

    def function(x):
        y = x * 1.7 + 0.3
        return (y == y.max(-1, keepdims=True)).astype("float32").sum(-1)

    assert (run(function, x, level) >= 1).all()


@pytest.mark.parametrize("level", LEVELS)
def test_rounded_sums_stay_in_the_domain_of_sqrt_and_log(level):
    """Of sums that round to 1 the rest is 0, whose root and logarithm there are."""
    a = np.cos(X / 3)
    args = jnp.asarray(np.stack([a, np.sqrt(1 - a * a)]), "bfloat16")

    def function(x):
        norm = x[0] * x[0] + x[1] * x[1]
        return jnp.sqrt(jnp.minimum(norm, 1) - norm * (norm <= 1)) + jnp.floor(norm * 4)

    want = np.asarray(jax.jit(function)(args), "float64")
    found = run(function, args, level)
    assert np.isfinite(found).all()
    assert np.abs(found - want).max() <= 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_conversion_in_the_model_still_rounds(level):
    """A model that rounds on purpose gets what it asks for."""
    x = np.float32(1 + 2.0**-10) * np.arange(1, 20, dtype="float32")
    rounded = lambda x: x.astype("bfloat16").astype("float32") + 0
    np.testing.assert_array_equal(run(rounded, x, level), np.asarray(jnp.asarray(x, "bfloat16"), "float64"))


@pytest.mark.parametrize("reduce", [jnp.max, jnp.min])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float8_e4m3fn"])
def test_extrema_of_short_floats_are_computed_in_f32(dtype, reduce):
    """From one element to the next, in registers; whatever is the largest is the same."""
    x = jnp.asarray(np.r_[X, np.nan, 0.0].reshape(17, 59), dtype)
    data = aotc.compile(jax.jit(lambda x: reduce(x, -1)), x)
    (text,) = (k["text"] for k in open_bundle(data).manifest["debug"]["kernels"].values())
    assert 'private("f32[]")' in text
    (found,) = aotc.load(data).invoke("main", np.asarray(x))
    np.testing.assert_array_equal(found.astype("float32"), np.asarray(reduce(x, -1)).astype("float32"))
