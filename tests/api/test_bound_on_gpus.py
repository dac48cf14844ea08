"""Bound weights on GPUs: what calls read of them is computed there once, and stays."""

import gc
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

GPU = "cuda:sm_90"


def layer(p, x):
    return jnp.tanh(x * jnp.exp(p["scale"]) + p["shift"])


def prepared_of(function, *arguments, **flags):
    data = aotc.compile(jax.jit(function), *arguments, source=False, **flags)
    return [v.get("prepared", {}).get("main") for v in open_bundle(data).manifest["variants"]]


def test_tf32_weights_are_transposed_once_when_bound():
    """Terms of a sum lie side by side: a weight that is stored so is taken as it is, as is any of older GPUs."""
    w, x = array(64, 96), array(64, 64)
    (row,) = prepared_of(jnp.matmul, x, w, bind=("args[1]",), target=GPU)
    assert [r["dims"] for r in row["prepare"]["results"]] == [[96, 64]]
    assert prepared_of(lambda x, w: x @ w.T, x, array(96, 64), bind=("args[1]",), target=GPU) == [None]
    assert prepared_of(jnp.matmul, x, w, bind=("args[1]",), target="cuda:sm_80") == [None]
    assert prepared_of(jnp.matmul, x, w, target=GPU) == [None]


def test_cpu_and_gpu_variants_prepare_their_own_weights():
    rows = prepared_of(jnp.matmul, array(64, 64), array(64, 96), bind=("args[1]",), target=f"cpu:x86-64-v3,{GPU}")
    dims = [row["prepare"]["results"][0]["dims"] for row in rows]
    assert [len(d) for d in dims] == [3, 2]


def test_convolution_weights_are_transposed_once_when_bound():
    def conv(x, w):
        return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    (row,) = prepared_of(conv, array(8, 16, 16, 64), array(3, 3, 64, 64), bind=("args[1]",), target=GPU)
    assert [r["dims"] for r in row["prepare"]["results"]] == [[3, 64, 3, 64]]


@pytest.fixture
def weights():
    return {"scale": array(8), "shift": array(8, seed=1)}


@pytest.fixture
def module(monkeypatch, weights):
    data = aotc.compile(jax.jit(layer), weights, array(4, 8), target=GPU, bind=("args[0]",))
    install(monkeypatch, data)
    return aotc.load(data)


def copies():
    gc.collect()  # GPUs of modules that are gone
    return [what for gpu in SimulatedGpu.every for what in gpu.log if what in ("upload", "copy")]


def test_calls_read_prepared_weights(module, weights):
    x = array(4, 8, seed=2)
    bound = module.bind({"args[0]": weights})
    want = layer(weights, x)
    np.testing.assert_allclose(module(weights, x), want, rtol=1e-5)
    for _ in range(3):
        np.testing.assert_allclose(bound(x), want, rtol=1e-5)
    on_gpu = module.put(x)
    for _ in range(4):
        before = len(copies())
        (made,) = bound.invoke(on_gpu, results="device")
        assert len(copies()) == before
        np.testing.assert_allclose(made.numpy(), want, rtol=1e-5)
    out = module.put(np.zeros((4, 8), "f4"))
    assert bound.invoke(on_gpu, out=[out]) == [out]
    np.testing.assert_allclose(out.numpy(), want, rtol=1e-5)
    np.testing.assert_allclose(bound.submit(on_gpu).result(60), want, rtol=1e-5)


def test_weights_on_the_gpu_are_bound_without_a_copy(module, weights):
    x = array(4, 8, seed=2)
    placed = {name: module.put(value) for name, value in weights.items()}
    before = len(copies())
    bound = module.bind({"args[0]": placed})
    assert len(copies()) == before
    np.testing.assert_allclose(bound(x), layer(weights, x), rtol=1e-5)


def test_updates_of_gpu_weights_are_atomic(module):
    """Both weights have the same number in them: a result that is made of two of them is none of these."""
    x = np.ones((4, 8), np.float32)

    def of(number):
        return {"scale": np.full(8, number, np.float32), "shift": np.full(8, -np.exp(number), np.float32)}

    bound = module.bind({"args[0]": of(0.5)})
    worst, stop = [0.0], threading.Event()

    def call():
        while not stop.is_set():
            worst.append(float(np.abs(bound(x)).max()))

    thread = threading.Thread(target=call)
    thread.start()
    end = time.monotonic() + 1
    number = 0.5
    while time.monotonic() < end:
        number = 0.5 if number == 1.5 else 1.5
        bound.update({"args[0]": of(number)})
    stop.set()
    thread.join()
    assert max(worst) < 1e-4
    with pytest.raises(CallError, match="bound together"):
        bound.update({0: of(1.0)["scale"]})
