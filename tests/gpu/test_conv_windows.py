"""Convolutions by windows: the template as the Python that it is, tensor maps of images, and whole programs."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.poisoned import between_nans, check_margins, poison
from gpu.products import STORED, simulate
from gpu.test_products import TARGETS, gpu, kernels_of
from support.gpu_program import gpu_program

import aotc
from aotc.ir.loop.forms.conv import window_operands
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.forms.tiling import Mma, Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cuda.block import SimulatedPatches
from aotc.vmfb.bundle import open_bundle

LETTERS = {1: ("NWC", "WIO", "NWC"), 2: ("NHWC", "HWIO", "NHWC"), 3: ("NDHWC", "DHWIO", "NDHWC")}


def conv(strides, padding, gaps):
    def function(x, w):
        return jax.lax.conv_general_dilated(
            x, w, strides, padding, rhs_dilation=gaps, dimension_numbers=LETTERS[len(strides)],
            preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else None,
        )  # fmt: skip

    return function


# Operands' dtype and shapes, strides, padding, steps between taps, and into how many parts sums are cut.
CASES = {
    "bf16": ("bf16", (2, 5, 6, 64), (3, 3, 64, 64), (1, 1), "SAME", (1, 1), 1),
    "some channels of a slice": ("f16", (2, 5, 5, 40), (3, 2, 40, 16), (1, 1), "VALID", (1, 1), 1),
    "channels of two slices": ("bf16", (1, 6, 5, 96), (2, 2, 96, 72), (1, 1), "SAME", (1, 1), 1),
    "steps": ("bf16", (2, 9, 8, 64), (3, 3, 64, 32), (2, 3), "SAME", (1, 1), 1),
    "gaps": ("bf16", (1, 9, 8, 32), (3, 2, 32, 32), (1, 1), "SAME", (2, 3), 1),
    "uneven padding": ("bf16", (1, 5, 6, 32), (3, 3, 32, 32), (2, 1), ((0, 3), (2, 0)), (1, 2), 1),
    "a pixel of a larger step": ("bf16", (2, 7, 6, 64), (1, 1, 64, 32), (2, 2), "VALID", (1, 1), 1),
    "tf32": ("tf32", (1, 5, 6, 48), (3, 3, 48, 40), (1, 1), "SAME", (1, 1), 1),
    "i8": ("i8", (1, 5, 6, 80), (2, 2, 80, 24), (1, 1), "SAME", (1, 1), 1),
    "one dim": ("bf16", (3, 40, 64), (5, 64, 32), (2,), "SAME", (1,), 1),
    "three dims": ("bf16", (1, 4, 3, 5, 32), (2, 2, 3, 32, 32), (1, 2, 1), "SAME", (1, 1, 1), 1),
    "few channels": ("bf16", (2, 9, 10, 3), (7, 7, 3, 32), (2, 2), "SAME", (1, 1), 1),
    "few channels of tf32": ("tf32", (1, 9, 10, 3), (5, 7, 3, 32), (2, 2), "SAME", (1, 1), 1),
    "few channels, large steps": ("bf16", (1, 32, 32, 3), (8, 8, 3, 32), (8, 8), "VALID", (1, 1), 1),
    "few channels, no steps": ("f16", (1, 6, 5, 16), (3, 3, 16, 32), (1, 1), "SAME", (1, 1), 1),
    "parts": ("bf16", (1, 4, 4, 256), (3, 3, 256, 32), (1, 1), "SAME", (1, 1), 9),
    "parts of tf32": ("tf32", (1, 4, 4, 256), (3, 3, 256, 32), (1, 1), "SAME", (1, 1), 9),
}
WIDE = {"few channels": 2, "few channels of tf32": 2, "few channels, large steps": 0, "few channels, no steps": 1}
"""How many columns are stored before the first."""
KINDS = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "i8": np.int8}


def made(name):
    """Return the function of a case, and operands of small integers."""
    kind, x, w, strides, padding, gaps, _ = CASES[name]
    random = np.random.default_rng(0)
    return conv(strides, padding, gaps), [random.integers(-3, 4, s).astype(KINDS[kind]) for s in (x, w)]


def wanted(function, arguments):
    with jax.default_device(jax.devices("cpu")[0]):
        return np.asarray(function(*(a.astype("f4") for a in arguments)), "f8")


def arrays_of(name, kernel, arguments):
    """Return operands with the padding that other kernels store, and the kernel's result, all between NaN."""
    (x, _), (out,) = kernel.inputs, kernel.outputs
    image, taps = arguments
    more = [(0, n - m) for n, m in zip(x.shape, image.shape)]
    if kernel.tiling.window.merged:
        low = WIDE[name]
        more[-2] = (low, x.shape[-2] - image.shape[-2] - low)
    image, taps = np.pad(image, more), np.pad(taps, [(0, 0)] * (len(more) - 2) + [more[-1], (0, 0)])
    if window_operands(read_product(kernel), kernel.tiling.window).transposed:
        taps = np.ascontiguousarray(np.moveaxis(taps, -1, -3))
    return [between_nans(a) for a in (image, taps, np.full(out.shape, 77, STORED[out.dtype]))]


@pytest.mark.cudasim
@pytest.mark.parametrize("name", CASES)
def test_convolutions_by_windows(name):
    """The loops are the convolution, and the template computes what they are."""
    function, arguments = made(name)
    data = aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a")
    (kernel,) = (k for k in kernels_of(data) if k.tiling)
    taken = [k["resources"] for k in open_bundle(data).manifest["variants"][0]["kernels"]]
    assert all(r["spills"] == r["stack"] == 0 for r in taken)
    assert kernel.tiling.window.parts == CASES[name][-1]
    assert parse_kernel(print_kernel(kernel)) == kernel
    arrays = arrays_of(name, kernel, arguments)
    simulate(print_kernel(kernel), arrays)
    for array in arrays:
        check_margins(array)
    found, short = arrays[-1].astype("f8"), kernel.outputs[0].dtype in ("bf16", "f16")
    found = found.sum(axis=0) if kernel.tiling.window.parts > 1 else found
    np.testing.assert_allclose(found, wanted(*made(name)), rtol=5e-3 if short else 0)


@pytest.mark.cudasim
@pytest.mark.parametrize("name", ["bf16", "steps", "few channels"])
def test_an_image_of_nan_reaches_no_other(name):
    function, arguments = made(name)
    _, variant = gpu_program(function, arguments, target="cuda:sm_90a")
    (kernel,) = (k for k in variant.kernels if k.tiling)
    arrays = arrays_of(name, kernel, arguments)
    poison(arrays[0], np.indices(arrays[0].shape)[0] == 0)
    simulate(print_kernel(kernel), arrays)
    found, want = (x[0].astype("f8") for x in (arrays[-1], wanted(function, arguments)))
    np.testing.assert_allclose(found, want, rtol=5e-3)


@pytest.mark.cudasim
def test_the_loops_are_the_convolution():
    function, arguments = made("uneven padding")
    arguments = [arguments[0][:, :4, :4], arguments[1][..., :24]]
    (kernel,) = kernels_of(aotc.compile(jax.jit(function), *arguments, target="cuda:sm_90a"))
    assert kernel.tiling.window is not None
    arrays = [*arguments, np.zeros(kernel.outputs[0].shape, KINDS["bf16"])]
    run_kernel(kernel, arrays)
    np.testing.assert_allclose(arrays[-1].astype("f8"), wanted(function, arguments), rtol=5e-3)


def test_a_box_of_pixels_goes_on_in_the_next_line_and_image():
    images = np.arange(1, 2 * 3 * 3 * 2 + 1).reshape(2, 3, 3, 2)
    patches = SimulatedPatches(images, (2, 10), (-1, -1), (-1, -1), (1, 1))
    found = patches.copied_box((0, -1, -1, 0), (1, 1))
    np.testing.assert_array_equal(found, images.reshape(-1, 2)[:10])
    np.testing.assert_array_equal(patches.copied_box((1, 1, -1, 1), (0, 1))[0], [images[1, 0, 1, 1], 0])
    np.testing.assert_array_equal(patches.copied_box((0, -1, 0, 0), (0, 0))[:2], [[0, 0], images[0, 0, 0]])


@pytest.mark.cudasim
def test_warp_templates_gather_patches_and_pad_with_zeros():
    x, w = np.zeros((1, 9, 9, 16), ml_dtypes.bfloat16), np.zeros((3, 3, 16, 32), ml_dtypes.bfloat16)
    (kernel,) = kernels_of(aotc.compile(jax.jit(conv((1, 1), "SAME", (1, 1))), x, w, target="cuda:compute_80"))
    assert kernel.tiling.template == Mma()
    assert read_product(kernel).gathered().inside is not None


def depthwise(x, w):
    return jax.lax.conv_general_dilated(
        x, w, (1, 2), "SAME", dimension_numbers=LETTERS[2], feature_group_count=x.shape[-1]
    )  # fmt: skip


@pytest.mark.cudasim
def test_a_depthwise_convolution_reads_zeros_around():
    random = np.random.default_rng(0)
    x, w = (random.integers(-3, 4, s).astype(KINDS["bf16"]) for s in ((1, 4, 5, 8), (3, 3, 1, 8)))
    (kernel,) = kernels_of(aotc.compile(jax.jit(depthwise), x, w, target="cuda:sm_90a"))
    arrays = [x, w, np.zeros(kernel.outputs[0].shape, KINDS["bf16"])]
    run_kernel(kernel, arrays)
    np.testing.assert_array_equal(arrays[-1].astype("f8"), wanted(depthwise, (x, w)))


def added(x, w):
    return x + conv((1, 1), "SAME", (1, 1))(x, w)


@pytest.mark.cudasim
def test_the_image_may_also_be_an_epilogue_operand():
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((1, 9, 9, 64), (3, 3, 64, 64))]
    (kernel,) = kernels_of(aotc.compile(jax.jit(added), *shapes, target="cuda:sm_90a"))
    assert kernel.tiling.window is not None
    assert not kernel.aliases


@pytest.mark.cudasim
def test_a_number_of_images_that_only_a_call_knows():
    (n,) = jax.export.symbolic_shape("n")
    shapes = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((n, 9, 9, 64), (3, 3, 64, 64))]
    exported = jax.export.export(jax.jit(conv((1, 1), "SAME", (1, 1))))(*shapes)
    data = aotc.compile(exported, target="cuda:sm_90a")
    (kernel,) = kernels_of(data)
    assert kernel.tiling.window.pixels == (9, 9)
    (entry,) = open_bundle(data).manifest["variants"][0]["kernels"]
    assert entry["launch"]["maps"][0]["sizes"] == [64, 9, 9, ["max", 1, [0]]]


def patches_apart(x, w):
    return conv((16, 16), "VALID", (1, 1))(x, w)


@pytest.mark.cudasim
@pytest.mark.parametrize("target", TARGETS)
def test_disjoint_patches_become_matmul_rows(target):
    x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 128, 128, 3), (16, 16, 3, 32)))
    kernels = kernels_of(aotc.compile(jax.jit(patches_apart), x, w, target=target))
    (kernel,) = (k for k in kernels if k.tiling)
    product = read_product(kernel)
    assert product.k[1] * product.batch[1] == 16 * 16 * 3  # in parts, or not
    assert kernel.tiling.template == (Wgmma(transposed=True) if target == "cuda:sm_90a" else Mma())


class TestConvolutionsOnAGpu:
    pytestmark = gpu

    def test_a_depthwise_convolution(self):
        random = np.random.default_rng(0)
        x, w = (random.integers(-3, 4, s).astype(KINDS["bf16"]) for s in ((2, 19, 21, 40), (5, 3, 1, 40)))
        module = aotc.load(aotc.compile(jax.jit(depthwise), x, w, target="cuda:sm_90a"), devices="cuda")
        found = np.asarray(jax.tree.leaves(module.invoke("main", x, w))[0]).astype("f8")
        np.testing.assert_array_equal(found, wanted(depthwise, (x, w)))

    def test_the_image_may_also_be_an_epilogue_operand(self):
        random = np.random.default_rng(0)
        x, w = (random.integers(-2, 3, s).astype(KINDS["f16"]) for s in ((3, 9, 9, 64), (3, 3, 64, 64)))
        module = aotc.load(aotc.compile(jax.jit(added), x, w, target="cuda:sm_90a"), devices="cuda")
        found = np.asarray(jax.tree.leaves(module.invoke("main", x, w))[0]).astype("f8")
        np.testing.assert_array_equal(found, wanted(added, (x, w)))

    def test_patches_that_share_nothing(self):
        random = np.random.default_rng(0)
        x, w = (random.integers(-3, 4, s).astype("f4") for s in ((2, 32, 48, 3), (16, 16, 3, 32)))
        module = aotc.load(aotc.compile(jax.jit(patches_apart), x, w, target="cuda:sm_90a"), devices="cuda")
        found = np.asarray(jax.tree.leaves(module.invoke("main", x, w))[0])
        np.testing.assert_array_equal(found, wanted(patches_apart, (x, w)))

    @pytest.mark.parametrize("target", TARGETS)
    @pytest.mark.parametrize("name", CASES)
    def test_convolutions(self, name, target):
        function, arguments = made(name)
        module = aotc.load(aotc.compile(jax.jit(function), *arguments, target=target), devices="cuda")
        for _ in range(2):
            found = np.asarray(jax.tree.leaves(module.invoke("main", *arguments))[0]).astype("f8")
            np.testing.assert_allclose(found, wanted(function, arguments), rtol=5e-3)
