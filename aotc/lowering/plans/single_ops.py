"""Plans of ops whose lowering has nothing to decide: a plan only names the algorithm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.vmfb.ranks.layout import RANK_CALL


@dataclass(frozen=True, slots=True)
class CollectivePlan(RegionPlan):
    """Plan in which the runtime exchanges data with other ranks, on the stream of the GPU."""


@dataclass(frozen=True, slots=True)
class CsrRowsPlan(RegionPlan):
    """Plan in which a grid item multiplies a row of a sparse matrix."""


@dataclass(frozen=True, slots=True)
class CustomCallPlan(RegionPlan):
    """Plan in which the only grid item calls the user's function."""


@dataclass(frozen=True, slots=True)
class DeviceCallPlan(RegionPlan):
    """Plan in which GPU threads call the user's function: for each element, for each row, or as a whole kernel."""


@dataclass(frozen=True, slots=True)
class LapackCallPlan(RegionPlan):
    """Plan in which a grid item calls LAPACK for a matrix."""


@dataclass(frozen=True, slots=True)
class RandomWordsPlan(RegionPlan):
    """Plan in which a grid item computes the words of one counter value of a random number generator."""


@dataclass(frozen=True, slots=True)
class SelectAndScatterPlan(RegionPlan):
    """Plan in which the windows of a ``select_and_scatter`` run in order, parallel over dims of window size 1."""


@dataclass(frozen=True, slots=True)
class TridiagonalPlan(RegionPlan):
    """Plan in which a grid item solves a tridiagonal system for all right-hand sides."""


def plan_gpu_call(b: RegionBuilder) -> RegionPlan:
    """Return the plan of a custom call on a GPU: of the runtime's collectives, or of a user's function."""
    is_collective = b.region_root_op("custom_call").attrs["target"].startswith(RANK_CALL)
    return CollectivePlan() if is_collective else DeviceCallPlan()


def constant_planner(plan: RegionPlan) -> Callable[[RegionBuilder], RegionPlan]:
    """Return a planner that always returns ``plan``."""
    return lambda b: plan
