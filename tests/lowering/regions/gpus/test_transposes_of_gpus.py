"""Arrays whose last axis moves on GPUs: tiles of every size, whole and cut off."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal
from support.gpu_program import check_gpu

SHAPES = [(16, 16), (16, 32), (3, 32, 16), (32, 32), (16, 65), (2, 17, 33), (64, 130)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "uint8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tiles_of_every_size(shape, dtype):
    x = np.asarray(jnp.asarray(normal(*shape) * 50).astype(dtype))
    variant = check_gpu(lambda x: jnp.swapaxes(x, -1, -2), [x])
    assert any("shared" in str(k.body) for k in variant.kernels)


@pytest.mark.parametrize("terms", [2, 4, 8])
@pytest.mark.parametrize("shape", [(16, 16), (144, 24), (33, 65)], ids=str)
def test_what_a_product_is_added_to_may_be_turned(terms, shape):
    """The tile that it is turned by stays while the product is computed."""
    rows, columns = shape
    arrays = [normal(rows, terms), normal(terms, columns), normal(columns, rows)]
    variant = check_gpu(lambda a, b, c: a @ b + c.T, arrays)
    assert "shared" in str(variant.kernels[-1].body)
