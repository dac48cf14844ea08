"""Assign each value of a module to a memory space: that of the process, or that of a GPU.

A *space* is the memory of one GPU, or the memory of the process, which all CPU devices share; each of these may have a
target of its own. In a program with several spaces, transfers copy values from one to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.opset import CONTROL_FLOW
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, walk
from aotc.targets import Target, baseline_cpu_target, common_cpu_target

SPILLED = "host memory"
"""The device of values that are spilled to the memory of the process because of a limit on the memory of their own."""


@dataclass(frozen=True, slots=True)
class Space:
    """A memory space: of the GPU ``device``, or (``device`` empty) of the process, for all CPU devices.

    ``target`` is the target of its kernels. For the memory of the process it stands for all CPU targets
    (:func:`aotc.targets.common_cpu_target`).
    """

    device: str
    target: Target


def spaces_of(module: Module, target: Target) -> tuple[Space, ...]:
    """Return the memory spaces of a module without ``on`` ops, that of the process first.

    A module that names no devices has a single space.
    """
    names: dict[str, None] = {}
    for function in module.functions.values():
        if "devices" in function.attrs:
            names.update(dict.fromkeys(value_devices(function).values()))
    own = {name: target.for_device(name) for name in names or ("",) if name != SPILLED}
    cpus = [t for t in own.values() if t.kind == "cpu"]
    device_spaces = tuple(Space(name, t) for name, t in own.items() if t.kind != "cpu")
    if cpus:
        return (Space("", common_cpu_target(cpus)), *device_spaces)
    return with_host_space(device_spaces) if SPILLED in names else device_spaces


def with_host_space(spaces: tuple[Space, ...]) -> tuple[Space, ...]:
    """Return ``spaces`` with the memory of the process first, added if it is missing."""
    return spaces if spaces[0].target.kind == "cpu" else (Space("", baseline_cpu_target()), *spaces)


def value_devices(function: Function) -> dict[Value, str]:
    """Return the device of each value of a function that names devices, as ``assign_devices`` chose it."""
    devices: dict[Value, str] = dict(zip(function.body.params, function.attrs["devices"]["arguments"]))
    _add_devices_of_region(function.body, devices)
    return devices


def _add_devices_of_region(region: Region, devices: dict[Value, str]) -> None:
    """Record the devices of the values of ``region`` in ``devices``.

    Results are on the device of their op, else of its first operand; carried values on that of the initial value,
    results of a branch on that of the first branch.
    """
    for op in region.ops:
        device = str(op.attrs.get("device", ""))
        if device:
            devices.update((v, device) for v in op.results)
        elif op.name == "while":
            for rows in (op.results, *(r.params for r in op.regions)):
                devices.update((v, devices[init]) for v, init in zip(rows, op.operands, strict=True))
        elif op.operands and op.name not in CONTROL_FLOW:
            devices.update((v, devices[op.operands[0]]) for v in op.results)
        if op.name in CONTROL_FLOW:
            if device:
                devices.update((p, device) for r in op.regions for p in r.params)
            for r in op.regions:
                _add_devices_of_region(r, devices)
        if op.name == "case" and not device:
            devices.update((v, devices[w]) for v, w in zip(op.results, op.regions[0].results, strict=True))


def space_finder(function: Function, spaces: tuple[Space, ...], target: Target) -> Callable[[Value], int]:
    """Return a function from a value of ``function`` to the number of its space."""
    if len(spaces) == 1:
        return lambda value: 0
    devices, names = value_devices(function), function.attrs["devices"]["known"]
    places = {space.device: n for n, space in enumerate(spaces)}
    own = {name: "" if target.for_device(name).kind == "cpu" else name for name in names} | {SPILLED: ""}
    numbers = {name: places[space] for name, space in own.items() if space in places}
    return lambda value: numbers[devices.get(value, names[0])]


def regions_by_target(module: Module, target: Target) -> dict[str, Target]:
    """Return the target of each outlined region, by its name."""
    dispatches = (op for f in module.functions.values() if f.public for op in walk(f.body) if op.name == "dispatch")
    return {op.attrs["callee"]: target.for_device(_device_of_op(op)) for op in dispatches}


def _device_of_op(op: Op) -> str:
    return str(op.attrs.get("device", ""))
