"""Arrays whose last axis moves on GPUs: tiles of every size, whole and cut off."""

import jax.numpy as jnp
import numpy as np
import pytest
from support.differential import normal
from support.gpu_program import check_gpu

SHAPES = [(16, 16), (16, 32), (3, 32, 16), (32, 32), (16, 65), (2, 17, 33), (64, 130)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64", "uint8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_transposes_on_gpus_use_shared_memory_tiles(shape, dtype):
    x = np.asarray(jnp.asarray(normal(*shape) * 50).astype(dtype))
    variant = check_gpu(lambda x: jnp.swapaxes(x, -1, -2), [x])
    assert any("shared" in str(k.body) for k in variant.kernels)


@pytest.mark.parametrize("terms", [2, 4, 8])
@pytest.mark.parametrize("shape", [(16, 16), (144, 24), (33, 65)], ids=str)
def test_a_transposed_addend_of_a_matmul_uses_a_shared_memory_tile(terms, shape):
    """The tile that it is turned by stays while the product is computed."""
    rows, columns = shape
    arrays = [normal(rows, terms), normal(terms, columns), normal(columns, rows)]
    variant = check_gpu(lambda a, b, c: a @ b + c.T, arrays)
    assert "shared" in str(variant.kernels[-1].body)
