"""Substitute symbols in a whole function by other symbols or by numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from aotc.ir.dims.algebra import Dim, Expr, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, walk

_LOOP_NAMES = (
    r"[cdfgijklmpqrstuvwz]|kk|column|depth|piece|within",  # of a single loop of a kernel
    r"[bt]_([a-z]|kk)",  # of the blocks and threads that share a loop
    r"(?!d\d|arg\d)[a-z_]+\d+",  # numbered in a kernel; importers number d0, d1 and arg0, arg1
    r"[a-z]+\d+(_\d+)+",  # numbered again in the kernel of a loop over kernels
)
_LOOP_NAME = re.compile("|".join(_LOOP_NAMES))
"""Names of loop variables: a model's dim of such a name is renamed before kernels are built."""


def map_attribute(data: Any, change: Callable[[Any], Any]) -> Any:
    """Return the attribute value ``data`` with ``change`` applied to every leaf of its tuples and dicts."""
    match data:
        case tuple() | list():
            return tuple(map_attribute(x, change) for x in data)
        case Mapping():
            return {k: map_attribute(v, change) for k, v in data.items()}
    return change(data)


def with_dims_in(data: Any, dims: Mapping[str, Dim]) -> Any:
    """Return an attribute value, or a shape, with symbols replaced by the dims of their names."""
    return map_attribute(data, lambda x: substitute(x, dims) if isinstance(x, Expr) else x)


def with_dims(function: Function, dims: Mapping[str, Dim]) -> Function:
    """Return ``function`` with symbols replaced by the dims of their names: in types, attributes and nested regions."""
    mapped: dict[Value, Value] = {}

    def value(v: Value) -> Value:
        mapped[v] = Value(v.name, TensorType(v.type.dtype, with_dims_in(v.type.shape, dims)))
        return mapped[v]

    def region(r: Region) -> Region:
        """Return a region with new values for its own, and dims replaced in types and attributes."""
        params = tuple(map(value, r.params))
        ops = []
        for op in r.ops:
            operands, attrs = tuple(mapped[v] for v in op.operands), with_dims_in(op.attrs, dims)
            inner = tuple(map(region, op.regions))
            ops.append(Op(op.name, operands, tuple(map(value, op.results)), attrs, inner, op.loc))
        return Region(params, tuple(ops), tuple(mapped[v] for v in r.results))

    return replace(function, body=region(function.body), attrs=with_dims_in(function.attrs, dims))


def is_loop_name(name: str) -> bool:
    """Return True if kernels may use ``name`` for a loop variable, so that a dim of the model must not have it."""
    return _LOOP_NAME.fullmatch(name) is not None


def free_loop_names(module: Module) -> Module:
    """Return ``module`` with symbols renamed that are named like loop variables: ``t`` becomes ``t_dim``."""
    names = {s.name for f in module.functions.values() for s in _symbols_of(f)}
    taken = sorted(filter(is_loop_name, names))
    if not taken:
        return module
    renamed = {}
    for name in taken:
        new = f"{name}_dim"
        while new in names:
            new += "_"
        names.add(new)
        renamed[name] = sym(new)
    changed = {}
    for key, f in module.functions.items():
        after = with_dims(f, renamed)
        sizes = {renamed.get(n, n): place for n, place in f.attrs.get("sizes", {}).items()}
        if sizes:
            after = replace(after, attrs={**after.attrs, "sizes": {str(n): place for n, place in sizes.items()}})
        changed[key] = after
    return module.with_functions(changed)


def _symbols_of(function: Function) -> set[Any]:
    """Return the symbols in the types of all values of ``function``."""
    values = [*function.body.params]
    for op in walk(function.body):
        values += [*op.results, *(p for r in op.regions for p in r.params)]
    return {s for v in values for d in v.type.shape for s in symbols(d)}
