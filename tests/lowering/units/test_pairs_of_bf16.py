"""Products of bf16 on a CPU that multiplies pairs of it: beside float64, XLA, and their kernels on NumPy."""

import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import close, normal

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.ir.semantics.run import interpret
from aotc.kernels.cpu.tiles.micro_kernel import innermost_unroll_factor
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.host.machine import cpu_features
from aotc.vmfb.native_code import disassemble_machine_code

TARGET = TARGETS["cpu:x86-64-v4-bf16"]
pytestmark = [pytest.mark.cpu]
runs_here = pytest.mark.skipif(
    not cpu_features().issuperset(TARGET.features), reason="this machine does not multiply pairs of bf16"
)

lax = jax.lax
SUM = 2.0**-23  # what a product or a sum of vdpbf16ps is rounded by


def bf16(*shape, seed=0):
    return normal(*shape, seed=seed, dtype=ml_dtypes.bfloat16)


def product_of(formula, dtype="float32"):
    """Return the sum of products that the letters of ``formula`` say."""
    return lambda x, y: jnp.einsum(formula, x, y, preferred_element_type=dtype)


def loaded(function, *args, **more):
    return aotc.load(aotc.compile(jax.jit(function), *args, target=TARGET.name, verify_each=True, **more))


def lowered(function, *args):
    """Return the kernels of a function."""
    options = Options(target=TARGET.name)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*args)
    return lower(run_passes(import_model(exported), options), TARGET, options).kernels


def forms(function, *args):
    """Return the forms of the tiles of a function."""
    return {s.form.name for kernel in lowered(function, *args) for s in walk(kernel.body) if isinstance(s, Tile)}


ROWS = "mk,kn->mn"
SIZES = [(1, 512, 48), (4, 64, 256), (5, 64, 256), (5, 65, 256), (14, 256, 32), (15, 257, 33), (40, 700, 96)]
CONSTANT = [(1, 511, 130), (2, 512, 64), (4, 64, 64), (5, 63, 64), (100, 300, 129)]
PRODUCTS = {
    **{f"{m}x{k}x{n}": (ROWS, (m, k), (k, n), False) for m, k, n in SIZES},
    **{f"constant-{m}x{k}x{n}": (ROWS, (m, k), (k, n), True) for m, k, n in CONSTANT},
    "no-terms": (ROWS, (9, 0), (0, 16), False),
    "constant-by-columns": ("mk,nk->mn", (3, 300), (70, 300), True),
    "by-columns": ("mk,nk->mn", (20, 301), (40, 301), False),
    "left-by-columns": ("km,kn->mn", (301, 20), (301, 40), False),
    "batch": ("bij,bjk->bik", (3, 17, 64), (3, 64, 33), False),
    "heads": ("bihd,bjhd->bhij", (2, 19, 3, 32), (2, 21, 3, 32), False),
}


@runs_here
@pytest.mark.parametrize("name", PRODUCTS)
def test_bf16_pair_matmuls_match_f64(name):
    """Each product and each sum is rounded to f32 at most once: of the sum of absolute values."""
    formula, left, right, constant = PRODUCTS[name]
    x, y = bf16(*left), bf16(*right, seed=1)
    function = product_of(formula)
    got = loaded(lambda x: function(x, y), x)(x) if constant else loaded(function, x, y)(x, y)
    exact, sizes = (np.einsum(formula, *(f(v.astype("f8")) for v in (x, y))) for f in (np.array, abs))
    assert got.dtype == np.float32
    assert (abs(got - exact) <= 2 * max(left) * SUM * sizes).all()
    np.testing.assert_allclose(got, jax.jit(function)(x, y), rtol=1e-4, atol=1e-5 * max(abs(exact).max(), 1))


@runs_here
@pytest.mark.parametrize("level", [0, 2])
def test_bf16_pair_matmuls_with_epilogues_match_jax(level):
    def function(x, w, b):
        return jax.nn.relu(x @ w + b), x @ w * 2, jnp.tanh(x @ w)

    args = [bf16(33, 130), bf16(130, 70, seed=1), bf16(70, seed=2)]
    close(loaded(function, *args, opt_level=level).invoke("main", *args), jax.jit(function)(*args))


@runs_here
def test_bf16_pair_matmuls_of_symbolic_rows_match_jax():
    w = bf16(96, 64, seed=1)
    rows = jax.export.symbolic_shape("b, 96")
    exported = jax.export.export(jax.jit(lambda x: x @ w))(jax.ShapeDtypeStruct(rows, jnp.bfloat16))
    module = aotc.load(aotc.compile(exported, target=TARGET.name, verify_each=True))
    for m in (1, 2, 13, 14, 15, 40):
        x = bf16(m, 96, seed=m)
        close(module(x), jax.jit(lambda x: x @ w)(x))


NHWC = ("NHWC", "HWIO", "NHWC")


def convolution(strides, padding, dilation=None, groups=1):
    return lambda x, w: lax.conv_general_dilated(
        x, w, strides, padding, None, dilation, NHWC, groups, preferred_element_type=jnp.float32
    )


CONVOLUTIONS = {
    "even": (convolution((1, 1), "SAME"), (2, 11, 9, 6), (3, 3, 6, 20), {"bf16"}),
    "odd": (convolution((1, 1), "SAME"), (2, 11, 9, 5), (3, 3, 5, 20), {"f32_bf16"}),
    "strided": (convolution((2, 3), "VALID"), (2, 11, 20, 8), (3, 2, 8, 33), {"bf16"}),
    "dilated": (convolution((1, 1), "VALID", (2, 2)), (1, 12, 11, 4), (3, 3, 4, 16), {"bf16"}),
    "groups": (convolution((1, 1), "SAME", groups=2), (1, 8, 8, 8), (3, 3, 4, 16), {"bf16"}),
    "odd-groups": (convolution((1, 1), "SAME", groups=2), (1, 8, 8, 6), (3, 3, 3, 16), {"f32_bf16"}),
    "groups-of-one-output": (convolution((1, 1), "SAME", groups=8), (1, 8, 8, 16), (3, 3, 2, 8), set()),
}


@runs_here
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_bf16_pair_convolutions_match_f32(name):
    function, image, kernel, found = CONVOLUTIONS[name]
    x, w = bf16(*image), bf16(*kernel, seed=1)
    assert forms(function, x, w) == found
    exact = jax.jit(function)(x.astype("f4"), w.astype("f4"))
    np.testing.assert_allclose(loaded(function, x, w)(x, w), exact, rtol=1e-4, atol=1e-4)


def test_bf16_pairs_are_used_only_for_two_bf16_operands():
    x, y = bf16(64, 128), bf16(128, 64)
    assert forms(product_of(ROWS), x, y) == {"bf16"}
    assert forms(product_of(ROWS), x, y.astype("f4")) == {"f32"}
    assert forms(product_of(ROWS), x.astype("f4"), y) == {"f32_bf16"}
    assert forms(product_of(ROWS), x.astype("f2"), y.astype("f2")) == {"f32_f16"}
    assert forms(product_of(ROWS), x[:, :127], y[:127]) == {"f32_bf16"}  # read where it lies
    assert forms(product_of(ROWS), x[:4], y) == {"f32_bf16"}


def test_bf16_pair_kernels_run_on_numpy():
    """The loop IR of a packed product means the same without the unit."""
    w = bf16(33, 40, seed=1)
    model = jax.export.export(jax.jit(lambda x: product_of(ROWS)(x, w)), platforms=["cpu"])(bf16(16, 33))
    x = bf16(16, 33, seed=2)
    (want,) = interpret(import_model(model), x)
    padded = np.pad(x, ((0, 0), (0, 1)))
    kernels = lowered(lambda x: product_of(ROWS)(x, w), x)
    (kernel,) = [k for k in kernels if any(isinstance(s, Tile) for s in walk(k.body))]
    _, panels = kernel.inputs
    cols = panels.shape[-1] // 2
    whole = np.zeros((34, panels.shape[0] * cols), w.dtype)
    whole[:33, :40] = w
    packed = whole.reshape(17, 2, -1, cols).transpose(2, 0, 3, 1).reshape(panels.shape)
    out = np.full((16, 40), 7, "f4")
    run_kernel(kernel, [padded, np.ascontiguousarray(packed), out], {})
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-5)


@runs_here
def test_bf16_pair_instructions_treat_subnormals_as_zero():
    """As the instruction has it, and no formula of ours: in operands and in sums."""
    x, y = np.ones((16, 64), ml_dtypes.bfloat16), np.full((64, 32), 2.0**-130, ml_dtypes.bfloat16)
    module = loaded(product_of(ROWS), x, y)
    assert (y != 0).all()
    assert not module(x, y).any()
    small = [(x * scale).astype(x.dtype) for scale in (2.0**-70, 2.0**-50)]
    y = np.full_like(y, 2.0**-70)
    assert not module(small[0], y).any()  # sums of 2^-134
    assert (module(small[1], y) == 2.0**-114).all()


@runs_here
def test_bf16_pair_matmuls_propagate_infinity_and_nan():
    x, y = bf16(16, 64), bf16(64, 32, seed=1)
    x[0, 0], x[1, 1], x[2, 2] = np.inf, np.nan, -np.inf
    got, want = loaded(product_of(ROWS), x, y)(x, y), jax.jit(product_of(ROWS))(x, y)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[::2][:2], np.asarray(want)[::2][:2])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
def test_the_inner_loop_uses_bf16_pair_instructions():
    """A tile of 14 rows of two vectors: nothing is widened, nothing spilled."""
    w, x = bf16(256, 64), jax.ShapeDtypeStruct((28, 256), jnp.bfloat16)
    for target, pairs in ((TARGET.name, True), ("cpu:x86-64-v4-vnni", False)):
        bundle = open_bundle(aotc.compile(jax.jit(lambda x: product_of(ROWS)(x, w)), x, target=target))
        (variant,) = bundle.manifest["variants"]
        text = disassemble_machine_code(bundle.verified_segment(variant["library"]), 0, 1 << 40)
        assert ("vdpbf16ps" in text) == pairs
        assert ("vfmadd231ps" in text) != pairs
        if pairs:
            assert text.count("vdpbf16ps") == 28 * innermost_unroll_factor(28)
            assert "vpslld" not in text  # by which pairs are widened
            assert not re.search(r"zmm\d+,0x\w*\(%rsp\)", text)
