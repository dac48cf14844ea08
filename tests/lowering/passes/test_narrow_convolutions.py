"""Convolutions of few output channels by tiles whose columns are pixels: values, types, shapes, infinite pixels."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from support.differential import close

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.ir.tensor.ir import walk
from aotc.options import Options
from aotc.pipeline import run_passes

pytestmark = pytest.mark.cpu

RNG = np.random.default_rng(0)
LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def normal(*shape, dtype="float32"):
    if np.dtype(dtype).kind in "iu":
        return RNG.integers(-100, 100, shape).astype(dtype)
    return RNG.standard_normal(shape).astype("float32").astype(dtype)


def convolution(rank, padding="SAME", **options):
    strides = options.pop("strides", (1,) * rank)
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, dimension_numbers=LAYOUTS[rank], **options
    )


def has_columns_of_pixels(function, *args):
    options = Options(target="cpu:x86-64-v4", stop_after="pack-contractions")
    raw = fetch(jax.jit(function), args, {})
    module = run_passes(import_raw(raw, options=options, platform="cpu"), options)
    ops = [op for f in module.functions.values() for op in walk(f.body)]
    return any(op.name == "conv" and "cols" in op.attrs for op in ops)


# Sizes of the input, of the kernel, and the options of a convolution.
CASES = {
    "a long signal": ((1, 1003, 1), (100, 1, 1), {}),
    "a signal of channels": ((2, 250, 7), (5, 7, 3), {}),
    "valid": ((1, 33, 41, 16), (3, 3, 16, 1), {"padding": "VALID"}),
    "two channels": ((1, 20, 64, 16), (3, 3, 16, 2), {}),
    "three channels": ((2, 17, 37, 16), (3, 5, 16, 3), {}),
    "five channels": ((1, 16, 100, 8), (3, 3, 8, 5), {}),
    "a large window": ((1, 70, 70, 1), (15, 15, 1, 1), {}),
    "dilated": ((1, 40, 60, 16), (3, 3, 16, 1), {"rhs_dilation": (2, 3)}),
    "strides of rows": ((1, 40, 60, 16), (3, 3, 16, 1), {"strides": (2, 1)}),
    "three dims": ((1, 5, 20, 36, 8), (2, 3, 3, 8, 1), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_narrow_convolutions_match_xla(name):
    shape, kernel, options = CASES[name]
    function, args = convolution(len(shape) - 2, **options), (normal(*shape), normal(*kernel))
    assert has_columns_of_pixels(function, *args)
    close(aotc.load(aotc.compile(function, *args, verify_each=True))(*args), jax.jit(function)(*args), factor=16)


@pytest.mark.parametrize("dtype", ["float64", "float16", "bfloat16", "int8", "int32", "int64"])
@pytest.mark.parametrize("target", ["cpu", "cpu:x86-64-v3"])
def test_narrow_convolutions_of_each_dtype_match_xla(dtype, target):
    wide = {"int8": "int32"}.get(dtype, dtype)
    with jax.enable_x64(True):
        function = convolution(2, preferred_element_type=wide)
        args = normal(1, 12, 75, 16, dtype=dtype), normal(3, 3, 16, 1, dtype=dtype)
        want = jax.jit(function)(*args)
        data = aotc.compile(function, *args, target=target)
    close(aotc.load(data)(*args), want, factor=16)


def test_narrow_convolutions_with_fused_bias_and_relu_match_xla():
    """The columns of the last tile overlap those of the one before, and no element is added to twice."""
    w, bias = normal(3, 3, 16, 3), normal(3)

    def function(x, y):
        return jnp.maximum(convolution(2)(x, w) + bias, 0) + y

    args = normal(1, 12, 75, 16), normal(1, 12, 75, 3)
    assert has_columns_of_pixels(function, *args)
    close(aotc.load(aotc.compile(function, *args))(*args), jax.jit(function)(*args), factor=16)


def test_narrow_convolutions_of_a_symbolic_batch_match_xla():
    w = normal(3, 3, 16, 1)
    (batch,) = export.symbolic_shape("b")
    shape = jax.ShapeDtypeStruct((batch, 20, 75, 16), "float32")
    exported = export.export(jax.jit(lambda x: convolution(2)(x, w)))(shape)
    module = aotc.load(aotc.compile(exported))
    for size in (1, 3):
        x = normal(size, 20, 75, 16)
        close(module(x), convolution(2)(x, w), factor=16)


def test_an_infinite_pixel_affects_only_its_windows():
    x, w = normal(1, 12, 75, 16), normal(3, 3, 16, 1)
    x[0, 5, 40, 3], x[0, 8, 74, 0] = np.inf, np.nan
    got = np.asarray(aotc.load(aotc.compile(convolution(2), x, w))(x, w))
    want = np.asarray(jax.jit(convolution(2))(x, w))
    np.testing.assert_array_equal(np.isfinite(got), np.isfinite(want))
    assert np.isfinite(got).sum() == got.size - 9 - 6


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [((1, 32, 32, 64), (3, 3, 64, 32)), ((1, 32, 9, 64), (3, 3, 64, 1)), ((1, 64, 64, 1), (3, 3, 1, 1))],
    ids=["many channels", "few pixels", "few taps"],
)
def test_other_convolutions_do_not_use_pixel_columns(shape, kernel):
    assert not has_columns_of_pixels(convolution(2), normal(*shape), normal(*kernel))
