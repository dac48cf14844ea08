"""Reductions on a CPU along rows in which operands are strided: some rows are first transposed to scratch memory.

    for p in parallel(0, 32):
        turned = scratch("f32[16, 272]")
        for r in range(0, 16):
            for t in range(0, 256):
                turned[r, t] = x[t, r + 16*p]
        for r in range(0, 16):
            acc = 0
            for k in range(0, 256):
                acc += turned[r, k] * y[r + 16*p, k]
            out[r + 16*p] = acc

The number of rows is the number of elements of a cache line, so each line of an operand is read once. If all axes are
reduced, rows are those of the last axis but one. :mod:`aotc.kernels.emit.vector.transposes` turns the copy into a
transpose in registers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, Expr, Sym, static, sym
from aotc.ir.dims.symbols import substitute_symbols, symbols
from aotc.ir.loop.access import with_scalars
from aotc.ir.loop.ir import Alloc, Buffer, For, Kernel, Load, Stmt, Store
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.cost_model.row_stages import RowLoop
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import NestAxis, append_serial_loops, grid_loop, make_axes, substitute_loops
from aotc.lowering.plans.cpu_reductions import TransposedRowPlan
from aotc.lowering.plans.cpu_transpose import is_transposed_load, loads_in_body
from aotc.lowering.plans.thresholds import FETCH_LINE, TURNED_TILE
from aotc.lowering.regions.loop.cpu_transpose import with_loads_of_copies
from aotc.lowering.regions.reduce.rows import Accumulators, RowReductions
from aotc.vmfb.dtypes import size_of


def lower_transposed_rows(b: RegionBuilder, plan: TransposedRowPlan) -> Kernel:
    """Lower reductions along rows; some neighbouring rows are transposed together first."""
    return _TransposedRows(b, plan).transposed_row_kernel()


class _TransposedRows(RowReductions):
    """Emit reductions along rows whose strided operands are transposed to scratch memory first."""

    def __init__(self, b: RegionBuilder, plan: TransposedRowPlan) -> None:
        super().__init__(b, plan)
        self.plan, self.height = plan, plan.height

    def transposed_row_kernel(self) -> Kernel:
        """Return the kernel whose grid items reduce some adjacent rows."""
        b, adjacent, some = self.b, self.plan.adjacent, self.plan.rows
        if adjacent not in self.kept:
            return self.kernel_of_row_items(self.plan.item_axes)
        self._allocate_stored_values("scratch")
        outer = make_axes(b.shape, [(k,) for k in self.kept if k != adjacent])
        (rows,) = make_axes(b.shape, [(adjacent,)])

        def emit_item(block: list[Stmt], at: list[Dim], begin: Dim, end: Dim) -> None:
            """Emit an item: all stages of its neighbouring rows."""
            self._emit_rows_together(
                block, begin, some,
                lambda inside, r: self._emit_row_stages(
                    inside, substitute_loops(b.anchors.space, b.shape, [*outer, rows], [*at, r])
                ),
            )  # fmt: skip

        grid, body = grid_loop(outer, (rows, some), emit_item)
        return b.kernel(grid, body, b.scalar_operations())

    # --- rows together ---

    def _loop_over_row(self, block: list[Stmt], at: Index, loop: RowLoop, accs: Accumulators) -> None:
        """Emit the loop of one stage; if all axes are reduced, neighbouring rows are transposed together."""
        if self.plan.adjacent in self.kept:
            super()._loop_over_row(block, at, loop, accs)
            return
        *others, rows, last = self.inner

        def emit_element(inner: list[Stmt], syms: list[Dim]) -> None:
            self._enter_row_block(inner)
            self._emit_stage_element(
                inner, substitute_loops(at, self.b.shape, self.inner, syms), self._flat_row_index(syms), loop, accs
            )

        def emit_rows_together(inner: list[Stmt], syms: list[Dim]) -> None:
            self._emit_rows_together(
                inner, 0, static(rows.extent),
                lambda inside, r: append_serial_loops([last], [*syms, r], emit_element, inside),
            )

        append_serial_loops(others, [], emit_rows_together, block)

    def _emit_rows_together(
        self, block: list[Stmt], begin: Dim, count: int, row: Callable[[list[Stmt], Dim], None]
    ) -> None:
        """Emit ``count`` rows from ``begin`` on; ``row(block, r)`` adds the statements of one row."""
        iterations = count // self.height
        first = begin + sym("q", 0, iterations) * self.height if iterations > 1 else begin
        inside: list[Stmt] = []
        r = sym("r", 0, self.height)
        row(inside, first + r)
        body = self._transposing_copies_and_rows(inside, r)
        block += [For("q", 0, iterations, tuple(body))] if iterations > 1 else body

    def _transposing_copies_and_rows(self, body: Sequence[Stmt], r: Expr) -> list[Stmt]:
        """Return the allocations, the transposing copies, and the loop over rows that reads the copies."""
        last = self.inner[-1]
        t = last.symbol()
        (adjacent,), (along,) = symbols(r), symbols(t)
        copies: dict[tuple[str, Index], Load] = {}
        stmts: list[Stmt] = []
        for x in loads_in_body(body):
            if (x.buffer.name, x.index) not in copies and is_transposed_load(x, adjacent, along):
                pitch = static(last.extent) + FETCH_LINE.value // size_of(x.dtype)
                copy = Buffer(self.b.fresh("turned"), x.dtype, (self.height, pitch), "scratch")
                copies[x.buffer.name, x.index] = Load(copy, (r, t))
                stmts += [Alloc(copy), *self._transposing_copy(x, copy, along, last)]
        return [*stmts, For("r", 0, self.height, with_scalars(tuple(body), lambda s: with_loads_of_copies(s, copies)))]

    def _transposing_copy(self, x: Load, copy: Buffer, along: Sym, last: NestAxis) -> list[Stmt]:
        """Return the loops that copy ``x`` of these rows to ``copy``, in pieces of a register transpose."""
        length, piece = static(last.extent), min(TURNED_TILE.value, static(last.extent))
        whole = length // piece
        parts: list[Stmt] = []
        for begin, count in ((sym("c", 0, whole) * piece, piece), (whole * piece, length % piece)):
            t = begin + sym("t", 0, count)
            index = tuple(substitute_symbols(i, {along: t}) for i in x.index)
            store = Store(copy, (sym("r", 0, self.height), t), Load(x.buffer, index))
            nest = For("r", 0, self.height, (For("t", 0, count, (store,)),))
            parts += [] if not count else [nest] if begin == whole * piece else [For("c", 0, whole, (nest,))]
        return parts
