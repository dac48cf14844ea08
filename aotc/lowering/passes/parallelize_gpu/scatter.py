"""Rewrite scatters on GPUs so that their updates can be applied in parallel, with the same result in any order.

Atomic instructions combine integers in memory. Other scatters are rewritten to scatters of integers, or to scatters in
which each element has at most one update. With ``index`` as the row of each update::

    before   %y = scatter %x, %index, %u (add) : f32[1000]

    after    %large = scatter 0, %index, magnitudes of %u (max) : u32[1000]
             %sum = scatter 0, %index, integers of %u, scaled by %large[%index] (add) : i64[1000]
             %y = %x + floats of %sum

- Sums of floats become sums of integers (:mod:`aotc.lowering.passes.parallelize_gpu.exact_float_sums`). If the array
  is much larger than the updates, each row's sum is accumulated in the slot of the last update to this row, and then
  added to the row; a single update to a row is added directly.
- Sums of whole rows are computed from sorted updates (:mod:`.scatter_add`).
- Maxima and minima of floats become those of integers that order like the floats.
- Updates that overwrite are dropped except for the last one to each element.
- Other scatters, with products and combiners of several ops, are sorted by rows (:mod:`.scatter_by_sort`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.parallel_scatters import (
    has_atomic_combiner,
    has_disjoint_updates,
    is_overwriting_scatter,
    update_window_count,
)
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.parallelize_gpu.exact_float_sums import ExactSum
from aotc.lowering.passes.parallelize_gpu.scatter_add import deterministic_scatter_add
from aotc.lowering.passes.parallelize_gpu.scatter_by_sort import scatter_by_sorted_runs
from aotc.lowering.passes.parallelize_gpu.scatter_rows import UpdateRows, scatter_update_rows, with_contiguous_windows
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, kind_of, real_of

Combine = Callable[[str, UpdateRows, Value, Value, Builder], Value]


SERIAL_UPDATES = Limit(
    16,
    "updates of a scatter that a GPU applies one after the other",
    "a load and a store each, in all less than the launches of the parallel form",
)


def parallelize_scatter(op: Op, target: Target, b: Builder) -> Sequence[Value] | None:
    """Rewrite a GPU scatter so that its updates can run in parallel; None keeps the op."""
    if has_disjoint_updates(op) or has_atomic_combiner(op) or SERIAL_UPDATES.holds(update_window_count(op)):
        return None
    if any(0 in v.type.shape for v in op.operands):
        return None
    if is_overwriting_scatter(op):
        return _overwriting_scatter(op, b)
    if any(inner.regions for inner in op.regions[0].ops):
        return None
    return (
        deterministic_scatter_add(op, target, b) or _scatter_as_atomics(op, b) or scatter_by_sorted_runs(op, target, b)
    )


def _scatter_as_atomics(op: Op, b: Builder) -> Sequence[Value] | None:
    """Rewrite a scatter as atomic updates in memory, if their order cannot change the result; else None."""
    name, dtype = combiner_op_name(op), op.results[0].type.dtype
    match name, kind_of(dtype):
        case "add", "f" | "c":
            return _scatter_by_rows(op, b, _scatter_sums)
        case "max" | "min", "f":
            return _scatter_by_rows(op, b, _scatter_extreme)
        case "add" | "max" | "min" | "and" | "or", "b":
            return _scatter_in_wider_integers(op, b, "u32", {"add": "or", "max": "or", "min": "and"}.get(name, name))
        case "add" | "max" | "min" | "and" | "or" | "xor", "i" | "u":
            return _scatter_in_wider_integers(op, b, f"{kind_of(dtype)}32", name)
    return None


def _scatter_by_rows(op: Op, b: Builder, combine: Combine) -> Sequence[Value]:
    """Return the result of a scatter, computed by ``combine(name, rows, array, updates, builder)`` on flat rows."""
    op = with_contiguous_windows(op, b)
    rows = scatter_update_rows(op, b)
    x, _, u = op.operands
    flat = b.reshape(x, rows.shape_of_rows(rows.rows)), b.reshape(u, rows.shape_of_rows(rows.updates))
    combined = combine(combiner_op_name(op) or "", rows, *flat, b)
    return (b.reshape(combined, x.type.shape),)


def _overwriting_scatter(op: Op, b: Builder) -> Sequence[Value]:
    """Return a scatter that overwrites, with only the last update to each row."""
    n, op = op.attrs["inputs"], with_contiguous_windows(op, b)
    rows = scatter_update_rows(op, b)
    index = rows.index_of_last_updates(rows.last_update_numbers(rows.index, b), b)
    arrays = [b.reshape(x, rows.shape_of_rows(rows.rows)) for x in op.operands[:n]]
    updates = [b.reshape(u, rows.shape_of_rows(rows.updates)) for u in op.operands[n + 1 :]]
    results = rows.scatter_rows(arrays, index, updates, copy_region(op.regions[0], b.names), b, disjoint=True)
    return [b.reshape(y, v.type.shape) for y, v in zip(results, op.results, strict=True)]


def _scatter_in_wider_integers(op: Op, b: Builder, dtype: str, name: str) -> Sequence[Value]:
    """Return a scatter of short integers as a scatter of the longer ``dtype``."""
    x, index, u = op.operands
    region = b.combiner(name, dtype)
    wide = b.op("scatter", (b.convert(x, dtype), index, b.convert(u, dtype)), op.attrs, regions=(region,))
    return (b.convert(b.append(wide)[0], op.result.type.dtype),)


def _scatter_sums(name: str, rows: UpdateRows, x: Value, u: Value, b: Builder) -> Value:
    """Return ``x`` with the float updates ``u`` added to its rows, exactly or in a fixed order."""
    dtype = x.type.dtype
    m = ElementwiseBuilder(b)
    if kind_of(dtype) == "c":
        (x_re, x_im), (u_re, u_im) = _real_and_imaginary_parts(x, b), _real_and_imaginary_parts(u, b)
        halves = _scatter_sums(name, rows, x_re, u_re, b), _scatter_sums(name, rows, x_im, u_im, b)
        return b.make("complex", halves, {}, x.type)
    if DTYPES[dtype].bits < 32:
        return b.convert(_scatter_sums(name, rows, b.convert(x, "f32"), b.convert(u, "f32"), b), dtype)
    exact = ExactSum(dtype, rows.updates, b)
    last = None if _is_dense_update(rows) else rows.last_update_numbers(rows.index, b)
    slots, met = (rows, None) if last is None else _sum_slots(rows, last, b)
    wide = f"u{DTYPES[dtype].bits}"
    start = m.filled(0, TensorType(wide, rows.shape_of_rows(slots.rows)))
    largest = rows.scatter_combined("max", start, slots.index, exact.absolute_value_bits(u), b)
    none = m.filled(0, TensorType("i64", start.type.shape))
    parts = exact.fixed_point_terms(u, rows.gather_rows(largest, slots.index, b))
    words = [rows.scatter_combined("add", none, slots.index, part, b) for part in parts]
    total = exact.float_of_integer_sums(words, largest)
    if last is None or met is None:
        return m("add", x, total)
    total = m.select(b.broadcast(met, (0,), u.type.shape), total, u)
    region = b.combiner("add", dtype)
    return rows.scatter_rows((x,), rows.index_of_last_updates(last, b), (total,), region, b, disjoint=True)[0]


def _real_and_imaginary_parts(x: Value, b: Builder) -> tuple[Value, Value]:
    """Return the real and the imaginary parts of complex numbers."""
    half = TensorType(real_of(x.type.dtype), x.type.shape)
    return b.make("real", (x,), {}, half), b.make("imag", (x,), {}, half)


DENSE_SCATTER = Limit(
    4,
    "rows of an array per update, up to which updates are summed in an array of the same shape",
    "with more, filling and reading that array costs more than the updates",
)


def _is_dense_update(rows: UpdateRows) -> bool:
    """Return True if the array is not much larger than the updates."""
    n, u = rows.rows, rows.updates
    return isinstance(n, int) and isinstance(u, int) and DENSE_SCATTER.holds(n // max(u, 1))


def _sum_slots(rows: UpdateRows, last: Value, b: Builder) -> tuple[UpdateRows, Value]:
    """Return slots for sums, one per update, and True for each update to a row that others update too.

    The sum of a row is in the slot of the last update to it; single updates have no slot.

    Also return which updates are part of a sum: all but those that are the only one to their row.
    """
    m = ElementwiseBuilder(b)
    number, met = m("add", last, -1), rows.has_other_updates(last, b)
    summed = m("and", met, m("ge", rows.index, 0))
    index = m.select(summed, number, m.filled(-1, number.type))
    return UpdateRows(rows.updates, rows.updates, rows.width, index), met


def _scatter_extreme(name: str, rows: UpdateRows, x: Value, u: Value, b: Builder) -> Value:
    """Return the maximum or minimum of ``x`` and the updates to it; NaN takes precedence over numbers."""
    dtype = x.type.dtype
    if DTYPES[dtype].bits < 32:
        return b.convert(_scatter_extreme(name, rows, b.convert(x, "f32"), b.convert(u, "f32"), b), dtype)
    start, keys = (_float_order_key(v, name, b) for v in (x, u))
    return _float_of_order_key(rows.scatter_combined(name, start, rows.index, keys, b), dtype, b)


def _float_order_key(x: Value, name: str, b: Builder) -> Value:
    """Return signed integers in the order of floats; NaN is above all for the maximum, else below all."""
    m = ElementwiseBuilder(b)
    bits = DTYPES[x.type.dtype].bits
    raw = m.bits(x, f"i{bits}")
    key = m.select(m("lt", raw, 0), m("xor", raw, 2 ** (bits - 1) - 1), raw)
    extreme = 2 ** (bits - 1) - 1 if name == "max" else -(2 ** (bits - 1))
    return m.select(m("ne", x, x), extreme, key)


def _float_of_order_key(key: Value, dtype: str, b: Builder) -> Value:
    """Return the floats for integers by :func:`_float_order_key`, its inverse."""
    m = ElementwiseBuilder(b)
    bits = DTYPES[dtype].bits
    return m.bits(m.select(m("lt", key, 0), m("xor", key, 2 ** (bits - 1) - 1), key), dtype)

