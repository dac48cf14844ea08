"""Long chains of one op lower in time that grows with their length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.growth import check_linear

from aotc.frontend.importer import import_model
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve_targets

pytestmark = pytest.mark.ir

OPTIONS = Options(target="cpu:x86-64-v3")
X = np.ones((24, 24), np.float32)
STEPS = {
    "pad": lambda x, i: jnp.pad(x, 1).T,
    "pad-crop": lambda x, i: jnp.pad(x, ((2, 1), (0, 3)))[1:-2, 2:-1].T,
    "roll": lambda x, i: jnp.roll(x, (1, 2), (0, 1)),
    "concatenate": lambda x, i: jnp.concatenate([x[1:], x[:1]], 0).T,
    "halves": lambda x, i: jnp.concatenate([x[:, 12:], x[:, :12]], 1)[::-1],
    "reshape": lambda x, i: x.T.reshape(48, 12).T.reshape(24, 24),
    "slice": lambda x, i: lax.dynamic_slice(jnp.pad(x, 1), (i, i), (24, 24)),
    "update": lambda x, i: lax.dynamic_update_slice(x, x[:4, :4] + 1, (i, i)),
    "take": lambda x, i: x[(jnp.arange(24) + i) % 24],
    "where": lambda x, i: jnp.where(x < x.T, x[::-1], x),
    "sum": lambda x, i: x + x.sum(0, keepdims=True) * x.T,
    "window": lambda x, i: lax.reduce_window(x, -np.inf, lax.max, (3, 3), (1, 1), "SAME"),
    "product": lambda x, i: x @ x.T,
    "cumsum": lambda x, i: jnp.cumsum(x, 0),
    "sort": lambda x, i: jnp.sort(x.T, 0),
    "remainder": lambda x, i: x.reshape(-1)[(jnp.arange(576) * 5 + i) % 576].reshape(24, 24),
    "branch": lambda x, i: lax.cond(i > 0, lambda v: v + 1, lambda v: v.T, x),
    "loop": lambda x, i: lax.fori_loop(0, i, lambda _, v: v.T * 2, x),
}


@pytest.mark.parametrize("after", ["an argument", "a product", "a sum"])
@pytest.mark.parametrize("name", STEPS)
def test_lowering_time_of_a_chain_is_linear(name, after):
    (target,) = resolve_targets(OPTIONS.target)

    def text(length):
        def function(x, i):
            x = {"an argument": lambda: x, "a product": lambda: x @ x, "a sum": lambda: x + x.sum(1)[:, None]}[after]()
            for _ in range(length):
                x = STEPS[name](x, i)
            return x

        return jax.jit(function).lower(X, 1).as_text()

    def work(source):
        lower(run_passes(import_model(source), OPTIONS), target, OPTIONS)

    check_linear(text, work, 6)
