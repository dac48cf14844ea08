"""Products on GPUs whose weights are of few bits, widened in their tiles: kernels, their memory, what they compute."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from vmfb.simulated_gpu import install
from vmfb.test_cuda import gpu, sim

pytest.importorskip("numba_cuda")

from gpu.products import product_text, simulate

import aotc
from aotc.ir.loop.forms.quantized import dequantize, quantize
from aotc.ir.loop.forms.tiling import Mma, Tiling
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.compile import kernel_ptx
from aotc.targets import TARGETS
from aotc.vmfb.bundle import open_bundle

DTYPES = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
MOST = {"f32": 1e-3, "bf16": 1e-2, "f16": 2e-3}
WAYS = {"int8": (8, 0), "int4": (4, 0), "int4:64": (4, 64), "int8:24": (8, 24)}


def numbers(*shape, dtype="f32", seed=0):
    return (np.random.default_rng(seed).standard_normal(shape) / 8).astype(DTYPES[dtype])


def model(rows, terms, cols, dtype, way, target="cuda:sm_90a"):
    """Return a bundle of a product with quantised weights, its operand, and the product of what they stand for."""
    w, x = numbers(terms, cols, dtype=dtype), numbers(rows, terms, dtype=dtype, seed=1)
    bits, run = WAYS[way]
    each = dequantize(*quantize(w.astype(np.float32), bits, run or terms), run or terms)
    flags = {"quantize_weights": way, "source": False, "verify_each": True}
    data = aotc.compile(jax.jit(lambda x: jnp.tanh(x @ w)), x, target=target, **flags)
    return data, x, np.tanh(x.astype("f8") @ each.astype("f8"))


def kernels_of(data):
    found = open_bundle(data).manifest["debug"]["kernels"].values()
    return [parse_kernel(k["text"]) for k in found]


def agree(data, x, want, dtype):
    found = aotc.load(data).invoke("main", x)[0].astype("f8")
    assert np.abs(found - want).max() <= MOST[dtype] * np.abs(want).max()


@sim
@pytest.mark.parametrize("target", ["cuda:sm_90a", "cuda:compute_80"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("way", WAYS)
def test_no_widened_copy_is_made(way, dtype, target, monkeypatch):
    """The product reads the integers; what it computes is simulated."""
    data, x, want = model(8, 256, 136, dtype, way, target)
    product, *others = [k for k in kernels_of(data) if k.tiling is not None]
    assert not others
    assert "i8" in {b.dtype for b in product.inputs}
    assert all("i8" not in {b.dtype for b in k.inputs} for k in kernels_of(data) if k.tiling is None)
    install(monkeypatch, data)
    agree(data, x, want, dtype)


@sim
def test_many_rows_are_multiplied_with_a_widened_copy():
    rows = {m: model(m, 512, 256, "bf16", "int8")[0] for m in (64, 65)}
    kinds = {m: [{b.dtype for b in k.inputs} & {"i8"} for k in kernels_of(d) if k.tiling] for m, d in rows.items()}
    assert kinds == {64: [{"i8"}], 65: [set()]}


@sim
def test_scales_of_runs_are_for_few_rows_of_f32():
    """In tiles of more rows each load would wait for the one before."""
    rows = {m: model(m, 512, 256, "f32", "int4:64")[0] for m in (16, 17)}
    kinds = {m: [{b.dtype for b in k.inputs} & {"i8"} for k in kernels_of(d) if k.tiling] for m, d in rows.items()}
    assert kinds == {16: [{"i8"}], 17: [set()]}


@sim
def test_a_model_that_brings_its_integers():
    """Weights that are arguments, and their scales, are widened in tiles too."""
    x, scales = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 512), (1, 256)))
    w = jax.ShapeDtypeStruct((512, 256), jnp.int8)
    model = lambda x, w, scales: x @ (w.astype(jnp.bfloat16) * scales)
    (kernel,) = (k for k in kernels_of(aotc.compile(jax.jit(model), x, w, scales, target="cuda:sm_90a")) if k.tiling)
    assert {b.dtype for b in kernel.inputs} == {"bf16", "i8"}


@sim
@pytest.mark.parametrize(("way", "widths"), [("int8", {"v2.u32"}), ("int4", {"u32"})])
def test_pieces_are_loaded_at_once(way, widths):
    """16 bytes of bf16 are 8 bytes of 8 bits or 4 of 4, and no byte is loaded alone; scales come by fours."""
    (kernel,) = (k for k in kernels_of(model(8, 512, 128, "bf16", way)[0]) if k.tiling)
    loads = [line.split()[0] for line in kernel_ptx(kernel, TARGETS["cuda:sm_90a"]).splitlines() if "ld.global" in line]
    assert {load.split(".nc.")[1] for load in loads if ".nc." in load} == {*widths, "v4.f32"}


@sim
@pytest.mark.parametrize("sizes", [(72, 72, 144), (3, 136, 304), (16, 16, 0), (70, 33, 24)])
@pytest.mark.parametrize(("tiling", "dtype"), [((16, 128, 3), "bf16"), ((64, 64, 3), "f16"),
                                               ((128, 128, 3), "tf32"), ((16, 128, 2), "tf32")])  # fmt: skip
def test_tiles(tiling, dtype, sizes):
    text = product_text(Tiling(Mma(), *tiling), dtype, "f32", sizes, b="col, k")
    stored = "f32" if dtype == "tf32" else dtype
    text = text.replace(f'b: "{stored}', 'b: "i8')
    wide = 'convert(b[col, k], "f32")'
    old, new = ("b[col, k]", wide) if dtype == "tf32" else (wide, f'convert(convert({wide}, "{dtype}"), "f32")')
    text = text.replace(old, new)
    kernel, random = parse_kernel(text), np.random.default_rng(0)
    a = random.integers(-3, 4, kernel.inputs[0].shape).astype(DTYPES[stored])
    b = random.integers(-127, 128, kernel.inputs[1].shape).astype(np.int8)
    out = np.full(kernel.outputs[0].shape, 99, np.float32)
    simulate(text, [a, b, np.zeros(sizes[1], np.float32), out], [None, lambda z, i, k: b[i, k]])
    np.testing.assert_array_equal(out, a.astype("f8") @ b.T.astype("f8"))


@sim
@pytest.mark.parametrize("stored", ["bf16", "f16"])
@pytest.mark.parametrize("sizes", [(72, 72, 144), (3, 136, 304), (5, 33, 23)])
@pytest.mark.parametrize("place", ["col, k", "k, col"])
def test_tiles_of_f32_with_weights_of_16_bits(place, sizes, stored):
    """Rows of f32 times weights of 16 bits, stored by columns or by rows, which are widened as they are loaded."""
    text = product_text(Tiling(Mma(), 16, 128, 3), "tf32", "f32", sizes, b=place).replace('b: "f32', f'b: "{stored}')
    text = text.replace(f"b[{place}]", f'convert(b[{place}], "f32")')
    kernel, random = parse_kernel(text), np.random.default_rng(0)
    a = random.integers(-3, 4, kernel.inputs[0].shape).astype(np.float32)
    b = random.integers(-127, 128, kernel.inputs[1].shape).astype(DTYPES[stored])
    out = np.full(kernel.outputs[0].shape, 99, np.float32)
    by_columns = place == "col, k"
    simulate(text, [a, b, np.zeros(sizes[1], np.float32), out],
             [lambda z, i, k: a[i, k], lambda z, i, k: np.float32(b[i, k] if by_columns else b[k, i])])  # fmt: skip
    np.testing.assert_array_equal(out, a.astype("f8") @ (b.T if by_columns else b).astype("f8"))


class TestOnTheGpu:
    pytestmark = gpu

    @pytest.mark.parametrize("rows", [8, 24, 64])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("way", WAYS)
    def test_results(self, way, dtype, rows):
        data, x, want = model(rows, 1032, 520, dtype, way)
        agree(data, x, want, dtype)
