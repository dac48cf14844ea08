"""View a scatter as an update of rows: element ``[w]`` of update ``u`` is written to element ``[index[u], w]``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.rewrite import Builder


@dataclass(frozen=True, slots=True)
class UpdateRows:
    """View of a scatter as updates of rows; one integer per update is its row.

    Attributes
    ----------
    rows, updates, width : Dim
        The array is ``[rows, width]`` and the updates are ``[updates, width]``, without the last dim if the width is 1.
    index : Value
        The row of each update; negative if the update is dropped.
    """

    rows: Dim
    updates: Dim
    width: Dim
    index: Value

    def shape_of_rows(self, count: Dim) -> tuple[Dim, ...]:
        """Return the shape of ``count`` rows."""
        return (count,) if self.width == 1 else (count, self.width)

    def scatter_rows(
        self, arrays: Sequence[Value], index: Value, updates: Sequence[Value], region: Region, b: Builder,
        disjoint: bool = False, in_runs: bool = False,
    ) -> tuple[Value, ...]:  # fmt: skip
        """Append a scatter of whole rows ``updates`` into ``arrays``, at the rows ``index``; return its results.

        ``disjoint`` states that each row has at most one update, ``in_runs`` that updates to one row are adjacent.
        """
        window = tuple(range(1, arrays[0].type.rank))
        attrs: dict[str, Any] = {
            "inputs": len(arrays), "update_window_dims": window, "inserted_window_dims": (0,),
            "input_batching_dims": (), "scatter_indices_batching_dims": (), "scatter_dims_to_operand_dims": (0,),
            "index_vector_dim": 1, "unique_indices": disjoint, "indices_are_sorted": in_runs,
        }  # fmt: skip
        return b.append(b.op("scatter", (*arrays, index, *updates), attrs, hint="scatter", regions=(region,)))

    def scatter_combined(self, name: str, start: Value, index: Value, updates: Value, b: Builder) -> Value:
        """Append a scatter into ``start`` whose updates are combined by the op ``name``; return its result."""
        return self.scatter_rows((start,), index, (updates,), b.combiner(name, start.type.dtype), b)[0]

    def gather_rows(self, x: Value, index: Value, b: Builder) -> Value:
        """Return the rows of ``x`` at ``index``; a dropped update gets an arbitrary row."""
        window = x.type.shape[1:]
        attrs = {
            "offset_dims": tuple(range(1, x.type.rank)), "collapsed_slice_dims": (0,), "operand_batching_dims": (),
            "start_indices_batching_dims": (), "start_index_map": (0,), "index_vector_dim": 1,
            "slice_sizes": (1, *window),
        }  # fmt: skip
        return b.make("gather", (x, index), attrs)

    def update_numbers(self, index: Value, b: Builder) -> Value:
        """Return an array of 1, 2, 3...: the numbers of the updates."""
        return ElementwiseBuilder(b)("add", b.make("iota", (), {"dim": 0}, index.type), 1)

    def last_update_numbers(self, index: Value, b: Builder) -> Value:
        """Return for each update the number, counted from 1, of the last update to the same row."""
        start = ElementwiseBuilder(b).filled(0, TensorType(index.type.dtype, (self.rows,)))
        last_of_row = self.scatter_combined("max", start, index, self.update_numbers(index, b), b)
        return self.gather_rows(last_of_row, index, b)

    def has_other_updates(self, last: Value, b: Builder) -> Value:
        """Return a mask of the updates to rows that other updates write too.

        ``last`` is the result of :meth:`last_update_numbers`.
        """
        m = ElementwiseBuilder(b)
        earlier = m("and", m("ne", last, self.update_numbers(self.index, b)), m("ge", self.index, 0))
        slot = m("add", last, -1)
        marked = UpdateRows(self.updates, self.updates, 1, m.select(earlier, slot, m.filled(-1, slot.type)))
        words = TensorType("u32", (self.updates,))
        marks = marked.scatter_combined("max", m.filled(0, words), marked.index, m.filled(1, words), b)
        return m("ne", marked.gather_rows(marks, slot, b), 0)

    def index_of_last_updates(self, last: Value, b: Builder) -> Value:
        """Return the row of each update, or -1 for all updates except the last one to each row."""
        m = ElementwiseBuilder(b)
        one = m("eq", last, self.update_numbers(self.index, b))
        return m.select(one, self.index, m.filled(-1, self.index.type))


def with_contiguous_windows(op: Op, b: Builder) -> Op:
    """Return a scatter with contiguous windows, so that the number of an element gives the order of updates."""
    n, windows = op.attrs["inputs"], op.attrs["update_window_dims"]
    rank = op.operands[n + 1].type.rank
    batch = [d for d in range(rank) if d not in windows]
    updates = [b.transpose(u, (*batch, *windows)) for u in op.operands[n + 1 :]]
    attrs = {**op.attrs, "update_window_dims": tuple(range(len(batch), rank))}
    return replace(op, operands=(*op.operands[: n + 1], *updates), attrs=attrs)


def scatter_update_rows(op: Op, b: Builder) -> UpdateRows:
    """Append the ops that compute the row of each update, and return the rows."""
    x, indices, update = (op.operands[n] for n in (0, op.attrs["inputs"], op.attrs["inputs"] + 1))
    a, whole = op.attrs, _whole_trailing_dims(op)
    shape = x.type.shape
    lead = update.type.shape[: update.type.rank - whole]
    wide = TensorType("i64", lead)
    skipped = {*a["inserted_window_dims"], *a["input_batching_dims"]}
    windows = iter(a["update_window_dims"])
    window = {d: next(windows) for d in range(len(shape)) if d not in skipped}
    batch = [d for d in range(len(lead)) if d not in a["update_window_dims"]]
    starts = _window_start_indices(op, indices, batch, wide, b)
    m = ElementwiseBuilder(b)
    flat: Value | None = None
    tests: list[Value] = []
    for d in range(len(shape) - whole):
        extent = update.type.shape[window[d]] if d in window else 1
        parts = []
        if d in starts:
            parts.append(starts[d])
            tests += [m("ge", starts[d], 0), m("le", starts[d], m.size(shape[d] - extent, wide))]
        if d in window and extent != 1:
            parts.append(b.make("iota", (), {"dim": window[d]}, wide))
        if flat is not None:
            parts.append(m("mul", flat, m.size(shape[d], wide)))
        flat = reduce(lambda x, y: m("add", x, y), parts) if parts else None
    if flat is None:
        flat = m.filled(0, wide)
    rows, updates, width = product(shape[: len(shape) - whole]), product(lead), product(shape[len(shape) - whole :])
    if tests:
        # An update whose window is not inside the array is dropped: its row is -1.
        flat = m.select(reduce(lambda x, y: m("and", x, y), tests), flat, m.filled(-1, wide))
    flat = b.reshape(flat, (updates,))
    short = all(isinstance(n, int) and n < 2**31 - 1 for n in (rows, updates))
    return UpdateRows(rows, updates, width, b.convert(flat, "i32" if short else "i64"))


def scatter_update_width(op: Op) -> Dim:
    """Return the number of contiguous array elements that an update covers in each row."""
    shape = op.operands[0].type.shape
    return product(shape[len(shape) - _whole_trailing_dims(op) :])


def _whole_trailing_dims(op: Op) -> int:
    """Return the number of trailing dims of the array that an update covers completely."""
    a, n = op.attrs, op.attrs["inputs"]
    x, update = op.operands[0].type, op.operands[n + 1].type
    skipped = {*a["inserted_window_dims"], *a["input_batching_dims"], *a["scatter_dims_to_operand_dims"]}
    count = 0
    while count < min(x.rank, update.rank):
        d, u = x.rank - 1 - count, update.rank - 1 - count
        if d in skipped or u not in a["update_window_dims"] or x.shape[d] != update.shape[u]:
            break
        count += 1
    return count


def _window_start_indices(op: Op, indices: Value, batch: list[int], wide: TensorType, b: Builder) -> dict[int, Value]:
    """Return the start index of each update's window, by dims of the array."""
    a, vector = op.attrs, op.attrs["index_vector_dim"]
    starts: dict[int, Value] = {}
    for k, d in enumerate(a["scatter_dims_to_operand_dims"]):
        column = indices
        if vector < indices.type.rank:
            column = b.slice_dim(indices, vector, k, k + 1)
            column = b.reshape(column, tuple(s for n, s in enumerate(indices.type.shape) if n != vector))
        if column.type.dtype == "u64":
            column = ElementwiseBuilder(b)("min", column, 2**63 - 1)
        starts[d] = b.broadcast(b.convert(column, "i64"), batch, wide.shape)
    for d, k in zip(a["input_batching_dims"], a["scatter_indices_batching_dims"], strict=True):
        starts[d] = b.make("iota", (), {"dim": batch[k if k < vector else k - 1]}, wide)
    return starts
