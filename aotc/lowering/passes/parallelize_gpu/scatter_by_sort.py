"""Sort the updates of a scatter by row if its combiner is not an atomic op.

If the combiner is associative, a scan combines each run of updates to one element, so that all threads work even if a
run is long::

    before   %y = scatter %x, %index, %u (mul) : f32[1000]

    after    %rows, %numbers = sort %index, 0 1 2 ... {stable = true}
             %runs = scan of %u[%numbers], which begins again where %rows change (mul)
             %y = scatter %x, %rows where a run ends, %runs {unique_indices = true} (mul) : f32[1000]

A combiner of several ops may not be associative: one thread applies a run in order, ``%y = scatter %x, %rows,
%u[%numbers] {indices_are_sorted = true}``.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import numpy as np

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.parallelize_gpu.merge_sort import parallelize_sort
from aotc.lowering.passes.parallelize_gpu.scatter_rows import scatter_update_rows, with_contiguous_windows
from aotc.lowering.passes.rewrite import Builder, append_region
from aotc.targets import Target


class _SegmentState(IntEnum):
    """State of a scan's part: no updates, only updates of an earlier run, or a part in which a run begins."""

    NONE = 0
    CONTINUES = 1
    BEGINS = 2


def scatter_by_sorted_runs(op: Op, target: Target, b: Builder) -> Sequence[Value]:
    """Rewrite a scatter as a sort of its updates by target, then one combination per run of equal targets."""
    n, op = op.attrs["inputs"], with_contiguous_windows(op, b)
    rows = scatter_update_rows(op, b)
    index, numbers = _sort_updates_by_row(rows.index, target, b)
    shape = rows.shape_of_rows(rows.updates)
    updates = [rows.gather_rows(b.reshape(u, shape), numbers, b) for u in op.operands[n + 1 :]]
    arrays = [b.reshape(x, rows.shape_of_rows(rows.rows)) for x in op.operands[:n]]
    region, m = copy_region(op.regions[0], b.names), ElementwiseBuilder(b)
    if combiner_op_name(op) in ACCUMULATED:
        totals = _segmented_scan(_run_begins(index, b), updates, op.regions[0], b)
        ends = m.select(_row_differs_from_neighbour(index, 1, b), index, m.filled(-1, index.type))
        combined = rows.scatter_rows(arrays, ends, totals, region, b, disjoint=True)
    else:
        combined = rows.scatter_rows(arrays, index, updates, region, b, in_runs=True)
    return [b.reshape(y, v.type.shape) for y, v in zip(combined, op.results, strict=True)]


def _sort_updates_by_row(index: Value, target: Target, b: Builder) -> Sequence[Value]:
    """Return the sorted rows, and for each the number of its update in the original order."""
    numbers = b.make("iota", (), {"dim": 0}, index.type)
    scalar = TensorType(index.type.dtype)
    params = tuple(Value(b.names.fresh(hint), scalar) for hint in "xymn")
    before = Value(b.names.fresh("before"), TensorType("i1"))
    region = Region(params, (Op("lt", params[:2], (before,), loc=b.loc),), (before,))
    op = b.op("sort", (index, numbers), {"dim": 0, "stable": True}, hint="sorted", regions=(region,))
    return parallelize_sort(op, target, b) or b.append(op)


def _row_differs_from_neighbour(index: Value, step: int, b: Builder) -> Value:
    """Return, for each update, whether its row differs from that of the next (``step`` 1) or previous (-1) update."""
    m, beyond = ElementwiseBuilder(b), b.constant(-2, TensorType(index.type.dtype))
    low, high = ({}, {0: 1}) if step > 0 else ({0: 1}, {})
    other = b.pad(index, beyond, low=low, high=high)
    count: Dim = index.type.shape[0]
    return m("ne", index, b.slice_dim(other, 0, 1, count + 1) if step > 0 else b.slice_dim(other, 0, 0, count))


def _run_begins(index: Value, b: Builder) -> Value:
    """Return the segment state of each single update: whether it begins a run of updates to one row."""
    m = ElementwiseBuilder(b)
    return m.select(
        _row_differs_from_neighbour(index, -1, b),
        _SegmentState.BEGINS,
        m.filled(_SegmentState.CONTINUES, TensorType("u8", index.type.shape)),
    )


def _segmented_scan(begins: Value, updates: Sequence[Value], region: Region, b: Builder) -> Sequence[Value]:
    """Return the segmented scan of the updates: each one combined with its predecessors in the same run."""
    shape = updates[0].type.shape
    marks = begins if len(shape) == 1 else b.broadcast(begins, (0,), shape)
    ones, none = (1,) * len(shape), ((0, 0),) * (len(shape) - 1)
    plain = dict.fromkeys(("strides", "base_dilations", "window_dilations"), ones)
    attrs = {**plain, "window": (shape[0], *ones[1:]), "padding": ((shape[0] - 1, 0), *none)}
    arrays = (marks, *updates)
    starts = [b.constant(np.zeros(()), TensorType(v.type.dtype)) for v in arrays]
    op = b.op(
        "reduce_window", (*arrays, *starts), attrs, hint="runs", regions=(_segmented_scan_combiner(arrays, region, b),)
    )
    return b.append(op)[1:]


def _segmented_scan_combiner(arrays: Sequence[Value], region: Region, b: Builder) -> Region:
    """Return the scan's combiner of two adjacent segments, each with a flag that marks a segment start."""
    types = [TensorType(v.type.dtype) for v in arrays]
    (left, *xs), (right, *ys) = ([Value(b.names.fresh(hint), t) for t in types] for hint in "xy")
    inner = Builder(b.names, loc=b.loc)
    m, results = ElementwiseBuilder(inner), append_region(region, (*xs, *ys), inner)
    starts = m("or", m("eq", left, _SegmentState.NONE), m("eq", right, _SegmentState.BEGINS))
    ends = m("eq", right, _SegmentState.NONE)
    selected = [m.select(starts, y, m.select(ends, x, z)) for x, y, z in zip(xs, ys, results, strict=True)]
    mark = m("max", left, right)
    return Region((left, *xs, right, *ys), tuple(inner.ops), (mark, *selected))
