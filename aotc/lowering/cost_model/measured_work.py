"""Annotate ops with their measured work: ``%1 = tan %0`` becomes ``%1 = tan %0 {work = 90}``.

*Work* is scalar operations per element. A profile measures an op if a kernel consisted of this op alone, as all kernels
do at ``-O0``. Without a profile the module is unchanged.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from aotc.ir.opset import CONTROL_FLOW
from aotc.ir.tensor.ir import Module, Op, Region
from aotc.lowering.cost_model.model import Costs
from aotc.options import Options
from aotc.targets import resolve_targets


def with_measured_work(module: Module, options: Options) -> Module:
    """Return ``module`` with the attribute ``work`` on each op that the profile of ``options`` measured."""
    if not options.costs:
        return module
    named = {name: Costs(resolve_targets(target)[0], options.costs) for name, target in options.devices.items()}
    costs = Costs(resolve_targets(options.target)[0], options.costs)
    changed = {
        n: replace(f, body=_region_with_measured_work(f.body, costs, named)) for n, f in module.functions.items()
    }
    return module.with_functions(changed)


def _region_with_measured_work(region: Region, costs: Costs, named: Mapping[str, Costs]) -> Region:
    return replace(region, ops=tuple(_op_with_measured_work(op, costs, named) for op in region.ops))


def _op_with_measured_work(op: Op, costs: Costs, named: Mapping[str, Costs]) -> Op:
    """Return ``op`` with its work; ``costs`` are those of the enclosing device, ``named`` those of devices by name."""
    if op.name in CONTROL_FLOW:
        inner = named.get(str(op.attrs.get("device", "")), costs)
        return replace(op, regions=tuple(_region_with_measured_work(r, inner, named) for r in op.regions))
    work = costs.work_of(op)
    return op if work is None else replace(op, attrs={**op.attrs, "work": work})
