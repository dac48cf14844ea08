"""Add the array that an inner loop accumulates to that of the outer loop only where the inner loop wrote.

Before::

    while c { t = zeros; while d { t = dynamic_update_slice t, s, i }; x = add x, t }     // fills and adds whole arrays
After::

    t = zeros
    while c {
        while d { t = dynamic_update_slice t, s, i; places = dynamic_update_slice places, i, k }
        for k { i = places[k]; x[i] = add x[i], t[i]; t[i] = 0 }
    }

The gradient of a lookup in nested scans has this form; afterwards it writes only the rows that the inner scan read.
Each element is the same sum in the same order: ``t`` is zero elsewhere, and ``x`` has no -0.0, which adding zero would
change (:mod:`aotc.lowering.analysis.signed_zeros`). A position that was written twice is added once, as ``t`` is reset
to zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.opset import PARTIAL_WRITES
from aotc.ir.tensor.copies import Names, copy_region
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, use_counts, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.signed_zeros import values_without_negative_zeros
from aotc.lowering.analysis.trip_counts import counters, trip_count
from aotc.lowering.passes.canonicalize.array_passes import is_branch_worthwhile
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.threshold import Limit
from aotc.options import Options
from aotc.vmfb.dtypes import DTYPES, kind_of

INDEX = TensorType("i32")
INNER_SUM = Limit(
    7,
    "size of an array, in multiples of what an inner loop writes of it, up to which the inner sum is added whole",
    "a written element is read and written twice more, and each update takes a few commands",
)


def add_inner_sums(function: Function, options: Options) -> Function:
    """Return ``function`` with arrays of inner loops added only where the inner loops wrote."""
    if "while" not in function.body.names or "add" not in function.body.names:
        return function
    sums = _InnerSumFinder(function.body, options).sums_by_loop()
    return (
        function.with_body(_InnerSumRewriter(function.body, sums).region_with_sparse_sums(function.body))
        if sums
        else function
    )


def _largest_integer_of(v: Value) -> int:
    """Return the largest integer of a value's type."""
    row = DTYPES[v.type.dtype]
    return (1 << (row.bits - (row.kind == "i"))) - 1


@dataclass(frozen=True)
class _InnerSum:
    """An inner loop whose state ``number`` starts as zeros, and that the op ``total`` adds to the array ``x``.

    Attributes
    ----------
    loop, total : Op
    number : int
    x : Value
    writes : list of Op
        The updates of the state, in order.
    counter : Value
        The parameter of the loop's body that counts its iterations from 0.
    iterations : int
    """

    loop: Op
    total: Op
    number: int
    x: Value
    writes: list[Op]
    counter: Value
    iterations: int


class _InnerSumFinder:
    """Find the inner loops whose accumulated array the outer loop adds to another one."""

    def __init__(self, body: Region, options: Options) -> None:
        self.body, self.options = body, options
        self.counts = use_counts(body)
        self.makers = {v: op for op in walk(body) for v in op.results}
        self.constants = {v: op for v, op in self.makers.items() if op.name == "constant"}

    @cached_property
    def unsigned(self) -> set[Value]:
        """Return the values that contain no -0.0."""
        return values_without_negative_zeros(self.body)

    def sums_by_loop(self) -> dict[Op, _InnerSum]:
        """Return one rewritable sum of an inner loop for each outer loop that has one."""
        sums: dict[Op, _InnerSum] = {}
        inside: set[Op] = set()
        for outer in reversed([op for op in walk(self.body) if op.name == "while"]):
            body = outer.regions[1]
            one = next(filter(None, (self._inner_sum_of(op, body) for op in body.ops if op.name == "add")), None)
            if one is not None and one.loop not in sums and not inside & {one.loop}:
                sums[outer] = one
                inside.add(one.loop)
        return sums

    def _inner_sum_of(self, total: Op, body: Region) -> _InnerSum | None:
        """Return the inner loop whose array the op ``total`` adds; None if a rewrite does not pay."""
        for x, t in (total.operands, total.operands[::-1]):
            loop = self.makers.get(t)
            if loop is None or loop.name != "while" or loop not in body.ops or self.counts[t] != 1:
                continue
            number = loop.results.index(t)
            fill = splat_of(loop.operands[number], self.makers)
            is_zero = fill is not None and bool(fill == 0) and not np.signbit(fill)
            iterations = trip_count(loop, self.constants, {})
            counter = self._iteration_counter(loop, iterations or 0)
            writes = self._update_chain_of_state(loop.regions[1], number)
            tested = loop.regions[0].params[number] in use_counts(loop.regions[0])
            if (
                not (is_zero and iterations and counter and writes)
                or tested
                or not self._is_rewriting_worthwhile(writes, iterations)
            ):
                continue
            if kind_of(x.type.dtype) not in "fc" or x in self.unsigned:
                return _InnerSum(loop, total, number, x, writes, counter, iterations)
        return None

    def _iteration_counter(self, loop: Op, iterations: int) -> Value | None:
        """Return the loop parameter that counts iterations from 0 in a type wide enough for all of them, or None."""
        rows = counters(loop, self.constants, {}).items()
        return next((v for v, row in rows if row == (0, 1) and iterations - 1 <= _largest_integer_of(v)), None)

    def _update_chain_of_state(self, body: Region, number: int) -> list[Op]:
        """Return the chain of updates that computes next state ``number`` of a loop; empty if other ops take part."""
        chain: list[Op] = []
        v = body.results[number]
        while v is not body.params[number]:
            op = self.makers.get(v)
            if op is None or op not in body.ops or op.name not in PARTIAL_WRITES - {"pad"} or len(op.results) != 1:
                return []
            chain.append(op)
            v = op.operands[0]
        return chain[::-1]

    def _is_rewriting_worthwhile(self, writes: Sequence[Op], iterations: int) -> bool:
        """Return True if the inner loop writes so little of the array that adding only this part takes less time."""
        parts = [updated_values_of(op).type.shape for op in writes]
        shape = writes[0].result.type.shape
        if not is_static((*shape, *(n for part in parts for n in part))):
            return False
        if not is_branch_worthwhile(writes[0].result, self.options, iterations * len(writes)):
            return False
        written = iterations * sum(static(product(part)) for part in parts)
        return not INNER_SUM.holds(static(product(shape)) // max(written, 1))


def updated_values_of(write: Op) -> Value:
    """Return the operand with the values that an update op writes."""
    return write.operands[1 if write.name == "dynamic_update_slice" else 2]


def _update_index_operands(write: Op) -> Sequence[Value]:
    """Return the index operands of an update."""
    return write.operands[2:] if write.name == "dynamic_update_slice" else write.operands[1:2]


class _InnerSumRewriter:
    """Rewrite outer loops so that they add only the elements that their inner loops wrote."""

    def __init__(self, body: Region, sums: Mapping[Op, _InnerSum]) -> None:
        self.found, self.names = sums, Names(body)
        self.definitions = {v: op for op in walk(body) for v in op.results}

    def region_with_sparse_sums(self, region: Region) -> Region:
        """Return ``region`` with its nested loops rewritten so that only written elements are added."""
        b = Builder(self.names, self.definitions)
        for op in region.ops:
            self._append_rewritten(op, b)
        return region.with_ops(b.ops, region.results)

    def _append_rewritten(self, op: Op, b: Builder) -> None:
        """Append ``op``, or the rewritten loop in its place; regions are rewritten, too."""
        b.loc = op.loc
        if op in self.found:
            self._rewritten_outer_loop(op, self.found[op], b)
        else:
            b.append(op.on(op.operands, tuple(map(self.region_with_sparse_sums, op.regions))) if op.regions else op)

    def _new_value(self, hint: str, type_: TensorType) -> Value:
        return Value(self.names.fresh(hint), type_)

    def _rewritten_outer_loop(self, op: Op, one: _InnerSum, before: Builder) -> None:
        """Append the rewritten outer loop, which also carries a zeroed array for the inner loop to reuse."""
        zeros = before.constant(0, one.x.type)
        at_condition, inside, last = (self._new_value("zeros", one.x.type) for _ in range(3))
        b = Builder(self.names, self.definitions)
        recorded: list[list[_UpdateIndex]] = []
        written = again = inside
        for inner in op.regions[1].ops:
            if inner is one.loop:
                recorded, written = self._recording_inner_loop(one, inside, b)
            elif inner is one.total:
                again = self._add_written_elements_loop(one, recorded, written, b)
            else:
                self._append_rewritten(inner, b)
        condition, body = op.regions
        regions = (
            Region((*condition.params, at_condition), condition.ops, condition.results),
            Region((*body.params, inside), tuple(b.ops), (*body.results, again)),
        )
        before.append(Op(op.name, (*op.operands, zeros), (*op.results, last), op.attrs, regions, op.loc))

    def _recording_inner_loop(
        self, one: _InnerSum, zeros: Value, outer: Builder
    ) -> tuple[list[list[_UpdateIndex]], Value]:
        """Append the inner loop with recording of update indices; return the indices and the accumulated array."""
        loop, (condition, body) = one.loop, one.loop.regions
        own = {*body.params, *(v for op in body.ops for v in op.results)}
        rows = [
            [_UpdateIndex(v, self.definitions.get(v), v in own) for v in _update_index_operands(op)]
            for op in one.writes
        ]
        recorded = [place for row in rows for place in row if place.is_recorded]
        outer.loc = loop.loc
        types = [TensorType(p.value.type.dtype, (one.iterations, *p.value.type.shape)) for p in recorded]
        begin = [outer.constant(0, type_) for type_ in types]
        params, unread, ends = ([self._new_value("places", type_) for type_ in types] for _ in range(3))
        b = Builder(self.names, self.definitions, loc=loop.loc)
        for op in body.ops:
            self._append_rewritten(op, b)
        zero = b.constant(0, one.counter.type)
        after = []
        for place, param in zip(recorded, params):
            row = b.reshape(place.value, (1, *place.value.type.shape))
            starts = (one.counter, *[zero] * place.value.type.rank)
            after.append(b.make("dynamic_update_slice", (param, row, *starts)))
        for place, end in zip(recorded, ends):
            place.all = end
        # The inner loop starts with zeros instead of the outer array, so that it returns only its own sum.
        operands = list(loop.operands)
        operands[one.number] = zeros
        regions = (
            Region((*condition.params, *unread), condition.ops, condition.results),
            Region((*body.params, *params), tuple(b.ops), (*body.results, *after)),
        )
        outer.append(Op(loop.name, (*operands, *begin), (*loop.results, *ends), loop.attrs, regions, loop.loc))
        return rows, loop.results[one.number]

    def _add_written_elements_loop(
        self, one: _InnerSum, rows: Sequence[Sequence[_UpdateIndex]], written: Value, outer: Builder
    ) -> Value:
        """Append the loop that adds the written elements to the outer array and sets them to zero again."""
        outer.loc = one.total.loc
        begin = outer.constant(0, INDEX)
        tested, k, end = (self._new_value("k", INDEX) for _ in range(3))
        type_ = one.x.type
        unread, states, left = ([self._new_value(hint, type_) for hint in ("sum", "zeros")] for _ in range(3))
        test = Builder(self.names, self.definitions, loc=outer.loc)
        more = test.make("lt", (tested, test.constant(one.iterations, INDEX)))
        b = Builder(self.names, self.definitions, loc=outer.loc)
        x, t = states
        for write, row in zip(one.writes, rows):
            indices = [place.at_iteration(k, b) for place in row]
            x, t = (_add_written_slice if write.name == "dynamic_update_slice" else _add_written_scatter)(
                write, x, t, indices, b
            )
        following = b.make("add", (k, b.constant(1, INDEX)))
        body = Region((k, *states), tuple(b.ops), (following, x, t))
        regions = Region((tested, *unread), tuple(test.ops), (more,)), body
        results = (end, one.total.result, left[1])
        outer.append(Op("while", (begin, one.x, written), results, {}, regions, outer.loc))
        return left[1]


@dataclass
class _UpdateIndex:
    """Index operand of an update in a loop, and the means to compute it again after the loop.

    Attributes
    ----------
    value : Value
    maker : Op or None
    is_own : bool
        Is the index computed in the loop?
    all : Value or None
        The indices of all iterations, if they are recorded.
    """

    value: Value
    maker: Op | None
    is_own: bool
    all: Value | None = None

    @property
    def is_recorded(self) -> bool:
        """Return True if the loop must record the index."""
        return self.is_own and (self.maker is None or self.maker.name != "constant")

    def at_iteration(self, k: Value, b: Builder) -> Value:
        """Return the index of iteration ``k``."""
        if self.all is None:
            if self.maker is None or not self.is_own:
                return self.value
            return b.constant(self.maker.attrs["value"], self.value.type)
        starts = (k, *[b.constant(0, INDEX)] * self.value.type.rank)
        row = b.make("dynamic_slice", (self.all, *starts), {"sizes": (1, *self.value.type.shape)})
        return b.reshape(row, self.value.type.shape)


def _add_written_slice(write: Op, x: Value, t: Value, starts: Sequence[Value], b: Builder) -> tuple[Value, Value]:
    """Return ``x`` plus the slice of ``t`` that ``write`` wrote, and ``t`` with zeros there."""
    sizes = {"sizes": updated_values_of(write).type.shape}
    old, part = (b.make("dynamic_slice", (v, *starts), sizes) for v in (x, t))
    added = b.make("dynamic_update_slice", (x, b.make("add", (old, part)), *starts))
    return added, b.make("dynamic_update_slice", (t, b.constant(0, part.type), *starts))


def _add_written_scatter(write: Op, x: Value, t: Value, indices: Sequence[Value], b: Builder) -> tuple[Value, Value]:
    """Return ``x`` plus the elements of ``t`` that the scatter ``write`` wrote, and ``t`` with zeros there."""
    a, shape = write.attrs, updated_values_of(write).type.shape
    sizes = [1] * x.type.rank
    skipped = {*a["inserted_window_dims"], *a["input_batching_dims"]}
    window = (d for d in range(x.type.rank) if d not in skipped)
    for d, u in zip(window, a["update_window_dims"], strict=True):
        sizes[d] = shape[u]
    reads = {
        "offset_dims": a["update_window_dims"], "collapsed_slice_dims": a["inserted_window_dims"],
        "operand_batching_dims": a["input_batching_dims"],
        "start_indices_batching_dims": a["scatter_indices_batching_dims"],
        "start_index_map": a["scatter_dims_to_operand_dims"], "index_vector_dim": a["index_vector_dim"],
        "slice_sizes": tuple(sizes),
    }  # fmt: skip
    old, part = (b.make("gather", (v, *indices), reads) for v in (x, t))
    one, other = (Value(b.names.fresh("s"), TensorType(x.type.dtype)) for _ in range(2))
    region = Region((one, other), (), (other,))
    added, cleared = b.make("add", (old, part)), b.constant(0, part.type)
    summed = b.make("scatter", (x, *indices, added), a, x.type, regions=(region,))
    return summed, b.make("scatter", (t, *indices, cleared), a, t.type, regions=(copy_region(region, b.names),))
