"""Compute large constants with a short description where they are read, instead of storing them in the bundle.

Before::

    %mask = constant dense<...> : i1[4096, 4096]        // a lower triangle, 16 MB
    %1 = select %mask, %x, %y
After::

    %mask = ge (iota 0), (iota 1)
    %1 = select %mask, %x, %y

Repeated rows become ``broadcast``, progressions of integers ``iota``, other integers in steps sums of ``iota`` with
quotients and remainders, diagonals and triangles comparisons of two ``iota``
(:mod:`aotc.lowering.analysis.computable`). Constants that a product, a sort or another op reads from memory stay: each
call would compute them first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import numpy as np

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.opset import LOOPED, MOVES, SCALARS
from aotc.ir.tensor.ir import Function, Module, Op, TensorType, Value, walk
from aotc.lowering.analysis.computable import Banded, Description, Progression, Repeated, Stepped, describe_array
from aotc.lowering.analysis.in_place import updated_operands
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.lowering.plans.thresholds import FOLDED_BYTES
from aotc.options import Options
from aotc.vmfb.dtypes import size_of


def compute_constants(module: Module, options: Options) -> Module:
    """Return ``module`` with large constants of simple content as the ops that compute them."""
    return module.with_functions({name: _with_computed_constants(f) for name, f in module.functions.items()})


def _with_computed_constants(function: Function) -> Function:
    """Return ``function`` with large constants computed by ops where their readers compute them in place."""
    large = [op for op in walk(function.body) if op.name == "constant" and _is_large_constant(op)]
    if not large:
        return function
    readers: dict[Value, list[Op]] = {}
    for op in walk(function.body):
        for v in op.operands:
            readers.setdefault(v, []).append(op)
    computed = {op.result for op in large if _is_read_in_place(op.result, readers)}
    return rewrite_function(
        function, lambda op, b: _compute_constant_rule(op, b) if op.result in computed else None, ("constant",)
    )


def _is_large_constant(op: Op) -> bool:
    type_ = op.result.type
    whole = op.attrs["value"].ndim == type_.rank > 0 and is_static(type_.shape)
    return whole and not FOLDED_BYTES.holds(static(product(type_.shape)) * size_of(type_.dtype))


def _is_read_in_place(value: Value, readers: Mapping[Value, Sequence[Op]]) -> bool:
    """Return True if no reader needs ``value`` in memory: each computes it inline, copies it, or carries it."""
    for op in readers.get(value, ()):
        if op.name in MOVES:
            if not _is_read_in_place(op.result, readers):
                return False
        elif op.name not in SCALARS and op.name not in LOOPED:
            updated = updated_operands(op)
            if any(v is value and n not in updated for n, v in enumerate(op.operands)):
                return False
    return True


def _compute_constant_rule(op: Op, b: Builder) -> Sequence[Value] | None:
    type_ = op.result.type
    description = describe_array(op.attrs["value"])
    return None if description is None else (_ops_of_constant(description, type_, b),)


def _ops_of_constant(description: Description, type_: TensorType, b: Builder) -> Value:
    """Append the iota, broadcast or arithmetic ops that compute a constant of simple content."""
    match description:
        case Repeated(part, dims):
            inner = b.constant(part, TensorType(type_.dtype, part.shape))
            return b.broadcast(inner, dims, type_.shape)
        case Progression(start, step, dim):
            numbers = TensorType("i64", (type_.shape[dim],))
            line = b.make("iota", (), {"dim": 0}, numbers)
            line = b.make("mul", (line, b.constant(step, numbers)))
            line = b.make("add", (line, b.constant(start, numbers)))
            return b.broadcast(b.convert(line, type_.dtype), (dim,), type_.shape)
        case Stepped():
            return _progression_ops(description, type_, b)
        case Banded(triangle, offset, inside, outside, dims):
            test, numbers = "ge" if triangle else "eq", TensorType("i32", tuple(type_.shape[d] for d in dims))
            i, j = (b.make("iota", (), {"dim": d}, numbers) for d in range(2))
            i = b.make("add", (i, b.constant(offset, numbers))) if offset else i
            if type_.dtype == "i1":  # attention recognises a comparison as a causal mask
                outer = "lt" if triangle else "ne"
                return b.broadcast(b.make(test if inside else outer, (i, j)), dims, type_.shape)
            parts = (b.constant(np.asarray(v), TensorType(type_.dtype, numbers.shape)) for v in (inside, outside))
            return b.broadcast(b.make("select", (b.make(test, (i, j)), *parts)), dims, type_.shape)


def _progression_ops(stepped: Stepped, type_: TensorType, b: Builder) -> Value:
    """Append the ops that compute an arithmetic progression along one or several dims."""
    sizes = [static(type_.shape[s.dim]) for s in stepped.axes]
    largest = abs(stepped.start) + sum(abs(s.step) * s.largest_multiplier(n) for s, n in zip(stepped.axes, sizes))
    dtype = "i32" if max(largest, *sizes) < 1 << 31 else "i64"
    parts: list[Value] = []
    for steps, size in zip(stepped.axes, sizes):
        # indices are unsigned: quotients and remainders of signed integers take twice as many instructions
        line = b.make("iota", (), {"dim": 0}, TensorType(dtype.replace("i", "u"), (size,)))
        for name, number, neutral in (("div", steps.every, 1), ("rem", steps.period, 0)):
            line = b.make(name, (line, b.constant(number, line.type))) if number != neutral else line
        line = b.convert(line, dtype)
        for name, number, neutral in (("mul", steps.step, 1), ("add", 0 if parts else stepped.start, 0)):
            line = b.make(name, (line, b.constant(number, line.type))) if number != neutral else line
        parts.append(b.broadcast(line, (steps.dim,), type_.shape))
    return b.convert(reduce(lambda x, y: b.make("add", (x, y)), parts), type_.dtype)
