"""Carry a flag with each loop array that is true if it has no -0.0: adding a small update then writes only its part.

Before::

    while c { x = add x, (dynamic_update_slice zeros, g, i) }       // changes each -0.0 of x to 0.0
After::

    clean = false                                                   // whether x has no -0.0
    while c {
        y = case clean { yield add x, zeros } { yield x }           // the first side runs about once in the loop
        s = add (dynamic_slice x, i), g
        x = dynamic_update_slice y, s, i
        clean = or clean, (no element of s is -0.0)
    }

Results have the same bits as before. The gradient of a loop that updates an array starts as the gradient of the loss,
whose zeros may have any sign; after one iteration it rarely has a -0.0. Arrays that never have a -0.0 need no flag
(:mod:`aotc.lowering.analysis.signed_zeros`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from aotc.ir.dims.algebra import static
from aotc.ir.opset import CONTROL_FLOW, PARTIAL_WRITES
from aotc.ir.opset.control import RUNS_ONCE
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.copies import Names, copy_region
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, use_counts, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.parallel_scatters import has_disjoint_updates, is_overwriting_scatter
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.analysis.signed_zeros import values_without_negative_zeros
from aotc.lowering.passes.canonicalize.array_passes import is_branch_worthwhile, is_small_part
from aotc.lowering.passes.rewrite import Builder
from aotc.options import Options
from aotc.vmfb.dtypes import DTYPES, kind_of

FLAG = TensorType("i1")


def track_negative_zeros(function: Function, options: Options) -> Function:
    """Return ``function`` with a flag for each large loop array to which updates of zeros are added."""
    names = function.body.names
    if "while" not in names or "add" not in names:
        return function
    tracker = _NegativeZeroTracker(function.body, options)
    return function.with_body(tracker.body_with_flags()) if tracker.find_tracked_arrays() else function


def combined_slice(
    name: str, part: Value, x: Value, starts: Sequence[Value], b: Builder, base: Value | None = None
) -> Value:
    """Return ``x`` (or ``base``) with ``part`` combined by op ``name`` into the slice that begins at ``starts``."""
    old = b.make("dynamic_slice", (x, *starts), {"sizes": part.type.shape})
    return b.make("dynamic_update_slice", (base or x, b.make(name, (old, part)), *starts))


def padded_starts(pad: Op, b: Builder) -> list[Value]:
    """Return the start of the operand of ``pad`` in its result, one index per dim."""
    return [b.constant(n, TensorType("i64")) for n in map(static, dims_of(pad.attrs, "low"))]


@dataclass
class _NegativeZeroTracker:
    """Find the loop states that need a flag "contains no -0.0", and add the flags to the loops.

    Attributes
    ----------
    states : set
        The numbers of states with a flag, with their loops.
    tracked : set of Value
        The values that have a flag.
    flags : dict of Value to Value
        The flags of values: scalars that are true if the value has no -0.0.
    """

    body: Region
    options: Options
    states: set[tuple[Value, int]] = field(init=False)
    tracked: set[Value] = field(default_factory=set)
    sums: dict[Op, tuple[Value, Op | None]] = field(default_factory=dict)
    flags: dict[Value, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Find the loop states that can have a flag; there are none if no sum adds an update of zeros."""
        self.makers = {v: op for op in walk(self.body) for v in op.results}
        self.counts = use_counts(self.body)
        loops = [op for op in walk(self.body) if op.name == "while" and op.results]
        sums = any(self._update_of_zeros(v) for op in walk(self.body) if op.name == "add" for v in op.operands)
        rows = [(op, n) for op in loops for n in range(len(op.results))] if sums else []
        self.states = {(op.results[0], n) for op, n in rows if self._is_trackable(op.results[n])}

    @cached_property
    def unsigned(self) -> set[Value]:
        """Return the values that never have a -0.0."""
        return values_without_negative_zeros(self.body)

    def _is_trackable(self, v: Value) -> bool:
        is_tested = kind_of(v.type.dtype) == "f" and DTYPES[v.type.dtype].bits % 8 == 0  # as integers of as many bits
        return is_tested and is_branch_worthwhile(v, self.options) and v not in self.unsigned

    # --- analysis ---

    def find_tracked_arrays(self) -> bool:
        """Find the arrays for which the flag can be computed; return True if an addition needs one."""
        if not self.states:
            return False
        loops = [op for op in walk(self.body) if op.name == "while"]
        while True:
            self.tracked, self.sums = set(), {}
            for op in loops:
                for n in self._tracked_state_numbers(op):
                    self.tracked.update((op.results[n], *(r.params[n] for r in op.regions)))
            self._record_tracked_values(self.body)
            rows = [(op, n) for op in loops for n in self._tracked_state_numbers(op)]
            failing = {(op.results[0], n) for op, n in rows if not self._has_known_zeros(op.regions[1].results[n])}
            if not failing:
                hopeful = self._states_that_may_become_free(rows)
                failing = {(op.results[0], n) for op, n in rows if op.results[n] not in hopeful}
            if not failing:
                return bool(self.sums)
            self.states -= failing

    def _states_that_may_become_free(self, states: Sequence[tuple[Op, int]]) -> set[Value]:
        """Return the tracked loop arrays that may become free of -0.0: initially, or after a sum."""
        hopeful, count = set(self.unsigned), -1
        while len(hopeful) != count:
            count = len(hopeful)
            for op, n in states:
                if not hopeful.isdisjoint((op.operands[n], op.regions[1].results[n])):
                    hopeful.update((op.results[n], *(r.params[n] for r in op.regions)))
            for op in walk(self.body):
                if op in self.sums or (
                    op.name != "case" and hopeful.issuperset(self._operands_needing_flags(op) or [None])
                ):
                    hopeful.update(op.results[:1])
                elif op.name == "case":
                    rows = zip(op.results, zip(*(r.results for r in op.regions)))
                    hopeful.update(v for v, row in rows if not hopeful.isdisjoint(row))
        return hopeful

    def _tracked_state_numbers(self, loop: Op) -> list[int]:
        return [n for n in range(len(loop.results)) if (loop.results[0], n) in self.states]

    def _has_known_zeros(self, v: Value) -> bool:
        return v in self.unsigned or v in self.tracked

    def _record_tracked_values(self, region: Region) -> None:
        """Record the values of ``region`` that get a flag, and the additions that read one."""
        for op in region.ops:
            for inner in op.regions:
                if op.name in CONTROL_FLOW:
                    self._record_tracked_values(inner)
            if op.name == "case":
                rows = enumerate(zip(*(r.results for r in op.regions)))
                self.tracked.update(op.results[n] for n, row in rows if self._are_tracked(op.results[n], row))
            elif len(op.results) == 1 and self._are_tracked(op.result, self._operands_needing_flags(op)):
                self.tracked.add(op.result)
            if op.name == "add" and (terms := self._sum_with_zero_update(op)) is not None:
                self.sums[op] = terms

    def _are_tracked(self, v: Value, arrays: Sequence[Value]) -> bool:
        """Return True if ``v`` has a flag because each of ``arrays`` has one or needs none."""
        return (
            bool(arrays)
            and v not in self.unsigned
            and all(map(self._has_known_zeros, arrays))
            and self._is_trackable(v)
        )

    def _operands_needing_flags(self, op: Op) -> Sequence[Value]:
        """Return the operands of ``op`` that must be free of -0.0 for its result to be free; empty if unknown."""
        match op.name:
            case "reshape":
                return op.operands
            case "dynamic_update_slice":
                return op.operands[:1]
            case "scatter" if is_overwriting_scatter(op) or combiner_op_name(op) == "add":
                return op.operands[:1]
            case "select":
                return op.operands[1:]
            case "add":
                return [v for v in op.operands if v in self.tracked][:1]
        return ()

    def _sum_with_zero_update(self, op: Op) -> tuple[Value, Op | None] | None:
        """Return the flagged array to which ``op`` adds an update of zeros, and the update (None for zeros alone)."""
        for x, part in (op.operands, op.operands[::-1]):
            update = self._update_of_zeros(part) if x in self.tracked else None
            if update is not None:
                return x, update if update.name in PARTIAL_WRITES else None
        return None

    def _update_of_zeros(self, part: Value) -> Op | None:
        """Return the op that computes ``part`` if it is an update of zeros, or zeros alone; else None."""
        op = self.makers.get(part)
        if op is not None and op.name == "reshape" and self.counts.get(part) == 1:
            op = self.makers.get(op.operands[0])
        if op is None or len(op.results) != 1:
            return None
        return op if self._is_all_zeros(op.result) or self._is_elementwise_zero_update(op) else None

    def _is_all_zeros(self, v: Value) -> bool:
        fill = splat_of(v, self.makers)
        return fill is not None and bool(fill == 0) and not np.signbit(fill)

    def _is_elementwise_zero_update(self, op: Op) -> bool:
        """Return True if ``op`` is an update of zeros whose elements can be added one by one."""
        if op.name not in PARTIAL_WRITES or len(op.results) != 1 or self.counts.get(op.result) != 1:
            return False
        if op.name == "pad":
            return self._is_all_zeros(op.operands[1]) and is_small_part(op)
        if op.name == "scatter":
            is_wide = DTYPES[op.result.type.dtype].bits >= 32
            if is_overwriting_scatter(op) or combiner_op_name(op) != "add" or not (is_wide or has_disjoint_updates(op)):
                return False
        return self._is_all_zeros(op.operands[0])

    # --- rewriting ---

    def body_with_flags(self) -> Region:
        """Return the function's body with flags."""
        return self._region_with_flags(self.body, Builder(Names(self.body)))

    def _region_with_flags(self, region: Region, outer: Builder, flagged: Sequence[int] = ()) -> Region:
        """Return ``region`` rewritten; the flags of its results numbered ``flagged`` are further results."""
        b = Builder(outer.names, outer.definitions)
        for op in region.ops:
            b.loc = op.loc
            if op.name == "while":
                self._loop_with_flags(op, b)
            elif op.name == "case":
                self._branch_with_flags(op, b)
            elif op in self.sums:
                self._append_flagged_sum(op, *self.sums[op], b)
            else:
                b.append(op)
                if len(op.results) == 1 and op.result in self.tracked:
                    self.flags[op.result] = self._flag_of_result(op, b)
        more = [self._flag_of(region.results[n], b) for n in flagged]
        return Region(region.params, tuple(b.ops), (*region.results, *more))

    def _flag_of(self, v: Value, b: Builder) -> Value:
        """Return the scalar flag of ``v``; the constant false if nothing is known about the array."""
        return self.flags.get(v) or b.constant(v in self.unsigned, FLAG)

    def _loop_with_flags(self, op: Op, b: Builder) -> None:
        """Append a loop that also carries the flags of its tracked states."""
        numbers = self._tracked_state_numbers(op)
        begin = [self._flag_of(op.operands[n], b) for n in numbers]
        regions = []
        for region, results in zip(op.regions, ([], numbers)):
            flags = [Value(b.names.fresh("clean"), FLAG) for _ in numbers]
            self.flags.update((region.params[n], flag) for n, flag in zip(numbers, flags))
            inner = self._region_with_flags(region, b, results)
            regions.append(Region((*region.params, *flags), inner.ops, inner.results))
        ends = [Value(b.names.fresh("clean"), FLAG) for _ in numbers]
        self.flags.update((op.results[n], flag) for n, flag in zip(numbers, ends))
        b.append(Op(op.name, (*op.operands, *begin), (*op.results, *ends), op.attrs, tuple(regions), op.loc))

    def _branch_with_flags(self, op: Op, b: Builder) -> None:
        """Append a ``case`` that also returns the flags of its tracked results."""
        numbers = [n for n, v in enumerate(op.results) if v in self.tracked]
        regions = tuple([self._region_with_flags(r, b, numbers) for r in op.regions])
        ends = [Value(b.names.fresh("clean"), FLAG) for _ in numbers]
        self.flags.update((op.results[n], flag) for n, flag in zip(numbers, ends))
        b.append(Op(op.name, op.operands, (*op.results, *ends), op.attrs, regions, op.loc))

    def _flag_of_result(self, op: Op, b: Builder) -> Value:
        """Return the flag of the result of ``op``."""
        flags = [self._flag_of(v, b) for v in self._operands_needing_flags(op)]
        flag = flags[0] if len(flags) == 1 else b.make("and", flags)
        written = op.operands[1 if op.name == "dynamic_update_slice" else 2] if op.name in PARTIAL_WRITES else None
        if written is None or written in self.unsigned or (op.name == "scatter" and not is_overwriting_scatter(op)):
            return flag
        return b.make("and", (flag, self._test_no_negative_zero(written, b)))

    def _test_no_negative_zero(self, v: Value, b: Builder) -> Value:
        """Append the test that no element of ``v`` is -0.0."""
        bits = DTYPES[v.type.dtype].bits
        words = b.make("bitcast", (v,), {}, TensorType(f"i{bits}", v.type.shape))
        least = b.constant(-1 << (bits - 1), words.type)
        differs = b.make("ne", (words, least))
        return b.reduce(differs, b.constant(True, FLAG), range(v.type.rank), b.combiner("and", "i1"))

    def _append_flagged_sum(self, op: Op, x: Value, update: Op | None, b: Builder) -> None:
        """Append the sum of ``x`` and an ``update`` of zeros, which adds only updated elements if flags allow."""
        flag, inner = self._flag_of(x, b), Builder(b.names, b.definitions, loc=op.loc)
        index = b.convert(flag, "i32")
        added = inner.make("add", (x, inner.constant(0, x.type)))
        regions = Region((), tuple(inner.ops), (added,)), Region((), (), (x,))
        base = op.result if update is None else Value(b.names.fresh("base"), x.type)
        b.append(Op("case", (index,), (base,), {RUNS_ONCE: 0}, regions, op.loc))
        if update is None:
            self.flags[op.result] = b.constant(True, FLAG)
            return
        shape = update.result.type.shape
        whole = b.reshape(base, shape)
        if update.name == "scatter":
            region = copy_region(update.regions[0], b.names)
            total = b.make("scatter", (whole, *update.operands[1:]), update.attrs, whole.type, regions=(region,))
            clean = b.constant(True, FLAG)
        else:
            pads = update.name == "pad"
            part = update.operands[0 if pads else 1]
            starts = padded_starts(update, b) if pads else update.operands[2:]
            total = combined_slice("add", part, b.reshape(x, shape), starts, b, whole)
            clean = b.make("or", (flag, self._test_no_negative_zero(b.definitions[total].operands[1], b)))
        b.append(Op("reshape", (total,), (op.result,), {}, loc=op.loc))
        self.flags[op.result] = clean
