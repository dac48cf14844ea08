"""The templates of products as the Python that they are: rings, barriers, edges, batches, without a GPU."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.poisoned import between_nans, check_margins
from gpu.products import STORED, SUMS, product_text, simulate
from support.halves import half_of_pairs

from aotc.ir.loop.forms.tiling import FP8_PAIRS, Mma, Tiling, Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cuda import block
from aotc.kernels.cuda.block import PhaseBarrier, swizzled_tile_offset
from aotc.kernels.cuda.templates.gemm.launch import gemm_tiles

pytestmark = pytest.mark.cudasim

NT, TN, TT = {"b": "col, k"}, {"a": "k, row"}, {"a": "k, row", "b": "col, k"}
BATCH = {"a": "z, row, k", "b": "z, k, col", "out": "z, row, col", "batch": 2}
HEADS = {"a": "row, z, k", "b": "col, z, k", "out": "row, z, col", "batch": 3}
FORMS = {
    "bf16": (Tiling(Wgmma(), 64, 64, 2), "bf16", {}),
    "f16 of two warpgroups": (Tiling(Wgmma(), 128, 64, 3), "f16", TT),
    "tf32": (Tiling(Wgmma(), 64, 64, 2), "tf32", NT),
    "bf16 in turn": (Tiling(Wgmma(ping_pong=True), 64, 64, 2), "bf16", {}),
    "f16 in turn": (Tiling(Wgmma(ping_pong=True), 128, 64, 3), "f16", TT),
    "heads in turn": (Tiling(Wgmma(ping_pong=True), 64, 64, 3), "bf16", HEADS),
    "i8": (Tiling(Wgmma(), 64, 64, 2), "i8", NT),
    "tf32 by rows": (Tiling(Wgmma(transposed=True), 64, 64, 2), "tf32", {}),
    "tf32 by rows, few": (Tiling(Wgmma(transposed=True), 32, 128, 3), "tf32", {}),
    "tf32 by rows, A": (Tiling(Wgmma(), 64, 64, 2), "tf32", TT),
    "tf32 by rows, stored so": (Tiling(Wgmma(transposed=True), 32, 64, 2), "tf32", {"out": "col, row"}),
    "bf16 turned": (Tiling(Wgmma(transposed=True), 32, 64, 2), "bf16", {}),
    "bf16 turned by terms": (Tiling(Wgmma(transposed=True), 32, 64, 3), "bf16", NT),
    "bf16 stored turned": (Tiling(Wgmma(), 64, 64, 2), "bf16", {"out": "col, row"}),
    "heads": (Tiling(Wgmma(), 64, 64, 2), "bf16", HEADS),
    "warps bf16": (Tiling(Mma(), 128, 128, 3), "bf16", {}),
    "warps f16 TN": (Tiling(Mma(), 64, 128, 4), "f16", TN),
    "warps tf32": (Tiling(Mma(), 128, 128, 3), "tf32", NT),
    "warps tf32 by rows": (Tiling(Mma(), 64, 64, 3), "tf32", TN),
    "warps tf32, computed": (Tiling(Mma(), 64, 128, 3), "tf32", {}),
    "warps i8, computed": (Tiling(Mma(), 64, 64, 3), "i8", {}),
    "f8": (Tiling(Wgmma(), 64, 64, 2), "e4m3.e4m3", NT),
    "f8 of two dtypes, turned": (Tiling(Wgmma(transposed=True), 32, 64, 2), "e5m2.e4m3", NT),
    "f8 in turn": (Tiling(Wgmma(ping_pong=True), 64, 64, 2), "e4m3.e5m2", NT),
    "warps f8": (Tiling(Mma(), 64, 64, 3), "e4m3.e5m2", NT),
    "warps f8, computed": (Tiling(Mma(), 64, 64, 3), "e5m2.e4m3", {}),
    "warps f64": (Tiling(Mma(), 64, 64, 3), "f64", NT),
    "warps f64 by rows": (Tiling(Mma(), 64, 128, 3), "f64", TN),
    "warps f64 in a batch": (Tiling(Mma(), 64, 64, 2), "f64", BATCH),
    "warps f64 stored turned": (Tiling(Mma(), 128, 64, 3), "f64", {"out": "col, row"}),
    "warps in a batch": (Tiling(Mma(), 64, 64, 3), "bf16", BATCH),
    "warps with two slices": (Tiling(Mma(), 64, 64, 2), "bf16", {}),
}


def operands(text):
    """Return the kernel, A, B and bias of small integers, and a result of 99, all between NaN."""
    kernel, random = parse_kernel(text), np.random.default_rng(0)
    given = [random.integers(-3, 4, b.shape).astype(STORED[b.dtype]) for b in kernel.inputs]
    (out,) = kernel.outputs
    return kernel, [between_nans(x) for x in (*given, np.full(out.shape, 99, STORED[out.dtype]))]


def wanted(arrays, orders):
    """Return the product that NumPy makes."""
    a, b, out = ((orders.get(name, default)).replace("row", "i").replace("col", "j").replace(", ", "")
                 for name, default in (("a", "row, k"), ("b", "k, col"), ("out", "row, col")))  # fmt: skip
    return np.einsum(f"{a},{b}->{out}", *(x.astype("f8") for x in arrays[:2]))


def reader(array, order):
    """Return the function of product, row or column, and term that is an element of an operand."""
    return lambda z, i, k: array[tuple({"z": z, "k": k}.get(d, i) for d in order.split(", "))]


@pytest.mark.parametrize(
    ("name", "sizes"), half_of_pairs(FORMS, [(72, 72, 144), (3, 136, 304), (16, 16, 0), (70, 33, 21), (72, 68, 40)])
)
def test_products(name, sizes):
    tiling, dtype, orders = FORMS[name]
    if tiling.is_wgmma and sizes == (70, 33, 21):
        pytest.skip("rows begin at no whole pieces of 16 bytes")
    if tiling.is_wgmma and (dtype in ("i8", *FP8_PAIRS) or "b" not in orders) and sizes == (72, 68, 40):
        pytest.skip("as above")
    if sizes == (3, 136, 304) and orders.get("a") == "k, row" and tiling.is_wgmma:
        pytest.skip("as above")
    text = product_text(tiling, dtype, SUMS.get(dtype, "f32"), sizes, **orders)
    _, arrays = operands(text)
    out = arrays[-1]
    places = [orders.get(n, d) for n, d in (("a", "row, k"), ("b", "k, col"), ("out", "row, col"))]

    def store(z, row, col, value):
        out[tuple({"z": z, "row": row, "col": col}[d] for d in places[2].split(", "))] = value

    simulate(text, arrays, [reader(x, order) for x, order in zip(arrays, places)], store)
    np.testing.assert_array_equal(out, wanted(arrays, orders))
    for array in arrays:
        check_margins(array)


@pytest.mark.parametrize("name", FORMS)
def test_a_kernel_means_what_its_template_computes(name):
    """The text reads back, and its loops, which NumPy runs, are the product."""
    tiling, dtype, orders = FORMS[name]
    text = product_text(tiling, dtype, SUMS.get(dtype, "f32"), (5, 7, 6), **orders)
    kernel, arrays = operands(text)
    assert parse_kernel(print_kernel(kernel)) == kernel
    run_kernel(kernel, arrays)
    np.testing.assert_array_equal(arrays[-1], wanted(arrays, orders))


def test_lowering_computes_the_shared_memory_of_gemm():
    for tiling, dtype, orders in FORMS.values():
        kernel = parse_kernel(product_text(tiling, dtype, SUMS.get(dtype, "f32"), (64, 64, 64), **orders))
        assert gemm_tiles(kernel).shared == kernel.tiling.shared


def test_a_barrier_counts_threads_and_bytes():
    barrier = PhaseBarrier(2)
    barrier.wait(1)  # the phase before the first is over
    barrier.count_arrivals(1, 64)
    barrier.count_arrivals(1, 0)
    assert barrier._phase == 0
    barrier.count_arrivals(0, -64)
    barrier.wait(0)
    assert barrier._phase == 1


def test_a_barrier_without_arrivals_times_out(monkeypatch):
    monkeypatch.setattr(block, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="waits forever for phase 0"):
        PhaseBarrier(1).wait(0)


def test_swizzled_rows_meet_no_bank_twice():
    """Of 8 rows, the same 16 bytes of each lie in different banks."""
    rows = np.arange(8)
    for piece in range(8):
        banks = swizzled_tile_offset(rows, 16 * piece) % 128 // 16
        assert sorted(banks) == list(range(8))
    rows, bytes_ = np.indices((16, 128))
    assert len(np.unique(swizzled_tile_offset(rows, bytes_))) == 16 * 128
