"""Bound weights on a GPU: TF32 and bf16 products, convolutions, updates while calls are made."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.small_models import array

import aotc
from aotc.vmfb.devices.cuda import driver

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]


def mlp(weights, x):
    for w in weights:
        x = jnp.tanh(x @ w)
    return x


def conv(weights, x):
    for w in weights:
        x = jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    return x


MODELS = {
    "tf32": (mlp, [array(256, 512), array(512, 128)], array(64, 256)),
    "bf16": (mlp, [array(256, 128).astype(ml_dtypes.bfloat16)], array(64, 256).astype(ml_dtypes.bfloat16)),
    "convolutions": (conv, [array(3, 3, 64, 64)], array(2, 16, 16, 64)),
}


@pytest.mark.parametrize("name", MODELS)
def test_bound_calls_on_a_gpu_match_unbound_calls(name):
    function, weights, x = MODELS[name]
    module = aotc.load(aotc.compile(jax.jit(function), weights, x, target="cuda:sm_90", bind=("args[0]",)))
    bound, placed = module.bind({"args[0]": weights}), module.put(x)
    for factor in (1, 0.5, 2):
        scaled = [(w * factor).astype(w.dtype) for w in weights]
        bound.update({"args[0]": scaled})
        want = np.asarray(module(scaled, x), np.float64)
        scale = np.abs(want).max()
        for _ in range(3):
            (stays,) = bound.invoke(placed, results="device")
            for got in (stays.numpy(), bound(x)):
                np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=1e-2 * scale)
