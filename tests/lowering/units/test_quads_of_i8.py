"""Products and convolutions of integers of 8 bits: what NumPy and XLA compute, by an instruction for four terms."""

import re
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cpu.tiles.micro_kernel import innermost_unroll_factor
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.host.machine import TILES, cpu_features, request_amx_tiles
from aotc.vmfb.native_code import disassemble_machine_code

pytestmark = [pytest.mark.cpu]
RUNNABLE = [
    t.name
    for t in TARGETS.values()
    if t.kind == "cpu"
    and t.triple.startswith("x86_64")
    and cpu_features().issuperset(t.features)
    and (TILES not in t.features or request_amx_tiles())
]
ROWS = "mk,kn->mn"
SHORT = "cpu:x86-64-v3-vnni"
LEFT = {"i8": (-128, 128, "i1"), "u8": (0, 256, "u1")}


def array(*shape, dtype="i8", seed=0):
    low, high, kind = LEFT[dtype]
    return np.random.default_rng(seed).integers(low, high, shape).astype(kind)


def product_of(formula):
    """Return the sum of products that the letters of ``formula`` say, of numbers that are widened first."""
    return lambda x, y: jnp.einsum(formula, x.astype("i4"), y.astype("i4"))


def answer(function, *args, target, constant=False, **more):
    given = args[:1] if constant else args
    run = (lambda x: function(x, *args[1:])) if constant else function
    return aotc.load(aotc.compile(jax.jit(run), *given, target=target, verify_each=True, **more))(*given)


def lowered(function, *args, target="cpu:x86-64-v4-vnni"):
    """Return the kernels of a function."""
    options = Options(target=target)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*args)
    return lower(run_passes(import_model(exported), options), TARGETS[target], options).kernels


def forms(function, *args, **more):
    """Return the forms of the tiles of a function, with the dtypes of their left operands."""
    kernels = lowered(function, *args, **more)
    return {(s.form.name, s.a.dtype) for kernel in kernels for s in walk(kernel.body) if isinstance(s, Tile)}


PRODUCTS = {
    "one-row": (ROWS, (1, 511), (511, 130)),
    "odd": (ROWS, (15, 257), (257, 33)),
    "many": (ROWS, (40, 300), (300, 96)),
    "by-columns": ("mk,nk->mn", (20, 301), (40, 301)),
    "left-by-columns": ("km,kn->mn", (301, 20), (301, 40)),
    "heads": ("bihd,bjhd->bhij", (2, 19, 3, 32), (2, 21, 3, 32)),
}


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", LEFT)
@pytest.mark.parametrize("name", PRODUCTS)
def test_i8_matmuls_are_exact(name, dtype, target):
    formula, left, right = PRODUCTS[name]
    x, y = array(*left, dtype=dtype), array(*right, seed=1)
    want = np.einsum(formula, x.astype("i4"), y.astype("i4"))
    for constant in (False, True):
        got = answer(product_of(formula), x, y, target=target, constant=constant)
        assert got.dtype == np.int32
        np.testing.assert_array_equal(got, want)


MANY_TERMS = {
    "rows": (product_of(ROWS), (200, 260), (260, 72)),
    "by-columns": (product_of("mk,nk->mn"), (150, 261), (72, 261)),
    "left-by-columns": (product_of("km,kn->mn"), (260, 200), (260, 70)),
    "heads": (product_of("bihd,bjhd->bhij"), (2, 140, 3, 160), (2, 160, 3, 160)),
    "pixels": (
        lambda x, w: jax.lax.conv_general_dilated(
            x.astype("i4"), w.astype("i4"), (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        ),
        (1, 14, 13, 18), (3, 3, 18, 40),
    ),
}  # fmt: skip


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("name", MANY_TERMS)
def test_i8_matmuls_with_an_unsigned_left_operand_are_exact(name, target):
    function, left, right = MANY_TERMS[name]
    x, y = array(*left), array(*right, seed=1)
    x.flat[:300], y.flat[:300] = -128, -128
    want = np.asarray(jax.jit(function)(x, y))
    for constant in (False, True):
        np.testing.assert_array_equal(answer(function, x, y, target=target, constant=constant), want)


@pytest.mark.parametrize("name", MANY_TERMS)
def test_left_operands_become_unsigned_if_profitable(name):
    """By an instruction that takes bytes without one: of a known right operand always, of an argument in many rows."""
    function, left, right = MANY_TERMS[name]
    x, y = array(*left), array(*right, seed=1)
    assert forms(function, x, y) == forms(lambda x: function(x, y), x) == {("i8", "u8")}
    for target in ("cpu:x86-64-v4", "cpu:x86-64-amx", "cpu:aarch64-dotprod", "cpu:aarch64-bf16"):
        assert forms(function, x, y, target=target) == {("i8", "i8")}
    few, matrix = array(20, 260), array(260, 300)
    assert forms(product_of(ROWS), few, matrix) == {("i8", "i8")}
    assert forms(lambda x: product_of(ROWS)(x, matrix), few) == {("i8", "u8")}


def test_column_sums_of_a_constant_matrix_are_precomputed():
    """No kernel reads the matrix but the one of the product, which reads panels."""
    x, y = array(200, 260), array(260, 72)
    kernels = lowered(lambda x: product_of(ROWS)(x, y), x)
    read = [b.shape for kernel in kernels for b in kernel.inputs]
    assert sorted(read) == sorted([(200, 260), (200, 260), (3, 65, 128), (72,)])


def convolution(strides, padding, dilation=None, groups=1, layout=("NHWC", "HWIO", "NHWC")):
    return lambda x, w: jax.lax.conv_general_dilated(
        x.astype("i4"), w.astype("i4"), strides, padding, None, dilation, layout, groups
    )


CONVOLUTIONS = {
    "channels": (convolution((1, 1), "SAME"), (1, 9, 20, 16), (3, 3, 16, 20), True),
    "three-channels": (convolution((2, 2), "SAME"), (2, 11, 9, 3), (3, 3, 3, 40), True),
    "strided": (convolution((2, 3), "VALID"), (1, 7, 20, 8), (3, 2, 8, 33), True),
    "dilated": (convolution((1, 1), "VALID", (2, 2)), (1, 8, 11, 6), (3, 3, 6, 16), True),
    "one-tap": (convolution((1, 1), "VALID"), (2, 5, 7, 18), (1, 1, 18, 24), True),
    "channels-first": (convolution((1, 1), "SAME", layout=None), (2, 5, 8, 9), (20, 5, 3, 3), True),
    "one-channel": (convolution((1, 1), "SAME"), (2, 11, 9, 1), (3, 3, 1, 40), False),
    "one-channel-many-taps": (convolution((1, 1), "SAME"), (1, 20, 9, 1), (9, 9, 1, 40), True),
    "groups": (convolution((1, 1), "SAME", groups=2), (1, 8, 8, 8), (3, 3, 4, 16), True),
    "groups-of-three": (convolution((1, 1), "SAME", groups=2), (1, 8, 8, 6), (3, 3, 3, 16), True),
    "depthwise": (convolution((1, 1), "SAME", groups=8), (1, 8, 8, 8), (3, 3, 1, 8), False),
}


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", LEFT)
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_i8_convolutions_are_exact(name, dtype, target):
    function, image, kernel, tiled = CONVOLUTIONS[name]
    x, w = array(*image, dtype=dtype), array(*kernel, seed=1)
    assert forms(function, x, w) == ({("i8", dtype)} if tiled else set())
    want = np.asarray(jax.jit(function)(x, w))
    for constant in (False, True):
        np.testing.assert_array_equal(answer(function, x, w, target=target, constant=constant), want)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("constant", [False, True])
def test_grouped_convolutions_of_many_terms_use_unsigned_operands(constant, target):
    """Channels that a quad lacks are added to each group, and 128 is taken away from the sums of each."""
    x, w = array(1, 16, 16, 36), array(3, 3, 18, 64, seed=1)
    function = convolution((1, 1), "SAME", groups=2)
    want = np.asarray(jax.jit(function)(x, w))
    np.testing.assert_array_equal(answer(function, x, w, target=target, constant=constant), want)


@pytest.mark.parametrize("target", RUNNABLE)
def test_i8_sums_wrap_like_i32(target):
    """As those of i32 do: nothing saturates, neither four products nor their sums."""
    x, y = np.full((5, 140_000), 255, "u1"), np.full((140_000, 16), -128, "i1")
    want = np.full((5, 16), 255 * -128 * 140_000 % (1 << 32), "u4").view("i4")
    np.testing.assert_array_equal(answer(product_of(ROWS), x, y, target=target), want)
    np.testing.assert_array_equal(answer(product_of(ROWS), x.view("i1"), y, target=target), 128 * 140_000)


def test_i8_matmuls_with_epilogues_match_jax():
    """Numbers are scaled in the kernel of the product."""

    def function(x, w, scales):
        total = product_of(ROWS)(x, w)
        return jax.nn.relu(total.astype("f4") * scales), total

    x, w, scales = array(33, 130), array(130, 70, seed=1), np.linspace(0.5, 2, 70, dtype="f4")
    got = answer(function, x, w, scales, target=RUNNABLE[-1])
    for a, b in zip(got, jax.jit(function)(x, w, scales), strict=True):
        np.testing.assert_array_equal(a, b)


def test_i8_quads_are_used_only_for_8_bit_operands():
    x, y = array(64, 128), array(128, 64)
    assert forms(product_of(ROWS), x, y) == {("i8", "i8")}
    assert forms(product_of(ROWS), x.view("u1"), y) == {("i8", "u8")}
    assert forms(lambda x: product_of(ROWS)(x, y.astype("i4") // 2), x) == {("i8", "i8")}  # a constant that fits
    assert forms(lambda x: product_of(ROWS)(x, y.astype("i4") * 2), x) == {("i32", "i32")}
    assert forms(product_of(ROWS), x, y.view("u1")) == {("i32", "i32")}
    assert forms(product_of(ROWS), x.astype("i2"), y) == {("i32", "i32")}


@pytest.mark.parametrize("dtype", LEFT)
def test_i8_quad_kernels_run_on_numpy(dtype):
    """The loop IR of a convolution means the same without the unit."""
    function, image, kernel, _ = CONVOLUTIONS["dilated"]
    x, w = array(*image, dtype=dtype), array(*kernel, seed=1)
    kernels = lowered(lambda x: function(x, w), x)
    (kernel,) = [k for k in kernels if any(isinstance(s, Tile) for s in walk(k.body))]
    padded, panels = kernel.inputs
    assert padded.shape == (1, 8, 11, 8)  # of six channels
    x = np.pad(x, ((0, 0),) * 3 + ((0, 2),))
    whole = np.pad(w, ((0, 0), (0, 0), (0, 2), (0, 0))).reshape(-1, 4, 1, 16)
    packed = np.ascontiguousarray(whole.transpose(2, 0, 3, 1)).reshape(panels.shape)
    out = np.full(kernel.outputs[0].shape, 7, "i4")
    run_kernel(kernel, [x, packed, out], {})
    np.testing.assert_array_equal(out, jax.jit(function)(x[..., :6], w))


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize("dtype", LEFT)
def test_the_inner_loop_uses_i8_quad_instructions(dtype):
    """A tile of 12 rows, or 4, of two vectors; what adds 128 to signed numbers takes two more. Nothing is spilled."""
    w, x = array(256, 64), jax.ShapeDtypeStruct((24, 256), {"i8": "int8", "u8": "uint8"}[dtype])
    units = {"cpu:x86-64-v4-vnni": "vpdpbusd", "cpu:x86-64-v4": "vpmaddwd", SHORT: "vpdpbusd"}
    for target, instruction in units.items():
        bundle = open_bundle(aotc.compile(jax.jit(lambda x: product_of(ROWS)(x, w)), x, target=target))
        (variant,) = bundle.manifest["variants"]
        text = disassemble_machine_code(bundle.verified_segment(variant["library"]), 0, 1 << 40)
        assert set(re.findall(r"\t(?:{vex} )?(vpdpbusd|vpmaddwd)", text)) == {instruction}
        if instruction == "vpdpbusd":
            sums = 8 if target == SHORT else 24
            assert text.count(instruction) == (sums + (2 if dtype == "i8" else 0)) * innermost_unroll_factor(sums)
            assert not re.search(r"[yz]mm\d+,0x\w*\(%rsp\)", text)
            assert ("{vex}" in text) == (target == SHORT)  # objdump's word for the encoding without AVX-512
