"""Products of matrices on tensor cores: what the linker says of each form of the templates, and what a GPU computes."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu import gpu_kernels
from gpu.products import GELU, MEANING, PLAIN, RELU, SHIFTED, STORED, SUMS, product_text, simulate
from gpu.test_simulated_gemm import FORMS as SIMULATED
from gpu.test_simulated_gemm import NT, TN, TT, operands
from vmfb.test_cuda import gpu

from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, FP8_PAIRS, Mma, Tiling, Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.compile import compile_kernel
from aotc.kernels.cuda.templates.gemm.launch import gemm_launch, gemm_tiles
from aotc.targets import TARGETS
from aotc.vmfb.devices.cuda.launch import fits_gpu_limits
from aotc.vmfb.devices.cuda.tensor_map import is_valid_tensor_map

pytestmark = pytest.mark.cudasim

TARGET = TARGETS["cuda:sm_90a"]
HEADS = {"a": "row, z, k", "b": "col, z, k", "out": "row, z, col", "batch": 3}
BATCH = {"a": "z, row, k", "b": "z, k, col", "out": "z, row, col", "batch": 3}
TURNED = {"out": "col, row"}

# Tiling, operands, result, orders, epilogue.
FORMS = {
    "bf16": (Tiling(Wgmma(), 128, 256, 4), "bf16", "bf16", {}, PLAIN),
    "bf16 gelu": (Tiling(Wgmma(), 128, 256, 4), "bf16", "bf16", {}, GELU),
    "bf16 NT": (Tiling(Wgmma(), 128, 256, 4), "bf16", "bf16", NT, RELU),
    "bf16 TN": (Tiling(Wgmma(), 128, 128, 5), "bf16", "f16", TN, PLAIN),
    "bf16 TT": (Tiling(Wgmma(), 128, 192, 4), "bf16", "bf16", TT, PLAIN),
    "bf16 turned": (Tiling(Wgmma(), 128, 256, 4), "bf16", "bf16", TURNED, GELU),
    "bf16 heads": (Tiling(Wgmma(), 128, 128, 5), "bf16", "bf16", HEADS, RELU),
    "bf16 batch": (Tiling(Wgmma(), 64, 128, 4), "bf16", "f32", BATCH, PLAIN),
    "f16": (Tiling(Wgmma(), 128, 128, 6), "f16", "f16", {}, RELU),
    "f16 small": (Tiling(Wgmma(), 64, 64, 6), "f16", "f32", {}, RELU),
    "f16 wide": (Tiling(Wgmma(), 64, 256, 5), "f16", "f16", {}, RELU),
    "bf16 in turn": (Tiling(Wgmma(ping_pong=True), 128, 128, 6), "bf16", "bf16", {}, GELU),
    "f16 in turn": (Tiling(Wgmma(ping_pong=True), 64, 256, 5), "f16", "f16", TT, RELU),
    "tf32 in turn": (Tiling(Wgmma(ping_pong=True), 128, 64, 6), "tf32", "f32", NT, GELU),
    "i8 in turn": (Tiling(Wgmma(ping_pong=True), 128, 128, 6), "i8", "i32", NT, PLAIN),
    "tf32": (Tiling(Wgmma(), 128, 256, 4), "tf32", "f32", NT, PLAIN),
    "tf32 small": (Tiling(Wgmma(), 64, 64, 6), "tf32", "f32", NT, GELU),
    "i8": (Tiling(Wgmma(), 128, 256, 4), "i8", "i32", NT, PLAIN),
    "tf32 by rows": (Tiling(Wgmma(transposed=True), 256, 128, 4), "tf32", "f32", {}, GELU),
    "tf32 by rows, small": (Tiling(Wgmma(transposed=True), 64, 64, 6), "tf32", "bf16", {}, RELU),
    "tf32 by rows, few": (Tiling(Wgmma(transposed=True), 32, 64, 8), "tf32", "f32", {}, PLAIN),
    "tf32 by rows, wide": (Tiling(Wgmma(transposed=True), 256, 64, 5), "tf32", "f32", {}, PLAIN),
    "tf32 by rows, A": (Tiling(Wgmma(), 128, 192, 5), "tf32", "f32", TT, RELU),
    "tf32 by rows, stored turned": (Tiling(Wgmma(transposed=True), 128, 128, 6), "tf32", "f32", TURNED, RELU),
    "bf16 turned, few": (Tiling(Wgmma(transposed=True), 32, 64, 8), "bf16", "bf16", {}, RELU),
    "warps bf16": (Tiling(Mma(), 128, 128, 3), "bf16", "bf16", {}, GELU),
    "warps f16 TT": (Tiling(Mma(), 128, 128, 3), "f16", "f32", TT, RELU),
    "warps tf32": (Tiling(Mma(), 128, 128, 3), "tf32", "f32", NT, PLAIN),
    "warps tf32 TN": (Tiling(Mma(), 128, 128, 3), "tf32", "f32", TN, PLAIN),
    "warps i8": (Tiling(Mma(), 64, 128, 3), "i8", "i32", {}, PLAIN),
    "f8": (Tiling(Wgmma(), 128, 256, 4), "e4m3.e4m3", "bf16", NT, PLAIN),
    "f8 small": (Tiling(Wgmma(), 64, 64, 6), "e5m2.e4m3", "f32", NT, GELU),
    "f8 in turn": (Tiling(Wgmma(ping_pong=True), 128, 128, 6), "e4m3.e5m2", "f16", NT, RELU),
    "f8 turned": (Tiling(Wgmma(transposed=True), 256, 128, 4), "e5m2.e4m3", "f32", NT, PLAIN),
    "warps f8": (Tiling(Mma(), 128, 128, 3), "e4m3.e5m2", "bf16", NT, RELU),
    "warps f8, computed": (Tiling(Mma(), 64, 128, 3), "e4m3.e5m2", "f32", {}, PLAIN),
    "warps f64": (Tiling(Mma(), 128, 128, 3), "f64", "f64", {}, PLAIN),
    "warps f64 NT": (Tiling(Mma(), 128, 128, 3), "f64", "f64", NT, SHIFTED),
    "warps f64 TN": (Tiling(Mma(), 64, 128, 3), "f64", "f64", TN, SHIFTED),
    "warps f64 turned": (Tiling(Mma(), 64, 64, 3), "f64", "f32", TURNED | TT, PLAIN),
    "warps f64 batch": (Tiling(Mma(), 64, 64, 2), "f64", "f64", BATCH, PLAIN),
    "warps batch": (Tiling(Mma(), 64, 64, 3), "bf16", "bf16", BATCH, RELU),
}
FEW = ("bf16", "f16 small", "tf32 small", "tf32 by rows", "warps bf16", "warps tf32 TN")


def text_of(name, sizes=("m", "n", "d")):
    tiling, operands_, result, orders, epilogue = FORMS[name]
    return product_text(tiling, operands_, result, sizes, epilogue=epilogue, **orders)


def orders_of(name):
    return FORMS[name][3]


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in FORMS])
def test_templates_stay_within_registers_and_gpu_limits(name):
    """Of sizes that are whole pieces of 16 bytes, and of unknown ones where a template takes those."""
    kernel = parse_kernel(text_of(name, (1000, 3008 if orders_of(name) is TURNED else 3000, 512)))
    tiles, image = gemm_tiles(kernel), compile_kernel(kernel, TARGET)
    assert image.data[:4] == b"\x7fELF"
    assert image.resources["spills"] == image.resources["stack"] == 0
    assert image.resources["registers"] * tiles.threads <= 65536
    row = {"threads": tiles.threads, "items": 1, "extents": [0] * 4, "launch": gemm_launch(kernel)}
    assert fits_gpu_limits(row)
    assert all(is_valid_tensor_map(m, 4) for m in row["launch"]["maps"])


@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_100", "sm_120", "compute_80"])
def test_warps_multiply_on_every_gpu(target):
    kernel = parse_kernel(text_of("warps tf32"))
    image = compile_kernel(kernel, TARGETS[f"cuda:{target}"])
    if target == "compute_80":
        assert b"mma.sync.aligned.m16n8k8" in image.data
    else:
        assert image.resources["spills"] == image.resources["stack"] == 0
    assert kernel.tiling.shared <= TARGETS[f"cuda:{target}"].shared_memory


SHAPES = [(256, 512, 256), (1000, 3000, 520), (200, 1000, 1048), (8, 136, 24), (1, 256, 64), (129, 8, 8)]
SHAPES += [(77, 131, 93), (64, 64, 1), (300, 65, 1000)]
BOUND = {"bf16": 4e-3, "f16": 5e-4, "f32": 5e-6, "f64": 2e-15, "i32": 0}
"""Of the relative error that rounding the result leaves, in f64 of both sums; TF32 and sums of 8 bits round besides."""


def is_taken(name, sizes):
    """Do the rows of operands begin at whole pieces of 16 bytes, where a template needs that?"""
    try:
        gemm_tiles(parse_kernel(text_of(name, sizes)))
    except ValueError:
        return False
    tiling, operands_, _, orders, _ = FORMS[name]
    each = 16 // ELEMENT_BYTES[operands_]
    extent = {"row": sizes[0], "col": sizes[1], "k": sizes[2], "z": orders.get("batch", 1)}
    inner = [orders.get(key, default).split(", ")[-1] for key, default in (("a", "row, k"), ("b", "k, col"))]
    return not tiling.is_wgmma or not any(extent[d] % each for d in inner)


class TestOnTensorCores:
    """Beside the product in f64 of the operands as they are rounded."""

    pytestmark = gpu

    @pytest.mark.parametrize("name", SIMULATED)
    def test_hardware_agrees_with_the_simulated_template(self, name):
        """The template run as Python, which tests/gpu/test_simulated_gemm.py holds to be right, has the same bits."""
        tiling, dtype, orders = SIMULATED[name]
        text = product_text(tiling, dtype, SUMS.get(dtype, "f32"), (72, 136, 208), **orders)
        kernel, arrays = operands(text)
        entry = {"threads": gemm_tiles(kernel).threads, "launch": gemm_launch(kernel)}
        loaded = gpu_kernels.Loaded(compile_kernel(kernel, TARGET), "gemm", entry, arrays)
        loaded.launch()
        got = loaded.result(3)[0]
        places = [orders.get(n, d) for n, d in (("a", "row, k"), ("b", "k, col"))]
        readers = [lambda z, i, k, x=x, p=p: x[tuple({"z": z, "k": k}.get(d, i) for d in p.split(", "))]
                   for x, p in zip(arrays, places)]  # fmt: skip
        simulate(text, arrays, readers)
        np.testing.assert_array_equal(got, arrays[3])

    @pytest.mark.parametrize("name", [n for n in FORMS if n.startswith("warps") and "f8" not in n])  # sm_89's
    def test_text_for_the_driver(self, name):
        self.check(name, (1000, 304, 520), "cuda:compute_80")

    @pytest.mark.parametrize("name", FORMS)
    def test_products(self, name):
        for sizes in SHAPES:
            if is_taken(name, sizes):
                self.check(name, sizes)

    @pytest.mark.parametrize("name", [n for n in FORMS if n.startswith("warps")])
    def test_products_of_unknown_sizes(self, name):
        image = compile_kernel(parse_kernel(text_of(name)), TARGET)
        for sizes in SHAPES:
            self.check(name, sizes, image=image)

    def check(self, name, sizes, target="cuda:sm_90a", image=None):
        _, kind, result, orders, epilogue = FORMS[name]
        kernel = parse_kernel(text_of(name) if image else text_of(name, sizes))
        shapes, random = parse_kernel(text_of(name, sizes)), np.random.default_rng(sum(sizes))
        draw = (lambda s: random.integers(-128, 128, s)) if kind == "i8" else random.standard_normal
        a, b, bias = (draw(x.shape).astype(STORED[x.dtype]) for x in shapes.inputs)
        out = np.zeros(shapes.outputs[0].shape, STORED[result])
        entry = {"threads": gemm_tiles(kernel).threads, "launch": gemm_launch(kernel)}
        image = image or compile_kernel(kernel, TARGETS[target])
        loaded = gpu_kernels.Loaded(image, "gemm", entry, [a, b, bias, out], sizes if kernel.dims else ())
        loaded.fill(3, 0xFF)
        loaded.launch()
        got, after = loaded.result(3)
        assert (after == 0xFF).all()
        letters = [orders.get(n, d).replace("row", "i").replace("col", "j").replace(", ", "")
                   for n, d in (("a", "row, k"), ("b", "k, col"), ("out", "row, col"))]  # fmt: skip
        sums = np.einsum(f"{letters[0]},{letters[1]}->{letters[2]}", a.astype("f8"), b.astype("f8"), optimize=True)
        along = np.moveaxis(sums, letters[2].index("j"), -1)
        want = np.moveaxis(MEANING[epilogue](along, bias.astype("f8")), -1, letters[2].index("j"))
        error = np.linalg.norm(got.astype("f8") - want) / np.linalg.norm(want)
        assert error <= BOUND[result] + (1e-3 if kind == "tf32" or kind in FP8_PAIRS else 0), (sizes, error)
