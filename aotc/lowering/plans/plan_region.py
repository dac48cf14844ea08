"""The plan of a region: one function for each kind of region and of target."""

from __future__ import annotations

from collections.abc import Callable

from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.cpu_reductions import plan_cpu_reduction
from aotc.lowering.plans.gpu_reductions import plan_gpu_reduction
from aotc.lowering.plans.region_plan import RegionPlan

PLANNERS: dict[tuple[str, str], Callable[[RegionBuilder], RegionPlan]] = {
    ("row", "cpu"): plan_cpu_reduction,
    ("row", "cuda"): plan_gpu_reduction,
    ("reduce", "cpu"): plan_cpu_reduction,
    ("reduce", "cuda"): plan_gpu_reduction,
}


def plan_region(b: RegionBuilder) -> RegionPlan:
    """Return how the region of a builder becomes a kernel for the builder's target."""
    return PLANNERS[b.function.attrs["kind"], b.target.kind](b)
