"""Give every op a device, and transfer values to the devices that read them.

Before, with the affinities ``d0``, ``d0``, ``d1`` of the arguments::

    %0 = dot_general %x, %w0                              %1 = dot_general %0, %w1

After::

    %0 = dot_general %x, %w0 {device = "d0"}              %0_d1 = transfer %0 {device = "d1"}
    %1 = dot_general %0_d1, %w1 {device = "d1"}

A value is transferred to a device once, right after it is computed. So no transfer is repeated, and transfers are
outside of loops that do not change the value. Constants, and values that are cheap to compute from them, are computed
on each device that reads them. A function that does not name a device is unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

from aotc.diagnostics import UNKNOWN, CompileError, Finding, Loc, size_text
from aotc.ir.opset import CONTROL_FLOW
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured_values, walk
from aotc.lowering.cost_model.model import Costs
from aotc.lowering.cost_model.op_time import size_in_bytes
from aotc.lowering.placement.devices import (
    DEFAULTED,
    OF_RESULT,
    OF_TARGET,
    Placement,
    named_devices,
    place_function,
    replicated_ops,
)
from aotc.lowering.placement.host_only import IMPLIED, host_only
from aotc.lowering.placement.host_side import host_side
from aotc.options import AUTO, DEVICE, HOST, Options
from aotc.targets import check_mix, resolve_targets

_ASKED = "the model says so"


def assign_devices(module: Module, options: Options) -> Module:
    """Return ``module`` with a device for each op of functions that name devices, and with transfers between them.

    Raises
    ------
    CompileError
        If nothing determines the device of an op, an argument or a result and ``options`` names no default device,
        there are more transfers than ``options`` allow, CPU devices have different architectures, or ``options`` names
        devices that the model does not use.
    """
    named = dict.fromkeys(name for f in module.functions.values() for name in named_devices(f))
    implied = any(IMPLIED in f.attrs for f in module.functions.values())
    if not implied:
        _check_device_names(module, options, named)
    if not options.devices and not named:
        return module
    functions = {name: _function_with_devices(f, options) if f.public else f for name, f in module.functions.items()}
    transfers = [op for f in functions.values() for op in walk(f.body) if op.name == "transfer"]
    if 0 <= options.max_transfers < len(transfers):
        message = f"transfers between devices: found {len(transfers)}, expected at most {options.max_transfers}"
        hint = "raise --max-transfers, or move affinities so that fewer are needed"
        rows = [Finding(_op_description(op), op.loc) for op in transfers[: CompileError.LIMIT - 1]]
        raise CompileError([Finding(message, hint=hint), *rows])
    return module.with_functions(functions)


def _op_description(op: Op) -> str:
    v, attrs = op.operands[0], op.attrs
    return f"{v}, {size_text(size_in_bytes(v))}, from {attrs['source']} to {attrs['device']}: {attrs['reason']}"


def _check_device_names(module: Module, options: Options, named: Collection[str]) -> None:
    """Raise an error for an unknown default device and for devices without ops; ``named`` are the model's devices."""
    devices = list(dict.fromkeys((*options.devices, *named)))
    default = options.default_device
    model = f"the model names {', '.join(named) or 'no device'}"
    place = next((f.loc for f in module.functions.values() if f.public), UNKNOWN)
    if default and default not in devices:
        options_name = f"the options name {', '.join(options.devices) or 'none'}"
        hint = f"one of {', '.join(devices)}" if devices else "leave it out"
        message = f"the default device {default!r} is not a device: {model}, {options_name}"
        raise CompileError.at(place, message, hint=hint)
    alone = devices[0] if len(devices) == 1 else default
    unread = [name for name in options.devices if name not in (*named, alone, HOST, DEVICE)]
    if unread and options.place != AUTO:
        message = f"no op is placed on {', '.join(unread)}: {model}, the options name {', '.join(options.devices)}"
        hint = "use names of the model, or --place=auto, which places large ops on all devices"
        raise CompileError.at(place, message, hint=hint)


def _function_with_devices(function: Function, options: Options) -> Function:
    """Return ``function`` with a device for each op, chosen by its affinities, by its op support or by cost."""
    devices = list(dict.fromkeys((*options.devices, *named_devices(function), *filter(None, [options.default_device]))))
    if not devices:  # other functions name devices
        return function
    targets = {name: resolve_targets(options.devices.get(name, options.target))[0] for name in devices}
    check_mix(targets)
    default = options.default_device or (devices[0] if len(devices) == 1 or options.place == AUTO else "")
    if IMPLIED in function.attrs:
        devices, default = [DEVICE, HOST], DEVICE
        by_model = Costs(targets[DEVICE], options.costs)
        decided = host_side(function, targets[DEVICE], targets[HOST], by_model)
        solution = place_function(function, DEVICE, decided=decided)
    else:
        costs = Costs(resolve_targets(options.target)[0], options.costs) if options.place == AUTO else None
        arguments = DEVICE if {HOST, DEVICE}.issubset(options.devices) else ""
        solution = place_function(function, default, targets, costs, arguments)
    mover = _TransferInserter(function, solution, default or devices[0])
    unplaced = [_unplaced_op_error(thing, function, devices) for thing in solution.unplaced]
    unplaced += [_unplaced_result_error(n, function, devices) for n in mover.results_without_device() if not default]
    if unplaced:
        raise CompileError(unplaced)
    attrs: dict[str, Any] = {
        "devices": {"known": devices, **mover.signature_devices()},
        "reasons": mover.placement_reasons(),
    }
    attrs["candidates"] = [list(solution.candidates[v]) for v in function.body.params]
    if IMPLIED in function.attrs:
        rows = ((only.what, op.loc) for op in walk(function.body) if (only := host_only(op)))
        attrs["on_host"] = [{"op": what, "loc": loc.traced_by or str(loc)} for what, loc in rows]
    return replace(function, body=mover.body_with_transfers(), attrs={**function.attrs, **attrs})


def _unplaced_op_error(thing: Op | Value, function: Function, devices: Iterable[str]) -> Finding:
    """Return the error about an op or value for which nothing determines a device."""
    hint = "give an argument or a result an affinity, or compile with --default-device"
    candidates = f"expected one of {', '.join(devices)}"
    if isinstance(thing, Op):
        return Finding(f"the device of {thing.name} is not specified; {candidates}", thing.loc, hint=hint)
    names = function.attrs.get("arg_names") or [v.name for v in function.body.params]
    name = names[function.body.params.index(thing)]
    message = f"the device of argument {name!r} of @{function.name} is not specified; {candidates}"
    return Finding(message, function.loc, hint=hint)


def _unplaced_result_error(number: int, function: Function, devices: Iterable[str]) -> Finding:
    """Return the error about result ``number``, which has neither a device nor an affinity."""
    what = f"result {number} of @{function.name}, which depends only on constants,"
    message = f"the device of {what} is not specified; expected one of {', '.join(devices)}"
    return Finding(message, function.loc, hint="give the result an affinity, or compile with --default-device")


def _values_read_besides_transfers(region: Region) -> set[Value]:
    """Return the values that results or ops other than transfers use; other values need no copies."""
    inner = [r for op in walk(region) for r in op.regions]
    read = {v for op in walk(region) if op.name != "transfer" for v in op.operands}
    return read.union(*(r.results for r in (region, *inner)))


class _TransferInserter:
    """Rebuilds a function so that each op reads values on its own device.

    A value has its own name on the device that computes it; ``copies`` are the values on other devices.
    """

    def __init__(self, function: Function, solution: Placement, default: str) -> None:
        """Record for each value which devices read it, from the ops and from the affinities of the results.

        ``default`` is the device of values for which ``solution`` has none.
        """
        self.original, self.solution, self.default = function, solution, default
        self.names = Names(function.body)
        self.origins: dict[Value, Value] = {}  # operands of the model's transfers, by their results
        self.wanted: dict[Value, dict[str, tuple[str, Loc]]] = {}  # devices that read a value, and why
        self.sources: dict[Value, Op] = {op.result: op for op in replicated_ops(function.body)}
        self.copies: dict[tuple[Value, str], Value] = {}
        self.read = _values_read_besides_transfers(function.body)
        affinity = function.attrs.get("affinity", {})
        self.demands = affinity.get("results") or [""] * len(function.body.results)
        for op in walk(function.body):
            if op.name == "transfer":
                self.origins[op.result] = self._original_of_transfer(op.operands[0])
        for op in walk(function.body):
            self._record_device_requests(op)
        self.of_result = OF_TARGET if IMPLIED in function.attrs else OF_RESULT
        for v, device in zip(function.body.results, self.demands, strict=True):
            self._request_on_device(v, device, self.of_result, function.loc)

    def device_of_value(self, v: Value) -> str:
        """Return the name of the device that computes ``v``; for a constant, which has none, the default device."""
        return self.solution.values.get(v) or self.default

    def results_without_device(self) -> list[int]:
        """Return the numbers of the results that have neither a device nor an affinity."""
        pairs = zip(self.original.body.results, self.demands, strict=True)
        return [n for n, (v, demand) in enumerate(pairs) if not demand and v not in self.solution.values]

    def signature_devices(self) -> dict[str, list[str]]:
        """Return the function's attributes with the device of each argument and result."""
        body = self.original.body
        results = [w or self.device_of_value(v) for v, w in zip(body.results, self.demands, strict=True)]
        return {"arguments": [self.device_of_value(v) for v in body.params], "results": results}

    def placement_reasons(self) -> dict[str, list[str]]:
        """Return, for each argument and each result, the reason for its device."""
        body, devices = self.original.body, self.solution.values
        reasons = {v: "it is made there" if v in devices else DEFAULTED for v in body.results}
        reasons |= dict.fromkeys(body.params, "the argument is there")
        results = [self.of_result if w else reasons[v] for v, w in zip(body.results, self.demands, strict=True)]
        return {"arguments": [self.solution.reasons[v] for v in body.params], "results": results}

    # --- what has to move ---

    def _record_device_requests(self, op: Op) -> None:
        """Record the devices of the readers of ``op``'s operands and of its branches' results."""
        if op.name == "transfer" and op.result in self.read:
            self._request_on_device(op.result, op.attrs["device"], _ASKED, op.loc)
        elif op.name in CONTROL_FLOW:
            for row in [op.operands, op.regions[1].results] if op.name == "while" else [r.results for r in op.regions]:
                for v, result in zip(row, op.results, strict=True):
                    self._request_on_device(v, self.device_of_value(result), f"{result} is there", op.loc)
        elif op in self.solution.ops:
            for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
                self._request_on_device(v, self.solution.ops[op], f"{op.name} reads it there", op.loc)

    def _original_of_transfer(self, v: Value) -> Value:
        """Return the value that transfers of the model copied to ``v``, or ``v`` itself."""
        return self.origins.get(v, v)

    def _request_on_device(self, v: Value, device: str, reason: str, loc: Loc) -> None:
        """Record that ``device`` reads ``v``, with the reason and the place in the model."""
        origin = self._original_of_transfer(v)
        if device and origin not in self.sources and device != self.device_of_value(origin):
            requests = self.wanted.setdefault(origin, {})
            if device not in requests or reason == _ASKED:
                requests[device] = reason, loc

    # --- the new function ---

    def body_with_transfers(self) -> Region:
        """Return the function's body with transfers between devices."""
        body = self.original.body
        rebuilt = self._region_with_transfers(body, ())
        ops = list(rebuilt.ops)
        wishes = zip(body.results, self.demands, strict=True)
        results = tuple(self._copy_on_device(v, w or self.device_of_value(v), ops) for v, w in wishes)
        return Region(body.params, tuple(ops), results)

    def _region_with_transfers(self, region: Region, results: tuple[str, ...]) -> Region:
        """Return a region with its results on the devices ``results``; copies that it creates are not used outside."""
        around = dict(self.copies)
        ops: list[Op] = []
        for v in region.params:
            self._append_transfers(v, ops)
        for op in region.ops:
            if op.name == "transfer" or any(self.sources.get(v) is op for v in op.results):
                continue
            ops.append(self._op_on_device(op, ops))
            for v in op.results:
                self._append_transfers(v, ops)
        values = tuple(self._copy_on_device(v, device, ops) for v, device in zip(region.results, results))
        if results or region is not self.original.body:
            self.copies = around
        return Region(region.params, tuple(ops), values)

    def _append_transfers(self, v: Value, ops: list[Op]) -> None:
        """Append the transfers of the newly computed ``v`` to the devices that read it."""
        for device, (reason, loc) in self.wanted.get(v, {}).items():
            copy = self.copies[v, device] = Value(self.names.fresh(f"{v.name}_{device}"), v.type)
            attrs = {"device": device, "source": self.device_of_value(v), "reason": reason}
            ops.append(Op("transfer", (v,), (copy,), attrs, (), loc))

    def _copy_on_device(self, v: Value, device: str, ops: list[Op]) -> Value:
        """Return the copy of ``v`` on ``device``; a constant is appended if it does not exist there yet."""
        origin = self._original_of_transfer(v)
        if origin not in self.sources:
            return origin if device == self.device_of_value(origin) else self.copies[origin, device]
        copy = self.copies.get((origin, device))
        if copy is None:
            source = self.sources[origin]
            operands = tuple(self._copy_on_device(v, device, ops) for v in source.operands)
            copy = self.copies[origin, device] = Value(self.names.fresh(f"{origin.name}_{device}"), origin.type)
            ops.append(replace(source, operands=operands, results=(copy,), attrs={**source.attrs, "device": device}))
        return copy

    def _op_on_device(self, op: Op, ops: list[Op]) -> Op:
        """Return ``op`` reading operands and captured values on its own device, with transfers where necessary."""
        if op.name in CONTROL_FLOW:
            return self._control_flow_on_devices(op, ops)
        device = self.solution.ops.get(op, "")
        operands = tuple(self._copy_on_device(v, device or self.device_of_value(v), ops) for v in op.operands)
        if not device:
            return replace(op, operands=operands)
        among = list(self.solution.candidates[op])
        attrs = {**op.attrs, "device": device, "candidates": among, "reason": self.solution.reasons[op]}
        outer = {v: self._copy_on_device(v, device, ops) for r in op.regions for v in captured_values(r)}
        return replace(
            op, operands=operands, attrs=attrs, regions=tuple(_scalar_region_on_device(r, outer) for r in op.regions)
        )

    def _control_flow_on_devices(self, op: Op, ops: list[Op]) -> Op:
        """Return a loop or branch whose conditions, states and results are on their own devices."""
        devices = tuple(self.device_of_value(v) for v in op.results)
        regions: tuple[Region, ...]
        if op.name == "while":
            operands = tuple(self._copy_on_device(v, d, ops) for v, d in zip(op.operands, devices, strict=True))
            condition, body = op.regions
            test = (self.device_of_value(self._original_of_transfer(condition.results[0])),)
            regions = self._region_with_transfers(condition, test), self._region_with_transfers(body, devices)
        else:
            test = (self.device_of_value(self._original_of_transfer(op.operands[0])),)
            operands = (self._copy_on_device(op.operands[0], test[0], ops),)
            regions = tuple(self._region_with_transfers(r, devices) for r in op.regions)
        moved = replace(op, operands=operands, regions=regions)
        every = {*test, *devices, *(inner.attrs.get("device", "") for r in regions for inner in r.ops)}
        return replace(moved, attrs={**op.attrs, "device": every.pop()}) if len(every) == 1 else moved


def _scalar_region_on_device(region: Region, outer: dict[Value, Value]) -> Region:
    """Return a region of scalar ops with its captured outer values replaced by those in ``outer``."""
    if all(a is b for a, b in outer.items()):
        return region
    ops = tuple(
        replace(
            op, operands=tuple(outer.get(v, v) for v in op.operands),
            regions=tuple(_scalar_region_on_device(r, outer) for r in op.regions),
        )
        for op in region.ops
    )  # fmt: skip
    return Region(region.params, ops, tuple(outer.get(v, v) for v in region.results))
