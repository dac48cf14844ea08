"""Random programs: the same numbers from aotc at every level as from JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.differential import check, normal

pytestmark = pytest.mark.cpu

lax = jax.lax

UNARY = [
    jnp.tanh,
    jnp.abs,
    lambda x: x * 0.5,
    lambda x: x + 1,
    jnp.sign,
    lambda x: jnp.where(x > 0, x, 0.25),
    jax.nn.sigmoid,
]
BINARY = [
    jnp.add,
    jnp.subtract,
    jnp.maximum,
    jnp.minimum,
    lambda a, b: a * jnp.tanh(b),
    lambda a, b: jnp.where(a < b, a, b),
]
REDUCE = [jnp.sum, jnp.max, jnp.min, jnp.mean]


def unary(n, k):
    return lambda values: UNARY[n](values[k % len(values)])


def binary(n, k, m):
    """Of two values; the second is broadcast or its leading element if shapes differ."""

    def apply(values):
        a, b = values[k % len(values)], values[m % len(values)]
        if a.shape != b.shape:
            b = (
                b.reshape(-1)[0]
                if b.ndim == 0 or a.ndim == 0 or b.shape[-1] != a.shape[-1]
                else b.reshape(-1, b.shape[-1])[0]
            )
        return BINARY[n](a, b)

    return apply


def reduced(n, k, axis, keep):
    def apply(values):
        x = values[k % len(values)]
        return REDUCE[n](x, axis % x.ndim, keepdims=keep) if x.ndim else x

    return apply


def centered(k, axis):
    def apply(values):
        x = values[k % len(values)]
        return x - x.max(axis % x.ndim, keepdims=True) if x.ndim else x

    return apply


def moved(n, k, axis):
    def apply(values):
        x = values[k % len(values)]
        if not x.ndim:
            return x
        axis_ = axis % x.ndim
        return [
            lambda: jnp.swapaxes(x, axis_, -1),
            lambda: jnp.flip(x, axis_),
            lambda: x.reshape(-1),
            lambda: x.reshape(x.shape[0], -1),
            lambda: lax.slice_in_dim(x, x.shape[axis_] // 2, None, axis=axis_),
            lambda: lax.slice_in_dim(x, 0, None, 2, axis=axis_),
            lambda: lax.pad(x, jnp.float32(0.5), [(1, 0, 1) if d == axis_ else (0, 0, 0) for d in range(x.ndim)]),
            lambda: jnp.concatenate([x, x * 2], axis_),
            lambda: jnp.broadcast_to(x[None], (2, *x.shape)) if x.ndim < 3 else x,
            lambda: jnp.roll(x, 1, axis_),
        ][n]()

    return apply


def product(k, m):
    def apply(values):
        a, b = values[k % len(values)], values[m % len(values)]
        a, b = (v.reshape(-1, v.shape[-1]) if v.ndim else v.reshape(1, 1) for v in (a, b))
        return (a @ b.T if a.shape[1] == b.shape[1] else a.T @ a) * 0.1

    return apply


NUMBER = st.integers(0, 7)
STEP = st.one_of(
    st.builds(unary, st.integers(0, len(UNARY) - 1), NUMBER),
    st.builds(binary, st.integers(0, len(BINARY) - 1), NUMBER, NUMBER),
    st.builds(reduced, st.integers(0, len(REDUCE) - 1), NUMBER, st.integers(0, 2), st.booleans()),
    st.builds(centered, NUMBER, st.integers(0, 2)),
    st.builds(moved, st.integers(0, 9), NUMBER, st.integers(0, 2)),
    st.builds(product, NUMBER, NUMBER),
)


def program(steps, outputs):
    def run(x, y):
        values = [x, y]
        for step in steps:
            made = step(values)
            if made.size <= 4096:
                values.append(made)
        return tuple(values[-1 - n % len(values)] for n in outputs)

    return run


def run_random(level, examples):
    @settings(max_examples=examples, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(STEP, min_size=2, max_size=9), st.lists(st.integers(0, 3), min_size=1, max_size=3))
    def inner(steps, outputs):
        check(program(steps, outputs), [normal(4, 6), normal(3, 4, 6, seed=1)], level, 50)

    inner()


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_random_programs_match_jax_at_every_level(level):
    run_random(level, 12)


@pytest.mark.slow
@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_many_random_programs_match_jax_at_every_level(level):
    run_random(level, 150)


def test_calls_do_not_modify_their_inputs():
    x = normal(4, 6)
    before = x.copy()
    check(lambda a: a.at[0].set(1.0) + a, [x], 2)
    np.testing.assert_array_equal(x, before)


def test_an_unused_argument_is_accepted():
    """JAX drops it from the exported function; a call passes it all the same."""
    check(lambda x, y: jnp.tanh(x), [normal(4, 6), normal(3)], 2)
