"""Maxima of softmax's rows leave NaN to the sums, and its exponentials are known to be at most 1."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop_printer import print_kernel
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import resolve

pytestmark = pytest.mark.cpu
X = normal(9, 37)
ODD = X.copy()
ODD[0, 3], ODD[1, 5], ODD[2, 7], ODD[3], ODD[4] = np.nan, np.inf, -np.inf, -np.inf, np.nan
ODD[5, :2], ODD[6, 1], ODD[7] = (np.inf, np.nan), 90.0, 200.0


def apart(x, i=-1):
    return jnp.exp(x - x.max(i, keepdims=True))


def masked(x):
    """A choice by the maximum itself, which the sum says nothing of."""
    top = x.max(-1, keepdims=True)
    e = jnp.exp(x - top)
    return jnp.where(top > 1, e / e.sum(-1, keepdims=True), 0.0)


BOTH, DECAYS, NUMBERS = {"decay", "max_number"}, {"decay"}, {"max_number"}
CASES = {
    "softmax": (jax.nn.softmax, BOTH),
    "log-softmax": (jax.nn.log_softmax, BOTH),
    "scaled": (lambda x: jax.nn.softmax(x / 3) * 2 + 1, BOTH),
    "masked-input": (lambda x: jax.nn.softmax(jnp.where(x > 0, x, -1e9)), BOTH),
    "logsumexp": (lambda x: jax.nn.logsumexp(x, axis=-1), NUMBERS),
    "exponentials-are-stored": (lambda x: (apart(x), apart(x).sum(-1)), DECAYS),
    "maximum-is-stored": (lambda x: (jax.nn.softmax(x), x.max(-1)), DECAYS),
    "chosen-by-the-maximum": (masked, DECAYS),
    "another-number": (lambda x: jnp.exp(x - x.min(-1, keepdims=True)).sum(-1), set()),
    "only-a-maximum": (lambda x: x.max(-1), set()),
}


def found(function, x, target="cpu:x86-64-v4"):
    options, (machine,) = Options(target=target), resolve(target)
    kernels = lower(run_passes(import_model(jax.jit(function), x), options), machine, options).kernels
    text = "".join(print_kernel(k) for k in kernels)
    return {name for name in BOTH if f"{name}(" in text}


@pytest.mark.parametrize("name", CASES)
def test_what_is_known_of_a_row(name):
    function, known = CASES[name]
    assert found(function, X) == known
    for x in (X, ODD, normal(3, 1), normal(2, 64) * 100):
        want = jax.tree.leaves(jax.jit(function)(x))
        for got, each in zip(aotc.load(aotc.compile(jax.jit(function), x)).invoke("main", x), want, strict=True):
            np.testing.assert_allclose(got, each, rtol=1e-5, atol=1e-6)


def test_a_maximum_that_was_rounded_is_no_bound():
    """Exponentials of more than 60 come of elements beside a maximum that was found in fewer bits."""

    def function(x):
        e = jnp.exp(x - x.astype("bfloat16").max(-1, keepdims=True).astype("float32"))
        return e / e.sum(-1, keepdims=True)

    assert "decay" not in found(function, X)
    x = np.full((3, 37), 33_000.0, np.float32)
    x[:, 5] += 70
    got = aotc.load(aotc.compile(jax.jit(function), x))(x)
    np.testing.assert_allclose(got, jax.jit(function)(x), rtol=1e-5)


def test_a_gpu_waits_for_memory():
    assert found(jax.nn.softmax, X, "cuda:sm_90") == set()
