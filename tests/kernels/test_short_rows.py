"""Rows of few elements, or of some that fill no vector: what LLVM makes of their loops, and that it is right."""

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba")

import aotc
from aotc.frontend.importer import import_raw
from aotc.frontend.mlir import fetch
from aotc.kernels import back_end
from aotc.kernels.cpu.compile import optimized_kernel_module, remove_one_lane_stores
from aotc.lowering.lower import lower
from aotc.options import Options
from aotc.pipeline import run_passes
from aotc.targets import TARGETS

pytestmark = pytest.mark.cpu

LENGTHS = (1, 9, 15, 24, 30, 61, 95, 100, 509)


def llvm(function, length, target):
    """The text of the LLVM modules of the kernels of a function of rows."""
    options = Options(target=target)
    rows = jax.ShapeDtypeStruct((64, length), "float32")
    module = run_passes(import_raw(fetch(jax.jit(function), (rows,), {}), options=options), options)
    kernels = lower(module, TARGETS[target], options).kernels
    return "\n".join(str(optimized_kernel_module(kernel, TARGETS[target])) for kernel in kernels)


@pytest.mark.parametrize("length", [15, 16, 30, 64, 96, 100])
def test_short_sums_are_vectors(length):
    assert re.search(r"vector\.reduce\.fadd\.v\d+f32", llvm(lambda x: x.sum(1), length, "cpu:x86-64-v4"))


def added(x):
    """An outer product, added: a loop along rows in one across them."""
    return x + x[:, :1] * x[0]


@pytest.mark.parametrize("length", [8, 12, 24, 31, 33])
def test_short_rows_are_vectors_along_them(length, monkeypatch):
    monkeypatch.setattr("aotc.kernels.cpu.compile.vector_loops", lambda *_: None)  # LLVM vectorizes
    across = r"llvm\.masked\.(gather|scatter)|shufflevector <\d+ x float> %(wide|strided)"
    text = llvm(added, length, "cpu:x86-64-v4")
    assert re.search(r"fmuladd\.v\d+f32|fmul .*<\d+ x float>", text)
    assert not re.search(across, text)
    monkeypatch.setattr("aotc.kernels.emit.metadata.UNROLLED_TURNS", length - 1)
    assert llvm(added, length, "cpu:x86-64-v4") != text


@pytest.mark.parametrize("length", [4, 7])
def test_rows_of_less_than_half_a_vector_are_unrolled(length, monkeypatch):
    text = llvm(added, length, "cpu:x86-64-v4")
    monkeypatch.setattr("aotc.kernels.emit.metadata.UNROLLED_TURNS", 0)
    assert llvm(added, length, "cpu:x86-64-v4") == text


@pytest.mark.parametrize("length", [1, 7, 8, 9, 15, 16, 24, 31, 33, 47, 64, 95, 96])
def test_outer_products_added_in_place(length):
    """Also where the result takes the operand's memory, and where rows are read backwards or turned."""

    def function(x, u, v):
        loop = jax.lax.fori_loop(0, 3, lambda _, x: x + u[:, None] * v, x)
        return loop, x * u[:, None] + v[::-1], x[:, ::-1] * v, x.T * v[:, None]

    rng = np.random.default_rng(length)
    x, u, v = (rng.standard_normal(s).astype(np.float32) for s in ((21, length), 21, length))
    for got, want in zip(aotc.load(aotc.compile(jax.jit(function), x, u, v))(x, u, v), jax.jit(function)(x, u, v)):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("length", [30, 61, 95])
def test_the_last_vector_of_dear_functions_has_a_mask(length):
    assert "llvm.masked.load" in llvm(lambda x: jnp.exp(x).sum(1), length, "cpu:x86-64-v4")
    assert "llvm.masked.load" not in llvm(lambda x: x.sum(1), length, "cpu:x86-64-v4")
    assert "llvm.masked.load" not in llvm(lambda x: jnp.exp(x).sum(1), length, "cpu:x86-64-v3")
    assert "llvm.masked.load" in llvm(lambda x: jnp.exp(x).sum(1), length, "cpu:aarch64-sve256")
    assert "llvm.masked.load" not in llvm(lambda x: jnp.exp(x).sum(1), length, "cpu:aarch64-bf16")


def test_loops_of_slightly_varying_length_have_a_masked_last_vector():
    """Of 64 rows a tile takes 21 or 22, and its columns are what the loop outside goes along."""
    weights = np.random.default_rng(0).standard_normal((20, 8)).astype(np.float32)
    assert "llvm.masked.store" in llvm(lambda x: jnp.log1p(jnp.exp(x @ weights)).T, 20, "cpu:x86-64-v4")
    assert "llvm.masked.store" not in llvm(lambda x: (x @ weights).T, 20, "cpu:x86-64-v4")


@pytest.mark.parametrize("dtype", [np.float32, np.float64, ml_dtypes.bfloat16, np.float16], ids=str)
def test_rows_of_any_length(dtype):
    def function(*arrays):
        return [(jnp.exp(x).sum(1), x.max(1), x.sum(1), jnp.tanh(x) / (1 + x * x), jax.nn.softmax(x)) for x in arrays]

    arrays = [np.random.default_rng(n).standard_normal((5, n)).astype(dtype) for n in LENGTHS]
    for x in arrays[1:]:
        x[0, -1], x[1, 0], x[2, -1] = 88, -np.inf, np.nan
    with jax.enable_x64(True):
        got = aotc.load(aotc.compile(jax.jit(function), *arrays))(*arrays)
    eps = float(ml_dtypes.finfo(dtype).eps)
    for x, results in zip(arrays, got, strict=True):
        wide = x.astype("float64")
        top = wide.max(1, keepdims=True)
        with np.errstate(all="ignore"):
            parts = np.exp(wide - top)
            want = (
                np.exp(wide).astype(dtype).astype("float64").sum(1), wide.max(1), wide.sum(1),
                np.tanh(wide) / (1 + wide * wide), parts / parts.sum(1, keepdims=True),
            )  # fmt: skip
        sizes = (want[0], 1, np.abs(wide).sum(1), 1, 1)
        for a, b, size in zip(results, want, sizes, strict=True):
            b = b.astype(dtype).astype("float64")
            with np.errstate(invalid="ignore"):
                a, limit = np.asarray(a, "float64"), 32 * eps * np.broadcast_to(size, b.shape)
                assert ((a == b) | (np.isnan(a) & np.isnan(b)) | (np.abs(a - b) <= limit)).all(), (dtype, x.shape)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.int8, np.int16], ids=str)
def test_the_last_lane_alone_writes_no_more_than_itself(dtype):
    """Rows that are written over where they are read: what the row before wrote beyond its end would be read."""

    def function(xs, y):
        return [(jnp.exp(x.astype("float32") - y) * 8).astype(x.dtype) for x in xs]

    lengths = (*range(1, 9), *range(15, 19), *range(31, 35), *range(63, 67), 129)
    xs = [np.random.default_rng(n).integers(-9, 3, (5, n)).astype(dtype) for n in lengths]
    y = np.arange(5, dtype="float32")[:, None]
    given = jax.jit(function, donate_argnums=0)
    want = jax.jit(function)(xs, y)
    for level in (1, 2):
        module = aotc.load(aotc.compile(given, xs, y, opt_level=level))
        got = module.invoke("main", *[x.copy() for x in xs], y, donate=True)
        for n, a, b in zip(lengths, got, want, strict=True):
            np.testing.assert_allclose(a.astype("f8"), np.asarray(b).astype("f8"), rtol=0.01, err_msg=str(n))


ONE_LANE = """
define void @f(ptr %p, <16 x i32> %v) {
  %t = trunc <16 x i32> %v to <16 x i16>
  call void @llvm.masked.store.v16i16.p0(<16 x i16> %t, ptr align 2 %p, <16 x i1> <LANES>)
  ret void
}
declare void @llvm.masked.store.v16i16.p0(<16 x i16>, ptr, <16 x i1>)
"""


@pytest.mark.parametrize("lanes", [(0,), (3,), (0, 1), ()])
def test_stores_of_one_lane_are_plain(lanes):
    mask = ", ".join(f"i1 {str(n in lanes).lower()}" for n in range(16))
    library = back_end.parse_assembly_for_target(ONE_LANE.replace("LANES", mask), TARGETS["cpu:x86-64-v3"])
    remove_one_lane_stores(library)
    text = str(library.module)
    assert ("call void @llvm.masked.store" in text) == (len(lanes) != 1)
    assert ("store i16" in text) == (len(lanes) == 1)
