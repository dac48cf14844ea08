"""Sums of rows of floats on GPUs: updates are sorted by row and added in order, the same in every call.

The row and the number of an update form one integer, so that a sort of integers preserves the order of the updates to
one row. A sort of few updates would leave most multiprocessors idle: they are ordered by counting, for each update, the
updates before it. A long run of updates to one row would occupy few threads for long, so it is split into parts::

    before   %y = scatter %x, %index, %u (add) : f32[50000, 256]        // 8192 updates

    after    %key = sort (%index * 8192 + 0 1 2 ...);  %rows = %key / 8192;  %v = %u[%key % 8192]
             %carried = scatter 0, %part, %v (add) : f32[128, 256]     // continue the run of the part before
             %own = scatter %x, %rows of the others, %v (add)
             %y = scatter %own, %row of each part, %carried (add)

In each of the three scatters the updates to a row are adjacent, and one thread per element of the row adds them.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import is_static, static
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.lowering.analysis.parallel_scatters import update_window_count
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.parallelize_gpu.merge_sort import parallelize_sort
from aotc.lowering.passes.parallelize_gpu.scatter_rows import (
    UpdateRows,
    scatter_update_rows,
    scatter_update_width,
    with_contiguous_windows,
)
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.resources import counting_sort_run_width
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, kind_of, real_of

SUMMED_ROW = Limit(
    31,
    "floats per update, up to which a GPU sums them as integers in any order; wider updates are sorted",
    "with more, a warp that sums sorted updates in order has a float for each lane",
)


def deterministic_scatter_add(op: Op, target: Target, b: Builder) -> Sequence[Value] | None:
    """Rewrite a scatter that adds rows of floats as a sort by row and sums in a fixed order; or None."""
    dtype = op.results[0].type.dtype
    if combiner_op_name(op) != "add" or kind_of(dtype) not in "fc" or DTYPES[real_of(dtype)].bits < 32:
        return None
    width = scatter_update_width(op)
    if not is_static((*op.operands[0].type.shape, update_window_count(op), width)) or SUMMED_ROW.holds(width):
        return None
    op = with_contiguous_windows(op, b)
    rows = scatter_update_rows(op, b)
    x, _, u = op.operands
    flat = b.reshape(x, rows.shape_of_rows(rows.rows)), b.reshape(u, rows.shape_of_rows(rows.updates))
    return (b.reshape(_SortedScatterAdd(rows, target, b).add_in_order(*flat), x.type.shape),)


COUNTED_UPDATES = Limit(
    1 << 13,
    "row updates that a GPU sorts by comparing each with all others",
    "reasoning: 64M comparisons take all multiprocessors of an NVIDIA H200 about 5 us; sorting and merging runs took "
    "37 us",
)
SUMMED_PART = BlockSize(
    32,
    "sorted updates of one row that a GPU thread adds in order, at least",
    "larger parts are about the square root of the number of updates",
)


class _SortedScatterAdd:
    """Append the ops that add updates, sorted by row, to rows of an array."""

    def __init__(self, rows: UpdateRows, target: Target, b: Builder) -> None:
        """Choose the dtype of sort keys, which have a row and an update number, and the updates per part."""
        self.rows, self.target, self.b, self.m = rows, target, b, ElementwiseBuilder(b)
        self.many, self.count = static(rows.rows), static(rows.updates)
        self.bits = max((self.count - 1).bit_length(), 1)
        self.dtype = "u32" if (self.many + 1) << self.bits <= 1 << 32 else "u64"
        self.part = max(1 << self.bits // 2, SUMMED_PART.value)

    def add_in_order(self, x: Value, u: Value) -> Value:
        """Return ``x`` with the float updates added in their order, the same in every call."""
        b, m, key = self.b, self.m, self._sorted_row_update_keys()
        row, number = self._row_of_key(key), b.convert(m("and", key, (1 << self.bits) - 1), self.rows.index.type.dtype)
        if self.count <= self.part:
            return self._scatter_row_sums(x, row, self.rows.gather_rows(u, number, b))
        parts = -(-self.count // self.part)
        before = self._last_keys_before_parts(key, parts)
        wide = b.reshape(b.broadcast(before, (0,), (parts, self.part)), (parts * self.part,))
        continue_while = m("and", m("ge", row, 0), m("eq", row, self._row_of_key(b.slice_dim(wide, 0, 0, self.count))))
        none, numbers = m.filled(-1, row.type), b.make("iota", (), {"dim": 0}, row.type)
        part = m.select(continue_while, m("shr_logic", numbers, self.part.bit_length() - 1), none)
        zeros = m.filled(0, TensorType(x.type.dtype, self.rows.shape_of_rows(parts)))
        continued = self.rows.gather_rows(u, m.select(continue_while, number, m.filled(0, row.type)), b)
        carried = self._scatter_row_sums(zeros, part, continued)
        own = self._scatter_row_sums(x, m.select(continue_while, none, row), self.rows.gather_rows(u, number, b))
        first, last = self._row_of_key(b.slice_dim(key, 0, 0, self.count, self.part)), self._row_of_key(before)
        return self._scatter_row_sums(own, m.select(m("eq", first, last), last, m.filled(-1, last.type)), carried)

    def _row_of_key(self, key: Value) -> Value:
        """Return the row in each key; -1 for dropped updates."""
        row = self.b.convert(self.m("shr_logic", key, self.bits), self.rows.index.type.dtype)
        return self.m.select(self.m("lt", row, self.many), row, self.m.filled(-1, row.type))

    def _last_keys_before_parts(self, key: Value, parts: int) -> Value:
        """Return the last key of the part before each part; before the first, the key of a dropped update."""
        last = self.b.slice_dim(key, 0, self.part - 1, (parts - 1) * self.part, self.part)
        none = self.b.constant(self.many << self.bits, TensorType(self.dtype))
        return self.b.pad(last, none, {0: 1})

    def _sorted_row_update_keys(self) -> Value:
        """Return (row, update number) packed in one integer per update, sorted; dropped updates come last."""
        b, m, index = self.b, self.m, self.rows.index
        row = m.select(m("ge", index, 0), index, m.filled(self.many, index.type))
        wide = b.convert(row, self.dtype)
        key = m("or", m("shl", wide, self.bits), b.make("iota", (), {"dim": 0}, wide.type))
        x, y = (Value(b.names.fresh(hint), TensorType(self.dtype)) for hint in "xy")
        before = Value(b.names.fresh("before"), TensorType("i1"))
        region = Region((x, y), (Op("lt", (x, y), (before,), loc=b.loc),), (before,))
        if COUNTED_UPDATES.holds(self.count):
            attrs = {
                "width": counting_sort_run_width([self.dtype], self.count, self.target),
                "done": 1,
                "numbered": False,
            }
            attrs["keep"] = attrs["width"]
            (sorted_key,) = b.append(b.op("sort_runs", (key,), attrs, hint="sorted", regions=(region,)))
            return sorted_key
        op = b.op("sort", (key,), {"dim": 0, "stable": False}, hint="sorted", regions=(region,))
        (sorted_key,) = parallelize_sort(op, self.target, b) or b.append(op)
        return sorted_key

    def _scatter_row_sums(self, x: Value, index: Value, u: Value) -> Value:
        """Append a scatter that adds ``u`` to rows of ``x``; updates to one row are adjacent."""
        region = self.b.combiner("add", x.type.dtype)
        return self.rows.scatter_rows((x,), index, (u,), region, self.b, in_runs=True)[0]
