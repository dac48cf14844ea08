"""Which memory each value of a module lies in: the process's, which all CPU devices share, or a GPU's own.

A *space* is memory that the kernels of one target work on. A program of one space is one for one target; where there
are several, values are copied from one to another by transfers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from aotc.ir.opset import CONTROL_FLOW
from aotc.ir.tensor_ir import Function, Module, Op, Region, Value, walk
from aotc.targets import Target


@dataclass(frozen=True, slots=True)
class Space:
    """Memory of one device of the model, or of all its CPU devices, which have no name here."""

    device: str
    target: Target


def spaces_of(module: Module, target: Target) -> tuple[Space, ...]:
    """Return the memories of a module without ``on``, the process's first; one if it names no devices."""
    names: dict[str, None] = {}
    for function in module.functions.values():
        if "devices" in function.attrs:
            names.update(dict.fromkeys(homes(function).values()))
    found = dict.fromkeys(_space(name, target) for name in names or ("",))
    return tuple(sorted(found, key=lambda space: space.target.kind != "cpu"))


def _space(device: str, target: Target) -> Space:
    own = target.of(device)
    return Space("" if own.kind == "cpu" else device, own)


def homes(function: Function) -> dict[Value, str]:
    """Return the device of each value of a function that names devices, as ``assign_devices`` has it."""
    found: dict[Value, str] = dict(zip(function.body.params, function.attrs["devices"]["arguments"]))
    _spread(function.body, found)
    return found


def _spread(region: Region, found: dict[Value, str]) -> None:
    for op in region.ops:
        device = str(op.attrs.get("device", ""))
        if device:
            found.update((v, device) for v in op.results)
        elif op.name == "while":
            for rows in (op.results, *(r.params for r in op.regions)):
                found.update((v, found[init]) for v, init in zip(rows, op.operands, strict=True))
        elif op.operands and op.name not in CONTROL_FLOW:
            found.update((v, found[op.operands[0]]) for v in op.results)
        if op.name in CONTROL_FLOW:
            if device:
                found.update((p, device) for r in op.regions for p in r.params)
            for r in op.regions:
                _spread(r, found)
        if op.name == "case" and not device:
            found.update((v, found[w]) for v, w in zip(op.results, op.regions[0].results, strict=True))


def space_finder(function: Function, spaces: tuple[Space, ...], target: Target) -> Callable[[Value], int]:
    """Return the function that tells in which space, by its number, a value of ``function`` lies."""
    if len(spaces) == 1:
        return lambda value: 0
    found, known = homes(function), function.attrs["devices"]["known"]
    numbers = {name: spaces.index(space) for name in known if (space := _space(name, target)) in spaces}
    return lambda value: numbers[found.get(value, known[0])]


def regions_by_target(module: Module, target: Target) -> Mapping[str, Target]:
    """Return what each outlined region is compiled for, by its name."""
    dispatches = (op for f in module.functions.values() if f.public for op in walk(f.body) if op.name == "dispatch")
    return {op.attrs["callee"]: target.of(_device_of(op)) for op in dispatches}


def _device_of(op: Op) -> str:
    return str(op.attrs.get("device", ""))
