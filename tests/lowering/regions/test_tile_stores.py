"""Tiles are stored along what lies side by side in memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc

pytestmark = pytest.mark.cpu

RANDOM = np.random.default_rng(0)
W = RANDOM.standard_normal((24, 100)).astype("float32")
EXPERTS = RANDOM.standard_normal((3, 24, 40)).astype("float32")


def product_kernel(module):
    """Return the text of the kernel that multiplies."""
    (text,) = [t.text for t in module._executable.kernel_texts() if "tile(" in t.text]
    return text


@pytest.mark.parametrize("rows", [3, 50, 128])
def test_a_matmul_with_a_transposed_reader_is_stored_by_columns(rows):
    """Also with an epilogue of several results, tiles of two heights, and a last panel of fewer columns."""
    x, y = (RANDOM.standard_normal(s).astype("float32") for s in ((rows, 24), (100, rows)))

    def f(x, y):
        t = (x @ W).T + y
        return t, t * t

    module = aotc.load(aotc.compile(f, x, y))
    for found, want in zip(module.invoke("main", x, y), jax.jit(f)(x, y), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    lines = [line.strip().partition(" in ")[0] for line in product_kernel(module).splitlines()]
    order = [line for line in lines if line in ("for r", "for c")]
    assert order == ["for c", "for r"]


def test_a_matmul_without_a_transposed_reader_is_stored_by_rows():
    x = RANDOM.standard_normal((50, 24)).astype("float32")
    module = aotc.load(aotc.compile(lambda x: jnp.tanh(x @ W), x))
    text = product_kernel(module)
    assert text.index("for r in") < text.index("for c in")
    np.testing.assert_allclose(module(x), np.tanh(x @ W), rtol=1e-4, atol=1e-5)


def test_expert_matmuls_match_numpy():
    """``th,ehm->etm`` is a product (e, m, t) as JAX writes it; rows of more than a tile, and few."""
    for rows in (5, 64):
        x = RANDOM.standard_normal((rows, 24)).astype("float32")
        found = aotc.load(aotc.compile(lambda x: jnp.einsum("th,ehm->etm", x, EXPERTS), x))(x)
        np.testing.assert_allclose(found, np.einsum("th,ehm->etm", x, EXPERTS), rtol=1e-4, atol=1e-4)
