"""Lower ``dft``: one grid item transforms one signal, or a block of neighbouring ones.

On a CPU it calls the function of the transform (:mod:`aotc.ir.loop.forms.fft`). Kernels do not contain its loops: a few
numbers define it completely.
"""

from __future__ import annotations

from math import prod

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import Kernel
from aotc.lowering.cost_model.work import DFT_WORK
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.row_axis import RowBlocks
from aotc.lowering.plans.linalg.dft import CalledDftPlan
from aotc.lowering.regions.common.library_call import LibraryCall


def lower_called_dft(b: RegionBuilder, plan: CalledDftPlan) -> Kernel:
    """Return the kernel whose items call the function of the transform."""
    attrs, (x, table), (out,) = b.the_op("dft").attrs, b.inputs, b.outputs
    n, stride = prod(attrs["radices"]), product(x.shape[attrs["axis"] + 1 :])
    rows = RowBlocks(x.shape, attrs["axis"], plan.most)
    pitch, width = plan.pitch, 0
    if pitch:
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
    return b.grid(rows.items, call.statements(transform), work)
