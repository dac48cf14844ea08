"""The tensor-level passes, one after the other, on programs from JAX: XLA on the CPU is the oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from aotc.frontend.importer import import_model
from aotc.ir.semantics.run import interpret
from aotc.ir.semantics.verify import verify
from aotc.lowering.passes.canonicalize.canonicalize import canonicalize
from aotc.lowering.passes.canonicalize_dot import canonicalize_dot
from aotc.lowering.passes.cse import cse
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.decompose_convolution import decompose_convolution
from aotc.lowering.passes.fold_constants import fold_constants
from aotc.lowering.passes.inline import inline
from aotc.lowering.passes.licm import licm
from aotc.options import Options

pytestmark = pytest.mark.ir

ORDER = (
    inline, canonicalize, cse, licm, canonicalize_dot, decompose_convolution, fold_constants,
    canonicalize, cse, dce,
)  # fmt: skip
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.normal(size=shape).astype(np.float32)


WEIGHT = normal(5, 7)


def mlp(x):
    return jax.nn.softmax(jax.nn.relu(x @ WEIGHT) + 1.0) @ jnp.asarray(WEIGHT.T)


def dilated(x, k):
    return jax.lax.conv_general_dilated(
        x, k, (2, 1), ((1, 2), (0, -1)), (1, 2), (2, 1), dimension_numbers=("NCHW", "OIHW", "NHWC")
    )


def grouped(x, k):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, k, (1, 1), "SAME", feature_group_count=2, dimension_numbers=numbers)


def gradient(conv):
    return jax.grad(lambda x, k: (conv(x, k) ** 2).sum(), argnums=(0, 1))


def einsums(a, b):
    return [jnp.einsum(f"bqhd,bkhd->{out}", a, b) for out in ("bhqk", "qk", "hd", "kdb", "dhq")]


def loop(x, y):
    def body(carry):
        n, a, unused = carry
        return n + 1, a * jnp.sin(y) + jnp.float32(2) ** 2, unused + 1

    return jax.lax.while_loop(lambda c: c[0] < 5, body, (0, x, jnp.zeros(3)))[1]


def nested_loops(x):
    def inner(a, b):
        return a * 0.5 + b + jnp.cos(x[0]), a

    def outer(carry, t):
        total, parts = jax.lax.scan(inner, carry, x)
        return total + t, parts.sum()

    return jax.lax.scan(outer, x[0], x)


def branches(x):
    return jax.lax.cond(x.sum() > 0, lambda v: (v + 1, v), lambda v: (v * 2, v), x)[0]


def movement(x):
    half = jnp.split(jnp.concatenate([x, x]), 2)[1]
    return jnp.sum(x[None], axis=0) + x**2 + x / 4 + half + jnp.arange(4.0) + x[1:, ::2].sum()


def norms(x):
    return jnp.median(x) + jnp.var(x) + jnp.cumsum(x).max()


CASES = {
    "mlp": (mlp, normal(3, 5)),
    "dilated": (dilated, normal(2, 3, 9, 8), normal(4, 3, 3, 2)),
    "dilated_gradient": (gradient(dilated), normal(2, 3, 9, 8), normal(4, 3, 3, 2)),
    "grouped": (grouped, normal(2, 6, 7, 4), normal(3, 3, 2, 6)),
    "grouped_gradient": (gradient(grouped), normal(2, 6, 7, 4), normal(3, 3, 2, 6)),
    "convolution_1d": (lambda x, k: jnp.convolve(x, k), normal(9), normal(3)),
    "einsums": (einsums, normal(2, 3, 4, 5), normal(2, 3, 4, 5)),
    "dot": (jnp.dot, normal(4), normal(4)),
    "matrix_vector": (jnp.dot, normal(3, 4), normal(4)),
    "loop": (loop, normal(3), normal(3)),
    "nested_loops": (nested_loops, normal(4, 3)),
    "branches": (branches, normal(3)),
    "movement": (movement, normal(4, 4)),
    "norms": (norms, normal(9)),
    "sort": (lambda x: jnp.argsort(x), normal(9)),
}


@pytest.mark.parametrize("name", CASES)
def test_every_pass_preserves_the_values(name):
    function, *arguments = CASES[name]
    wanted = jax.tree.leaves(jax.jit(function)(*arguments))
    module = import_model(function, *arguments)
    for step in ORDER:
        module = step(module, Options())
        assert [f.message for f in verify(module)] == [], step.__name__
        for got, want in zip(interpret(module, *arguments), wanted, strict=True):
            np.testing.assert_allclose(got, want, rtol=2e-4, atol=2e-5, err_msg=step.__name__)


@pytest.mark.parametrize("name", ["dilated_gradient", "einsums"])
def test_only_canonical_contractions_remain(name):
    function, *arguments = CASES[name]
    module = import_model(function, *arguments)
    for step in ORDER:
        module = step(module, Options())
    names = {op.name for op in module.functions["main"].body.ops}
    assert names & {"matmul", "conv"}
    assert not names & {"dot_general", "convolution", "call"}
