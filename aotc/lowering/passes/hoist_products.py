"""On GPUs, replace matmuls with one slice of an array per iteration by one matmul with the whole array before the loop.

Before, a matmul of few rows in each iteration::

    while %i, ... { (%i, ...): %r = dynamic_slice %xs, %i {sizes = (1, 16, 256)}  %y = matmul %r, %w ... }
After, one of many::

    %p = matmul %xs, %w   while %i, ... { (%i, ...): %y = dynamic_slice %p, %i {sizes = (1, 16, 1024)} ... }

``lax.scan`` over the inputs of a recurrent cell has this form. A matmul of 16 rows reads all weights, just like one of
1600 rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Module, Op, Region, Value
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


def hoist_products(module: Module, options: Options) -> Module:
    """Replace matmuls of one slice per loop iteration on GPUs by one matmul of the whole array before the loop."""
    return rewrite_for_target_kind("cuda", module, options, _hoist_matmuls_of_loop)


def _hoist_matmuls_of_loop(op: Op, b: Builder, _target: Target) -> Sequence[Value] | None:
    """Return the results of a loop whose matmuls with one slice per iteration run once before it, or None."""
    if op.name != "while":
        return None
    condition, body = op.regions
    if not any(o.name == "matmul" for o in body.ops):
        return None
    inside = {*body.params, *(v for o in body.ops for v in o.results)}
    makers = {v: o for o in body.ops for v in o.results}
    constants = {v: maker for v, maker in b.definitions.items() if maker.name == "constant"}
    iterations = trip_count(op, constants, {})
    ops: list[Op] = []
    for inner in body.ops:
        row = _slice_of_iteration(inner, inside, makers)
        if row is None or not _is_hoisting_worthwhile(inner, row, iterations):
            ops.append(inner)
        else:
            ops += _row_slices(inner, row, _append_whole_matmul(inner, row, b), b)
    if len(ops) == len(body.ops):
        return None
    results = tuple(Value(b.names.fresh(v.name), v.type) for v in op.results)
    b.append(replace(op, results=results, regions=(condition, Region(body.params, tuple(ops), body.results))))
    return results


def _slice_of_iteration(op: Op, inside: set[Value], makers: Mapping[Value, Op]) -> Op | None:
    """Return the slice of a loop-invariant array that the matmul ``op`` reads in each iteration, or None."""
    if op.name != "matmul" or op.attrs["lhs_transposed"] or op.operands[1] in inside or op.result.type.rank != 2:
        return None
    row = makers.get(op.operands[0])
    while row is not None and row.name == "reshape":
        row = makers.get(row.operands[0])
    if row is None or row.name != "dynamic_slice" or row.operands[0] in inside:
        return None
    shape, sizes = row.operands[0].type.shape, dims_of(row.attrs, "sizes")
    whole = len(shape) > 1 and sizes[0] == 1 and tuple(sizes[1:]) == shape[1:]
    return row if whole and is_static((*shape, *op.result.type.shape)) else None


HOISTED_PRODUCT_ROWS = Limit(
    128,
    "rows of a matmul in a loop that a GPU computes for all iterations at once, before the loop",
    "with more rows, one matmul fills a GPU by itself",
)
HOISTED_PRODUCT_BYTES = Limit(1 << 28, "bytes of the results of such a hoisted matmul", "a part of the memory of a GPU")
HOISTED_PRODUCT_WASTE = Limit(
    64,
    "rows multiplied per row that the loop uses, or all rows if the trip count is unknown",
    "with few rows, a matmul of 64 times as many takes no longer than two of them",
)


def _is_hoisting_worthwhile(op: Op, row: Op, iterations: int | None) -> bool:
    """Return True if the matmul is too small to fill a GPU, and the loop reads most rows of the array."""
    rows, columns = map(static, op.result.type.shape)
    count = static(row.operands[0].type.shape[0])
    waste = count // max(iterations, 1) if iterations is not None else count
    size = count * rows * columns * size_of(op.result.type.dtype)
    return HOISTED_PRODUCT_ROWS.holds(rows) and HOISTED_PRODUCT_BYTES.holds(size) and HOISTED_PRODUCT_WASTE.holds(waste)


def _append_whole_matmul(op: Op, row: Op, b: Builder) -> Value:
    """Append the matmul with all rows; return its result with the sliced rows as a separate dim."""
    source = row.operands[0]
    rows, columns = op.result.type.shape
    count, terms = source.type.shape[0], op.operands[0].type.shape[1]
    flat = b.reshape(source, (product((count, rows)), terms))
    return b.reshape(b.make("matmul", (flat, op.operands[1]), op.attrs), (count, rows, columns))


def _row_slices(op: Op, row: Op, all_rows: Value, b: Builder) -> list[Op]:
    """Return the ops that slice the result of ``op`` from ``all_rows``, with start 0 along dims that are read whole."""
    number, other = row.operands[1], row.operands[2]
    sizes = (1, *op.result.type.shape)
    slice_ = b.op("dynamic_slice", (all_rows, number, other, other), {"sizes": sizes})
    return [slice_, replace(op, name="reshape", operands=slice_.results, attrs={})]
