"""Evaluate ops of the tensor IR with all floats in 64 bits: the reference for rounding errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from aotc.ir.opset import OPS
from aotc.ir.semantics.run import Activation, Hooks, interpret
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, captured_values, walk
from aotc.vmfb.dtypes import DTYPES, to_numpy


def wide_results(frame: Activation, op: Op) -> list[np.ndarray] | None:
    """Return the results of ``op`` on the values of ``frame`` in 64 bits; None if it depends on its number format."""
    inner = [op, *(o for r in op.regions for o in walk(r))]
    if any(OPS[o.name].of_format for o in inner):
        return None
    read = {*op.operands, *(v for r in op.regions for v in captured_values(r))}
    mapped = {v: Value(v.name, _wide_type(v.type)) for v in read}
    outer = Activation(frame.module, frame.dims)
    outer.environment = {mapped[v]: _array_in_64_bits(frame.environment[v]) for v in read}
    return list(outer.apply(_op_in_64_bits(op, mapped)))


def wide_call(function: Function, arrays: Sequence[np.ndarray], hooks: Hooks) -> list[np.ndarray] | None:
    """Return the results of ``function`` with all floats in 64 bits; None if an op depends on its number format."""
    if any(OPS[o.name].of_format for o in walk(function.body)):
        return None
    body = _region_in_64_bits(function.body, {})
    wide = replace(function, body=body)
    values = [_array_in_64_bits(a) for a in arrays]
    return interpret(Module({function.name: wide}), *values, function=function.name, hooks=hooks)


def _op_in_64_bits(op: Op, mapped: dict[Value, Value]) -> Op:
    """Return ``op`` with 64-bit floats in its types, regions and attributes."""
    operands = tuple(mapped[v] for v in op.operands)
    regions = tuple(_region_in_64_bits(r, mapped) for r in op.regions)
    for v in op.results:
        mapped[v] = Value(v.name, _wide_type(v.type))
    return Op(op.name, operands, tuple(mapped[v] for v in op.results), _wide_attrs(op.attrs), regions, op.loc)


def _region_in_64_bits(region: Region, mapped: dict[Value, Value]) -> Region:
    """Return ``region`` with 64-bit floats in its types."""
    for v in region.params:
        mapped[v] = Value(v.name, _wide_type(v.type))
    ops = tuple(_op_in_64_bits(op, mapped) for op in region.ops)
    return Region(tuple(mapped[v] for v in region.params), ops, tuple(mapped[v] for v in region.results))


def _wide_type(t: TensorType) -> TensorType:
    return TensorType({"f": "f64", "c": "c128"}.get(DTYPES[t.dtype].kind, t.dtype), t.shape)


def _wide_attrs(attrs: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _array_in_64_bits(v) if isinstance(v, (np.ndarray, np.generic)) else v for k, v in attrs.items()}


def _array_in_64_bits(array: Any) -> np.ndarray:
    values = np.asarray(array)
    kind = next(row.kind for row in DTYPES.values() if to_numpy(row.name) == values.dtype)
    return values.astype({"f": np.float64, "c": np.complex128}.get(kind, values.dtype))
