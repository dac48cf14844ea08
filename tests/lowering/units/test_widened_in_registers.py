"""Products of bf16 and f16 on CPUs without an instruction for them: tiles read 16 bits, and widen them in registers."""

import re
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import normal

import aotc
from aotc.diagnostics import InternalError
from aotc.frontend.importer import import_model
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cpu.compile import unoptimized_kernel_module
from aotc.kernels.cpu.tiles.micro_kernel import innermost_unroll_factor
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.host.machine import cpu_features
from aotc.vmfb.native_code import disassemble_machine_code

pytestmark = [pytest.mark.cpu]
OLD, WIDE = "cpu:x86-64-v2", "cpu:x86-64-v4-vnni"
RUNNABLE = [t for t in (OLD, "cpu:x86-64-v3", "cpu:x86-64-v4", WIDE) if cpu_features() >= set(TARGETS[t].features)]
DTYPES = {"bf16": ml_dtypes.bfloat16, "f16": np.float16}
SUM = 2.0**-23


def array(*shape, dtype, seed=0):
    return normal(*shape, seed=seed, dtype=DTYPES[dtype])


def sums_of(x):
    return "float64" if x.dtype == "float64" else "float32"


def product(x, y):
    return jnp.matmul(x, y, preferred_element_type=sums_of(x))


def convolution(x, w):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=numbers, preferred_element_type=sums_of(x)
    )


def lowered(function, *args, target=WIDE, **more):
    """Return the kernels of a function that have tiles."""
    options = Options(target=target, **more)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*args)
    kernels = lower(run_passes(import_model(exported), options), TARGETS[target], options).kernels
    return [k for k in kernels if any(isinstance(s, Tile) for s in walk(k.body))]


def forms(function, *args, **more):
    return {s.form.name for k in lowered(function, *args, **more) for s in walk(k.body) if isinstance(s, Tile)}


CASES = {
    "one-row": (product, (1, 511), (511, 130)),
    "few-rows": (product, (3, 512), (512, 64)),
    "few-rows-by-columns": (lambda x, y: product(x, y.T), (3, 512), (64, 512)),
    "many": (product, (40, 301), (301, 97)),
    "left-by-columns": (lambda x, y: product(x.T, y), (300, 40), (300, 96)),
    "batch": (product, (3, 17, 64), (3, 64, 33)),
    "channels": (convolution, (1, 9, 20, 16), (3, 3, 16, 20)),
    "odd-channels": (convolution, (2, 8, 9, 5), (3, 3, 5, 33)),
}


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CASES)
def test_each_product_and_sum_in_f32_is_rounded_once(name, dtype, target):
    """The operands are exact in f32, so a result is as near as one of f32: of the sum of absolute values."""
    function, left, right = CASES[name]
    x, y = array(*left, dtype=dtype), array(*right, dtype=dtype, seed=1)
    with jax.enable_x64(True):
        exact, sizes = (np.asarray(function(f(x.astype("f8")), f(y.astype("f8"))), "f8") for f in (np.array, abs))
    for constant in (False, True):
        given = (x,) if constant else (x, y)
        run = (lambda x: function(x, y)) if constant else function
        got = aotc.load(aotc.compile(jax.jit(run), *given, target=target, verify_each=True))(*given)
        assert got.dtype == np.float32
        assert (abs(got - exact) <= 600 * SUM * sizes + 1e-30).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_tiles_widen_right_operands_if_the_target_can(dtype):
    """Tiles do, wherever the operand lies; but f16 for a CPU without an instruction, and what is on the left."""
    x, y = array(64, 128, dtype=dtype), array(128, 64, dtype=dtype)
    expected = "f32" if dtype == "f16" else "f32_bf16"
    for target, form in ((WIDE, f"f32_{dtype}"), (OLD, expected), ("cpu:aarch64", f"f32_{dtype}")):
        assert forms(product, x, y, target=target) == {form}
        assert forms(lambda x: product(x, y), x, target=target) == {form}
        assert forms(product, x[:2], y, target=target) == {form}
        assert forms(product, x.astype("f4"), y, target=target) == {form}  # which JAX widens
    assert forms(product, x, y.astype("f4")) == {"f32"}
    assert forms(convolution, array(1, 8, 8, 4, dtype=dtype), array(3, 3, 4, 32, dtype=dtype)) == {f"f32_{dtype}"}


def test_a_requested_precision_applies_to_both_operands():
    """The right one was not f32 all the time; but what the option rounds is the product."""
    x, y = array(64, 128, dtype="bf16"), array(128, 64, dtype="bf16")
    for precision, form in (("model", "f32_bf16"), ("highest", "f32_bf16"), ("bf16", "bf16"), ("bf16x3", "bf16")):
        found = forms(product, x.astype("f4"), y, target="cpu:x86-64-v4-bf16", matmul_precision=precision)
        assert found == {form}


@pytest.mark.parametrize("dtype", DTYPES)
def test_short_float_weights_are_stored_unwidened(dtype):
    x, y = array(8, 256, dtype=dtype), array(256, 512, dtype=dtype)
    data = aotc.compile(jax.jit(lambda x: product(x, y)), x, target="cpu:x86-64-v3")
    wide = aotc.compile(jax.jit(lambda x: product(x, y.astype("f4"))), x.astype("f4"), target="cpu:x86-64-v3")
    assert len(wide) - len(data) > 0.9 * y.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
def test_widening_kernels_run_on_numpy(dtype):
    x, w = array(20, 96, dtype=dtype), array(96, 40, dtype=dtype, seed=1)
    (kernel,) = lowered(lambda x: product(x, w), x)
    left, panels = kernel.inputs
    assert (left.dtype, panels.dtype) == ("f32", dtype)
    cols = panels.shape[-1]
    whole = np.zeros((96, panels.shape[0] * cols), w.dtype)
    whole[:, :40] = w
    packed = np.ascontiguousarray(whole.reshape(96, -1, cols).swapaxes(0, 1))
    out = np.full((20, 40), 7, "f4")
    run_kernel(kernel, [x.astype("f4"), packed, out], {})
    np.testing.assert_allclose(out, x.astype("f4") @ w.astype("f4"), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", RUNNABLE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_subnormals_infinity_and_nan_are_widened_exactly(dtype, target):
    """What is subnormal counts, as f16's least numbers do; what is not finite passes."""
    tiny = np.finfo(np.float16).smallest_subnormal if dtype == "f16" else 2.0**-133
    x, y = np.ones((8, 64), DTYPES[dtype]), np.full((64, 32), tiny, DTYPES[dtype])
    x[1, 3], x[2, 3], y[5, 7] = np.inf, np.nan, -np.inf
    got = aotc.load(aotc.compile(jax.jit(product), x, y, target=target))(x, y)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(got, x.astype("f4") @ y.astype("f4"))


def test_emission_refuses_f16_tiles_without_f16_instructions():
    head = 'def k(a0: "f32[4, 8]", a1: "f16[8, 8]", /, o0: "f32[4, 8]", *, grid: "1", flops: "1", bytes: "1"):'
    said = "rows=4, cols=8, out_base=0, out_row=8, a_base=0, a_row=8, b_base=0, levels=[(8, 1, 8)]"
    kernel = parse_kernel(f"{head}\n    tile(o0, a0, a1, {said}, form={FORMS['f32_f16']})\n")
    with pytest.raises(InternalError, match="cannot widen f16"):
        unoptimized_kernel_module(kernel, TARGETS[OLD])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize(("dtype", "instruction"), [("bf16", "vpslld"), ("f16", "vcvtph2ps")])
def test_the_inner_loop_widens_once_for_all_rows(dtype, instruction):
    """Two vectors for 14 rows of a tile, or more; nothing is spilled."""
    w, x = array(256, 64, dtype=dtype), jax.ShapeDtypeStruct((28, 256), DTYPES[dtype])
    bundle = open_bundle(aotc.compile(jax.jit(lambda x: product(x, w)), x, target=WIDE))
    (variant,) = bundle.manifest["variants"]
    library = disassemble_machine_code(bundle.verified_segment(variant["library"]), 0, 1 << 40)
    (text,) = re.findall(rf"<tile_f32_{dtype}_14x\w+>:(.*?)\tret", library, re.DOTALL)
    products, widened = text.count("vfmadd231ps"), len(re.findall(rf"\t{instruction}\s.*zmm", text))
    assert products == 28 * innermost_unroll_factor(28)
    assert widened == 2 * innermost_unroll_factor(28)
    assert not re.search(r"zmm\d+,0x\w*\(%rsp\)", text)
