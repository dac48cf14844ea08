"""In which order blocks take the tiles of a product: those that run at a time read few lines of both operands."""

from itertools import pairwise

import pytest

pytest.importorskip("numba_cuda")

from gpu.products import product_text

from aotc.ir.loop.forms.tiling import Mma, Tiling, Wgmma
from aotc.ir.loop.parser import parse_kernel
from aotc.kernels.cuda.block import _SimulatedCuda
from aotc.kernels.cuda.templates.gemm.launch import gemm_tiles
from aotc.kernels.cuda.templates.steps import matmul_tile_order

pytestmark = pytest.mark.cudasim

TILINGS = [
    Tiling(Wgmma(), 128, 256, 4),
    Tiling(Wgmma(), 128, 128, 6),
    Tiling(Wgmma(ping_pong=True), 64, 128, 8),
    Tiling(Wgmma(transposed=True), 256, 128, 4),
    Tiling(Wgmma(), 128, 192, 5),
    Tiling(Mma(), 128, 128, 3),
]


def order(tiling, m, n, batch=0):
    """Return the place of each tile, in the order in which they are taken, and the sizes of a tile."""
    more = {"a": "z, row, k", "b": "z, col, k", "out": "z, row, col", "batch": batch} if batch else {"b": "col, k"}
    tiles = gemm_tiles(parse_kernel(product_text(tiling, "bf16", "f32", (m, n, 64), **more)))
    place = matmul_tile_order(_SimulatedCuda(1, 1), tiles.rows, tiles.cols, tiles.batched)
    down, across = -(-m // tiles.rows), -(-n // tiles.cols)
    return [place(t, down, across) for t in range(max(batch, 1) * down * across)], tiles


@pytest.mark.parametrize("sizes", [(4096, 4096, 0), (5000, 300, 0), (100, 7000, 0), (2500, 1500, 3)])
@pytest.mark.parametrize("tiling", TILINGS)
def test_each_tile_is_taken_once(tiling, sizes):
    m, n, batch = sizes
    found, tiles = order(tiling, m, n, batch)
    places = [(z, i, j) for z in range(max(batch, 1)) for i in range(0, m, tiles.rows) for j in range(0, n, tiles.cols)]
    assert sorted(found) == places


@pytest.mark.parametrize("tiling", TILINGS)
def test_tiles_that_are_taken_together_are_nearly_a_square(tiling):
    """An H200 has 132 multiprocessors: their tiles read at most a third more lines than those of a square."""
    found, tiles = order(tiling, 8192, 8192)
    for wave in range(2):
        taken = found[132 * wave : 132 * wave + 132]
        lines = tiles.rows * len({i for _, i, _ in taken}) + tiles.cols * len({j for _, _, j in taken})
        assert lines <= 4 / 3 * 2 * (132 * tiles.rows * tiles.cols) ** 0.5


@pytest.mark.parametrize("tiling", TILINGS)
def test_columns_are_gone_through_once_for_two_thousand_rows(tiling):
    """The second operand is read from memory so often; it took twice as many times when a group had 8 tiles of 128."""
    found, tiles = order(tiling, 4096, 4096)
    columns = [j for _, _, j in found]
    assert sum(a > b for a, b in pairwise(columns)) == -(-4096 // (2048 // tiles.rows * tiles.rows)) - 1
