"""Lower ``dft``: one grid item transforms one signal, or a block of neighbouring ones.

On a CPU it calls the function of the transform (:mod:`aotc.ir.loop.forms.fft`). Kernels do not contain its loops: a few
numbers define it completely.
"""

from __future__ import annotations

from math import prod

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.limits import TRANSFORM_LANES
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import Kernel
from aotc.ir.tensor.ir import Function
from aotc.lowering.cost_model.work import DFT_WORK
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.row_axis import RowBlocks
from aotc.lowering.regions.common.library_call import LibraryCall
from aotc.lowering.regions.fft_gpu import BlockDft, ThreadDft, fits_a_block
from aotc.lowering.threshold import BlockSize
from aotc.targets import Target

DFT_ELEMENTS = BlockSize(1 << 13, "points of the neighbouring transforms of a grid item", "the same as DFT_POINTS")
DFT_LANES = BlockSize(
    16,
    "neighbouring transforms per grid item, at least; larger items have a multiple of it",
    "a 512-bit vector of f32",
)


def lower_dft(function: Function, target: Target) -> Kernel:
    """Lower a ``dft`` region."""
    b = RegionBuilder(function, target)
    x, axis = b.inputs[0], b.the_op("dft").attrs["axis"]
    stride, most = product(x.shape[axis + 1 :]), DFT_LANES.value
    if target.kind == "cuda" or isinstance(stride, int):  # a CPU takes as long for few signals as for a block of them
        most = max(most, DFT_ELEMENTS.value // static(x.shape[axis]) // most * most)
    rows = RowBlocks(x.shape, axis, most)
    if target.kind == "cuda":
        return BlockDft(b).kernel() if fits_a_block(b, target) else ThreadDft(b, rows).kernel()
    return _called(b, rows)


def _called(b: RegionBuilder, rows: RowBlocks) -> Kernel:
    """Return the kernel whose items call the function of the transform."""
    attrs, (x, table), (out,) = b.the_op("dft").attrs, b.inputs, b.outputs
    n, stride = prod(attrs["radices"]), product(x.shape[attrs["axis"] + 1 :])
    pitch = width = 0
    if rows.block > 1:
        lanes = min(TRANSFORM_LANES, 1 << (rows.block - 1).bit_length())
        pitch = -(-rows.block // lanes) * lanes
        even = isinstance(stride, int) and stride % rows.block == 0
        width = rows.block if even else rows.width if isinstance(rows.width, int) else 0
    across = stride if pitch and isinstance(stride, int) else 0
    transform = Transform(
        table.dtype, attrs["radices"], attrs["inverse"], float(attrs["scale"]), attrs["real"], pitch, width, across
    )
    call = LibraryCall(b)
    call.args += [(x, rows.place(0, 0)), (table, (0, 0)), (out, rows.place(0, 0))]
    if transform.work:
        call.args.append((call.memory(table.dtype, (transform.work,)), (0,)))
    numbers: list[tuple[int, Dim]] = [(width, rows.width), (across, stride)] if pitch else []
    for known, value in numbers:
        if not known:
            call.number(value)
    work = product(x.shape) * DFT_WORK.value * max(n.bit_length() - 1, 1)
    return b.grid(rows.items, call.statements(transform.text), work)
