"""Fourier transforms on GPUs: a block of threads for each signal."""

import jax.numpy as jnp
import pytest
from support.differential import normal
from support.gpu_program import check_gpu

from aotc.ir.loop.ir import Barrier, walk


@pytest.mark.parametrize("size", [17, 30, 105, 512])
def test_ffts_on_gpus_match_jax(size):
    x = (normal(2, size) + 1j * normal(2, size, seed=2)).astype("complex64")
    variant = check_gpu(lambda x: (jnp.fft.fft(x), jnp.fft.ifft(x)), [x], factor=8)
    assert any(isinstance(s, Barrier) for k in variant.kernels for s in walk(k.body))


def test_two_dimensional_and_real_ffts_on_gpus_match_jax():
    check_gpu(jnp.fft.fft2, [normal(40, 48).astype("complex64")], factor=8)
    check_gpu(jnp.fft.rfft, [normal(3, 256)], factor=8)
