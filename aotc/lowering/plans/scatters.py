"""Plan updates of part of an array in place on a CPU: of a slice, or at indices in the order of the updates."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.tensor.ir import Op
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize


@dataclass(frozen=True, slots=True)
class SliceUpdatePlan(RegionPlan):
    """Plan of a slice update; a grid item has a row of the slice if ``by_rows``, else one element."""

    by_rows: bool


def plan_cpu_slice(b: RegionBuilder) -> SliceUpdatePlan:
    """Return the plan of a slice update by rows."""
    return SliceUpdatePlan(by_rows=True)


@dataclass(frozen=True, slots=True)
class SerialScatterPlan(RegionPlan):
    """Plan of a scatter whose updates are applied one after the other.

    Attributes
    ----------
    width : int
        Elements of the last window dim that a grid item writes; 0: one item writes all.
    """

    width: int


UPDATE_WINDOW = BlockSize(
    64,
    "elements of a scatter's last window dim that one CPU grid item writes",
    "four cache lines of f32",
)


def plan_cpu_scatter(b: RegionBuilder) -> SerialScatterPlan:
    """Return the plan of a scatter in order, parallel over blocks of the window."""
    return plan_serial_scatter(b.region_root_op("scatter"), UPDATE_WINDOW.value)


def plan_serial_scatter(op: Op, width: int) -> SerialScatterPlan:
    """Return the plan of a scatter in order, with items of ``width`` elements if the window is wider."""
    update, window = op.operands[len(op.inputs) + 1].type, op.attrs["update_window_dims"]
    extent = update.shape[window[-1]] if window else 1
    return SerialScatterPlan(width if isinstance(extent, int) and extent > width else 0)
