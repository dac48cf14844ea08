"""Regions of kind loop on a GPU: one element per thread, or several independent ones.

The elements of a thread are neighbours along the last axis if every array is accessed in that order; vectors are then
loaded and stored. Otherwise they are far apart, so that adjacent threads access neighbours::

    for p in parallel(0, n // 4):              for p in parallel(0, n // 4):
        for u in lanes(0, 4):                      for u in lanes(0, 4):
            y[4*p + u] = exp(x[4*p + u])               y[p + n//4*u] = x[p + n//4*u + 1]

If the number of elements is not a multiple of the elements per thread, threads with fewer elements compute them one by
one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, mod, product, sym
from aotc.ir.loop.ir import Apply, For, If, Kernel, Stmt
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index, linearize
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import Emit, grid_loop, make_axes, substitute_loops
from aotc.lowering.elements.windows import window_element_emitter
from aotc.lowering.plans.gpu_loops import ThreadLoopPlan, lane_to_element_indices


def lower_thread_loops(b: RegionBuilder, plan: ThreadLoopPlan) -> Kernel:
    """Lower an elementwise region to a GPU thread per element or per few elements."""
    grid, body = gpu_loops_of_plan(b, plan, window_element_emitter(b, b.elements()))
    return b.kernel(grid, body, b.scalar_operations())


def gpu_loops_of_plan(b: RegionBuilder, plan: ThreadLoopPlan, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and thread loops of a GPU plan; ``emit(block, index)`` adds one element's statements."""
    merged = make_axes(b.shape, plan.axes)
    if not merged:
        alone: list[Stmt] = []
        emit(alone, b.anchors.space)
        return 1, tuple(alone)
    if plan.lanes > 1:
        return _ThreadLanes(b, plan, emit).grid_and_loops()
    return grid_loop(
        merged, None, lambda block, at, begin, end: emit(block, substitute_loops(b.anchors.space, b.shape, merged, at))
    )


class _ThreadLanes:
    """Emit a grid of threads with ``count`` elements each."""

    def __init__(self, b: RegionBuilder, plan: ThreadLoopPlan, emit: Emit) -> None:
        """Divide the elements among threads, a fixed number of lanes for each."""
        self.b, self.emit, self.count = b, emit, plan.lanes
        self.merged = make_axes(b.shape, plan.axes)
        self.extents = [a.extent for a in self.merged]
        self.total = product(self.extents)
        self.is_whole = mod(self.total, self.count) == 0
        self.items = (self.total + (0 if self.is_whole else self.count - 1)) // self.count
        self.thread, self.lane = sym("p", 0, self.items), b.fresh("u")
        self.number = lane_to_element_indices(plan.order, self.thread, self.extents, self.count, self.items)

    def grid_and_loops(self) -> tuple[Dim, tuple[Stmt, ...]]:
        """Return the grid size and the loop over elements of a thread."""
        number = self.number
        lanes = For(self.lane, 0, self.count, tuple(self._thread_body(number(sym(self.lane, 0, self.count)))), "lanes")
        block: list[Stmt] = [lanes]
        if not self.is_whole:
            block = [If(self._lane_exists(number(self.count - 1)), (lanes,), (self._emit_lanes_one_by_one(number),))]
        return self.items, (For("p", 0, self.items, tuple(block), "parallel"),)

    def _thread_body(self, at: Sequence[Dim]) -> list[Stmt]:
        block: list[Stmt] = []
        self.emit(block, substitute_loops(self.b.anchors.space, self.b.shape, self.merged, at))
        return block

    # --- where there are fewer elements than lanes ---

    def _lane_exists(self, at: Index) -> Apply:
        return Apply("lt", (IndexScalar(linearize(at, self.extents)), IndexScalar(self.total)), "i1")

    def _emit_lanes_one_by_one(self, number: Callable[[Dim], Index]) -> Stmt:
        v = self.b.fresh("v")
        at = number(sym(v, 0, self.count))
        return For(v, 0, self.count, (If(self._lane_exists(at), tuple(self._thread_body(at))),))
