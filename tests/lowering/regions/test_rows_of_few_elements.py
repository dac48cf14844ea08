"""Short rows are written out or have their numbers computed together, and give what XLA gives."""

import jax
import jax.numpy as jnp
import pytest
from support.differential import check, normal

pytestmark = pytest.mark.cpu

PROGRAMS = {
    "distances": lambda x, w: jnp.sqrt(((x[:, None] - w) ** 2).sum(-1)),
    "norms": lambda x, w: x / jnp.linalg.norm(x, axis=1, keepdims=True),
    "products": lambda x, w: (x + w).prod(1) + x.max(1),
    "softmax": lambda x, w: jax.nn.softmax(x * w, axis=1),
    "log-sum-exp": lambda x, w: jax.nn.logsumexp(x, axis=1),
    "a-stage-behind-a-dear-number": lambda x, w: (x * jnp.exp(jnp.tanh((x * w).sum(1)))[:, None]).sum(1),
    "logistic-gradient": lambda x, w: jax.nn.sigmoid(-(x * w).sum(1))[:, None] * x,
    "places": lambda x, w: jnp.argmax(x, axis=1),
    "two-axes": lambda x, w: jnp.exp(x.reshape(-1, 1, x.shape[1]).sum((1, 2))),
}


@pytest.mark.parametrize("terms", [1, 2, 3, 8, 9, 10, 14, 15, 20])
@pytest.mark.parametrize("name", PROGRAMS)
def test_reductions_of_short_rows_match_jax(name, terms):
    check(PROGRAMS[name], [normal(37, terms), normal(terms, seed=1)], 2)


@pytest.mark.parametrize("shape", [(16, 20), (17, 20), (15, 20), (3, 33, 20), (1, 20), (40, 2, 3)])
def test_short_rows_over_several_axes_match_jax(shape):
    check(lambda x: jnp.exp(-jax.nn.logsumexp(x * x, axis=-1)), [normal(*shape)], 2)


def test_short_rows_of_integers_and_f64_match_jax():
    check(lambda x: (x * 9).astype(int).sum(1), [normal(33, 4)], 2)
    with jax.enable_x64(True):
        check(lambda x: jnp.log1p(jnp.exp((x * x).sum(1))), [normal(33, 20).astype("float64")], 2)
