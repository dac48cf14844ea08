"""Large constants of a program for several devices: arguments while XLA partitions it, and constants again after that.

XLA's partitioner runs in a child process, which would parse, copy and print each constant of the program. Replicated
arguments have only a type there. Each rank slices them as it slices constants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod
from typing import NamedTuple

from jaxlib.mlir import ir

from aotc.frontend.entry_attrs import attribute_dictionaries
from aotc.frontend.mlir_types import inner_operations, is_private

# Bytes of a constant from which it is hoisted. XLA may fold smaller ones, such as tables of indices.
HOISTED_BYTES = 1 << 20
_MANUAL = "sdy.manual_computation"


class HoistedConstant(NamedTuple):
    """The elements and the location of a constant, which is the last argument of a program or one of the last."""

    value: ir.Attribute
    location: ir.Location


def hoist_constants(
    module: ir.Module, main: ir.OpView, whole: Callable[[ir.RankedTensorType], dict[str, ir.Attribute]]
) -> list[HoistedConstant]:
    """Replace large constants of a module by arguments of its public function, and return them in their order.

    Constants of functions that it calls become arguments of those, too. Constants inside of manual computations, which
    describe one device, remain. JAX passes those of ``shard_map`` as operands.

    Parameters
    ----------
    module : ir.Module
    main : ir.OpView
        The public function.
    whole : callable
        Returns the attributes of an argument that is whole on each device.
    """
    functions = {f.operation.attributes["sym_name"].value: f for f in _functions(module)}
    hoister = _Hoister(functions)
    hoisted = hoister.hoist(main)
    if hoisted:
        count = len(main.operation.regions[0].blocks[0].arguments)
        rows = attribute_dictionaries(main, "arg_attrs", count - len(hoisted))
        rows += [whole(constant.value.type) for constant in hoisted]
        main.operation.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows])
    return hoisted


def restore_constants(main: ir.OpView, hoisted: list[HoistedConstant]) -> None:
    """Replace the last arguments of a function by constants."""
    block = main.operation.regions[0].blocks[0]
    first = len(block.arguments) - len(hoisted)
    for number, constant in enumerate(hoisted):
        with ir.InsertionPoint.at_block_begin(block):
            op = _constant(constant)
        block.arguments[first + number].replace_all_uses_with(op.results[0])
    for number in range(len(block.arguments) - 1, first - 1, -1):
        block.erase_argument(number)
    _set_argument_types(main)
    if "arg_attrs" in main.operation.attributes:
        rows = attribute_dictionaries(main, "arg_attrs", first)
        main.operation.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows[:first]])


def _constant(constant: HoistedConstant) -> ir.Operation:
    attributes = {"value": constant.value}
    types = [constant.value.type]
    return ir.Operation.create("stablehlo.constant", results=types, attributes=attributes, loc=constant.location)


def _functions(module: ir.Module) -> list[ir.OpView]:
    return [op for op in module.body.operations if op.operation.name == "func.func"]


class _Hoister:
    """Functions of a module, whose large constants become arguments."""

    def __init__(self, functions: dict[str, ir.OpView]) -> None:
        self._functions = functions
        self._closed = _functions_of_manual_computations(functions)
        self._done: dict[str, list[HoistedConstant]] = {}

    def hoist(self, function: ir.OpView) -> list[HoistedConstant]:
        """Make the large constants of a function, and of those that it calls, its last arguments."""
        block = function.operation.regions[0].blocks[0]
        places: dict[ir.Attribute, ir.Value] = {}
        found: list[HoistedConstant] = []

        def argument(constant: HoistedConstant) -> ir.Value:
            if constant.value not in places:
                places[constant.value] = block.add_argument(constant.value.type, constant.location)
                found.append(constant)
            return places[constant.value]

        for op in [*_operations_outside_manual_computations(function.operation)]:
            if op.name == "stablehlo.constant" and _is_readable(op) and is_large(op.attributes["value"]):
                op.results[0].replace_all_uses_with(argument(HoistedConstant(op.attributes["value"], op.location)))
                op.erase()
            elif op.name == "func.call" and (needed := self._hoisted_of(op)):
                _call_with(op, [argument(constant) for constant in needed])
        if found:
            _set_argument_types(function)
            if "arg_attrs" in function.operation.attributes and is_private(function):
                rows = attribute_dictionaries(function, "arg_attrs", len(block.arguments) - len(found))
                rows += [{} for _ in found]
                function.operation.attributes["arg_attrs"] = ir.ArrayAttr.get([ir.DictAttr.get(row) for row in rows])
        return found

    def _hoisted_of(self, call: ir.Operation) -> list[HoistedConstant]:
        name = call.attributes["callee"].value
        if name in self._closed or name not in self._functions:
            return []
        if name not in self._done:
            self._done[name] = self.hoist(self._functions[name])
        return self._done[name]


def _is_readable(op: ir.Operation) -> bool:
    """Return True unless the constant is complex: MLIR's Python bindings cannot return such elements."""
    kind = op.results[0].type
    return isinstance(kind, ir.RankedTensorType) and not isinstance(kind.element_type, ir.ComplexType)


def is_large(value: ir.Attribute) -> bool:
    """Return True if the elements of a constant are hoisted: not one number for all of them, and many bytes."""
    kind = value.type if isinstance(value, ir.DenseElementsAttr) else None
    if not isinstance(kind, ir.RankedTensorType) or value.is_splat:
        return False
    try:
        size = _element_bytes(kind.element_type)
    except ValueError:
        return False
    return prod(kind.shape) * size >= HOISTED_BYTES


def _element_bytes(kind: ir.Type) -> int:
    """Return the bytes of an element; at least one."""
    if isinstance(kind, ir.ComplexType):
        return 2 * _element_bytes(kind.element_type)
    if not isinstance(kind, ir.IntegerType | ir.FloatType):
        raise ValueError(f"no size of {kind}")
    return max(kind.width // 8, 1)


def _operations_outside_manual_computations(root: ir.Operation) -> Iterator[ir.Operation]:
    for op in inner_operations(root):
        yield op
        if op.name != _MANUAL:
            yield from _operations_outside_manual_computations(op)


def _functions_of_manual_computations(functions: dict[str, ir.OpView]) -> set[str]:
    """Return the names of functions that manual computations call, and of those that such functions call."""
    called = {name: {*_callees(f.operation)} for name, f in functions.items()}
    found = {name for f in functions.values() for name in _callees_of_manual_computations(f.operation)}
    rest = [*found]
    while rest:
        more = called.get(rest.pop(), set()) - found
        found |= more
        rest += more
    return found


def _callees_of_manual_computations(root: ir.Operation) -> Iterator[str]:
    for op in inner_operations(root):
        yield from _callees(op) if op.name == _MANUAL else _callees_of_manual_computations(op)


def _callees(root: ir.Operation) -> Iterator[str]:
    for op in inner_operations(root):
        if op.name == "func.call":
            yield op.attributes["callee"].value
        yield from _callees(op)


def _call_with(call: ir.Operation, more: list[ir.Value]) -> None:
    """Replace a call by one with more operands."""
    attributes = dict(call.attributes.items())
    with ir.InsertionPoint(call):
        new = ir.Operation.create(
            "func.call", results=[r.type for r in call.results], operands=[*call.operands, *more],
            attributes=attributes, loc=call.location,
        )  # fmt: skip
    for old, result in zip(call.results, new.results, strict=True):
        old.replace_all_uses_with(result)
    call.erase()


def _set_argument_types(function: ir.OpView) -> None:
    """Write the types of a function's arguments to its type."""
    types = [argument.type for argument in function.operation.regions[0].blocks[0].arguments]
    kind = function.operation.attributes["function_type"].value
    function.operation.attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, kind.results))
