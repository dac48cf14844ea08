"""Emit loops over elements by any plan of loops, for lowerings with their own statements for an element."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.ir import Stmt
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.nests import Emit
from aotc.lowering.plans.cpu_loops import LoopPlan
from aotc.lowering.plans.cpu_transpose import TransposedLoopPlan
from aotc.lowering.plans.gpu_loops import ThreadLoopPlan
from aotc.lowering.plans.loops import AnyLoopPlan
from aotc.lowering.regions.loop.cpu import cpu_loops_of_plan
from aotc.lowering.regions.loop.cpu_transpose import transposed_block_loops
from aotc.lowering.regions.loop.gpu import gpu_loops_of_plan
from aotc.lowering.regions.loop.gpu_transpose import transposing_tiles_of_plan


def loops_of_plan(b: RegionBuilder, e: Elements, plan: AnyLoopPlan, emit: Emit) -> tuple[Dim, tuple[Stmt, ...]]:
    """Return the grid and loop nest of an elementwise plan; ``emit`` adds the statements of one element."""
    match plan:
        case LoopPlan():
            return cpu_loops_of_plan(b, plan, emit)
        case TransposedLoopPlan():
            return transposed_block_loops(b, plan, emit)
        case ThreadLoopPlan():
            return gpu_loops_of_plan(b, plan, emit)
    return transposing_tiles_of_plan(b, e, plan, emit)
