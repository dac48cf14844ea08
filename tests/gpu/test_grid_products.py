"""Products of loops that all blocks of a GPU run: their tiles, on NumPy, and what threads do to each other."""

import numpy as np
import pytest
from gpu.block_races import Races, checked
from support.small_models import array

from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, walk
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.verify import verify_kernel
from aotc.lowering.program.while_kernels.grid_products import GridMatmul, tiling_for_grid_matmul

pytestmark = pytest.mark.cudasim
THREADS, BLOCKS = 32, 5

SOURCE = """
def k(a: "f32[{a}]", b: "f32[{b}]", c: "f32[{m}, {n}]", /,
      o: "f32[{m}, {n}]", *, grid: "1", tiling: "Tiling(Mma(), 64, 64, 3)"):
    for row in range(0, {m}):
        for col in range(0, {n}):
            total = private("f32[]")
            total[()] = f32(0.0)
            for k in range(0, {k}):
                total[()] += reduce_precision(a[{at}], i32(8), i32(10)) * reduce_precision(b[{bt}], i32(8), i32(10))
            o[row, col] = total[()] + c[row, col]
"""
SHAPES = {
    "rows and columns in whole tiles": (16, 32, 32),
    "a row": (1, 64, 48),
    "a column": (40, 1, 64),
    "part of a tile": (5, 13, 24),
    "terms that no slices divide": (4, 8, 21),
    "many rows": (37, 9, 16),
    "a number": (1, 1, 8),
}


def product(m, n, k, a_turned=False, b_turned=False, room=4096):
    """A kernel that is the product alone, and its tile."""
    shapes = {"a": f"{k}, {m}" if a_turned else f"{m}, {k}", "b": f"{n}, {k}" if b_turned else f"{k}, {n}"}
    places = {"at": "k, row" if a_turned else "row, k", "bt": "col, k" if b_turned else "k, col"}
    kernel = parse_kernel(SOURCE.format(m=m, n=n, k=k, **shapes, **places))
    p = read_product(kernel)
    tile = tiling_for_grid_matmul(p, BLOCKS, THREADS, room)
    stage = Buffer("stage", "f32", (room,), "shared")
    body = (Alloc(stage), *GridMatmul(p, tile, THREADS, stage, "_1").matmul_statements())
    return Kernel("k", kernel.inputs, kernel.outputs, (), 1, body), tile


def operands(m, n, k, a_turned, b_turned):
    a, b, c = array(m, k), array(k, n, seed=1), array(m, n, seed=2)
    stored = [np.ascontiguousarray(x.T) if transposed else x for x, transposed in ((a, a_turned), (b, b_turned))]
    return [*stored, c], a.astype("f8") @ b + c


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)], ids=["", "A turned", "B turned"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_products(shape, transposed):
    """Equal to the product, and no thread touches what another writes between two barriers."""
    kernel, _ = product(*shape, *transposed)
    assert verify_kernel(kernel) == []
    arrays, want = operands(*shape, *transposed)
    out = np.full(want.shape, np.nan, "f4")
    races = Races()
    checked(races)(print_kernel(kernel), [*arrays, out], {})
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert not races.found


def test_terms_come_in_chunks_where_shared_memory_is_small():
    kernel, tile = product(16, 32, 64, room=600)
    assert tile.staged_elements <= 600
    assert tile.chunk < 64
    arrays, want = operands(16, 32, 64, False, False)
    out = np.zeros(want.shape, "f4")
    races = Races()
    checked(races)(print_kernel(kernel), [*arrays, out], {})
    np.testing.assert_allclose(out, want, rtol=1e-4, atol=1e-5)
    assert not races.found


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_thread_has_a_part_of_few_elements(shape):
    kernel, tile = product(*shape)
    assert tile.threads_per_slice * tile.slices <= THREADS
    assert tile.thread_rows * tile.thread_cols <= 16
    loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.kind == "thread"]
    assert max(loop.end for loop in loops) == THREADS
