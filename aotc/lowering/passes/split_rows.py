"""Reduce long rows in parts, so that one pass computes both reductions of a softmax or variance (online form).

Rows are long if they do not fit the fast memory of a worker. Before::

    %m = reduce %x {dims = (1,)} (max)                            // %x: f32[32, 262144]
    %s = reduce (exp (sub %x, (broadcast %m))) {dims = (1,)} (add)
After::

    %xp = reshape %x : f32[32, 64, 4096]
    %mp = reduce %xp {dims = (2,)} (max)                          // with %sp, one kernel
    %sp = reduce (exp (sub %xp, (broadcast %mp))) {dims = (2,)} (add)
    %m = reduce %mp {dims = (1,)} (max)
    %s = reduce (mul %sp, (exp (sub %mp, (broadcast %m)))) {dims = (1,)} (add)

:mod:`aotc.lowering.plans.long_rows` decides which rows are split. Later readers of the row compute ``exp`` again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Module, Op, Region, TensorType, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.long_rows import LongRow, is_reshape_like
from aotc.lowering.analysis.prefix_scans import neutral_value
from aotc.lowering.passes.fuse.absorb import fusion_target
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.lowering.plans.long_rows import RowForm, long_row_splits
from aotc.options import Options
from aotc.vmfb.dtypes import limits


def split_rows(module: Module, options: Options) -> Module:
    """Split reductions of long rows into parts, so that one pass computes both reductions of a softmax."""
    changed = {}
    for function in module.functions.values():
        forms = [form for form in long_row_splits_of(function.body, options) if form.part]
        rule = _RowRewriter(forms).split_reduction_rule
        changed[function.name] = rewrite_function(function, rule, ("reduce",)) if forms else function
    return module.with_functions(changed)


def long_row_splits_of(region: Region, options: Options) -> Iterator[RowForm]:
    """Yield the split decision for each long row of ``region`` and of its nested regions."""
    if options.opt_level < 2:
        return
    yield from long_row_splits(region, fusion_target(options))
    for op in region.ops:
        target = options.devices.get(op.attrs.get("device", ""), options.target)
        for inner in op.regions:
            yield from long_row_splits_of(inner, replace(options, target=target))


class _RowRewriter:
    """Rewrite the reductions of long rows as reductions of parts, and combinations of the parts."""

    def __init__(self, forms: Sequence[RowForm]) -> None:
        self._rows: dict[Value, LongRow] = {form.row.second.result: form.row for form in forms}
        self._parts: dict[Value, int] = {form.row.first.result: form.part for form in forms}
        self._own: dict[Value, tuple[Value, Value]] = {}  # by the old first result: the new ones of parts and of rows

    def split_reduction_rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the values that replace a reduction of a long row, or None."""
        if len(op.results) != 1:
            return None
        if op.result in self._parts:
            return self._first_reduction_in_parts(op, b)
        row = self._rows.get(op.result)
        return self._second_reduction_in_parts(op, row, b) if row else None

    def _first_reduction_in_parts(self, op: Op, b: Builder) -> Sequence[Value]:
        """Append the first reduction of a row (maximum or sum) of each part, then of the parts."""
        own = _reduction_of_parts(op, self._rows_as_parts(op.operands[0], op, op.result, b), b)
        whole = b.append(replace(op, operands=(own, op.operands[1]), attrs={"dims": (own.type.rank - 1,)}))
        self._own[op.result] = own, whole[0]
        return whole

    def _second_reduction_in_parts(self, op: Op, row: LongRow, b: Builder) -> Sequence[Value]:
        """Append the second reduction of a row, each part centred by its own first reduction, and rescale the sums.

        This is the online softmax (M. Milakov, N. Gimelshein, 2018), or the parallel variance of T. Chan et al. (1983).
        """
        own_first, first = self._own[row.first.result]
        minuend, broadcast = b.definitions[row.difference.result].operands
        whole = b.definitions[broadcast].operands[0]
        if row.is_softmax:
            centre = _finite_centre(_recompute_for_parts(whole, {first: own_first}, own_first.type.shape, b), b)
        else:
            centre = b.make("mul", (own_first, b.constant(1 / self._parts[row.first.result], own_first.type)))
            centre = b.convert(centre, whole.type.dtype)
        x = self._rows_as_parts(minuend, op, row.first.result, b)
        x = b.make("sub", (x, b.broadcast(centre, range(centre.type.rank), x.type.shape)))
        for step in row.steps:
            type_ = TensorType(step.result.type.dtype, x.type.shape)
            x = b.make(step.name, (x,) * len(step.operands), step.attrs, type_)
        own = _reduction_of_parts(op, x, b)
        difference = self._part_centre_minus_row_centre(own, centre, whole, b)
        if row.is_softmax:
            own = _rescaled_sums(own, b.make("exp", (difference,)), b)
        else:
            part = b.constant(self._parts[row.first.result], own.type)
            own = b.make("add", (own, b.make("mul", (part, b.make("mul", (difference, difference))))))
        total = b.reduce(own, op.operands[1], (own.type.rank - 1,), copy_region(op.regions[0], b.names))
        return [_nan_for_infinite_rows(total, whole, b) if row.is_softmax else total]

    def _rows_as_parts(self, x: Value, op: Op, first: Value, b: Builder) -> Value:
        """Return ``x``, whose rows ``op`` reduces, reshaped to parts of rows."""
        row_shape = op.result.type.shape
        size = self._parts[first]
        parts = static(product(x.type.shape[len(row_shape) :])) // size
        return b.reshape(x, (*row_shape, parts, size))

    def _part_centre_minus_row_centre(self, own: Value, centre: Value, row_centre: Value, b: Builder) -> Value:
        """Return ``centre - row_centre``, with the shape and dtype of ``own``.

        ``centre`` has the maximum or mean of each part of a row, ``row_centre`` that of each row. ``own`` has one
        element per part.
        """
        shape = own.type.shape
        of_row = b.broadcast(b.reshape(row_centre, shape[:-1]), range(len(shape) - 1), shape)
        return b.make("sub", (b.convert(centre, own.type.dtype), b.convert(of_row, own.type.dtype)))


def _reduction_of_parts(op: Op, x: Value, b: Builder) -> Value:
    """Return the reduction ``op`` of each part of ``x``, from the neutral value."""
    region = copy_region(op.regions[0], b.names)
    neutral = neutral_value(region.ops[0].name, x.type.dtype)
    assert neutral is not None
    return b.reduce(x, b.constant(neutral, TensorType(x.type.dtype)), (x.type.rank - 1,), region)


def _recompute_for_parts(value: Value, part_values: Mapping[Value, Value], shape: Sequence[Dim], b: Builder) -> Value:
    """Recompute the per-row ``value`` with one element per part of a row.

    ``part_values`` maps values with one number per row to those with one number per part.
    """
    recomputed = dict(part_values)
    stack = [value]
    while stack:
        v = stack[-1]
        if v in recomputed:
            stack.pop()
            continue
        of_parts = TensorType(v.type.dtype, tuple(shape))
        number = splat_of(v, b.definitions)
        if number is not None:
            recomputed[v] = b.constant(number, of_parts)
            continue
        op = b.definitions[v]
        if waiting := [u for u in op.operands if u not in recomputed]:
            stack += waiting
        elif is_reshape_like(op):
            recomputed[v] = recomputed[op.operands[0]]
        else:
            recomputed[v] = b.make(op.name, [recomputed[u] for u in op.operands], op.attrs, of_parts)
    return recomputed[value]


def _finite_centre(centre: Value, b: Builder) -> Value:
    """Return ``centre`` with 0 for parts of only the lowest value, so that their sums are 0 instead of NaN."""
    lowest = b.make("eq", (centre, b.constant(limits(centre.type.dtype)[0], centre.type)))
    return b.make("select", (lowest, b.constant(0, centre.type), centre))


def _rescaled_sums(own: Value, factor: Value, b: Builder) -> Value:
    """Return sums times factors; a sum of 0 stays 0, however large its factor."""
    empty = b.make("eq", (own, b.constant(0, own.type)))
    return b.make("select", (empty, own, b.make("mul", (own, factor))))


def _nan_for_infinite_rows(total: Value, centre: Value, b: Builder) -> Value:
    """Return ``total``, or NaN for rows whose centre is not finite: their sums of exp(x - centre) are NaN."""
    centre = b.convert(b.reshape(centre, total.type.shape), total.type.dtype)
    return b.make("add", (total, b.make("sub", (centre, centre))))
