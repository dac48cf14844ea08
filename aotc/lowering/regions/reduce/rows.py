"""Base of reductions along rows, which compute some scalars for each row."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Kernel, Load, Scalar, Space, Stmt, Store, Var
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.cost_model.row_stages import RowLoop
from aotc.lowering.elements.builder import (
    RegionBuilder,
    anchor_results,
    index_of_value_at_anchor,
    join_transposed,
    reduction_operands_at,
    store_combined,
    store_elements,
    store_rows,
)
from aotc.lowering.elements.elements import Provide, provide_scalar
from aotc.lowering.elements.nests import (
    NestAxis,
    append_serial_loops,
    grid_loop,
    make_axes,
    substitute_loops,
)
from aotc.lowering.plans.row_values import RowLoopsPlan, results_along_rows

Accumulators = dict[Op, list[Buffer]]


class RowReductions:
    """Emit rows in the grid; a *stage* is one loop over the reduced axes of a row."""

    def __init__(self, b: RegionBuilder, plan: RowLoopsPlan) -> None:
        """Read the plan: the axes, the values stored between loops, and the results that share memory with them."""
        self.b, self.kept, self.reduced = b, plan.kept, plan.reduced
        self.stored = {b.named[s.name]: b.named.get(s.in_result) for s in plan.stored}
        self.e = b.elements()
        self.scratch: dict[Value, Buffer] = {}
        self.replaced: dict[Value, Value] = {}  # for values stored in the place of a result: that result
        self.part: Index = ()  # index of the accumulators for the current steps
        self.is_unrolled = False  # are loops over reduced axes unrolled?
        self.outs = results_along_rows(b)
        self.stages = b.row_stages()
        self.inner = make_axes(b.shape, plan.inner)
        self.known: dict[Value, tuple[Index, Scalar]] = {}

    def kernel_of_row_items(self, item_axes: int) -> Kernel:
        """Return the reduction kernel whose grid items each have the rows of the last ``item_axes`` kept axes."""
        b = self.b
        self._allocate_stored_values("private" if self.is_unrolled else "scratch")
        axes = make_axes(b.shape, [(k,) for k in self.kept])
        outer, tail = axes[: len(axes) - item_axes], axes[len(axes) - item_axes :]
        grid, body = grid_loop(
            outer, None, lambda block, syms, begin, end: self._emit_rows_of_item(block, outer, tail, syms)
        )
        return b.kernel(grid, body, b.scalar_operations())

    def _emit_rows_of_item(
        self, block: list[Stmt], outer: list[NestAxis], tail: list[NestAxis], syms: list[Dim]
    ) -> None:
        """Emit the rows of one grid item: all rows along the axes ``tail``."""
        b, axes = self.b, [*outer, *tail]

        def emit_row(inner: list[Stmt], s: list[Dim]) -> None:
            self._emit_row_stages(inner, substitute_loops(b.anchors.space, b.shape, axes, s))

        append_serial_loops(tail, syms, emit_row, block)

    def _allocate_stored_values(self, space: Space) -> None:
        """Emit the allocations of buffers for values that one loop stores for later loops."""
        for v, result in self.stored.items():
            if result is None:
                self.scratch[v] = Buffer(self.b.fresh("row"), v.type.dtype, (self.stages.elements,), space)
            else:
                self.scratch[v], self.replaced[v] = self.outs[result], result

    def _emit_row_stages(self, block: list[Stmt], at: Index) -> None:
        """Emit all stages of one row."""
        self.e.anchored.clear()
        block += [Alloc(buffer) for v, buffer in self.scratch.items() if v not in self.replaced]
        stored: set[Value] = set()
        self.known = {}
        for loop in self.stages.loops:
            accs = self._allocate_accumulators(loop.ops, block)
            self.keep = [v for v in self.scratch if v in loop.cone and v not in stored]
            self._compute_row_scalars(block, at, self.stages.row_scalars_before(loop, stored))
            stored.update(self.keep)
            self._loop_over_row(block, at, loop, accs)
            anchor_results(self.e, accs)
        self._enter_row_block(block)
        store_rows(self.b, self.e, at)

    def _enter_row_block(self, block: list[Stmt]) -> None:
        """Continue in ``block``, with the scalars of the row that are computed already."""
        self.e.enter(block)
        for v, (index, scalar) in self.known.items():
            self.e.cache_element(v, index, scalar)

    def _compute_row_scalars(self, block: list[Stmt], at: Index, values: Sequence[Value]) -> None:
        """Emit, before a loop, the computation of ``values`` that are constant in it."""
        self._enter_row_block(block)
        for v in values:
            index = index_of_value_at_anchor(self.b, v, at)
            scalar = self.e.at(v, index)
            if isinstance(scalar, Apply | Var):
                self.known[v] = index, self.e.bind(scalar) if isinstance(scalar, Apply) else scalar
                self.e.cache_element(v, *self.known[v])

    def _allocate_accumulators(self, ops: Sequence[Op], block: list[Stmt]) -> Accumulators:
        """Emit the allocation and the initial values of private accumulators for ``ops``; return the buffers."""
        self._enter_row_block(block)
        accs: Accumulators = {}
        for op in ops:
            accs[op] = []
            for v, init in zip(op.results, op.inits, strict=True):
                acc = Buffer(self.b.fresh("acc"), v.type.dtype, (), "private")
                block += [Alloc(acc), Store(acc, (), self.e.at(init, ()))]
                accs[op].append(acc)
        return accs

    def _loop_over_row(self, block: list[Stmt], at: Index, loop: RowLoop, accs: Accumulators) -> None:
        """Emit the loop of one stage; subclasses may distribute its steps over threads."""

        def emit_element(inner: list[Stmt], syms: list[Dim]) -> None:
            self._enter_row_block(inner)
            self._emit_stage_element(
                inner, substitute_loops(at, self.b.shape, self.inner, syms), self._flat_row_index(syms), loop, accs
            )

        append_serial_loops(self.inner, [], emit_element, block, lambda _: self.is_unrolled)

    def _emit_stage_element(self, block: list[Stmt], at: Index, flat: Dim, loop: RowLoop, accs: Accumulators) -> None:
        """Emit one step of a stage, at element ``flat`` of the row's stored values."""
        join_transposed(self.b, self.e, at)
        for v in self.keep:
            self.e.anchored.pop(v, None)  # another part of this loop, written before, stores it as well
            scalar = self.e.at(v, at)
            scalar = scalar if isinstance(scalar, Var) else self.e.bind(scalar)
            place = self._replaced_at(v, at) if v in self.replaced else self._rows_of_block(flat)
            block.append(Store(self.scratch[v], place, scalar))
            self.e.anchored[v] = provide_scalar(scalar, at)
        store_elements(self.e, [(self.outs[v], v, index_of_value_at_anchor(self.b, v, at)) for v in loop.stores])
        for op in loop.ops:
            store_combined(self.b, self.e, op, accs[op], reduction_operands_at(self.b, self.e, op, at), [], self.part)
        for v in self.keep:
            self.e.anchored[v] = self._load_of_stored_row(v, at)

    def _replaced_at(self, value: Value, iteration: Index) -> Index:
        return index_of_value_at_anchor(self.b, self.replaced[value], iteration)

    def _rows_of_block(self, flat: Dim) -> Index:
        """Return the index at which element ``flat`` of a row is stored."""
        return (flat,)

    def _load_of_stored_row(self, value: Value, iteration: Index) -> Provide:
        """Return a function that loads stored elements of the row of ``iteration``; it returns None for other rows."""

        def load_stored_element(index: Index) -> Scalar | None:
            is_same_row = all(index[k] == iteration[k] for k in range(len(iteration)) if k not in self.reduced)
            place = self._replaced_at(value, index) if value in self.replaced else (self._flat_index_in_row(index),)
            return Load(self.scratch[value], place) if is_same_row else None

        return load_stored_element

    def _flat_row_index(self, syms: list[Dim]) -> Dim:
        """Return the number of an element in its row, from the variables of the inner loops."""
        flat: Dim = 0
        for axis, s in zip(self.inner, syms, strict=True):
            flat = flat * axis.extent + s
        return flat

    def _flat_index_in_row(self, index: Index) -> Dim:
        """Return the number of an element in its row, from its index in the iteration space."""
        flat: Dim = 0
        for k in self.reduced:
            flat = flat * self.b.shape[k] + index[k]
        return flat
