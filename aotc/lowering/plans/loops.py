"""Plan the loops over the elements of a region, for any kind of target."""

from __future__ import annotations

from collections.abc import Callable

from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.nests import Emit
from aotc.lowering.elements.windows import window_element_emitter
from aotc.lowering.plans.cpu_loops import LoopPlan, plan_cpu_loops
from aotc.lowering.plans.cpu_transpose import TransposedLoopPlan
from aotc.lowering.plans.gpu_loops import GpuTransposePlan, ThreadLoopPlan, plan_gpu_loops

AnyLoopPlan = LoopPlan | TransposedLoopPlan | ThreadLoopPlan | GpuTransposePlan

LOOP_PLANNERS: dict[str, Callable[[RegionBuilder, Emit], AnyLoopPlan]] = {
    "cpu": plan_cpu_loops,
    "cuda": plan_gpu_loops,
}


def plan_element_loops(b: RegionBuilder) -> AnyLoopPlan:
    """Choose the loops of an elementwise or windowed region."""
    return LOOP_PLANNERS[b.target.kind](b, window_element_emitter(b, b.trial_elements()))
