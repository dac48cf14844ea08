"""Devices that a model assigns to values: affinities, and JAX's memory kinds and single-device shardings.

An *affinity* is an attribute that names a device: of a function, an argument, a result or an op. The import emits a
``transfer`` op where a value must be on another device.

With JAX's ``compute_on("device_host")`` an op uses values on ``host``, and all others use values on ``device``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from difflib import get_close_matches
from itertools import zip_longest
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import CompileError, Finding, Loc
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.session import ImportState
from aotc.options import DEVICE, HOST, Options

_AFFINITIES = ("aotc.affinity", "iree.abi.affinity")
_KIND_OF_MEMORY = "mhlo.memory_kind"
_PLACEMENT = "_xla_buffer_placement"
_SHARDING = "mhlo.sharding"
_COMPUTE_TYPE = "_xla_compute_type"
_CALLS = frozenset({"func.call", "stablehlo.composite"})  # results of a function are on ``device``
_ONE_DEVICE = re.compile(r"\{maximal device=(\d+)\}")
_OF_IREE = re.compile(r'#hal\.device\.(?:promise|affinity)<@(?:"([^"]+)"|([\w$.-]+))>')

_LOOKALIKES = str.maketrans("oli", "011")

ANYWHERE = nullcontext()  # of most ops: a context that is made anew would be felt

MEMORIES = {"device": DEVICE, "pinned_host": HOST, "unpinned_host": HOST}
"""The device of each of JAX's memory kinds, in compilations with a device ``host``."""
_SIDES = frozenset(MEMORIES.values())


def affinity_of(attributes: Mapping[str, Any], devices: Collection[str], loc: Loc) -> str:
    """Return the device name of an argument or a result from its attributes, or an empty string.

    ``devices`` are the device names in the options. An affinity decides. Without one, a memory kind decides if
    ``devices`` contains ``host``. Without a memory kind, a sharding ``{maximal device=1}`` means ``d1`` if ``devices``
    contains that name.

    Raises
    ------
    CompileError
        At ``loc`` if an affinity does not name a device.
    """
    stated = stated_affinity(attributes, loc)
    return (
        stated
        or _device_of_memory_kind(attributes.get(_KIND_OF_MEMORY), devices)
        or _device_of_sharding(attributes.get(_SHARDING), devices)
    )


def stated_affinity(attributes: Mapping[str, Any], loc: Loc) -> str:
    """Return the device that an affinity attribute names; an empty string if there is no such attribute."""
    for name in _AFFINITIES:
        if name in attributes:
            device = device_of_attribute(attributes[name])
            if not device:
                message = f"{name} is {attributes[name]}, which names no device"
                raise CompileError.at(loc, message, hint=f'write {name} = "d1"')
            return device
    return ""


def device_of_attribute(attribute: Any) -> str:
    """Return the device that an attribute (string, symbol or IREE's promise) names, or an empty string."""
    if isinstance(attribute, ir.StringAttr | ir.FlatSymbolRefAttr):
        return attribute.value
    promise = _OF_IREE.fullmatch(str(attribute))
    return promise[1] or promise[2] if promise else ""


def check_signatures(functions: Mapping[str, Any], options: Options, path: str) -> None:
    """Reject misspelt device names in the affinities of functions, arguments and results.

    A device that the options do not declare is compiled for ``--target``. So an undeclared name is an error only if it
    looks like a declared one: ``dO`` for ``d0``.

    Raises
    ------
    CompileError
        With the most similar name for each.
    """
    if not options.devices:
        return
    declared = tuple(dict.fromkeys((*options.devices, *filter(None, [options.default_device]))))
    alike = set(map(_folded_device_name, declared))
    findings: dict[str, Finding] = {}  # the first mention of each device
    for function in functions.values():
        for attribute, device, what, loc in _signature_affinities(function, path):
            if device not in declared and device not in findings and _folded_device_name(device) in alike:
                message = f"{attribute} {what} names device {device!r}, but the options name {', '.join(declared)}"
                near = _nearest_name_hint(device, declared, attribute)
                findings[device] = Finding(message, loc, hint=f"{near}declare it: --device {device}=TARGET")
    if findings:
        raise CompileError([*findings.values()])


def _signature_affinities(function: Any, path: str) -> Iterator[tuple[str, str, str, Loc]]:
    """Yield the affinities of a function, its arguments and results: attribute, device, description, location."""
    own = function.operation
    name, loc = f"@{own.attributes['sym_name'].value}", loc_from_mlir(own.location, path)
    rows = [(f"of {name}", own.attributes, loc)]
    places = [loc_from_mlir(a.location, path) for block in own.regions[0].blocks for a in block.arguments]
    if "arg_attrs" in own.attributes:
        arguments = zip_longest(own.attributes["arg_attrs"], places, fillvalue=loc)  # a declaration has no block
        rows += [(f"of argument {n} of {name}", attributes, place) for n, (attributes, place) in enumerate(arguments)]
    if "res_attrs" in own.attributes:
        rows += [(f"of result {n} of {name}", result, loc) for n, result in enumerate(own.attributes["res_attrs"])]
    for what, attributes, place in rows:
        for attribute in (a for a in _AFFINITIES if a in attributes):
            if device := device_of_attribute(attributes[attribute]):
                yield attribute, device, what, place


def _folded_device_name(name: str) -> str:
    """Return a device name in which similar characters are equal: lower case, 0 for O, 1 for l and I."""
    return name.casefold().translate(_LOOKALIKES)


def _nearest_name_hint(device: str, declared: Collection[str], attribute: str) -> str:
    """Return the beginning of a hint with the declared name most similar to ``device``, or an empty string."""
    names = {_folded_device_name(name): name for name in declared}
    near = [names[key] for key in get_close_matches(_folded_device_name(device), names, n=1, cutoff=0.5)]
    return f'write {{{attribute} = "{near[0]}"}}, or ' if near else ""


def check_declared(state: ImportState, device: str, attribute: str, ops: bool) -> None:
    """Reject an undeclared device name in the ``attribute`` of a transfer or an op.

    The options and the model's affinities declare devices; if there are none, every name is allowed. Affinities of
    functions, arguments and results count as declarations; with ``ops``, affinities of ops do, too.

    Raises
    ------
    CompileError
        With the most similar declared name.
    """
    session = state.session
    stated = (name for function in session.symbols.values() for name in _declared_affinities(function.operation, ops))
    declared = dict.fromkeys((*filter(None, [session.default_device]), *session.devices, *stated))
    if not declared or device in declared or device in MEMORIES.values():
        return
    where = f"an affinity of an argument or a result, or --device {device}=TARGET"
    state.fail(
        f"{attribute} names device {device!r}, but the affinities and options name {', '.join(declared)}",
        hint=f"{_nearest_name_hint(device, declared, attribute)}declare it: {where}",
    )


def _declared_affinities(function: Any, ops: bool) -> list[str]:
    """Return the device names in the affinities of a function's signature; with ``ops`` also those of its ops."""
    names: list[str] = []

    def visit(op: Any) -> ir.WalkResult:
        signature = (op.attributes[name] for name in ("arg_attrs", "res_attrs") if name in op.attributes)
        for attributes in (op.attributes, *(row for rows in signature for row in rows)):
            names.extend(device_of_attribute(attributes[name]) for name in _AFFINITIES if name in attributes)
        return ir.WalkResult.ADVANCE

    if ops:
        function.walk(visit)
    else:
        visit(function)
    return [name for name in names if name]


def on_affinity_device(state: ImportState, op: Any) -> AbstractContextManager[None]:
    """Return a context that imports ``op`` on the device of its affinity, with its operands moved to that device.

    If the op has no operand to move, like an iota, its results are moved instead.
    """
    device = stated_affinity(op.attributes, state.loc)
    if not device:
        return ANYWHERE
    check_declared(state, device, next(name for name in _AFFINITIES if name in op.attributes), ops=False)
    return _imported_on_device(state, op, device)


@contextmanager
def _imported_on_device(state: ImportState, op: Any, device: str) -> Iterator[None]:
    """Move the operands of ``op`` to ``device`` while the ``with`` block imports the op.

    Afterwards the operands have their old places again. If there is no operand to move, the results are moved.
    """
    if state.by_element:
        state.fail(f"{state.op} in the computation of another op has an affinity", "give it to the op around")
    former = {
        v: leaves
        for v in _operands_and_outer_values(op)
        if (leaves := state.values.get(v)) and state.known.keys().isdisjoint(leaves)
    }
    state.values.update(
        (v, transferred_to_devices(state, leaves, [device] * len(leaves))) for v, leaves in former.items()
    )
    try:
        yield
    finally:
        state.values.update(former)
    if not former:
        for v in op.results:
            leaves = state.leaves(v)
            state.values[v] = transferred_to_devices(state, leaves, [device] * len(leaves))


def _operands_and_outer_values(op: Any) -> dict[Any, None]:
    """Return the operands of ``op`` and the values from outside that its regions use, as keys of a dict."""
    read, inside = dict.fromkeys(op.operands), set()
    blocks = [block for region in op.regions for block in region.blocks]
    while blocks:
        block = blocks.pop()
        inside.update(block.arguments)
        for inner in (view.operation for view in block.operations):
            read.update(dict.fromkeys(inner.operands))
            inside.update(inner.results)
            blocks += [b for region in inner.regions for b in region.blocks]
    return {v: None for v in read if v not in inside}


def transferred_to_devices(state: ImportState, leaves: Collection[Any], devices: Collection[str]) -> tuple[Any, ...]:
    """Return the tensors ``leaves``, each transferred to its entry of ``devices``; an empty name means no transfer.

    Integers that may be sizes stay: every device has them.
    """
    pairs = zip(leaves, devices, strict=True)
    return tuple(
        state.one("transfer", [v], {"device": device}) if device and v not in state.known else v for v, device in pairs
    )


def placement_annotation(op: Any, devices: Collection[str]) -> str:
    """Return the device to which ``annotate_device_placement`` or ``Sharding`` moves its operand, or ""."""
    return _device_of_memory_kind(frontend_attribute(op, _PLACEMENT), devices) or _device_of_sharding(
        op.attributes.get(_SHARDING), devices
    )


def frontend_attribute(op: Any, name: str) -> str:
    """Return the frontend attribute ``name`` of an op, or an empty string."""
    stated = op.attributes.get("mhlo.frontend_attributes")
    return _string_of_attribute(stated[name]) if isinstance(stated, ir.DictAttr) and name in stated else ""


def _device_of_memory_kind(kind: Any, devices: Collection[str]) -> str:
    return MEMORIES.get(_string_of_attribute(kind), "") if kind and HOST in devices else ""


def _device_of_sharding(sharding: Any, devices: Collection[str]) -> str:
    number = _ONE_DEVICE.fullmatch(_string_of_attribute(sharding)) if sharding is not None else None
    name = f"d{number[1]}" if number else ""
    return name if name in devices else ""


def _string_of_attribute(attribute: Any) -> str:
    return attribute.value if isinstance(attribute, ir.StringAttr) else str(attribute)


def on_compute_side(state: ImportState, op: Any) -> AbstractContextManager[None]:
    """Return a context that imports ``op`` with its operands moved to the side where it runs: device or host.

    ``compute_on`` marks ops that run on the host. Nothing is moved if the options do not name both ``device`` and
    ``host``, or inside the regions of a host op. Constants and known sizes are not moved either: both sides have them.
    """
    return ANYWHERE if state.hosted or not _SIDES.issubset(state.session.devices) else _with_operands_moved(state, op)


@contextmanager
def _with_operands_moved(state: ImportState, op: Any) -> Iterator[None]:
    """Move the operands of ``op`` to the host or the device while the ``with`` block imports the op."""
    marked = frontend_attribute(op, _COMPUTE_TYPE) == HOST
    former = {v: state.values[v] for v in op.operands if (v in state.on_host) != marked and _may_move_value(state, v)}
    for v, leaves in former.items():
        moved = (state.one("transfer", [leaf], {"device": HOST if marked else DEVICE}) for leaf in leaves or ())
        state.values[v] = tuple(moved)
    state.hosted = marked
    try:
        yield
    finally:
        state.hosted = False
        state.values.update(former)
        if marked and op.name not in _CALLS:
            state.on_host.update(op.results)


def _may_move_value(state: ImportState, v: Any) -> bool:
    leaves = state.values[v]
    producer = v.owner.name if isinstance(v, ir.OpResult) else ""
    return leaves is not None and producer != "stablehlo.constant" and not any(x in state.known for x in leaves)
