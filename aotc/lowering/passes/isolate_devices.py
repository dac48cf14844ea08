"""Put the ops of each device into separate regions, so that no later pass mixes devices.

Before: ``%0 = dot_general ... {device = "d0"}``, ``%1 = exp %0 {device = "d0"}``. After::

    %1_2 = on {device = "d0"} {
      %0 = dot_general ...    %1 = exp %0
    } -> %1

Passes rewrite such a region like a branch. Only transfers, and loops and branches over several devices, remain between
regions. There is one region for each device and *level*, the number of transfers on the longest path to an op.
``join_devices`` removes the regions once ops have become kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.opset import CONTROL_FLOW, EFFECTS
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured_values
from aotc.options import Options

_NOTES = ("device", "candidates", "reason")


def isolate_devices(module: Module, options: Options) -> Module:
    """Return ``module`` with ops in regions of their devices."""
    return module.with_functions(
        {
            n: replace(f, body=_DeviceIsolator(f).region_with_device_regions(f.body))
            for n, f in module.functions.items()
            if "devices" in f.attrs
        }
    )


def device_of(op: Op) -> str:
    """Return the device that ``op`` runs on; an empty string for a transfer, or for several devices."""
    return "" if op.name == "transfer" else str(op.attrs.get("device", ""))


class _DeviceIsolator:
    """Wrap the ops of each device in ``on`` regions."""

    def __init__(self, function: Function) -> None:
        self.names = Names(function.body)

    def region_with_device_regions(self, region: Region) -> Region:
        """Return ``region`` with consecutive ops of one device wrapped in ``on`` regions."""
        levels = _device_group_levels(region)
        order = sorted(range(len(region.ops)), key=lambda n: (levels[n], device_of(region.ops[n]), n))
        groups: list[list[Op]] = []
        last = None
        for n in order:
            key = levels[n], device_of(region.ops[n])
            if key != last or not key[1]:
                groups.append([])
            groups[-1].append(region.ops[n])
            last = key
        read = _values_read_after_groups(groups, region.results)
        outer: dict[Value, Value] = {}
        ops = [self._device_region_of_group(group, outer, later) for group, later in zip(groups, read, strict=True)]
        return Region(region.params, tuple(ops), tuple(outer.get(v, v) for v in region.results))

    def _device_region_of_group(self, group: Sequence[Op], outer: dict[Value, Value], later: set[Value]) -> Op:
        """Return the ``on`` op that replaces ``group``; ``outer`` maps values of earlier groups to their results."""
        device = device_of(group[0])
        if not device:
            (op,) = group
            op = _with_renamed_operands(op, outer)
            return replace(
                op,
                regions=tuple(self.region_with_device_regions(r) for r in op.regions)
                if op.name in CONTROL_FLOW
                else (),
            )
        ops = tuple(_without_device_attributes(_with_renamed_operands(op, outer)) for op in group)
        results = tuple(v for op in ops for v in op.results if v in later)
        outside = tuple(Value(self.names.fresh(v.name), v.type) for v in results)
        outer.update(zip(results, outside, strict=True))
        return Op("on", (), outside, {"device": device}, (Region((), ops, results),), group[0].loc)


def _device_group_levels(region: Region) -> list[int]:
    """Return a level for each op such that ops of one device and level can share an ``on`` region.

    An op that binds a size separates the ops before it from those after it; ops with an effect keep their order.
    """
    level: dict[Value, int] = {}
    least = effect = top = 0
    levels = []
    for op in region.ops:
        between = not device_of(op)
        need = least
        for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
            defined = level.get(v, 0)
            need = max(need, defined + (defined % 2 != int(between)))
        if between and need % 2 == 0:
            need += 1
        if op.name == "bind_dim":
            need = top + 1 + top % 2
            least = need + 1
        if op.name in EFFECTS:
            need = effect = max(need, effect + (effect % 2 != int(between)))
        top = max(top, need)
        levels.append(need)
        level.update((v, need) for v in op.results)
    return levels


def _values_read_after_groups(groups: Sequence[Sequence[Op]], results: Sequence[Value]) -> list[set[Value]]:
    """Return the values that are read after each group."""
    later = set(results)
    read: list[set[Value]] = []
    for group in reversed(groups):
        read.append(set(later))
        for op in group:
            later.update((*op.operands, *(v for r in op.regions for v in captured_values(r))))
    return read[::-1]


def _without_device_attributes(op: Op) -> Op:
    """Return ``op`` without the attributes that its region of a device makes redundant."""
    attrs = {k: v for k, v in op.attrs.items() if k not in _NOTES}
    return replace(
        op,
        attrs=attrs,
        regions=tuple(replace(r, ops=tuple(map(_without_device_attributes, r.ops))) for r in op.regions),
    )


def _with_renamed_operands(op: Op, names: dict[Value, Value]) -> Op:
    """Return ``op`` with operands replaced by ``names``, also in its regions."""
    operands = tuple(names.get(v, v) for v in op.operands)
    regions = tuple(
        Region(
            r.params, tuple(_with_renamed_operands(i, names) for i in r.ops), tuple(names.get(v, v) for v in r.results)
        )
        for r in op.regions
    )
    return replace(op, operands=operands, regions=regions)
