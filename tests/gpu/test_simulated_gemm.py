"""The template of products as the Python that it is: rings, barriers, edges, without a GPU."""

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from aotc.kernels.cuda import block
from aotc.kernels.cuda.block import Array, PhaseBarrier, swizzled
from aotc.kernels.cuda.templates import gemm_mma, gemm_wgmma
from aotc.kernels.cuda.templates.tiles import WarpgroupTiles, WarpTiles
from aotc.vmfb.dtypes import to_numpy

pytestmark = pytest.mark.cudasim

FORMS = {
    "bf16": WarpgroupTiles("bf16", "f32", cols=64, consumers=1, stages=2),
    "f16 of two warpgroups": WarpgroupTiles("f16", "f32", cols=64, stages=3, a_by_rows=True, b_by_rows=False),
    "tf32": WarpgroupTiles("tf32", "f32", cols=64, consumers=1, stages=2, b_by_rows=False),
}


WARP_FORMS = {
    "bf16": WarpTiles("bf16", "f32"),
    "f16 the other way": WarpTiles("f16", "f32", 4, True, False, warp_rows=64, warps_down=2),
    "tf32": WarpTiles("tf32", "f32", b_by_rows=False),
}


def functions(m, n, k):
    """Return what a template calls."""
    sizes = {"aotc_rows": lambda: m, "aotc_cols": lambda: n, "aotc_depth": lambda: k}
    return {**sizes, "aotc_epilogue": lambda row, col, value: 2 * value + row}


def operands_of(tiles, m, n, k):
    """Return A, and B transposed, of small integers."""
    dtype = to_numpy("f32" if tiles.operands == "tf32" else tiles.operands)
    random = np.random.default_rng(m)
    return [random.integers(-3, 4, s).astype(dtype) for s in ((m, k), (n, k))]


def check(out, a, b):
    want = 2 * (a.astype("f8") @ b.astype("f8").T) + np.arange(len(a))[:, None]
    np.testing.assert_array_equal(out, want)


def stored(x, by_rows, rows, depth):
    """Return an operand as it lies in memory, for the maps of a template."""
    box = (64, depth) if by_rows else (depth, rows)
    return Array(np.ascontiguousarray(x.T if by_rows else x), box)


@pytest.mark.parametrize("sizes", [(70, 72, 136), (64, 64, 8), (3, 130, 300), (5, 5, 0)])
@pytest.mark.parametrize("name", FORMS)
def test_products(name, sizes):
    tiles, (m, n, k) = FORMS[name], sizes
    a, b = operands_of(tiles, m, n, k)
    out = np.full((m, n), np.nan, np.float32)
    maps = (stored(a, tiles.a_by_rows, tiles.rows, tiles.depth), stored(b, tiles.b_by_rows, tiles.cols, tiles.depth))
    given = (maps, (None, None, out), (), 1)
    kernel = lambda: gemm_wgmma._kernel(tiles)
    block.run(gemm_wgmma, kernel, 2, tiles.threads, tiles.shared, given, functions(m, n, k))
    check(out, a, b)


@pytest.mark.parametrize("sizes", [(136, 72, 200), (8, 136, 8), (5, 8, 0)])
@pytest.mark.parametrize("name", WARP_FORMS)
def test_products_of_warps(name, sizes):
    tiles, (m, n, k) = WARP_FORMS[name], sizes
    a, b = operands_of(tiles, m, n, k)
    out = np.full((m, n), np.nan, np.float32)
    given = [np.ascontiguousarray(x) for x in (a.T if tiles.a_by_rows else a, b.T if tiles.b_by_rows else b)]
    blocks = -(-m // tiles.rows) * -(-n // tiles.cols)
    kernel = lambda: gemm_mma._kernel(tiles)
    arguments = ((*given, out), (), 1)
    block.run(gemm_mma, kernel, blocks, tiles.threads, tiles.shared, arguments, functions(m, n, k))
    check(out, a, b)


def test_a_barrier_counts_threads_and_bytes():
    barrier = PhaseBarrier(2)
    barrier.wait(1)  # the phase before the first is over
    barrier.change(1, 64)
    barrier.change(1, 0)
    assert barrier._phase == 0
    barrier.change(0, -64)
    barrier.wait(0)
    assert barrier._phase == 1


def test_who_waits_for_nobody_is_told(monkeypatch):
    monkeypatch.setattr(block, "PATIENCE_SECONDS", 0.01)
    with pytest.raises(TimeoutError, match="waits for ever"):
        PhaseBarrier(1).wait(0)


def test_swizzled_rows_meet_no_bank_twice():
    """Of 8 rows, the same 16 bytes of each lie in different banks."""
    rows = np.arange(8)
    for piece in range(8):
        banks = swizzled(rows, 16 * piece) % 128 // 16
        assert sorted(banks) == list(range(8))
    rows, bytes_ = np.indices((16, 128))
    assert len(np.unique(swizzled(rows, bytes_))) == 16 * 128
