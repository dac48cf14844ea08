"""Softmax divides a row once, and its exponentials lie where the result goes until then."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import check, close, normal

import aotc

pytestmark = pytest.mark.cpu
X = normal(6, 300, scale=4.0)
PLACES = np.random.default_rng(3).permutation(300)


def spread(x):
    return jnp.exp(x - x.max(-1, keepdims=True))


def by_hand(x):
    return spread(x) / spread(x).sum(-1, keepdims=True)


def kernels(function, *arguments, folder, **options):
    """The text of the kernels of a function."""
    aotc.compile(function, *arguments, dump_ir=str(folder), cache=False, **options)
    (text,) = folder.glob("*-lower.txt")
    return text.read_text()


TAKEN = {
    "softmax": jax.nn.softmax,
    "by hand": by_hand,
    "of two dims": lambda x: jax.nn.softmax(x.reshape(6, 3, 100), axis=(1, 2)),
    "with a mask": lambda x: jax.nn.softmax(jnp.where(x > 0, x, -jnp.inf)),
    "and more": lambda x: jnp.tanh(jax.nn.softmax(x * 2) + x),
}
LEFT = {
    "another divisor": lambda x: x / x.max(-1, keepdims=True),
    "no maximum": lambda x: jnp.exp(x) / jnp.exp(x).sum(-1, keepdims=True),
    "another row": lambda x: spread(2 * x) / spread(x).sum(-1, keepdims=True),
    "another sum": lambda x: spread(x) / (spread(x).sum(-1, keepdims=True) + 1),
    "bf16": lambda x: jax.nn.softmax(x.astype(jnp.bfloat16)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_each_row_has_one_division(name, tmp_path):
    text = kernels(TAKEN[name], X, folder=tmp_path)
    assert text.count("div(") == text.count("div(f32(1.0), ") == 1
    for level in (0, 1, 2):
        check(TAKEN[name], (X,), level)


@pytest.mark.parametrize("name", LEFT)
def test_other_divisions_of_rows_are_unchanged(name, tmp_path):
    text = kernels(LEFT[name], X, folder=tmp_path)
    assert text.count("div(") == 1
    assert "1.0), " not in text
    check(LEFT[name], (X,), 2, factor=3)


def test_rows_divided_by_their_maximum_contain_one():
    x = np.abs(normal(200, 70)) + 0.1
    (found,) = aotc.load(aotc.compile(LEFT["another divisor"], x)).invoke("main", x)
    assert (found.max(-1) == 1).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("n", [1, 3, 16, 49, 1000])
def test_softmax_of_every_row_length_is_close_to_f64(n, dtype):
    with jax.enable_x64(True):
        x = normal(9, n, scale=30.0, dtype=dtype)
        x[0], x[1, 0], x[2, : n // 2] = 7, 80, -np.inf
        (found,) = aotc.load(aotc.compile(jax.nn.softmax, x)).invoke("main", x)
    wide = np.exp(np.longdouble(x - x.max(-1, keepdims=True)))
    wide /= wide.sum(-1, keepdims=True)
    eps, tiny = np.finfo(dtype).eps, np.finfo(dtype).tiny
    np.testing.assert_allclose(np.longdouble(found), wide, rtol=8 * eps, atol=tiny)
    assert (found[0] == x.dtype.type(1) / x.dtype.type(n)).all()


def test_rows_without_a_finite_sum_match_xla():
    x = normal(5, 33)
    x[0, 3], x[1], x[2, 5], x[3, 6:] = np.nan, -np.inf, np.inf, -np.inf
    (found,) = aotc.load(aotc.compile(jax.nn.softmax, x)).invoke("main", x)
    np.testing.assert_array_equal(np.isnan(found), np.isnan(np.asarray(jax.nn.softmax(x))))
    close([found], [np.asarray(jax.nn.softmax(x))])


ELSEWHERE = {
    "read from the right": lambda x: jax.nn.softmax(x)[:, ::-1],
    "read from the right before": lambda x: jnp.flip(spread(x) + 1, -1) * x / spread(x).sum(-1, keepdims=True),
    "read one further": lambda x: (jnp.roll(spread(x) * 2, 1, -1) + x) * spread(x).sum(-1, keepdims=True),
    "read anywhere": lambda x: jnp.take(spread(x) + x, PLACES, axis=-1) * x * spread(x).sum(-1, keepdims=True),
    "of another type": lambda x: jax.nn.softmax(x).astype(jnp.float16),
    "two results": lambda x: (jax.nn.softmax(x), jnp.sin(spread(x))),
    "two results at last": lambda x: (jax.nn.softmax(x), jnp.sin(jax.nn.softmax(x) + spread(x))),
    "the exponentials too": lambda x: (spread(x), by_hand(x)),
    "two rows": lambda x: jax.nn.softmax(jnp.sin(x)) * jnp.cos(jnp.sin(x)),
}


def test_exponentials_are_stored_in_the_result(tmp_path):
    assert "scratch(" not in kernels(jax.nn.softmax, X, folder=tmp_path)


@pytest.mark.parametrize("name", ["of another type", "two results at last", "two rows"])
def test_exponentials_that_do_not_fit_the_result_use_scratch(name, tmp_path):
    assert "scratch(" in kernels(ELSEWHERE[name], X, folder=tmp_path)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_exponentials_with_other_readers_match_xla(name):
    check(ELSEWHERE[name], (X,), 2)


@pytest.mark.parametrize("shape", ["b, 100", "4, n", "b, n"])
def test_softmax_of_symbolic_sizes_matches_jax(shape):
    specs = jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), "float32")
    module = aotc.load(aotc.compile(jax.nn.softmax, specs))
    x = normal(4, 100, scale=4.0)
    close(module.invoke("main", x), [np.asarray(jax.nn.softmax(x))])


def test_a_donated_argument_is_read_before_it_is_overwritten():
    function = jax.jit(lambda x: jax.nn.softmax(x), donate_argnums=0)
    (found,) = aotc.load(aotc.compile(function, X)).invoke("main", X.copy())
    close([found], [np.asarray(jax.nn.softmax(X))])
    residual = jax.jit(lambda x: jax.nn.softmax(x) + x, donate_argnums=0)
    (found,) = aotc.load(aotc.compile(residual, X)).invoke("main", X.copy())
    close([found], [np.asarray(jax.nn.softmax(X)) + X])
