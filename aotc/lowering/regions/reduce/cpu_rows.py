"""Short rows on a CPU, one row per vector lane.

The shortest rows are unrolled, and LLVM vectorises across them. For longer rows with expensive per-row scalars, only
these scalars are computed in vectors::

    for q in range(0, 31):
        for l in range(0, 16):
            acc = 0
            for k in range(0, 20):
                acc += x[16*q + l, k] * w[k]
            sums[l] = acc
        for l in range(0, 16):
            y[16*q + l] = log1p(exp(sums[l]))
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, static, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Kernel, Load, Stmt, Store, Var
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, index_of_value_at_anchor, store_rows
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.elements.nests import NestAxis, append_serial_loops, substitute_loops
from aotc.lowering.plans.cpu_reductions import RowPlan
from aotc.lowering.regions.reduce.rows import RowReductions


def lower_rows(b: RegionBuilder, plan: RowPlan) -> Kernel:
    """Lower reductions row by row, short rows in vectors."""
    return _ShortRows(b, plan).kernel_of_row_items(plan.item_axes)


class _ShortRows(RowReductions):
    """Emit reductions row by row; several short rows share vectors."""

    def __init__(self, b: RegionBuilder, plan: RowPlan) -> None:
        super().__init__(b, plan)
        self.lanes = plan.lanes
        self.is_unrolled = plan.unrolled

    def _emit_rows_of_item(
        self, block: list[Stmt], outer: list[NestAxis], tail: list[NestAxis], syms: list[Dim]
    ) -> None:
        """Emit the rows of an item, one per vector lane along the last axis if the plan has lanes."""
        lanes = self.lanes
        if not lanes:
            super()._emit_rows_of_item(block, outer, tail, syms)
            return
        append_serial_loops(
            tail[:-1], syms, lambda inner, s: self._loop_along_last_axis(inner, [*outer, *tail], s, lanes), block
        )

    def _loop_along_last_axis(self, block: list[Stmt], axes: Sequence[NestAxis], syms: list[Dim], lanes: int) -> None:
        """Emit the loop over rows along the last axis, ``lanes`` at a time, and a loop over the remaining rows."""
        b, axis = self.b, axes[-1]
        whole = static(axis.extent) // lanes
        iteration: list[Stmt] = []
        lane = sym("l", 0, lanes)
        together = sym(axis.name, 0, whole) * lanes + lane
        self._stages_of_lanes(
            iteration, substitute_loops(b.anchors.space, b.shape, axes, [*syms, together]), lane, lanes
        )
        block.append(For(axis.name, 0, whole, tuple(iteration)))
        if whole * lanes != axis.extent:
            rest: list[Stmt] = []
            one = sym(axis.name, whole * lanes, axis.extent)
            self._emit_row_stages(rest, substitute_loops(b.anchors.space, b.shape, axes, [*syms, one]))
            block.append(For(axis.name, whole * lanes, axis.extent, tuple(rest)))

    def _stages_of_lanes(self, block: list[Stmt], at: Index, lane: Dim, lanes: int) -> None:
        """Emit all stages of the rows ``at`` for each ``lane``, with one loop over lanes per stage."""
        self.e.anchored.clear()
        self.keep, self.known = [], {}
        for loop in self.stages.loops:
            for v in self.stages.row_scalars_before(loop, ()):
                self._compute_row_scalar(block, at, lane, lanes, v)
            inner: list[Stmt] = []
            accs = self._allocate_accumulators(loop.ops, inner)
            self._loop_over_row(inner, at, loop, accs)
            pairs = [(v, acc) for op in loop.ops for v, acc in zip(op.results, accs[op], strict=True)]
            sums = [(v, acc, self._scalar_per_row_buffer(block, v, lanes)) for v, acc in pairs]
            inner += [Store(each, (lane,), Load(acc, ())) for _, acc, each in sums]
            block.append(For("l", 0, lanes, tuple(inner)))
            for v, _, each in sums:
                self.e.anchor(v, provide_scalar(Load(each, (lane,))))
        results: list[Stmt] = []
        self._enter_row_block(results)
        store_rows(self.b, self.e, at)
        if results:
            block.append(For("l", 0, lanes, tuple(results)))

    def _compute_row_scalar(self, block: list[Stmt], at: Index, lane: Dim, lanes: int, value: Value) -> None:
        """Emit the loop that computes one scalar of each row."""
        inner: list[Stmt] = []
        self._enter_row_block(inner)
        index = index_of_value_at_anchor(self.b, value, at)
        scalar = self.e.at(value, index)
        if isinstance(scalar, Apply | Var):
            numbers = self._scalar_per_row_buffer(block, value, lanes)
            block.append(For("l", 0, lanes, (*inner, Store(numbers, (lane,), scalar))))
            self.known[value] = index, Load(numbers, (lane,))

    def _scalar_per_row_buffer(self, block: list[Stmt], value: Value, lanes: int) -> Buffer:
        """Return a new buffer with one scalar per row."""
        buffer = Buffer(self.b.fresh("rows"), value.type.dtype, (lanes,), "private")
        block.append(Alloc(buffer))
        return buffer
