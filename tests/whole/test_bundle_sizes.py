"""A bundle holds the constants of its model that cannot be computed, and little else."""

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
from aotc.lowering.analysis.computable import describe

pytestmark = pytest.mark.cpu

CODE = 256 << 10  # bytes of kernels, programs and the model's text, of a small model


def real_bytes(model, *args):
    """Return the bytes of the constants of a model that no few numbers describe."""
    module = import_model(jax.jit(model), *args)
    constants = [op.attrs["value"] for f in module.functions.values() for op in walk(f.body) if op.name == "constant"]
    kept = {a.tobytes(): a.nbytes for a in constants if describe(a) is None}
    return sum(kept.values())


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
def test_bundle_is_its_real_constants_and_code(name):
    model, args, factor = corpus(name)
    data = aotc.compile(model, *args)
    assert len(data) <= 1.1 * real_bytes(model, *args) + CODE
    close(aotc.load(data)(*args), jax.jit(model)(*args), factor)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_small_model(name):
    test_bundle_is_its_real_constants_and_code(name)
