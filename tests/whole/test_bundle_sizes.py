"""A bundle holds the constants of its model that cannot be computed, and little else."""

import lzma
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from support.differential import TOLERANCE, close
from support.small_models import MODELS, array

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.tensor.ir import walk

pytestmark = pytest.mark.cpu

CODE = 256 << 10  # bytes of kernels, programs and the model's text, of a small model


def content(a):
    """Return the bytes that an array takes for a compressor of general use: as it is, or its differences along a dim.

    The compiler has another one (zlib), and formulas: this is an independent measure of what it has to store. An array
    that shrinks to half at most is real, and is stored as it is: kernels read it from the file.
    """
    flat = np.ascontiguousarray(a).reshape(-1)
    words = flat.view(f"u{min(a.itemsize, 8)}")
    strides = [prod(a.shape[d + 1 :]) * len(words) // len(flat) for d in range(a.ndim) if a.shape[d] > 1]
    forms = [words, *(words[s:] - words[:-s] for s in strides)]
    for count in (1 << 14, None):  # most weights differ from all forms in a sample already
        parts = [form[:count].tobytes() for form in forms]
        least = min(len(lzma.compress(part, preset=1)) for part in parts)
        if least > len(parts[0]) / 2:
            return a.nbytes
    return least


def test_computable_constants_take_few_bytes():
    noise = np.random.default_rng(0).standard_normal((300, 300)).astype("float32")
    assert content(noise) == noise.nbytes
    index = np.arange(90_000).reshape(300, 300)
    for computable in (np.eye(300), np.tri(300) > 0, index, index * 0.3, index % 7, np.tile(noise[0], (300, 1))):
        assert content(computable) < 0.03 * computable.nbytes


def all_bytes(model, *args):
    """Return the bytes of the distinct constants of a model, and the content of these."""
    module = import_model(jax.jit(model), *args)
    constants = [op.attrs["value"] for f in module.functions.values() for op in walk(f.body) if op.name == "constant"]
    distinct = {a.tobytes(): a for a in constants if a.size}.values()
    return sum(a.nbytes for a in distinct), sum(map(content, distinct))


def folding_of_proteins(pairs, rows, places):
    """Some blocks of AlphaFold's kind: large states of zeros, scatters into zeros, masks, bins of distances."""
    n, c = pairs.shape[1], 16
    weights = array(c, c, scale=0.1)
    mask = np.tri(n, n)[None, :, :, None].astype("float32")
    for block in range(3):
        grow = lambda i, s, pairs=pairs, block=block: jnp.tanh(s + pairs * (i + block)) @ weights
        state = lax.fori_loop(0, 4, grow, jnp.zeros((1, n, n, c), "float32"))
        messages = jnp.zeros((n, n, c)).at[places].add(rows[:, None, :] * state[0, :1])
        bins = jax.nn.one_hot(jnp.digitize(jnp.abs(state[0, ..., 0]), jnp.linspace(0, 4, c - 1)), c)
        kept = lax.cond(rows[0, 0] > 9, lambda m: m, lambda m: jnp.zeros_like(m), messages)
        pairs = pairs + (messages + bins + kept)[None] * mask
    return pairs, jnp.zeros((n, n, 32)), lax.dynamic_update_slice(jnp.ones((n, n, 8)), pairs[0, ..., :8] * 2, (0, 0, 0))


def embedding_gradient(places):
    table = array(2000, 64)
    return jax.value_and_grad(lambda t: jnp.sum(jnp.sin(t[places])))(jnp.asarray(table))


def corpus(name):
    """Return a model whose weights are constants, its arguments, and how many f32 tolerances its results may differ."""
    match name:
        case "folding_of_proteins":
            places = np.array([3, 9, 3, 40, 7, 1], "int32")
            return folding_of_proteins, (array(1, 64, 64, 16, scale=0.1), array(6, 16), places), 64
        case "embedding_gradient":
            return embedding_gradient, (np.array([3, 9, 3, 1999], "int32"),), 64
    model, weights, x, tolerance = MODELS[name]
    return lambda x: model(weights, x), (x,), max(64, tolerance / TOLERANCE["float32"])


@pytest.mark.parametrize("name", ["folding_of_proteins", "embedding_gradient", "lstm", "conv_net", "train_step"])
def test_a_bundle_contains_only_its_real_constants_and_code(name):
    model, args, factor = corpus(name)
    data = aotc.compile(model, *args)
    assert len(data) <= 1.1 * all_bytes(model, *args)[1] + CODE
    close(aotc.load(data)(*args), jax.jit(model)(*args), factor)


def test_a_protein_model_takes_at_most_a_tenth_more_than_its_constants():
    """With code, programs and source: most bytes of the model are masks, bins, identities and zeros."""
    residues, n = jnp.asarray(array(70_000, 16)), 512
    pairs, blocks = np.eye(n, dtype="float32")[::-1] + np.tri(n, dtype="float32"), np.arange(n) // 64
    same = np.equal.outer(blocks, blocks).astype("float32")
    bins = np.eye(64, dtype="float32")[np.random.default_rng(0).integers(0, 64, (n // 3, n // 3))]

    def model(x, places):
        features, _, _ = folding_of_proteins(x, residues[places], places)
        mixed = pairs @ jnp.tile(features[0, :, 0], (n // 64, 1))
        return features, mixed.T @ same, jnp.sort(pairs[:40]) @ mixed, bins @ (x[0, 0, 0, 0] * array(64, 3))

    args = array(1, 64, 64, 16, scale=0.1), np.array([3, 9, 3, 40, 7, 1], "int32")
    whole, real = all_bytes(model, *args)
    data = aotc.compile(model, *args)
    assert whole > 2.5 * real
    assert len(data) <= 1.1 * real
    close(aotc.load(data)(*args), jax.jit(model)(*args), 256)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_small_model_contains_only_its_real_constants_and_code(name):
    test_a_bundle_contains_only_its_real_constants_and_code(name)
