"""Gradients of convolutions' kernels on a CUDA target: images are channels, and pixels are taps."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from vmfb.simulated_gpu import install
from vmfb.test_cuda import gpu, sim

pytest.importorskip("numba_cuda")

from gpu.test_products import agree, kernels_of

import aotc

BF16 = ml_dtypes.bfloat16


def gradient(taps, step=1):
    """Return the gradient of a kernel of so many taps, of an input and the gradient of the result."""

    def function(x, g):
        shape = (taps, taps, x.shape[-1], g.shape[-1])
        lies = {"dimension_numbers": ("NHWC", "HWIO", "NHWC")}
        convolve = lambda w: jax.lax.conv_general_dilated(x, w, (step, step), "SAME", **lies)
        return jax.linear_transpose(convolve, jax.ShapeDtypeStruct(shape, x.dtype))(g)[0]

    return function


def products_of(taps, size, channels, columns, dtype, images=16, step=1):
    pixels = size // step
    shapes = ((images, size, size, channels), (images, pixels, pixels, columns))
    given = (jax.ShapeDtypeStruct(s, dtype) for s in shapes)
    return kernels_of(aotc.compile(jax.jit(gradient(taps, step)), *given, target="cuda:sm_90a"))


@sim
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_slices_are_filled_with_pixels_of_a_line(dtype):
    """Of 16 images one pixel has 32 bytes, or 64: those of a line are copied together, once its padding is stored."""
    (window,) = (k.tiling.window for k in products_of(3, 14, 256, 256, dtype) if k.tiling)
    depth = 128 // jnp.dtype(dtype).itemsize
    assert window.merged
    assert window.slices(depth) * window.parts == 14 * (14 * 16 // depth + (dtype == jnp.bfloat16))


@sim
def test_slices_that_are_full_need_nothing_stored():
    """64 images of bf16 fill a slice; where taps are apart nothing can be joined."""
    for images, step in ((64, 1), (16, 2)):
        (window,) = (k.tiling.window for k in products_of(3, 14, 128, 128, jnp.bfloat16, images, step) if k.tiling)
        assert not window.merged


@sim
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_kernel_of_one_tap_is_a_product_of_what_lies_there(dtype):
    kernels = products_of(1, 56, 64, 128, dtype)
    product, total = (k for k in kernels if k.name.endswith(("matmul", "reduce")))
    assert product.tiling is not None
    assert {b.shape[-1] for b in product.inputs} == {64, 128}
    assert total.inputs[0].dtype == "f32"
    assert len(kernels) == 2


CASES = {
    "one tap": (1, (4, 6, 5, 16), (4, 6, 5, 24), 1),
    "three taps": (3, (8, 4, 5, 8), (8, 4, 5, 16), 1),
    "one tap, a step of two": (1, (4, 6, 6, 16), (4, 3, 3, 24), 2),
}


def given(name, dtype):
    taps, x, g, step = CASES[name]
    random = np.random.default_rng(0)
    return gradient(taps, step), [random.standard_normal(s, np.float32).astype(dtype) for s in (x, g)]


def wanted(function, arguments):
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return [np.asarray(function(*(jnp.asarray(a.astype("f8")) for a in arguments)))]


@sim
@pytest.mark.parametrize("dtype", [BF16, np.float32])
@pytest.mark.parametrize("name", CASES)
def test_simulated_results(name, dtype, monkeypatch):
    function, arguments = given(name, dtype)
    data = aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a", verify_each=True)
    install(monkeypatch, data)
    agree(aotc.load(data).invoke("main", *arguments), wanted(function, arguments), 1e-2)


class TestKernelGradientsOnAGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("dtype", [BF16, np.float32])
    @pytest.mark.parametrize("shape", [(1, 14, 64, 128, 1), (3, 14, 64, 64, 1), (3, 14, 64, 64, 2), (3, 28, 32, 64, 1)])
    def test_results(self, shape, dtype):
        taps, size, channels, columns, step = shape
        function, random = gradient(taps, step), np.random.default_rng(0)
        shapes = ((16, size, size, channels), (16, size // step, size // step, columns))
        arguments = [random.standard_normal(s, np.float32).astype(dtype) for s in shapes]
        module = aotc.load(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a"), devices="cuda")
        agree(module.invoke("main", *arguments), wanted(function, arguments), 1e-2)
