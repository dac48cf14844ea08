"""The templates of attention as the Python that they are: rings, turns, edges, heads, without a GPU."""

import time

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.attention import BIAS, HEADS, SHARED, TOKENS, attention_text, operands, simulate, wanted
from gpu.test_attention_regions import CASES, arrays_of, region
from support.halves import half_of_pairs

from aotc.ir.loop.forms.attention import attention_shared_bytes_of_kernel
from aotc.ir.loop.forms.tiling import DecodeAttention, MmaAttention, Tiling, WgmmaAttention
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.ir.opset.attention import ATTENTION
from aotc.kernels.cuda import hopper
from aotc.kernels.cuda.block import Cluster, PhaseBarrier, ThreadBlock, _run_simulated_cluster, simulated_thread
from aotc.kernels.cuda.templates.attention import decode as attention_few
from aotc.kernels.cuda.templates.attention.launch import attention_tiles
from aotc.lowering.regions.lower_region import lower_region
from aotc.targets import TARGETS

pytestmark = pytest.mark.cudasim

# Tiling, sizes (heads, rows, terms, depth, width), dtype, orders, causal offset.
FORMS = {
    "a warpgroup": (Tiling(WgmmaAttention(), 64, 64, 2), (2, 40, 100, 64, 64), "bf16", HEADS, None),
    "two that take turns, causal": (Tiling(WgmmaAttention(), 128, 32, 2), (2, 150, 136, 64, 80), "f16", TOKENS, 0),
    "rows without terms": (Tiling(WgmmaAttention(), 128, 32, 2), (2, 130, 64, 96, 64), "bf16", SHARED, -40),
    "warps": (Tiling(MmaAttention(), 32, 64, 2), (2, 40, 100, 64, 64), "f16", HEADS, None),
    "a warp alone": (Tiling(MmaAttention(), 16, 64, 3), (4, 5, 300, 80, 72), "bf16", SHARED, None),
    "warps of f32": (Tiling(MmaAttention(), 32, 64, 2), (2, 40, 100, 64, 64), "f32", TOKENS, 0),
    "warps of f32 96": (Tiling(MmaAttention(), 64, 64, 2), (2, 40, 100, 56, 96), "f32", HEADS, None),
    "a warp alone of f32": (Tiling(MmaAttention(), 16, 16, 3), (4, 5, 100, 40, 72), "f32", SHARED, None),
    "few": (Tiling(DecodeAttention(), 32, 32, 2), (2, 5, 300, 64, 80), "bf16", SHARED, None),
    "few, by clusters": (Tiling(DecodeAttention(2), 32, 16, 2), (4, 3, 170, 72, 64), "f16", SHARED, None),
    "few of f32": (Tiling(DecodeAttention(), 64, 16, 2), (2, 1, 100, 40, 72), "f32", HEADS, None),
    "few, causal": (Tiling(DecodeAttention(3), 32, 16, 3), (2, 6, 136, 64, 80), "bf16", TOKENS, 0),
    "few of f32 192": (Tiling(DecodeAttention(2), 32, 16, 2), (2, 5, 100, 192, 136), "f32", HEADS, None),
    "warps of f32 168": (Tiling(MmaAttention(), 32, 16, 2), (2, 40, 50, 168, 144), "f32", TOKENS, 0),
    "warps, causal": (Tiling(MmaAttention(), 32, 64, 2), (2, 60, 136, 64, 80), "bf16", TOKENS, 0),
}


def same(got, want):
    """Are numbers those of f64 but for the rounding of weights, and nothing where nothing is?"""
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(np.nan_to_num(got), np.nan_to_num(want), atol=0.01)


@pytest.mark.parametrize("name", FORMS)
def test_attention(name):
    tiling, sizes, dtype, orders, causal = FORMS[name]
    text = attention_text(tiling, sizes, dtype, "f32", orders, causal)
    _, arrays = operands(text)
    simulate(text, arrays)
    same(np.moveaxis(arrays[-1], 1, 0) if orders is TOKENS else arrays[-1], wanted(arrays, orders, causal))


@pytest.mark.parametrize(
    "tiling",
    [Tiling(WgmmaAttention(), 64, 32, 2), Tiling(MmaAttention(), 16, 64, 2), Tiling(DecodeAttention(2), 32, 16, 2)],
)
def test_scores_of_any_form(tiling):
    """Some are minus infinity, or so low that products of them with a number are."""
    text = attention_text(tiling, (2, 16, 70, 16, 16), "f16", "f32", score=BIAS)
    _, arrays = operands(text)
    arrays[3][:, 3:40] = -np.inf
    low = np.float32(-0.7 * np.finfo(np.float32).max)

    def score(z, row, term, product):
        return low if row == 5 else np.float32(product * np.float32(0.125) + np.float32(arrays[3][row, term]))

    simulate(text, arrays, score)
    want = wanted(arrays, bias=True)
    want[:, 5] = arrays[2].astype("f8").mean(1)
    same(arrays[-1], want)


@pytest.mark.parametrize("name", FORMS)
def test_a_kernel_means_what_its_template_computes(name):
    """The text reads back, and its loops, which NumPy runs, are attention."""
    tiling, _, dtype, orders, causal = FORMS[name]
    text = attention_text(tiling, (4, 5, 7, 8, 8), dtype, "f32", orders, None if causal is None else 0)
    kernel, arrays = operands(text)
    assert parse_kernel(print_kernel(kernel)) == kernel
    run_kernel(kernel, arrays)
    got = np.moveaxis(arrays[-1], 1, 0) if orders is TOKENS else arrays[-1]
    same(got, wanted(arrays, orders, None if causal is None else 0))


@pytest.mark.parametrize(
    ("tiling", "dtype"),
    half_of_pairs([Tiling(MmaAttention(), 16, 32, 3), Tiling(DecodeAttention(2), 64, 16, 2)], ["bf16", "f32"]),
)
def test_parts_leave_their_means_and_weights(tiling, dtype):
    """The last part is no whole block of terms, and rows end within parts or before them."""
    function, attrs, types = region(*CASES["parts"], dtype)
    lowered = lower_region(function, TARGETS["cuda:sm_90a"])
    text = print_kernel(lowered).replace(str(lowered.tiling), str(tiling))
    arrays = arrays_of(types)
    want = ATTENTION["attention"].reference(arrays, attrs, (), [v.type for v in function.body.results])
    got = [np.full(w.shape, 99, w.dtype) for w in want]
    given = [*arrays, *got]
    parts, heads = want[0].shape[0], types[0].shape[2]

    def rest(z, row, top, whole):
        with np.errstate(divide="ignore"):
            got[1][z // parts // heads, row, z // parts % heads, z % parts] = top + np.log(whole)

    simulate(text, given, rest=rest)
    for g, w in zip(got, want):
        np.testing.assert_array_equal(np.isnan(g), np.isnan(w))
        np.testing.assert_allclose(np.nan_to_num(g), np.nan_to_num(w), atol=0.02)


@pytest.fixture
def late(monkeypatch):
    """Let nothing be where it is copied to from the begin of a copy to the first wait for it."""
    land, wait, begun = hopper._simulate_tma_store, PhaseBarrier.wait, {}

    def begin(part, to, barrier):
        block = simulated_thread().block
        rows, bytes_ = np.indices((len(part), part.shape[1] * part.itemsize))
        block.memory[to + hopper.swizzled_tile_offset(rows, bytes_)] = 0xFF
        begun.setdefault(id(block.barriers[barrier]), []).append((part, to, barrier))

    def wait_and_land(self, parity):
        for copy in begun.pop(id(self), ()):
            land(*copy)
        wait(self, parity)

    monkeypatch.setattr(hopper, "_simulate_tma_store", begin)
    monkeypatch.setattr(PhaseBarrier, "wait", wait_and_land)


@pytest.mark.parametrize("name", [n for n in FORMS if n.startswith("few")])
def test_rings_wait_for_what_is_copied_and_read(late, name):
    test_attention(name)


@pytest.mark.parametrize("slow", [0, 1])
def test_blocks_of_a_cluster_wait_for_each_other(monkeypatch, slow):
    put = attention_few.store_shared_f32

    def put_late(place, value):
        time.sleep(0.002 if simulated_thread().block.rank == slow else 0)
        put(place, value)

    monkeypatch.setattr(attention_few, "store_shared_f32", put_late)
    test_attention("few, by clusters")


def test_lowering_computes_the_shared_memory_of_attention():
    for tiling, sizes, dtype, orders, causal in FORMS.values():
        kernel = parse_kernel(attention_text(tiling, sizes, dtype, "f32", orders, causal))
        assert attention_tiles(kernel).shared == attention_shared_bytes_of_kernel(kernel)


@pytest.mark.parametrize("group", ["cluster", "block", "warp"])
def test_a_thread_that_fails_wakes_those_that_wait(group):
    cluster = Cluster(32)
    block = ThreadBlock(0, 32, 0, {}, cluster)
    waits = {"cluster": cluster.wait_for_all, "block": block.together.wait, "warp": block._groups[32][0].wait}

    def kernel():
        if simulated_thread().thread == 3:
            raise ValueError("it broke")
        waits[group]()

    started = time.monotonic()
    with pytest.raises(ValueError, match="it broke"):
        _run_simulated_cluster(kernel, cluster, 32, ())
    assert time.monotonic() - started < 5


def test_waiting_counts_as_an_arrival():
    barrier = PhaseBarrier(2)
    barrier.count_arrivals(1, 0)
    barrier.wait_for_all()
    assert barrier._phase == 1
