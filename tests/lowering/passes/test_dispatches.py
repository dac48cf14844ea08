"""How many kernels a call runs, and what they read and write: no more than when fusion had no budget of work."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import MODELS, array

from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.dims.algebra import product
from aotc.ir.tensor.ir import Region
from aotc.pipeline import checked_options, run_passes
from aotc.vmfb.dtypes import size_of

pytestmark = pytest.mark.ir


def transformer(w, x):
    """Two layers as in ViT and BERT: attention, a gelu between two products, norms, residuals."""

    def norm(x):
        centered = x - x.mean(-1, keepdims=True)
        return centered * jax.lax.rsqrt((centered**2).mean(-1, keepdims=True) + 1e-6)

    for attention, up, down in w:
        q, k, v = (norm(x) @ m for m in attention)
        q, k, v = (t.reshape(2, 48, 4, 16).transpose(0, 2, 1, 3) for t in (q, k, v))
        scores = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 4)
        x = x + (scores @ v).transpose(0, 2, 1, 3).reshape(x.shape)
        x = x + jax.nn.gelu(norm(x) @ up) @ down
    return x


def residual(w, x):
    """The stem and two blocks of a ResNet in inference, batch norm written out."""
    dims = ("NHWC", "HWIO", "NHWC")

    def conv(x, w, steps=(1, 1)):
        return jax.lax.conv_general_dilated(x, w, steps, "SAME", dimension_numbers=dims) * 1.5 - w[0, 0, 0]

    x = jax.nn.relu(conv(x, w[0], (2, 2)))
    x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
    for k in w[1:]:
        x = jax.nn.relu(x + conv(jax.nn.relu(conv(x, k)), k))
    return x.mean((1, 2))


def adam(w, x):
    """A step of Adam for two dense layers."""

    def loss(w):
        return -jnp.mean(jax.nn.log_softmax(jax.nn.relu(x @ w[0]) @ w[1])[:, 3])

    weights, first, second = w
    value, g = jax.value_and_grad(loss)(weights)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first, g)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, second, g)
    new = jax.tree.map(lambda w, m, v: w - 1e-3 * m / (jnp.sqrt(v) + 1e-8), weights, first, second)
    return value, new, first, second


def layer(n):
    return (
        tuple(array(64, 64, seed=n + i, scale=0.1) for i in range(3)),
        array(64, 256, seed=n + 3, scale=0.1), array(256, 64, seed=n + 4, scale=0.1),
    )  # fmt: skip


DENSE = (array(96, 128, scale=0.1), array(128, 10, seed=1, scale=0.1))
LARGER = {
    "transformer": (transformer, (layer(0), layer(9)), array(2, 48, 64)),
    "residual": (residual, (array(7, 7, 3, 16), *(array(3, 3, 16, 16, seed=i) for i in (1, 2))), array(1, 64, 64, 3)),
    "adam": (adam, (DENSE, DENSE, DENSE), array(32, 96)),
    "softmax": (lambda w, x: jax.nn.softmax(x * w), np.float32(2), array(256, 4096)),
}  # fmt: skip
CORPUS = {**{name: row[:3] for name, row in MODELS.items()}, **LARGER}

BEFORE = {
    "mlp": ((8, 5_180), (3, 3_540), (3, 3_540)),
    "conv_net": ((9, 47_992), (7, 38_680), (7, 38_680)),
    "attention": ((22, 29_832), (7, 15_360), (7, 15_360)),
    "lstm": ((12, 3_925), (9, 3_125), (9, 3_125)),
    "newton": ((8, 475), (6, 379), (6, 379)),
    "int8_dense": ((6, 4_400), (2, 2_048), (2, 2_048)),
    "bf16_mlp": ((3, 2_560), (2, 2_304), (2, 2_304)),
    "train_step": ((14, 17_984), (7, 11_936), (7, 11_936)),
    "transformer": ((62, 4_519_936), (20, 2_228_224), (20, 2_228_224)),
    "residual": ((18, 1_011_864), (12, 749_592), (12, 749_592)),
    "adam": ((26, 1_058_828), (13, 862_340), (13, 862_340)),
    "softmax": ((6, 33_560_580), (1, 8_388_612), (1, 8_388_612)),
}
"""Dispatches and the bytes of their operands and results at -O1, -O2 and -O3, before regions had budgets (bf8e3e5)."""


def dispatched(name: str, level: int) -> tuple[int, int]:
    """Return how many dispatches a program has, those of loops once, and the bytes of all their arrays."""
    function, w, x = CORPUS[name]
    options = checked_options(None, {"opt_level": level, "target": "cpu:x86-64-v4"})
    module = run_passes(import_raw(fetch(jax.jit(function), (w, x), {}), options=options, platform="cpu"), options)
    return _count(module.functions["main"].body)


def _count(region: Region) -> tuple[int, int]:
    calls = size = 0
    for op in region.ops:
        if op.name == "dispatch":
            calls += 1
            arrays = {*op.operands, *op.results}
            size += sum(product(v.type.shape) * size_of(v.type.dtype) for v in arrays)
        for inner in map(_count, op.regions):
            calls, size = calls + inner[0], size + inner[1]
    return calls, size


@pytest.fixture(scope="module")
def found():
    return {name: [dispatched(name, level) for level in (1, 2, 3)] for name in CORPUS}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_the_corpus_has_no_more_dispatches_and_bytes_than_recorded(found, level):
    for what in (0, 1):
        before = sum(rows[level - 1][what] for rows in BEFORE.values())
        assert sum(rows[level - 1][what] for rows in found.values()) <= 1.02 * before


@pytest.mark.parametrize("name", CORPUS)
def test_each_program_has_no_more_dispatches_and_bytes_than_recorded(found, name):
    for (calls, size), (calls_before, size_before) in zip(found[name], BEFORE[name]):
        assert calls <= 1.02 * calls_before
        assert size <= 1.02 * size_before


@pytest.mark.parametrize("name", CORPUS)
def test_a_higher_optimization_level_moves_no_more_bytes(found, name):
    sizes = [size for _, size in found[name]]
    assert sizes == sorted(sizes, reverse=True)
