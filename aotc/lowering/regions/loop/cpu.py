"""Regions of kind loop and window on a CPU: one pass over the elements."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from aotc.ir.dims.algebra import Dim, maximum, minimum
from aotc.ir.loop.ir import For, Kernel, Stmt
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import Emit, append_serial_loops, grid_loop, make_axes, substitute_loops
from aotc.lowering.elements.windows import window_element_emitter
from aotc.lowering.plans.cpu_loops import LoopPlan


def lower_loops(b: RegionBuilder, plan: LoopPlan) -> Kernel:
    """Lower an elementwise region to one loop nest on the CPU."""
    grid, body = cpu_loops_of_plan(b, plan, window_element_emitter(b, b.elements()))
    return b.kernel(grid, body, b.scalar_operations())


def cpu_loops_of_plan(b: RegionBuilder, plan: LoopPlan, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and loop nest of a CPU plan; ``emit(block, index)`` adds the statements of one element."""
    axes = make_axes(b.shape, plan.axes)
    if not axes:
        alone: list[Stmt] = []
        emit(alone, b.anchors.space)
        return 1, tuple(alone)
    outer, inner = axes[: -plan.inner], axes[-plan.inner :]
    *tail, last = inner

    def innermost_loops(syms: list[Dim]) -> list[For]:
        """Return the innermost loop, in several segments if the plan cuts it."""
        loops = []
        ends: list[tuple[int, Dim]] = [*pairwise(plan.cuts)] if plan.cuts else [(0, last.extent)]
        for lo, hi in ends:
            inside: list[Stmt] = []
            emit(
                inside, substitute_loops(b.anchors.space, b.shape, [*outer, *tail, last], [*syms, last.symbol(lo, hi)])
            )
            loops.append(For(last.name, lo, hi, tuple(inside)))
        return loops

    def append_loops(block: list[Stmt], syms: list[Dim]) -> None:
        block += innermost_loops(syms)

    def emit_item(block: list[Stmt], symbols: list[Dim], begin: Dim, end: Dim) -> None:
        """Emit an item: a range of the innermost axis, of the outer axis, or all iterations of the inner axes."""
        inside: list[Stmt] = []
        if plan.chunk:
            for one in innermost_loops(symbols):  # an item has a part of each segment; most of these are empty
                first, behind = (maximum(begin, one.begin), minimum(end, one.end)) if plan.cuts else (begin, end)
                block.append(replace(one, begin=first, end=behind))
        elif plan.rows:
            append_serial_loops(tail, [*symbols, outer[-1].symbol()], append_loops, inside)
            block.append(For(outer[-1].name, begin, end, tuple(inside)))
        else:
            append_serial_loops(tail, symbols, append_loops, block)

    if plan.rows:
        return grid_loop(outer[:-1], (outer[-1], plan.rows), emit_item, int(plan.is_across))
    return grid_loop(outer, (last, plan.chunk) if plan.chunk else None, emit_item)
