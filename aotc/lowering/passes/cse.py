"""Compute equal values once: an op with the same operands and attributes as an earlier one is replaced by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import Expr
from aotc.ir.opset import CONTROL_FLOW, EFFECTS
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, replaced_values
from aotc.lowering.passes.dce import has_effect
from aotc.options import Options

_PLAIN = frozenset({int, str, Expr, type(None)})  # most data of attributes: it is its own key


def cse(module: Module, options: Options) -> Module:
    """Return ``module`` without repeated ops; ops of an outer region also replace equal ops in nested ones."""
    changed = {
        n: f.with_body(_ValueNumbering().region_without_repeats(f.body, {})) for n, f in module.functions.items()
    }
    return module.with_functions(changed)


def structural_key(function: Function) -> tuple:
    """Return a structural key of a function: equal for functions that differ only in names of values."""
    body, scope = function.body, _ValueNumbering()
    values = (*body.params, *(v for op in body.ops for v in op.results))
    place = next((n for n, v in enumerate(values) if v.name == function.attrs.get("root")), None)
    return scope.region_key(body, {}), scope.hashable_attribute({**function.attrs, "root": place})


class _HashableArray:
    """An array as a dict key: hashed by a sample of its bytes, equal if all bytes are equal.

    Hashing every byte of the weights of a large model would take longer than the rest of this pass.
    """

    SAMPLE = 64

    def __init__(self, array: np.ndarray) -> None:
        self.array = array
        self.bytes = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        step = max(self.bytes.size // self.SAMPLE, 1)
        self.hash = hash((array.dtype.str, array.shape, self.bytes[::step].tobytes()))

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _HashableArray) or self.hash != other.hash:
            return False
        a, b = self.array, other.array
        return a is b or (a.dtype == b.dtype and a.shape == b.shape and np.array_equal(self.bytes, other.bytes))


class _ValueNumbering:
    """Remove ops that compute the same values as earlier ops (value numbering)."""

    def __init__(self) -> None:
        self.mapped: dict[Value, Value] = {}

    def region_without_repeats(self, region: Region, available: dict[Any, tuple[Value, ...]]) -> Region:
        """Return ``region`` without ops that repeat one of ``available``, which maps keys of ops to their results."""
        outer = len(available)
        ops = []
        for op in region.ops:
            regions = tuple([self.region_without_repeats(r, available) for r in op.regions]) if op.regions else ()
            op = op.on(replaced_values(op.operands, self.mapped), regions)
            if op.name in CONTROL_FLOW or op.name in EFFECTS or has_effect(op):
                ops.append(op)
                continue
            seen = len(available)
            earlier = available.setdefault(self.op_key(op, {}), op.results)
            if len(available) > seen:
                ops.append(op)
            else:
                self.mapped.update(zip(op.results, earlier))
        while len(available) > outer:
            available.popitem()
        return region.with_ops(ops, replaced_values(region.results, self.mapped))

    def op_key(self, op: Op, numbers: dict[Value, int]) -> tuple:
        """Return the structural key of ``op``: its name, operands, attributes, result types and regions."""
        operands = tuple([numbers.get(v, v) for v in op.operands]) if numbers else op.operands
        regions = tuple([self.region_key(r, numbers) for r in op.regions]) if op.regions else ()
        attrs = self.hashable_attribute(op.attrs) if op.attrs else ()
        return op.name, operands, attrs, tuple([v.type for v in op.results]), regions

    def region_key(self, region: Region, outer: dict[Value, int]) -> tuple:
        """Return the structural key of ``region``, with numbers in place of the names of its values."""
        numbers = dict(outer)
        for p in region.params:
            numbers[p] = len(numbers)
        ops = []
        for op in region.ops:
            ops.append(self.op_key(op, numbers))
            for v in op.results:
                numbers[v] = len(numbers)
        types = tuple(p.type for p in region.params)
        return types, tuple(ops), tuple(numbers.get(v, v) for v in region.results)

    def hashable_attribute(self, data: Any) -> Any:
        """Return an attribute's value as a hashable key; floats are compared by their text, so -0.0 is not 0.0."""
        if type(data) in _PLAIN:
            return data
        match data:
            case Mapping():
                return tuple((k, self.hashable_attribute(data[k])) for k in sorted(data))
            case tuple() | list():
                return tuple(map(self.hashable_attribute, data))
            case np.ndarray():
                return _HashableArray(data)
            case bool() | float():
                return (type(data).__name__, repr(data))
        return data
