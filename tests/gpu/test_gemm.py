"""Products of matrices on tensor cores: what the linker says of each form of the template, and what a GPU computes."""

from dataclasses import replace
from functools import partial
from itertools import product as all_of

import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu import gpu_kernels
from vmfb.test_cuda import gpu

from aotc.ir.dims import sym
from aotc.ir.loop_ir import Apply, Buffer, Const, Kernel, Load, Var
from aotc.kernels.cuda import block
from aotc.kernels.cuda.templates import gemm_mma, gemm_wgmma
from aotc.kernels.cuda.templates.gemm import Product, compile_gemm, launch_entry
from aotc.kernels.cuda.templates.tiles import WarpgroupTiles, WarpTiles
from aotc.targets import TARGETS
from aotc.vmfb.devices.launch import fits
from aotc.vmfb.devices.tensor_map import map_fits

pytestmark = pytest.mark.cudasim

TARGET = TARGETS["cuda:sm_90a"]
STORED = {"bf16": ml_dtypes.bfloat16, "f16": np.float16, "tf32": np.float32, "f32": np.float32}
SUM = Var("sum", "f32")


def plain(bias, col):
    return SUM


def relu_of_bias(bias, col):
    added = Apply("add", (SUM, Load(bias, (col,))), "f32")
    return Apply("max", (added, Const(0.0, "f32")), "f32")


def gelu_of_bias(bias, col):
    def op(name, *args):
        return Apply(name, args, "f32")

    x = op("add", SUM, Load(bias, (col,)))
    cube = op("mul", Const(0.044715, "f32"), op("mul", x, op("mul", x, x)))
    inner = op("mul", Const(0.7978845608028654, "f32"), op("add", x, cube))
    return op("mul", op("mul", Const(0.5, "f32"), x), op("add", Const(1.0, "f32"), op("tanh", inner)))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(0.7978845608028654 * (x + 0.044715 * x**3)))


MEANING = {
    plain: lambda x, bias: x,
    relu_of_bias: lambda x, bias: np.maximum(x + bias, 0),
    gelu_of_bias: lambda x, bias: gelu(x + bias),
}


def product_of(tiles, epilogue, sizes=None):
    """Return a product of symbolic sizes, or of fixed ones."""
    m, n, k = sizes or (sym(name, 0, 1 << 20) for name in ("m", "n", "k"))
    kind = "f32" if tiles.operands == "tf32" else tiles.operands
    a = Buffer("a", kind, (k, m) if tiles.a_by_rows else (m, k))
    b = Buffer("b", kind, (k, n) if tiles.b_by_rows else (n, k))
    bias, out = Buffer("bias", "f32", (n,)), Buffer("out", tiles.result, (m, n))
    kernel = Kernel("gemm", (a, b, bias), (out,), () if sizes else ("m", "n", "k"), 1, ())
    return Product(kernel, m, n, k, epilogue(bias, sym("col", 0, 1 << 20)))


FORMS = {
    "bf16": (WarpgroupTiles("bf16", "bf16"), plain),
    "bf16 gelu": (WarpgroupTiles("bf16", "bf16"), gelu_of_bias),
    "bf16 NT": (WarpgroupTiles("bf16", "bf16", b_by_rows=False), relu_of_bias),
    "bf16 TN": (WarpgroupTiles("bf16", "f32", cols=128, stages=5, a_by_rows=True), plain),
    "bf16 TT": (WarpgroupTiles("bf16", "bf16", cols=192, a_by_rows=True, b_by_rows=False), plain),
    "f16": (WarpgroupTiles("f16", "f16", cols=128, stages=6), relu_of_bias),
    "f16 small": (WarpgroupTiles("f16", "f32", cols=64, consumers=1, stages=8), relu_of_bias),
    "tf32": (WarpgroupTiles("tf32", "f32", b_by_rows=False), plain),
    "warps bf16": (WarpTiles("bf16", "bf16"), gelu_of_bias),
    "warps f16 TT": (WarpTiles("f16", "f32", a_by_rows=True, b_by_rows=False), relu_of_bias),
    "warps tf32": (WarpTiles("tf32", "f32", b_by_rows=False), plain),
    "tf32 small": (WarpgroupTiles("tf32", "f32", cols=64, consumers=1, stages=8, b_by_rows=False), gelu_of_bias),
}
FEW = ("bf16", "f16 small", "tf32 small", "warps bf16")


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in FORMS])
def test_what_a_form_takes(name):
    tiles, epilogue = FORMS[name]
    product = product_of(tiles, epilogue)
    image = compile_gemm(product, tiles, TARGET)
    assert image.data[:4] == b"\x7fELF"
    assert image.resources["spills"] == image.resources["stack"] == 0
    assert image.resources["registers"] * tiles.threads <= 65536
    row = {"threads": tiles.threads, "items": 1, "extents": [0] * 4, "launch": launch_entry(product, tiles)}
    assert fits(row)
    assert all(map_fits(m, 4) for m in row["launch"]["maps"])


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "compute_80"])
def test_warps_multiply_on_every_gpu(target):
    tiles, epilogue = FORMS["warps tf32"]
    image = compile_gemm(product_of(tiles, epilogue), tiles, TARGETS[f"cuda:{target}"])
    if target == "compute_80":
        assert b"mma.sync.aligned.m16n8k8" in image.data
    else:
        assert image.resources["spills"] == image.resources["stack"] == 0
    assert tiles.shared <= TARGETS[f"cuda:{target}"].shared_memory


def simulated(tiles, given, sizes):
    """Return the product that the template's Python makes of operands as they are stored."""
    m, n, _ = sizes
    out = np.zeros((m, n), np.float32)
    names = dict(zip(("aotc_rows", "aotc_cols", "aotc_depth"), sizes))
    functions = {name: partial(int, size) for name, size in names.items()}
    functions["aotc_epilogue"] = lambda row, col, value: value
    if isinstance(tiles, WarpTiles):
        blocks = -(-m // tiles.rows) * -(-n // tiles.cols)
        module, arguments = gemm_mma, ((*given, out), (), 1)
    else:
        boxes = [
            (64, tiles.depth) if by_rows else (tiles.depth, count)
            for by_rows, count in ((tiles.a_by_rows, tiles.rows), (tiles.b_by_rows, tiles.cols))
        ]
        module, blocks = gemm_wgmma, 1
        arguments = (tuple(map(block.Array, given, boxes)), (*given, out), (), 1)
    block.run(module, partial(module._kernel, tiles), blocks, tiles.threads, tiles.shared, arguments, functions)
    return out


SHAPES = [(256, 512, 256), (1000, 3000, 520), (200, 1000, 1048), (8, 136, 24), (1, 256, 64), (129, 8, 8)]
BOUND = {"bf16": 4e-3, "f16": 5e-4, "f32": 5e-6}
"""Of the relative error that rounding the result leaves; TF32 rounds the operands besides."""


class TestOnTensorCores:
    """Beside the product in f64 of the operands as they are rounded."""

    pytestmark = gpu

    @pytest.mark.parametrize("name", ["bf16", "f16 small", "tf32 small", "warps f16 TT", "warps tf32"])
    def test_instructions_mean_what_is_said_of_them(self, name):
        """The template run as Python, which tests/gpu/test_simulated_gemm.py holds to be right, has the same bits."""
        tiles, (m, n, k) = replace(FORMS[name][0], result="f32"), (72, 136, 200)
        product = product_of(tiles, plain, (m, n, k))
        random = np.random.default_rng(0)
        kind = STORED[tiles.operands]
        given = [
            random.integers(-8, 9, s).astype(kind)
            for s in (((k, m) if tiles.a_by_rows else (m, k)), ((k, n) if tiles.b_by_rows else (n, k)))
        ]
        made = simulated(tiles, given, (m, n, k))
        entry = {"threads": tiles.threads, "launch": launch_entry(product, tiles)}
        arrays = [*given, np.zeros(n, np.float32), np.zeros((m, n), np.float32)]
        loaded = gpu_kernels.Loaded(compile_gemm(product, tiles, TARGET), "gemm", entry, arrays)
        loaded.launch()
        np.testing.assert_array_equal(loaded.result(3)[0], made)

    def test_text_for_the_driver(self):
        tiles, epilogue = FORMS["warps bf16"]
        product = product_of(tiles, epilogue)
        image = compile_gemm(product, tiles, TARGETS["cuda:compute_80"])
        self.check(image, product, tiles, epilogue, (1000, 3000, 520), True)

    @pytest.mark.parametrize(("name", "dynamic"), [*all_of(FORMS, [True]), ("bf16", False)])
    def test_products(self, name, dynamic):
        tiles, epilogue = FORMS[name]
        image = compile_gemm(product_of(tiles, epilogue), tiles, TARGET) if dynamic else None
        for m, n, k in SHAPES:
            if tiles.a_by_rows and m % 8:
                continue
            product = product_of(tiles, epilogue, None if dynamic else (m, n, k))
            self.check(image or compile_gemm(product, tiles, TARGET), product, tiles, epilogue, (m, n, k), dynamic)

    def check(self, image, product, tiles, epilogue, sizes, dynamic):
        m, n, k = sizes
        random = np.random.default_rng(m + n + k)
        a, b = (random.standard_normal(s).astype(STORED[tiles.operands]) for s in ((m, k), (k, n)))
        bias, out = random.standard_normal(n).astype(np.float32), np.zeros((m, n), STORED[tiles.result])
        given = [np.ascontiguousarray(x) for x in (a.T if tiles.a_by_rows else a, b if tiles.b_by_rows else b.T)]
        entry = {"threads": tiles.threads, "launch": launch_entry(product, tiles)}
        loaded = gpu_kernels.Loaded(image, "gemm", entry, [*given, bias, out], sizes if dynamic else ())
        loaded.fill(3, 0xFF)
        loaded.launch()
        got, after = loaded.result(3)
        assert (after == 0xFF).all()
        want = MEANING[epilogue](a.astype("f8") @ b.astype("f8"), bias)
        error = np.linalg.norm(got.astype("f8") - want) / np.linalg.norm(want)
        assert error <= BOUND[tiles.result] + (1e-3 if tiles.operands == "tf32" else 0), (sizes, error)
