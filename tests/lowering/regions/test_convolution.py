"""Convolutions whose windows lie in memory as rows a multiple of 1 KB apart, which share cache sets.

The windows overlap, touch or leave gaps; all of them are read where they lie.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from support.differential import check, close, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Alloc, Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cpu

LAYOUTS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def conv(*strides, lhs=None, rhs=None, groups=1, padding="VALID", layout=None):
    def function(x, w):
        layouts = layout or LAYOUTS[len(strides)]
        return lax.conv_general_dilated(x, w, strides, padding, lhs, rhs, layouts, groups)

    return function


def operands(image, kernel, dtype="float32"):
    scale = float(np.prod(kernel[:-1])) ** -0.5
    return [normal(*image, dtype=dtype), normal(*kernel, seed=1, scale=scale, dtype=dtype)]


STRIDED = operands((1, 13, 128), (3, 128, 64))
COLUMNS = operands((1, 8, 8, 256), (1, 3, 256, 64))


def baked(x):
    return conv(2)(x, jnp.asarray(STRIDED[1]))


def activated(x, w):
    return jax.nn.relu(conv(2)(x, w) + w[0, 0])


OVERLAP = {
    "stride-1": (conv(1), operands((8, 7, 256), (2, 256, 64))),
    "stride-1-kernel-7": (conv(1), operands((8, 12, 256), (7, 256, 64))),
    "stride-2": (conv(2), STRIDED),
    "stride-2-last-pixel-unused": (conv(2), operands((1, 14, 128), (3, 128, 64))),
    "stride-2-same": (conv(2, padding="SAME"), operands((1, 11, 128), (3, 128, 64))),
    "stride-3": (conv(3), operands((8, 19, 256), (4, 256, 64))),
    "stride-4-kernel-5": (conv(4), operands((1, 25, 64), (5, 64, 64))),
    "one-channel": (conv(256), operands((1, 256 * 5 + 257, 1), (257, 1, 64))),
    "tall-and-low-tiles": (conv(2), operands((8, 31, 128), (3, 128, 60))),
    "batch": (conv(2), operands((8, 13, 128), (3, 128, 64))),
    "f64": (conv(1), operands((1, 7, 128), (2, 128, 32), "float64")),
    "f64-dilated-input": (conv(2, lhs=(2,), padding=((0, 0),)), operands((1, 7, 64), (3, 64, 32), "float64")),
    "bf16": (conv(2), operands((1, 13, 128), (3, 128, 64), "bfloat16")),
    "f16": (conv(2), operands((1, 13, 128), (3, 128, 64), "float16")),
    "dilated-kernel": (conv(2, rhs=(2,)), operands((1, 15, 128), (3, 128, 64))),
    "groups": (conv(2, groups=2), operands((1, 13, 128), (3, 64, 64))),
    "many-groups": (conv(1, 1, groups=32), operands((2, 9, 9, 96), (3, 3, 3, 128))),
    "groups-of-two-panels": (conv(2, 1, groups=3), operands((2, 9, 29, 21), (3, 3, 7, 105))),
    "groups-dilated": (conv(1, 1, rhs=(2, 1), groups=4), operands((1, 9, 9, 16), (3, 3, 4, 16))),
    "groups-of-one-output": (conv(1, groups=6), operands((1, 91, 6), (50, 1, 6))),
    "groups-f64": (conv(1, groups=4), operands((2, 49, 8), (3, 2, 12), "float64")),
    "groups-bf16": (conv(1, groups=4), operands((2, 19, 24), (3, 6, 12), "bfloat16")),
    "groups-gradients": (
        jax.grad(lambda x, w: (conv(1, 1, groups=8)(x, w) ** 2).sum(), (0, 1)),
        operands((2, 9, 9, 16), (3, 3, 2, 32)),
    ),
    "2d": (conv(1, 1), COLUMNS),
    "2d-strided": (conv(2, 2), operands((1, 15, 13, 128), (1, 3, 128, 64))),
    "2d-dilated": (conv(1, 1, rhs=(2, 1)), COLUMNS),
    "2d-nchw": (conv(1, 1, layout=("NCHW", "OIHW", "NCHW")), operands((1, 256, 8, 8), (64, 256, 1, 3))),
    "3d": (conv(1, 1, 2), operands((1, 2, 4, 13, 128), (1, 1, 3, 128, 64))),
    "constant-weights": (baked, STRIDED[:1]),
    "bias-relu": (activated, STRIDED),
    "gradients": (jax.grad(lambda x, w: (conv(2)(x, w) ** 2).sum(), (0, 1)), STRIDED),
}

APART = {
    "kernel-2-stride-2": (conv(2), operands((8, 13, 128), (2, 128, 1024))),
    "kernel-1-stride-2": (conv(2), operands((8, 11, 128), (1, 128, 2048))),
    "kernel-2-stride-3": (conv(3), operands((8, 17, 256), (2, 256, 448))),
    "f64-kernel-1-stride-2": (conv(2), operands((1, 11, 64), (1, 64, 224), "float64")),
}


@pytest.mark.parametrize("name", [*OVERLAP, *APART])
def test_convolutions_match_xla(name):
    function, args = (OVERLAP | APART)[name]
    with jax.enable_x64(args[0].dtype == np.float64):
        check(function, args, 2, 20)


def kernels_with_tiles(function, args, target):
    options = Options(target=target)
    with jax.enable_x64(args[0].dtype == np.float64):
        model = import_model(jax.jit(function), *args)
    kernels = lower(run_passes(model, options), TARGETS[target], options).kernels
    return [k for k in kernels if any(isinstance(s, Tile) for s in walk(k.body))]


@pytest.mark.parametrize("target", ["cpu:x86-64-v3", "cpu:x86-64-v4"])
@pytest.mark.parametrize("name", [*OVERLAP, *APART])
def test_convolutions_read_no_element_beyond_a_row(name, target):
    """Tiles touch nothing outside their buffers, and no row is copied."""
    function, args = (OVERLAP | APART)[name]
    kernels = kernels_with_tiles(function, args, target)
    assert kernels
    for kernel in kernels:
        run_kernel(kernel, [np.zeros(b.shape, to_numpy(b.dtype)) for b in (*kernel.inputs, *kernel.outputs)])
        assert not any(isinstance(s, Alloc) and s.buffer.space == "scratch" for s in walk(kernel.body))


@pytest.mark.parametrize(
    ("function", "spec", "kernel", "sizes"),
    [
        (conv(2), "b, 13, 128", (3, 128, 64), ({"b": 1}, {"b": 5})),
        (conv(2, groups=2), "b, 13, 128", (3, 64, 64), ({"b": 1}, {"b": 5})),
        (conv(1, 1), "b, h, 8, 256", (1, 3, 256, 64), ({"b": 1, "h": 4}, {"b": 2, "h": 3})),
        (conv(2), "b, 2*w + 3, 128", (3, 128, 64), ({"b": 2, "w": 5}, {"b": 1, "w": 30})),
    ],
    ids=["batch", "batch-of-groups", "batch-and-height", "batch-and-width"],
)
def test_convolutions_of_symbolic_sizes_match_xla(function, spec, kernel, sizes):
    symbolic = jax.ShapeDtypeStruct(export.symbolic_shape(spec), jnp.float32)
    exported = export.export(jax.jit(function))(symbolic, jax.ShapeDtypeStruct(kernel, jnp.float32))
    module = aotc.load(aotc.compile(exported))
    for size in sizes:
        image = [eval(extent, dict(size)) for extent in spec.split(",")]
        args = operands(image, kernel)
        close(module.invoke("main", *args), jax.jit(function)(*args), 20)


@pytest.mark.parametrize("kernel", ["3, c, 2*n", "3, c, 8", "3, 4, 2*n", "k, 4, 8"])
def test_grouped_convolutions_of_symbolic_sizes_match_xla(kernel):
    inputs = "2*c" if "c" in kernel else "8"
    scope = export.SymbolicScope()
    specs = f"b, 13, {inputs}", kernel
    types = [jax.ShapeDtypeStruct(export.symbolic_shape(spec, scope=scope), "f4") for spec in specs]
    exported = export.export(jax.jit(conv(2, groups=2)))(*types)
    module = aotc.load(aotc.compile(exported))
    for size in ({"b": 2, "c": 4, "n": 4, "k": 3}, {"b": 1, "c": 1, "n": 9, "k": 1}):
        args = operands(*([eval(extent, dict(size)) for extent in spec.split(",")] for spec in specs))
        close(module.invoke("main", *args), jax.jit(conv(2, groups=2))(*args), 20)


@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_convolution_counts_one_multiplication_and_addition_per_term(groups):
    """Also as plain loops: grouped, depthwise and tiny ones. The roofline divides by it."""
    x, w = operands((1, 6, 8, 16), (2, 3, 16 // groups, 16))
    module = run_passes(import_model(conv(1, 1, groups=groups), x, w), Options())
    variant = lower(module, TARGETS["cpu:x86-64-v3"], Options())
    found = [k.flops for k in variant.kernels if "conv" in k.name]
    assert found == [2 * 5 * 6 * 16 * (2 * 3 * 16 // groups)]
