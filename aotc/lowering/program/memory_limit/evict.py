"""Evict one value from a memory that is too full: recompute it, or move it to the host, until it is read again.

Before::

    y = exp(x); big = f(x); z = g(big); w = y + z

After, if ``y`` is recomputed (:mod:`.rematerialize`), or moved (:mod:`.spill`)::

    big = f(x); z = g(big); y2 = exp(x); w = y2 + z       // also y, if an op reads it before big
    y = exp(x); h = transfer y; big = f(x); z = g(big); y2 = transfer h; w = y2 + z

A loop or branch counts as one op: evicted operands are recomputed or moved back before it. If memory peaks inside of
one, its ops are treated likewise. Outer values that it reads only before or after the peak are recomputed or moved back
inside of it (:mod:`.loop_operands`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial

from aotc.ir.tensor.ir import Function, Op, Region, Value, values_captured_by_op
from aotc.lowering.analysis.constant_values import constants_in
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.work import expected_iterations
from aotc.lowering.placement.memory_spaces import value_devices
from aotc.lowering.program.memory_limit.copy_readers import MemoryRewrite
from aotc.lowering.program.memory_limit.loop_operands import evictions_inside_regions
from aotc.lowering.program.memory_limit.order_ops import Functions, Kernels, LiveMemoryModel, SpaceOf
from aotc.lowering.program.memory_limit.rematerialize import rematerialize_rewrites
from aotc.lowering.program.memory_limit.spill import spill_rewrites


def evict_at_peak(
    function: Function, functions: Functions, kernels: Kernels, finder: Callable[[Function], SpaceOf], costs: Costs,
    space: int, spills: bool, suffix: str,
) -> Function | None:  # fmt: skip
    """Rewrite ``function`` to need less memory at the peak in ``space``; None if nothing helps.

    Parameters
    ----------
    finder : callable
        Returns, for a function, the mapping from its values to memories.
    spills : bool
        May values be moved to host memory?
    suffix : str
        Makes the names of new values unique in the function.
    """

    def live_model_of(body: Region, form: Function) -> LiveMemoryModel:
        return LiveMemoryModel(body, functions, kernels, finder(form), only=space)

    model = live_model_of(function.body, function)
    before = model.peak_bytes_and_count(function.body.ops)
    places = value_devices(function) if spills else {}
    for candidate in sorted(
        _evictions_at_peak(model, costs, places, constants_in(function.body)), key=lambda c: c.price
    ):
        body = candidate.make(suffix)
        rewritten = replace(function, body=body)
        if live_model_of(body, rewritten).peak_bytes_and_count(body.ops) < before:
            return rewritten
    return None


def _evictions_at_peak(
    model: LiveMemoryModel, costs: Costs, places: Mapping[Value, str], constants: Mapping[Value, Op]
) -> Iterator[MemoryRewrite]:
    """Yield the possible evictions of a value at the peak, also inside the loop or branch with the peak.

    ``constants`` may determine trip counts.
    """
    yield from rematerialize_rewrites(model, costs)
    if places:
        yield from spill_rewrites(model, places)
    worst = model.region.ops[model.peak_position(model.region.ops)]
    if not model.inner[worst][0]:
        return
    iterations = expected_iterations(worst, constants, model.functions) if worst.name == "while" else 1
    for v in dict.fromkeys(values_captured_by_op(worst)):
        yield from evictions_inside_regions(model, worst, v, costs, places, iterations)
    for number, region in enumerate(worst.regions):
        inner = model.model_of_inner_region(region)
        if inner.peak_bytes_and_count(region.ops)[0] == model.inner[worst][0]:
            for one in _evictions_at_peak(inner, costs, places, constants):
                yield MemoryRewrite(
                    iterations * one.price, partial(_region_with_inner_eviction, model.region, worst, number, one)
                )


def _region_with_inner_eviction(region: Region, op: Op, number: int, relief: MemoryRewrite, suffix: str) -> Region:
    """Return ``region`` with the eviction inside of a region of ``op``."""
    regions = tuple(relief.make(suffix) if n == number else r for n, r in enumerate(op.regions))
    return replace(region, ops=tuple(replace(op, regions=regions) if o is op else o for o in region.ops))
