"""Regions of kind loop on a GPU: one element per thread, or several independent ones.

A thread takes neighbours along the last axis if every array is accessed in that order; the emitter then loads and
stores vectors. Otherwise its elements are far apart, so that adjacent threads still access neighbours::

    for p in parallel(0, n // 4):              for p in parallel(0, n // 4):
        for u in lanes(0, 4):                      for u in lanes(0, 4):
            y[4*p + u] = exp(x[4*p + u])               y[p + n//4*u] = x[p + n//4*u + 1]

If the number of elements is not a multiple of that, threads with fewer elements compute them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, Expr, Sym, mod, product, sym
from aotc.ir.loop.access import accesses
from aotc.ir.loop.ir import Apply, For, If, Let, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.nests import Emit, NestAxis, coefficient, grid_loop, place
from aotc.lowering.plans.thresholds import LANE_BYTES, LANE_ELEMENTS, LANE_THREADS
from aotc.lowering.regions.loop.gpu_transpose import tiles_over
from aotc.lowering.threshold import Limit
from aotc.vmfb.dtypes import size_of


def threads_over(
    b: RegionBuilder, e: Elements, merged: list[NestAxis], emit: Emit, trial: list[Stmt]
) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and the loops of a region whose element ``emit`` writes; ``trial`` is one such element."""
    count = lanes_of(product(a.extent for a in merged), trial)
    tiles = tiles_over(b, e, merged, emit) if _is_flat(trial) else None
    if tiles or count > 1:
        return tiles or _Lanes(b, merged, emit, count).loops()
    return grid_loop(
        merged, None, lambda block, at, begin, end: emit(block, place(b.anchors.space, b.shape, merged, at))
    )


LANE_STATEMENTS = Limit(
    512,
    "statements of a thread that computes several elements",
    "bounds registers and compile time",
)


def lanes_of(elements: Dim, body: Sequence[Stmt]) -> int:
    """Return the elements per thread: enough to fill a vector, few enough to keep a GPU busy."""
    if not _is_flat(body):
        return 1
    sizes = [size_of(a.buffer.dtype) for a in accesses(tuple(body)) if a.buffer.space == "global"]
    count = max(LANE_BYTES.value // max(sizes, default=1), LANE_ELEMENTS.value)
    while count > 1 and not (
        LANE_STATEMENTS.holds(count * len(body))
        and (not isinstance(elements, int) or not LANE_THREADS.holds(elements // count))
    ):
        count //= 2
    return count


def _is_flat(body: Sequence[Stmt]) -> bool:
    return all(isinstance(s, Let | Store) for s in body)


class _Lanes:
    """Emitter of a grid of threads with ``count`` elements each."""

    def __init__(self, b: RegionBuilder, merged: list[NestAxis], emit: Emit, count: int) -> None:
        self.b, self.merged, self.emit, self.count = b, merged, emit, count
        self.extents = [a.extent for a in merged]
        self.total = product(self.extents)
        self.is_whole = mod(self.total, count) == 0
        self.items = (self.total + (0 if self.is_whole else count - 1)) // count
        self.thread, self.lane = sym("p", 0, self.items), b.fresh("u")

    def loops(self) -> tuple[Dim, tuple[Stmt, ...]]:
        """Return the grid size and its loop."""
        number = next(way for way in (self._neighbours, self._outermost, self._apart) if self._fits(way))
        lanes = For(self.lane, 0, self.count, tuple(self._body(number(self._symbol()))), "lanes")
        block: list[Stmt] = [lanes]
        if not self.is_whole:
            block = [If(self._exists(number(self.count - 1)), (lanes,), (self._one_by_one(number),))]
        return self.items, (For("p", 0, self.items, tuple(block), "parallel"),)

    def _symbol(self) -> Dim:
        return sym(self.lane, 0, self.count)

    def _body(self, at: Sequence[Dim]) -> list[Stmt]:
        block: list[Stmt] = []
        self.emit(block, place(self.b.anchors.space, self.b.shape, self.merged, at))
        return block

    # --- which element is that of lane u? ---

    def _neighbours(self, u: Dim) -> Index:
        return delinearize(self.thread * self.count + u, self.extents)

    def _outermost(self, u: Dim) -> Index:
        """Return elements that differ along the first axis only; the other indices are the same in all lanes."""
        first = self.extents[0] // self.count
        at = delinearize(self.thread, [first, *self.extents[1:]])
        return (at[0] + u * first, *at[1:])

    def _apart(self, u: Dim) -> Index:
        return delinearize(self.thread + u * self.items, self.extents)

    def _fits(self, number: Callable[[Dim], Index]) -> bool:
        if number == self._neighbours:
            return self._are_side_by_side()
        return number == self._apart or mod(self.extents[0], self.count) == 0

    def _are_side_by_side(self) -> bool:
        """Return True if every array is accessed at adjacent, aligned elements by the lanes, or at the same one."""
        ((((lane,), _),),) = (self._symbol().terms,)  # type: ignore[union-attr]
        assert isinstance(lane, Sym)
        for a in accesses(tuple(self._body(self._neighbours(self._symbol())))):
            if a.buffer.space != "global" or a.index is None:
                continue
            flat = linearize(a.index, a.buffer.shape)
            step = coefficient(flat, lane)
            if step != 0 and (step != 1 or not is_multiple(flat - self._symbol(), self.count)):
                return False
        return True

    # --- where there are fewer elements than lanes ---

    def _exists(self, at: Index) -> Apply:
        return Apply("lt", (IndexScalar(linearize(at, self.extents)), IndexScalar(self.total)), "i1")

    def _one_by_one(self, number: Callable[[Dim], Index]) -> Stmt:
        v = self.b.fresh("v")
        at = number(sym(v, 0, self.count))
        return For(v, 0, self.count, (If(self._exists(at), tuple(self._body(at))),))


def is_multiple(flat: Dim, of: int) -> bool:
    """Return True if each term of ``flat`` is a multiple of ``of``."""
    if isinstance(flat, Expr):
        return flat.const % of == 0 and all(c % of == 0 for _, c in flat.terms)
    return flat % of == 0
