"""Products on a CPU's matrix unit: beside float64 and XLA where there is one, elsewhere played by Python."""

import re
import shutil
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support.differential import close, normal
from support.played.emulated_matrix import run_emulated
from support.played.emulated_matrix import runs_here as can_play

import aotc
from aotc.frontend.importer import import_model
from aotc.ir.dims.symbols import evaluate
from aotc.ir.loop.ir import Tile, walk
from aotc.ir.loop.run import run_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.host.machine import cpu_features, request_amx_tiles
from aotc.vmfb.native_code import disassemble_machine_code

TARGET = TARGETS["cpu:x86-64-amx"]
pytestmark = [pytest.mark.cpu]
has_unit = cpu_features().issuperset(TARGET.features) and request_amx_tiles()
runs_here = pytest.mark.skipif(not has_unit, reason="this machine has no matrix unit")
played = pytest.mark.skipif(not can_play, reason="this machine lacks AVX-512")

lax = jax.lax
SUM = 2.0**-23
SUMS = {"bf16": "float32", "i8": "int32"}
INSTRUCTION = {"bf16": "tdpbf16ps", "i8": "tdpbssd", "u8": "tdpbusd"}
ROWS = "mk,kn->mn"


def array(*shape, dtype="bf16", seed=0):
    if dtype in ("i8", "u8"):
        low, kind = (-128, "i1") if dtype == "i8" else (0, "u1")
        return np.random.default_rng(seed).integers(low, low + 256, shape).astype(kind)
    return normal(*shape, seed=seed, dtype=ml_dtypes.bfloat16)


def product_of(formula, dtype="bf16"):
    """Return the sum of products that the letters of ``formula`` say."""
    return lambda x, y: jnp.einsum(formula, x, y, preferred_element_type=SUMS[dtype])


def loaded(function, *args, threads=None, **more):
    data = aotc.compile(jax.jit(function), *args, target=TARGET.name, verify_each=True, **more)
    return aotc.load(data, threads=threads)


def lowered(function, *args):
    """Return the kernels of a function."""
    options = Options(target=TARGET.name)
    exported = jax.export.export(jax.jit(function), platforms=["cpu"])(*args)
    kernels = lower(run_passes(import_model(exported), options), TARGET, options).kernels
    assert not [fault for kernel in kernels for fault in verify_kernel(kernel) or ()]
    return kernels


def tiles_of(kernels):
    return {(s.form.name, s.rows, s.cols) for kernel in kernels for s in walk(kernel.body) if isinstance(s, Tile)}


def values(dtype, shape, seed):
    """Return random elements of a buffer."""
    known = dtype in INSTRUCTION
    return array(*shape, dtype=dtype, seed=seed) if known else normal(*shape, seed=seed, dtype=to_numpy(dtype))


def check_played(kernels, instruction="tdp", **sizes):
    """Compare the kernel of tiles, played, with its meaning; it has the instruction."""
    (kernel,) = [k for k in kernels if any(isinstance(s, Tile) for s in walk(k.body))]
    assert set(sizes) == set(kernel.dims)
    inputs = [values(x.dtype, [evaluate(d, sizes) for d in x.shape], n) for n, x in enumerate(kernel.inputs)]
    outs = [([evaluate(d, sizes) for d in x.shape], to_numpy(x.dtype)) for x in kernel.outputs]
    want, got = ([np.full(shape, 7, dtype) for shape, dtype in outs] for _ in range(2))
    run_kernel(kernel, [*inputs, *want], sizes)
    unit = run_emulated(kernel, TARGET, [*inputs, *got], [sizes[d] for d in kernel.dims])
    assert unit.faults == []
    assert any(x.startswith(instruction) for x in unit.seen)
    close(got, want)


# Rows: a register's and one more, two registers' and one more; columns and terms alike.
SIZES = [
    (5, 64, 64), (16, 64, 64), (17, 64, 33), (32, 31, 48), (33, 33, 32), (33, 64, 16), (40, 300, 130), (65, 127, 31),
    (100, 64, 96),
]  # fmt: skip
PRODUCTS = {
    **{f"{m}x{k}x{n}": (ROWS, (m, k), (k, n), False) for m, k, n in SIZES},
    **{f"constant-{m}x{k}x{n}": (ROWS, (m, k), (k, n), True) for m, k, n in [(1, 511, 130), (4, 512, 64), *SIZES]},
    "constant-by-columns": ("mk,nk->mn", (3, 300), (70, 300), True),
    "by-columns": ("mk,nk->mn", (20, 301), (40, 301), False),
    "left-by-columns": ("km,kn->mn", (301, 20), (301, 40), False),
    "rows-apart": (ROWS, (70, 127), (127, 225), True),
    "rows-apart-of-whole-lines": (ROWS, (64, 128), (128, 256), False),
    "rows-apart-in-a-batch": ("bij,bjk->bik", (2, 50, 31), (2, 31, 250), False),
    "batch": ("bij,bjk->bik", (3, 17, 64), (3, 64, 33), False),
    "heads": ("bihd,bjhd->bhij", (2, 19, 3, 32), (2, 21, 3, 32), False),
}


@played
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_unit_kernels_match_their_loop_ir(name, dtype):
    formula, left, right, constant = PRODUCTS[name]
    x, y = array(*left, dtype=dtype), array(*right, dtype=dtype, seed=1)
    function = product_of(formula, dtype)
    kernels = lowered(lambda x: function(x, y), x) if constant else lowered(function, x, y)
    assert {form for form, _, _ in tiles_of(kernels)} == {dtype}
    check_played(kernels)


@runs_here
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("name", PRODUCTS)
def test_matrix_unit_matmuls_match_f64(name, dtype):
    """Each product and each sum is rounded to f32 at most once: of the sum of absolute values. Integers are exact."""
    formula, left, right, constant = PRODUCTS[name]
    x, y = array(*left, dtype=dtype), array(*right, dtype=dtype, seed=1)
    function = product_of(formula, dtype)
    got = loaded(lambda x: function(x, y), x)(x) if constant else loaded(function, x, y)(x, y)
    exact, sizes = (np.einsum(formula, *(f(v.astype("f8")) for v in (x, y))) for f in (np.array, abs))
    assert got.dtype == SUMS[dtype]
    assert (abs(got - exact) <= 2 * max(left) * (SUM if dtype == "bf16" else 0) * sizes).all()


def test_matrix_unit_tiles_depend_on_rows_and_columns():
    """Up to 16 rows 1 x 4 registers of sums, from 17 on 2 x 2; no more columns than there are."""

    def tiles(m, n, dtype="bf16", k=128):
        y = array(k, n, dtype=dtype)
        return tiles_of(lowered(lambda x: product_of(ROWS, dtype)(x, y), array(m, k, dtype=dtype)))

    for dtype in SUMS:
        assert tiles(16, 256, dtype) == {(dtype, 16, 64)}
        assert tiles(16, 48, dtype) == {(dtype, 16, 48)}
        assert tiles(17, 256, dtype) == {(dtype, 17, 32)}
        assert tiles(32, 256, dtype) == {(dtype, 32, 32)}
        assert tiles(33, 256, dtype) == {(dtype, 17, 32), (dtype, 16, 32)}
        assert tiles(64, 16, dtype) == {(dtype, 32, 16)}


def test_rows_read_by_many_panels_are_copied():
    """Those of tiles of two registers that eight panels or more read, in places of an odd number of lines."""

    def copied(m, n, dtype="bf16", k=128):
        kernels = lowered(product_of(ROWS, dtype), array(m, k, dtype=dtype), array(k, n, dtype=dtype))
        statements = [s for kernel in kernels for s in walk(kernel.body)]
        return {s.a.shape for s in statements if isinstance(s, Tile) and s.a.space != "global"}

    assert copied(64, 256) == {(32, 160)}
    assert copied(64, 224) == set()
    assert copied(17, 256) == {(17, 160)}
    assert copied(16, 256) == set()
    assert copied(40, 256, k=127) == {(20, 160)}
    assert copied(40, 256, k=161) == {(20, 224)}
    assert copied(64, 256, "i8") == {(32, 192)}


def test_only_bf16_and_i8_matmuls_use_the_matrix_unit():
    """Those of two bf16, and of two i8; others are as on other CPUs."""
    x, y = array(64, 128), array(128, 64)
    assert {form for form, _, _ in tiles_of(lowered(product_of(ROWS), x, y.astype("f4")))} == {"f32"}
    assert {form for form, _, _ in tiles_of(lowered(product_of(ROWS), x.astype("f2"), y.astype("f2")))} == {"f32_f16"}
    assert {form for form, _, _ in tiles_of(lowered(product_of(ROWS), x[:4], y))} == {"f32_bf16"}
    x, y = array(64, 128, dtype="i8"), array(128, 64, dtype="i8")
    short = lowered(lambda x, y: jnp.matmul(x, y, preferred_element_type=jnp.int8), x, y)  # sums wrap around alike
    assert tiles_of(short) == {("i8", 32, 32)}


EMPTY = [(9, 0, 16), (0, 64, 64), (40, 64, 0)]


@pytest.mark.parametrize("size", EMPTY)
def test_empty_matmuls_do_not_use_the_matrix_unit(size):
    m, k, n = size
    for kernel in lowered(product_of(ROWS), array(m, k), array(k, n)):
        assert kernel.grid == 0 or not tiles_of([kernel])


@runs_here
@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("shift", [0, 16, 24, 63])
def test_unaligned_rows_match_numpy(shift, dtype):
    x, y = array(70, 128, dtype=dtype), array(128, 256, dtype=dtype, seed=1)
    memory = np.zeros(x.nbytes + 128, "u1")
    begin = -memory.ctypes.data % 64 + shift // x.itemsize * x.itemsize
    there = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    there[:] = x
    close(loaded(product_of(ROWS, dtype), x, y)(there, y), jax.jit(product_of(ROWS, dtype))(x, y))


@runs_here
@pytest.mark.parametrize("size", EMPTY)
def test_empty_matmuls_are_zero(size):
    m, k, n = size
    got = loaded(product_of(ROWS), array(m, k), array(k, n))(array(m, k), array(k, n))
    assert got.shape == (m, n)
    assert not got.any()


def test_items_reuse_rows_and_panels():
    """Beside those of a CPU without the unit."""

    def grid(size, target):
        types = [jax.ShapeDtypeStruct((size, size), "bfloat16")] * 2
        exported = jax.export.export(jax.jit(product_of(ROWS)), platforms=["cpu"])(*types)
        options = Options(target=target.name)
        *_, kernel = lower(run_passes(import_model(exported), options), target, options).kernels
        return kernel.grid

    pairs = TARGETS["cpu:x86-64-v4-bf16"]
    assert 8 <= grid(1024, TARGET) <= 24 < grid(1024, pairs)
    assert grid(512, TARGET) >= 8
    assert grid(128, TARGET) == 1 < grid(128, pairs)


def epilogue(x, w, b):
    return jax.nn.relu(x @ w + b)


@played
def test_matrix_unit_kernels_with_epilogues_match_their_loop_ir():
    args = [array(33, 130), array(130, 70, seed=1), array(70, seed=2)]
    check_played(lowered(epilogue, *args))


@runs_here
@pytest.mark.parametrize("level", [0, 2])
def test_bf16_results_with_epilogues_match_jax(level):
    args = [array(33, 130), array(130, 70, seed=1), array(70, seed=2)]
    close(loaded(epilogue, *args, opt_level=level).invoke("main", *args), jax.jit(epilogue)(*args))


def any_rows(w):
    """A product of rows whose number only a call knows."""
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(f"b, {w.shape[0]}"), w.dtype)


@played
@pytest.mark.parametrize("columns", [64, 256])
@pytest.mark.parametrize("m", [1, 31, 32, 63])
def test_matrix_unit_kernels_of_symbolic_rows_match_their_loop_ir(m, columns):
    w = array(96, columns, seed=1)
    kernels = (kernel,) = lowered(lambda x: product_of(ROWS)(x, w), any_rows(w))
    check_played(kernels, b=m)
    x, panels = array(m, 96), array(columns // 32, 48, 64, seed=2)
    got = np.empty((m, columns), np.float32)
    run_kernel(kernel, [x, panels, got], {"b": m})
    right = panels.reshape(-1, 48, 32, 2).transpose(1, 3, 0, 2).reshape(96, columns)
    np.testing.assert_allclose(got, x.astype(np.float64) @ right.astype(np.float64), rtol=1e-4, atol=1e-4)


@runs_here
@pytest.mark.parametrize("columns", [64, 256])
def test_matrix_unit_matmuls_of_symbolic_rows_match_jax(columns):
    w = array(96, columns, seed=1)
    module = loaded(lambda x: x @ w, any_rows(w))
    for m in (1, 2, 13, 16, 17, 31, 32, 33, 70):
        x = array(m, 96, seed=m)
        close(module(x), jax.jit(lambda x: x @ w)(x))


def convolution(strides, padding, dilation=None):
    numbers = ("NHWC", "HWIO", "NHWC")

    def convolved(x, w):
        if w.dtype == "int8":
            return lax.conv_general_dilated(x.astype("i4"), w.astype("i4"), strides, padding, None, dilation, numbers)
        return lax.conv_general_dilated(x, w, strides, padding, None, dilation, numbers, preferred_element_type="f4")

    return convolved


def unsigned_product(x, y):
    return x.astype("i4") @ y.astype("i4")


@played
@pytest.mark.parametrize("m", [5, 40])
def test_matrix_unit_kernels_of_unsigned_operands_match_their_loop_ir(m):
    kernels = lowered(unsigned_product, array(m, 300, dtype="u8"), array(300, 130, dtype="i8", seed=1))
    check_played(kernels, "tdpbusd")


CONVOLUTIONS = {
    "channels": (convolution((1, 1), "SAME"), (1, 6, 20, 32), (3, 3, 32, 20)),
    "few-channels": (convolution((1, 1), "VALID"), (2, 5, 9, 6), (3, 3, 6, 20)),
    "strided": (convolution((2, 3), "VALID"), (1, 7, 20, 8), (3, 2, 8, 33)),
    "dilated": (convolution((1, 1), "VALID", (2, 2)), (1, 8, 11, 4), (3, 3, 4, 16)),
}


@played
@pytest.mark.parametrize("dtype", ["bf16", "i8", "u8"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_matrix_unit_convolution_kernels_match_their_loop_ir(name, dtype):
    """Integers have any number of channels: those that a quad lacks are zeros."""
    function, image, kernel = CONVOLUTIONS[name]
    form = "bf16" if dtype == "bf16" else "i8"
    kernels = lowered(function, array(*image, dtype=dtype), array(*kernel, dtype=form, seed=1))
    assert {found for found, _, _ in tiles_of(kernels)} == {form}
    check_played(kernels, INSTRUCTION[dtype])


@runs_here
@pytest.mark.parametrize("dtype", ["i8", "u8"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_matrix_unit_integer_convolutions_match_jax(name, dtype):
    function, image, kernel = CONVOLUTIONS[name]
    x, w = array(*image, dtype=dtype), array(*kernel, dtype="i8", seed=1)
    np.testing.assert_array_equal(loaded(function, x, w)(x, w), jax.jit(function)(x, w))


@runs_here
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_matrix_unit_convolutions_match_f32(name):
    function, image, kernel = CONVOLUTIONS[name]
    x, w = array(*image), array(*kernel, seed=1)
    exact = jax.jit(function)(x.astype("f4"), w.astype("f4"))
    np.testing.assert_allclose(loaded(function, x, w)(x, w), exact, rtol=1e-4, atol=1e-4)


@runs_here
def test_matrix_unit_matmuls_of_unsigned_operands_match_numpy():
    x, y = array(40, 300, dtype="u8"), array(300, 130, dtype="i8", seed=1)
    np.testing.assert_array_equal(loaded(unsigned_product, x, y)(x, y), x.astype("i4") @ y.astype("i4"))


@runs_here
def test_concurrent_matrix_unit_calls_are_right():
    """Workers have registers of their own, as have several callers at a time."""
    w = array(512, 640, dtype="i8", seed=1)
    x = [array(300, 512, dtype="i8", seed=n) for n in range(4)]
    module = loaded(lambda x: product_of(ROWS, "i8")(x, w), x[0], threads=4)
    wrong = []

    def call(n):
        exact = x[n].astype("i4") @ w.astype("i4")
        for _ in range(20):
            if not np.array_equal(module(x[n]), exact):
                wrong.append(n)

    callers = [threading.Thread(target=call, args=(n,)) for n in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong


@runs_here
def test_the_matrix_unit_treats_subnormals_as_zero():
    """As the instruction has it, and no formula of ours."""
    x, y = np.ones((16, 64), ml_dtypes.bfloat16), np.full((64, 32), 2.0**-130, ml_dtypes.bfloat16)
    module = loaded(product_of(ROWS), x, y)
    assert (y != 0).all()
    assert not module(x, y).any()


@runs_here
def test_the_matrix_unit_propagates_infinity_and_nan():
    """Also behind what is left of k, whose copy ends in zeros."""
    x, y = array(16, 70), array(70, 32, seed=1)
    x[0, 0], x[1, 69], x[2, 2] = np.inf, np.nan, -np.inf
    got, want = loaded(product_of(ROWS), x, y)(x, y), jax.jit(product_of(ROWS))(x, y)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(got[::2][:2], np.asarray(want)[::2][:2])


@pytest.mark.skipif(shutil.which("objdump") is None, reason="no objdump")
@pytest.mark.parametrize(("dtype", "instruction"), [("bf16", "tdpbf16ps"), ("i8", "tdpbssd")])
def test_a_bundle_contains_the_matrix_instruction(dtype, instruction):
    """Layers of other numbers of terms too, which other targets have one kernel for."""
    x = jax.ShapeDtypeStruct((64, 256), {"bf16": "bfloat16", "i8": "int8"}[dtype])
    weights = [array(*size, dtype=dtype) for size in ((256, 192), (192, 192), (192, 64))]

    def layers(x):
        for w in weights:
            x = jnp.tanh(product_of(ROWS, dtype)(x, w)).astype(x.dtype)
        return x

    for target in (TARGET.name, "cpu:x86-64-v4-bf16"):
        bundle = open_bundle(aotc.compile(layers, x, target=target))
        (variant,) = bundle.manifest["variants"]
        text = disassemble_machine_code(bundle.verified_segment(variant["library"]), 0, 1 << 40)
        found = set(re.findall(r"\t(tdp\w+|vdpbf16ps|vpdpbusd)", text))
        assert found == ({instruction} if target == TARGET.name else {"vdpbf16ps" if dtype == "bf16" else "vpdpbusd"})
