"""Short rows on a CPU, one row per vector lane.

The shortest rows are unrolled, and LLVM vectorises across them. For longer rows with expensive per-row scalars, only
these scalars are computed in vectors::

    for q in range(0, 31):
        for l in range(0, 16):
            acc = 0
            for k in range(0, 20):
                acc += x[16*q + l, k] * w[k]
            sums[l] = acc
        for l in range(0, 16):
            y[16*q + l] = log1p(exp(sums[l]))
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import Dim, static, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, For, Load, Stmt, Store, Var
from aotc.ir.opset import ACCUMULATED, SCALARS
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.prefix_scans import combiner
from aotc.lowering.elements.builder import RegionBuilder, relocate
from aotc.lowering.elements.elements import provide
from aotc.lowering.elements.nests import NestAxis, place, serial
from aotc.lowering.plans.operand_reuse import is_light
from aotc.lowering.regions.reduce.rows import Rows
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import kind_of, size_of

UNROLLED_ROW = Limit(
    8,
    "elements of a row that is unrolled on a CPU, so that neighbouring rows share vectors",
    "Zen 5, 8192 rows of f32, us in loops and unrolled: sums of 3 4.1 and 0.6, of 8 3.1 and 2.8, of 9 6.4 and 17; "
    "norms of 8 9.0 and 3.0",
)
UNROLLED_LONGER_ROW = Limit(
    14,
    "elements of an unrolled row, if their number is even or expensive functions are applied to them",
    "Zen 5, 8192 rows of f32, us in loops and unrolled: sums of 14 50 and 25, of 16 5 and 29; log-sum-exp of 13 181 "
    "and 59",
)
LIGHT_NUMBERS = Limit(
    8,
    "vector operations on the per-row scalars of a short row, up to which each row computes them alone",
    "Zen 5, 8192 rows of 20 f32, us alone and for 16 rows at once: logistic (work 14) of sums 42 and 22, x / norm "
    "(work 6) 26 and 34",
)


class ShortRows(Rows):
    """Rows, of which those that are short enough share vectors."""

    def __init__(self, b: RegionBuilder, kept: list[int], reduced: list[int]) -> None:
        super().__init__(b, kept, reduced)
        if self._is_written_out():
            self.unroll = UNROLLED_LONGER_ROW

    def _item_of(self, block: list[Stmt], outer: list[NestAxis], tail: list[NestAxis], syms: list[Dim]) -> None:
        lanes = self._lanes(tail)
        if not lanes:
            super()._item_of(block, outer, tail, syms)
            return
        serial(tail[:-1], syms, lambda inner, s: self._along(inner, [*outer, *tail], s, lanes), block)

    def _is_written_out(self) -> bool:
        """Return True if rows are so short that vectors along them do not help.

        LLVM vectorises odd numbers of cheap elements by itself.
        """
        ops = [op for loop in self.stages.loops for op in loop.ops]
        n = self.stages.elements
        if not all(combiner(op) in ACCUMULATED and kind_of(op.result.type.dtype) == "f" for op in ops):
            return False
        if UNROLLED_ROW.holds(n) or self.outs:
            return UNROLLED_ROW.holds(n)
        return UNROLLED_LONGER_ROW.holds(n) and (n % 2 == 0 or not is_light(self.b, ops))

    def _lanes(self, tail: Sequence[NestAxis]) -> int:
        """Return how many rows compute their scalars together; 0 if each row computes its own."""
        numbers = [v for v in self.b.ops if self.stages.is_row(v)]
        work = sum(SCALARS[op.name].vector_work for v in numbers if (op := self.b.ops[v]).name in SCALARS)
        if self.unroll or self.scratch or not tail or LIGHT_NUMBERS.holds(work):
            return 0
        lanes = self.b.target.vector_bytes // max(size_of(v.type.dtype) for v in numbers)
        return lanes if isinstance(tail[-1].extent, int) and tail[-1].extent >= lanes else 0

    def _along(self, block: list[Stmt], axes: Sequence[NestAxis], syms: list[Dim], lanes: int) -> None:
        """Write the loop over the rows of the last axis, ``lanes`` at a time, and a loop over the remaining rows."""
        b, axis = self.b, axes[-1]
        whole = static(axis.extent) // lanes
        turn: list[Stmt] = []
        lane = sym("l", 0, lanes)
        together = sym(axis.name, 0, whole) * lanes + lane
        self._together(turn, place(b.anchors.space, b.shape, axes, [*syms, together]), lane, lanes)
        block.append(For(axis.name, 0, whole, tuple(turn)))
        if whole * lanes != axis.extent:
            rest: list[Stmt] = []
            one = sym(axis.name, whole * lanes, axis.extent)
            self._row(rest, place(b.anchors.space, b.shape, axes, [*syms, one]))
            block.append(For(axis.name, whole * lanes, axis.extent, tuple(rest)))

    def _together(self, block: list[Stmt], at: Index, lane: Dim, lanes: int) -> None:
        """Write all stages of the rows ``at`` for each ``lane``, with one loop over lanes per stage."""
        self.e.anchored.clear()
        self.keep, self.known = [], {}
        for loop in self.stages.loops:
            for v in self.stages.numbers_before(loop, ()):
                self._number(block, at, lane, lanes, v)
            inner: list[Stmt] = []
            accs = self._accumulators(loop.ops, inner)
            self._over_the_row(inner, at, loop, accs)
            made = [(v, acc) for op in loop.ops for v, acc in zip(op.results, accs[op], strict=True)]
            sums = [(v, acc, self._of_lanes(block, v, lanes)) for v, acc in made]
            inner += [Store(each, (lane,), Load(acc, ())) for _, acc, each in sums]
            block.append(For("l", 0, lanes, tuple(inner)))
            for v, _, each in sums:
                self.e.anchor(v, provide(Load(each, (lane,))))
        results: list[Stmt] = []
        self._enter(results)
        for out, v in self.rows:
            index = relocate(self.b, v, at)
            results.append(Store(out, index, self.e.at(v, index)))
        if results:
            block.append(For("l", 0, lanes, tuple(results)))

    def _number(self, block: list[Stmt], at: Index, lane: Dim, lanes: int, value: Value) -> None:
        """Write the loop that computes one scalar of each row."""
        inner: list[Stmt] = []
        self._enter(inner)
        index = relocate(self.b, value, at)
        scalar = self.e.at(value, index)
        if isinstance(scalar, Apply | Var):
            numbers = self._of_lanes(block, value, lanes)
            block.append(For("l", 0, lanes, (*inner, Store(numbers, (lane,), scalar))))
            self.known[value] = index, Load(numbers, (lane,))

    def _of_lanes(self, block: list[Stmt], value: Value, lanes: int) -> Buffer:
        """Return a new buffer with one scalar per row."""
        buffer = Buffer(self.b.fresh("rows"), value.type.dtype, (lanes,), "private")
        block.append(Alloc(buffer))
        return buffer
