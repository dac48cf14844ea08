"""Ops whose lowering has nothing to decide: a plan only names the way in which the kernel is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan


@dataclass(frozen=True, slots=True)
class CsrRowsPlan(RegionPlan):
    """A grid item multiplies a row of a sparse matrix."""


@dataclass(frozen=True, slots=True)
class CustomCallPlan(RegionPlan):
    """One grid item calls the user's function."""


@dataclass(frozen=True, slots=True)
class DeviceCallPlan(RegionPlan):
    """Plan in which GPU threads call the user's function: for each element, for each row, or as a whole kernel."""


@dataclass(frozen=True, slots=True)
class LapackCallPlan(RegionPlan):
    """A grid item calls LAPACK for a matrix."""


@dataclass(frozen=True, slots=True)
class RandomWordsPlan(RegionPlan):
    """A grid item computes the words of a counter of a random number generator."""


@dataclass(frozen=True, slots=True)
class SelectAndScatterPlan(RegionPlan):
    """The windows of a ``select_and_scatter`` run in order, in parallel over the dims that no window spans."""


@dataclass(frozen=True, slots=True)
class TridiagonalPlan(RegionPlan):
    """A grid item solves a tridiagonal system for all right-hand sides."""


def always(plan: RegionPlan) -> Callable[[RegionBuilder], RegionPlan]:
    """Return the planner of an op that is always lowered by ``plan``."""
    return lambda b: plan
