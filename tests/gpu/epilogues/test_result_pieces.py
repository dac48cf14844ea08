"""The pieces in which a product's results are stored: how wide, which way, what is loaded ahead, and what they mean."""

from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("numba_cuda")

from gpu.products import STORED

from aotc.ir.dims.algebra import sym
from aotc.ir.dims.symbols import substitute
from aotc.ir.loop.forms.matmul import read_product
from aotc.ir.loop.ir import Alloc, Buffer, For, Load, Store
from aotc.ir.loop.parser import parse_kernel
from aotc.ir.loop.run import run_kernel
from aotc.kernels.cuda.templates.gemm.epilogue_layout import HELD, LANE, PIECE, SUMS, piece_statements, result_pieces

TEXT = """
def gemm(a: "bf16[{m}, 8]", b: "bf16[8, {n}]", r: "{kind}[{m}, {n}]", c: "{kind}[{n}]", d: "{kind}[{m}]", /, {outs}, *, grid: "1", tiling: "Tiling(Wgmma(), 64, 64, 2)"):
    for row in range(0, {m}):
        for col in range(0, {n}):
            total = private("f32[]")
            total[()] = f32(0.0)
            for k in range(0, 8):
                total[()] += convert(a[row, k], "f32") * convert(b[k, col], "f32")
            {epilogue}
"""  # noqa: E501
WAYS = {
    "rows": ("f32", "f32[{m}, {n}]", "o[row, col] = (total[()] + r[row, col]) * c[col] + d[row]"),
    "rows of bf16": ("bf16", "bf16[{m}, {n}]", 'o[row, col] = convert(total[()], "bf16") + r[row, col]'),
    "columns": ("f32", "f32[{n}, {m}]", "o[col, row] = (total[()] + r[row, col]) * c[col] + d[row]"),
    "heads": ("f32", "f32[{n} // 4, {m}, 4]", "o[col // 4, row, col % 4] = total[()] + c[col]"),
    "a test": ("f32", "f32[{m}, {n}]", "o[row, col] = select(total[()] > c[col], r[row, col], total[()])"),
}


def kernel_of(way, m, n):
    kind, shape, epilogue = WAYS[way]
    out = shape.format(m=m, n=n).replace(f"{n} // 4", str(n // 4))
    return parse_kernel(TEXT.format(m=m, n=n, kind=kind, outs=f'o: "{out}"', epilogue=epilogue))


@pytest.mark.parametrize(
    ("way", "m", "n", "width", "down", "held"),
    [
        ("rows", 8, 16, 4, False, (("f32", 4), ("f32", 4), ("f32", 1))),
        ("rows", 8, 18, 1, False, ()),
        ("rows of bf16", 6, 16, 8, False, (("bf16", 8),)),
        ("rows of bf16", 6, 12, 4, False, (("bf16", 4),)),
        ("columns", 8, 6, 4, True, (("f32", 1), ("f32", 4))),
        ("columns", 6, 8, 1, True, ()),
        ("heads", 6, 8, 4, False, (("f32", 4),)),
        ("a test", 6, 8, 4, False, (("f32", 4),)),
    ],
)
def test_width_and_distance_of_result_pieces(way, m, n, width, down, held):
    """What is read one way while it is stored the other, or on a test, is not loaded ahead."""
    kernel = kernel_of(way, m, n)
    found = result_pieces(read_product(kernel), [b.name for b in (*kernel.inputs, *kernel.outputs)])
    assert (found.width, found.down, found.held) == (width, down, held)
    wide = way in ("rows", "rows of bf16") and width > 1
    assert found.far == (((2, np.dtype(STORED[WAYS[way][0]]).itemsize),) if wide else ())


def by_pieces(kernel):
    """Return the loops of ``kernel`` as a template runs them: a piece's sums, what is loaded for it, its statements."""
    product = read_product(kernel)
    found = piece_statements(product)
    width, axis = found.pieces.width, (product.row if found.pieces.down else product.col)
    piece, lane = sym(PIECE, 0, axis[1] // width), sym(LANE, 0, width)
    own = {axis[0]: piece * width + lane}
    sums = Buffer(SUMS, "f32", (width,), "private")
    product_of = kernel.body[0].body[0].body[2].body[-1]
    values = [replace(x, args=(replace(x.args[0], index=tuple(substitute(i, own) for i in x.args[0].index)),))
              for x in product_of.value.args]  # fmt: skip
    one = replace(product_of, buffer=sums, index=(lane,), value=replace(product_of.value, args=tuple(values)))
    body = [Alloc(sums), For(LANE, 0, width, (Store(sums, (lane,), zero_of(kernel)), For("k", 0, 8, (one,))))]
    for n, (load, (dtype, count)) in enumerate(zip(found.loads, found.pieces.held)):
        held = Buffer(f"{HELD}{n}", dtype, (count,), "private")
        at = (lane,) if count > 1 else (0,)
        body += [Alloc(held), For(LANE, 0, count, (Store(held, at, Load(load.buffer, load.index)),))]
    inner, outer = (PIECE, axis[1] // width), (product.col if found.pieces.down else product.row)
    loops = For(outer[0], 0, outer[1], (For(inner[0], 0, inner[1], (*body, *found.body)),))
    return replace(kernel, body=(loops,), tiling=None)


def zero_of(kernel):
    return kernel.body[0].body[0].body[1].value


@pytest.mark.parametrize("way", WAYS)
def test_pieces_compute_the_epilogue(way):
    kernel = kernel_of(way, 8, 16)
    random = np.random.default_rng(0)
    given = [random.integers(-3, 4, b.shape).astype(STORED[b.dtype]) for b in kernel.inputs]
    made = [np.zeros(b.shape, STORED[b.dtype]) for b in kernel.outputs]
    want = [np.ones(b.shape, STORED[b.dtype]) for b in kernel.outputs]
    run_kernel(kernel, [*given, *want])
    run_kernel(by_pieces(kernel), [*given, *made])
    np.testing.assert_array_equal(made, want)
