"""Remove the regions of devices once ops are kernels: each op gets its device as an attribute.

Before: ``%1_2 = on {device = "d0"} { %1 = dispatch %x {callee = "k0"} } -> %1``. After: ``%1 = dispatch %x {callee =
"k0", device = "d0"}``. Constants, views, and loops and branches within one device get it, too.
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.tensor.ir import Module, Op, Region, Value
from aotc.options import Options


def join_devices(module: Module, options: Options) -> Module:
    """Return ``module`` without ``on`` ops: the ops inside get the attribute ``device``."""
    changed = {
        n: replace(f, body=_without_device_regions(f.body, {}, ""))
        for n, f in module.functions.items()
        if "devices" in f.attrs
    }
    return module.with_functions(changed)


def _without_device_regions(region: Region, names: dict[Value, Value], device: str) -> Region:
    """Return ``region`` with each ``on`` replaced by its ops; ``names`` maps its results to the values inside."""
    ops: list[Op] = []
    for op in region.ops:
        operands = tuple(names.get(v, v) for v in op.operands)
        if op.name == "on":
            inner = _without_device_regions(op.regions[0], names, op.attrs["device"])
            ops += inner.ops
            names.update(zip(op.results, inner.results, strict=True))
            continue
        attrs = {**op.attrs, "device": device} if device else op.attrs
        regions = tuple(_without_device_regions(r, names, device) for r in op.regions)
        ops.append(replace(op, operands=operands, attrs=attrs, regions=regions))
    return Region(region.params, tuple(ops), tuple(names.get(v, v) for v in region.results))
