"""Lower ``csr_dot``: one grid item per row of the sparse matrix."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.ir import Apply, Buffer, For, Kernel, Load, Stmt, Store
from aotc.lowering.elements.builder import RegionBuilder, grid_item
from aotc.lowering.elements.elements import Elements, constant_scalar
from aotc.lowering.plans.single_ops import CsrRowsPlan
from aotc.lowering.threshold import Estimate

SPARSE_WORK = Estimate(4, "scalar operations counted per multiply-add of a sparse matmul")


def lower_csr_dot(b: RegionBuilder, plan: CsrRowsPlan) -> Kernel:
    """Lower ``csr_dot``: a grid item sums the dense rows that a sparse row selects, each times its value.

    Offsets and column numbers are clamped: invalid ones read an arbitrary element, but never out of bounds.
    """
    data, starts, columns, dense = (b.buffers[v] for v in b.region_root_op("csr_dot").operands)
    out = b.outputs[0]
    rows = out.shape[0]
    r = grid_item(rows, "r")
    width = out.shape[1] if len(out.shape) == 2 else None
    e = b.elements()
    body: list[Stmt] = []
    zero = constant_scalar(0, out.dtype)
    k = sym("k", 0, width) if width is not None else 0
    at = (r,) if width is None else (r, k)
    clear: Stmt = Store(out, at, zero)
    body.append(clear if width is None else For("k", 0, width, (clear,)))
    e.enter(body)
    begin, end = (e.clamp_index(Load(starts, (place,)), data.shape[0]) for place in (r, r + 1))
    body.append(For("p", begin, end, tuple(_add_selected_dense_row(e, data, columns, dense, out, at))))
    work = data.shape[0] * (1 if width is None else width)
    return b.grid(rows, body, work * SPARSE_WORK.value, "r")


def _add_selected_dense_row(
    e: Elements, data: Buffer, columns: Buffer, dense: Buffer, out: Buffer, at: tuple[Dim, ...]
) -> list[Stmt]:
    """Return the statements that add one stored element times its dense row to the result row."""
    inner = e.new_block()
    p = sym("p", 0, data.shape[0])
    factor = e.bind(Load(data, (p,)))
    column = e.clamp_index(Load(columns, (p,)), dense.shape[0] - 1)
    added = Store(out, at, Apply("mul", (factor, Load(dense, (column, *at[1:]))), out.dtype), "add")
    inner.append(added if len(at) == 1 else For("k", 0, out.shape[1], (added,)))
    return inner
