"""Attention on tensor cores: what the linker says of each form of the templates, and what a GPU computes."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu import gpu_kernels
from gpu.attention import BIAS, HEADS, PLAIN, SHARED, STORED, TOKENS, attention_text, operands, simulate, wanted
from gpu.test_simulated_attention import FORMS as SIMULATED
from vmfb.test_cuda import gpu

from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling, WgmmaAttention
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.compile import compile_kernel
from aotc.kernels.cuda.templates.launches import template_launch
from aotc.targets import TARGETS
from aotc.vmfb.devices.cuda.launch import fits_gpu_limits
from aotc.vmfb.devices.cuda.tensor_map import is_valid_tensor_map

pytestmark = pytest.mark.cudasim

TARGET = TARGETS["cuda:sm_90a"]
# Tiling, depth, width, dtype, orders, causal offset, score.
FORMS = {
    "128": (Tiling(WgmmaAttention(), 128, 128, 2), 128, 128, "bf16", TOKENS, None, PLAIN),
    "128 causal": (Tiling(WgmmaAttention(), 128, 128, 2), 128, 128, "bf16", SHARED, 0, PLAIN),
    "128 bias": (Tiling(WgmmaAttention(), 128, 128, 2), 128, 128, "f16", HEADS, None, BIAS),
    "64": (Tiling(WgmmaAttention(), 192, 128, 2), 64, 64, "f16", HEADS, None, PLAIN),
    "64 causal": (Tiling(WgmmaAttention(), 192, 128, 2), 64, 64, "bf16", TOKENS, 3, PLAIN),
    "80 and 96": (Tiling(WgmmaAttention(), 128, 128, 2), 80, 96, "bf16", HEADS, -20, PLAIN),
    "256": (Tiling(WgmmaAttention(), 128, 64, 2), 256, 256, "bf16", HEADS, 0, PLAIN),
    "one warpgroup": (Tiling(WgmmaAttention(), 64, 128, 2), 128, 64, "bf16", SHARED, 0, PLAIN),
    "warps": (Tiling(MmaAttention(), 128, 64, 2), 128, 128, "bf16", TOKENS, 0, PLAIN),
    "warps bias": (Tiling(MmaAttention(), 64, 64, 2), 64, 80, "f16", HEADS, None, BIAS),
    "warps 256": (Tiling(MmaAttention(), 32, 64, 2), 256, 256, "f16", SHARED, None, PLAIN),
    "warps of f32": (Tiling(MmaAttention(), 128, 64, 2), 64, 64, "f32", TOKENS, 0, PLAIN),
    "warps of f32 bias": (Tiling(MmaAttention(), 64, 32, 2), 64, 40, "f32", HEADS, None, BIAS),
    "warps of f32 96": (Tiling(MmaAttention(), 32, 32, 2), 56, 96, "f32", SHARED, None, PLAIN),
    "warps of f32, few": (Tiling(MmaAttention(), 32, 64, 2), 64, 64, "f32", HEADS, None, PLAIN),
    "warps of f32 128": (Tiling(MmaAttention(), 128, 32, 2), 128, 128, "f32", SHARED, None, PLAIN),
    "a warp alone of f32": (Tiling(MmaAttention(), 16, 16, 3), 128, 128, "f32", SHARED, None, PLAIN),
    "a warp alone of f32 64": (Tiling(MmaAttention(), 16, 32, 3), 64, 64, "f32", HEADS, 0, PLAIN),
    "a warp alone of f32 256": (Tiling(MmaAttention(), 16, 16, 3), 256, 256, "f32", SHARED, None, PLAIN),
    "a warp alone": (Tiling(MmaAttention(), 16, 32, 3), 128, 128, "bf16", SHARED, None, PLAIN),
    "a warp alone 64": (Tiling(MmaAttention(), 16, 64, 3), 64, 64, "f16", HEADS, 0, PLAIN),
    "few": (Tiling(DecodeAttention(), 128, 16, 3), 128, 128, "bf16", SHARED, None, PLAIN),
    "few, by clusters": (Tiling(DecodeAttention(4), 64, 32, 3), 64, 64, "bf16", TOKENS, None, PLAIN),
    "few bias": (Tiling(DecodeAttention(8), 128, 16, 3), 80, 96, "f16", HEADS, None, BIAS),
    "few 256": (Tiling(DecodeAttention(), 64, 16, 3), 256, 256, "bf16", SHARED, 0, PLAIN),
    "few of f32": (Tiling(DecodeAttention(2), 128, 16, 3), 64, 64, "f32", HEADS, None, PLAIN),
    "few of f32 128": (Tiling(DecodeAttention(2), 64, 16, 3), 128, 128, "f32", SHARED, 0, PLAIN),
    "few of f32 256": (Tiling(DecodeAttention(2), 32, 16, 3), 256, 256, "f32", SHARED, None, PLAIN),
    "warps of f32 256": (Tiling(MmaAttention(), 128, 16, 2), 256, 256, "f32", SHARED, 0, PLAIN),
    "warps of f32 160 bias": (Tiling(MmaAttention(), 64, 16, 2), 160, 192, "f32", HEADS, None, BIAS),
}
FEW = ("few", "128 causal", "64", "warps", "warps of f32")
SPILLED = {"64": 32, "64 causal": 12, "warps 256": 24}
"""The most bytes that a form may spill; others may spill none."""


def text_of(name, sizes=(8, 1000, 1000)):
    tiling, depth, width, dtype, orders, causal, score = FORMS[name]
    return attention_text(tiling, (*sizes, depth, width), dtype, None, orders, causal, score)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in FEW else pytest.mark.slow) for n in FORMS])
def test_attention_templates_stay_within_registers_and_gpu_limits(name):
    kernel = parse_kernel(text_of(name))
    image, (threads, launch) = compile_kernel(kernel, TARGET), template_launch(kernel)
    assert image.data[:4] == b"\x7fELF"
    assert image.resources["spills"] <= SPILLED.get(name, 0)
    assert image.resources["registers"] * threads <= 65536
    row = {"threads": threads, "items": 1, "extents": [0] * 4, "launch": launch}
    assert fits_gpu_limits(row)
    assert all(is_valid_tensor_map(m, 4) for m in launch["maps"])


@pytest.mark.parametrize("target", ["sm_80", "sm_120", "compute_80"])
def test_warps_attend_on_every_gpu(target):
    kernel = parse_kernel(text_of("warps"))
    image = compile_kernel(kernel, TARGETS[f"cuda:{target}"])
    if target == "compute_80":
        assert b"mma.sync.aligned.m16n8k16" in image.data
    else:
        assert image.resources["spills"] == image.resources["stack"] == 0
    assert template_launch(kernel)[1]["shared"] <= TARGETS[f"cuda:{target}"].shared_memory


SIZES = [(4, 1, 1), (2, 7, 130), (6, 129, 64), (4, 300, 300), (2, 1000, 1031), (40, 200, 257)]


@pytest.mark.parametrize("name", FORMS)
def test_launches_of_any_sizes_fit_gpu_limits(name):
    """Of two heads that share keys too, whose number is always 0."""
    for sizes in SIZES:
        threads, launch = template_launch(parse_kernel(text_of(name, sizes)))
        assert fits_gpu_limits({"threads": threads, "items": 1, "extents": [0] * 4, "launch": launch})


BOUND = {"bf16": 6e-3, "f16": 1e-3, "f32": 1e-3}
"""Of the relative error that rounding weights and results leaves."""


class TestAttentionOfTensorCores:
    """Beside attention in f64 of the operands as they are rounded."""

    pytestmark = gpu

    @pytest.mark.parametrize("name", SIMULATED)
    def test_hardware_agrees_with_the_simulated_attention(self, name):
        """The template run as Python, which tests/gpu/test_simulated_attention.py holds to be right, agrees."""
        tiling, sizes, dtype, orders, causal = SIMULATED[name]
        text = attention_text(tiling, sizes, dtype, "f32", orders, causal)
        kernel, arrays = operands(text)
        got = self.run(kernel, arrays)
        simulate(text, arrays)
        np.testing.assert_allclose(np.nan_to_num(got), np.nan_to_num(arrays[-1]), atol=2e-3)

    @pytest.mark.parametrize("name", FORMS)
    def test_forms(self, name):
        for sizes in SIZES:
            self.check(name, sizes)

    @pytest.mark.parametrize("name", [n for n in FORMS if n.startswith(("warps", "a warp"))])
    def test_text_for_the_driver(self, name):
        self.check(name, (4, 200, 300), "cuda:compute_80")

    def run(self, kernel, arrays, target="cuda:sm_90a"):
        threads, launch = template_launch(kernel)
        image = compile_kernel(kernel, TARGETS[target])
        loaded = gpu_kernels.Loaded(image, kernel.name, {"threads": threads, "launch": launch}, arrays)
        loaded.fill(len(arrays) - 1, 0xFF)
        loaded.launch()
        got, after = loaded.result(len(arrays) - 1)
        assert (after == 0xFF).all()
        return got

    def check(self, name, sizes, target="cuda:sm_90a"):
        _, _, _, dtype, orders, causal, score = FORMS[name]
        kernel, arrays = operands(text_of(name, sizes), seed=sum(sizes))
        got = self.run(kernel, arrays, target).astype("f8")
        got = np.moveaxis(got, 1, 0) if orders is TOKENS else got
        want = wanted(arrays, orders, causal, score is BIAS)
        assert STORED[dtype] == arrays[-1].dtype
        np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=str(sizes))
        got, want = np.nan_to_num(got), np.nan_to_num(want)
        assert np.linalg.norm(got - want) <= BOUND[dtype] * np.linalg.norm(want) + 1e-9, sizes
