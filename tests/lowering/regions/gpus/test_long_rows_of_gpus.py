"""Rows of GPUs that are kept in shared memory, as they do not fit a thread's registers: every part of their loops."""

import jax
import numpy as np
import pytest
from support.gpu_program import gpu_program
from support.small_models import array

from aotc.ir.loop.run import run_kernel

pytestmark = pytest.mark.ir


@pytest.mark.parametrize("length", [33_284, 36_864])
def test_a_row_in_shared_memory_is_written_by_its_first_reader(length):
    """Whole turns and those that are left each write their part of what is kept; later loops read it."""
    x = array(140, length)
    _, variant = gpu_program(jax.nn.softmax, [x])
    (kernel,) = variant.kernels
    out = np.full_like(x, np.nan)
    run_kernel(kernel, [x, out], end=1)
    np.testing.assert_allclose(out[0], jax.nn.softmax(x[0]), rtol=1e-5, atol=1e-8)
    assert np.isnan(out[1:]).all()
