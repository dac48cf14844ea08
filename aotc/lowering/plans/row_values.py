"""Plan loops along the rows of a region with reductions: merged axes, and values stored between loops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.loop.ir import Buffer, Load, Stmt, Store
from aotc.ir.opset import ELEMENTWISE
from aotc.ir.tensor.ir import Value
from aotc.lowering.cost_model.row_stages import RowStages
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.elements.nests import buffer_addresses, mergeable_axes
from aotc.lowering.plans.region_plan import RegionPlan

Groups = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class ReductionPlan(RegionPlan):
    """Base of the plans of reductions: the order of the loops.

    Attributes
    ----------
    kept, reduced : tuple of int
        Axes of the region's iteration space, in the order of their loops.
    """

    kept: tuple[int, ...]
    reduced: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StoredValue(RegionPlan):
    """A value that the first loop over a row stores for later ones.

    Attributes
    ----------
    name : str
        The value's name.
    in_result : str
        The result in whose memory the value is stored; empty if it has its own memory.
    """

    name: str
    in_result: str = ""


@dataclass(frozen=True, slots=True)
class RowLoopsPlan(ReductionPlan):
    """Base of the plans of reductions row by row.

    Attributes
    ----------
    inner : tuple of tuple of int
        The reduced axes of each loop along a row.
    stored : tuple of StoredValue
        Values that are stored from one loop along a row to the next.
    """

    inner: Groups
    stored: tuple[StoredValue, ...]


def results_along_rows(b: RegionBuilder) -> dict[Value, Buffer]:
    """Return the results with an element for each step along a row, and their buffers."""
    pairs = zip(b.outputs, b.function.body.results, strict=True)
    return {v: out for out, v in pairs if not b.anchors.is_row(v)}


def row_trial(b: RegionBuilder, stages: RowStages) -> list[Stmt]:
    """Return trial statements of one step along a row, for analysing its memory accesses."""
    e, trial = b.trial_elements(), list[Stmt]()
    e.enter(trial)
    reductions = [op for loop in stages.loops for op in loop.ops]
    for op in reductions:
        for v in op.results:
            acc = Buffer("acc", v.type.dtype, (), "private")
            e.anchor(v, provide_scalar(Load(acc, ())))
    for op in reductions:
        for v in op.inputs:
            e.bind(e.at(v, b.anchors.reads[op]))
    for v, out in results_along_rows(b).items():
        trial.append(Store(out, b.index[v], e.at(v, b.index[v])))
    return trial


def merged_axes(b: RegionBuilder, reduced: Sequence[int], trial: Sequence[Stmt]) -> Groups:
    """Return the reduced axes grouped into loops: neighbours merge if all addresses in ``trial`` allow."""
    return tuple(mergeable_axes(b.anchors.space, b.shape, reduced, buffer_addresses(trial)))


def row_value_records(
    b: RegionBuilder, stages: RowStages, values: Iterable[Value], in_results: bool
) -> tuple[StoredValue, ...]:
    """Return records of ``values`` to store between loops; with ``in_results`` in the memory of results if possible."""
    replaced: dict[Value, Value] = {}
    for v in (stored := tuple(values)):
        result = _result_to_store_in(b, stages, v, replaced) if in_results else None
        if result is not None:
            replaced[v] = result
    return tuple(StoredValue(v.name, replaced[v].name if v in replaced else "") for v in stored)


def _result_to_store_in(
    b: RegionBuilder, stages: RowStages, value: Value, replaced: Mapping[Value, Value]
) -> Value | None:
    """Return the result in whose memory ``value`` can be stored, because its storing loop reads it last; or None.

    The value can then use the result's memory in the meantime, and the nearest cache has only a row and its result.
    """
    last = stages.loops[-1]
    if last.ops or len(last.stores) != 1:
        return None
    (result,) = last.stores
    between = stages.values_needed_for(last.stores, (value,))
    moved = [v for v in between if b.ops[v].name not in ELEMENTWISE and {value, *between} & {*b.ops[v].operands}]
    fits = result.type.dtype == value.type.dtype and b.index[result] == b.anchors.space
    return result if fits and not moved and result not in (value, *replaced.values()) else None
