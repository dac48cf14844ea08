"""Analyse attention masks: split them into conjuncts, and recognize the causal one.

A value is read at a symbolic index: one symbol for each axis, and 0 for dims of one element.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import MOVES, OPS, ORDERINGS, SCALARS
from aotc.ir.opset.dim_attributes import dim_of
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.index_maps import Index, operand_index_of_movement, value_before_movement
from aotc.vmfb.dtypes import kind_of, to_numpy

Makers = Mapping[Value, Op]


@dataclass(frozen=True, slots=True)
class ElementRead:
    """A value with the symbolic index at which it is read: axes, and 0 for dims of one element."""

    value: Value
    index: Index


# Depth of recursion into ops on scalars: typical numbers such as 1 / sqrt(depth) need fewer; longer chains are ignored.
NUMBER_STEPS = 8


def uniform_number(value: Value, makers: Makers, steps: int = NUMBER_STEPS) -> float | None:
    """Return the number that fills the constant ``value``, or None if it is not uniform.

    The value is a constant, or computed from constants by a chain of at most ``steps`` scalar ops; movement ops do not
    count.
    """
    value = value_before_movement(value, makers)
    op = makers.get(value)
    if op is None or kind_of(value.type.dtype) == "c":
        return None
    if op.name in SCALARS and steps and (value.type.rank == 0 or op.name == "convert"):
        type_ = TensorType(op.result.type.dtype)
        numbers = [uniform_number(v, makers, steps - 1) for v in op.operands]
        if any(x is None for x in numbers):
            return None
        arrays = [np.asarray(x).astype(to_numpy(v.type.dtype)) for x, v in zip(numbers, op.operands, strict=True)]
        return float(OPS[op.name].reference(arrays, op.attrs, (), (type_,))[0])
    number = splat_of(value, makers)
    return None if number is None else float(number)


def earliest_read(read: ElementRead, extents: Mapping[Dim, Dim], makers: Makers) -> ElementRead | None:
    """Follow ``read`` back through movement ops as far as its dims stay whole; return that read, or None."""
    best = read if _reads_whole_dims(read, extents) else None
    while (op := makers.get(read.value)) is not None and op.name in MOVES:
        read = ElementRead(op.operands[0], operand_index_of_movement(op, read.index))
        if not _reads_whole_dims(read, extents):
            break
        best = read
    return best


def _reads_whole_dims(read: ElementRead, extents: Mapping[Dim, Dim]) -> bool:
    axes = [i for i in read.index if i != 0]
    sizes = zip(read.index, read.value.type.shape, strict=True)
    return all(n == (1 if i == 0 else extents.get(i)) for i, n in sizes) and len(set(axes)) == len(axes)


def mask_conjuncts(mask: ElementRead, extents: Mapping[Dim, Dim], makers: Makers) -> list[ElementRead]:
    """Return the conjuncts of a mask, each followed back through movement ops."""
    stack, conjuncts = [mask], []
    while stack:
        read = stack.pop()
        read = earliest_read(read, extents, makers) or read
        op = makers.get(read.value)
        if op is not None and op.name == "and":
            stack += [replace(read, value=v) for v in reversed(op.operands)]
        else:
            conjuncts.append(read)
    return conjuncts


def causal_offset(part: ElementRead, term: Dim, makers: Makers) -> tuple[Dim, Dim] | None:
    """Return the row axis and the offset if the conjunct ``part`` means ``term <= row + offset``, else None."""
    value, index = part.value, part.index
    while (op := makers.get(value)) is not None and op.name in MOVES:
        value, index = op.operands[0], operand_index_of_movement(op, index)
    if op is None:
        return None
    if op.name == "constant":
        return _lower_triangle_offset(op.attrs["value"], index, term)
    sides = [_integer_tensor_element(v, index, makers) for v in op.operands] if op.name in ORDERINGS else []
    left, right = sides or (None, None)
    if left is None or right is None:
        return None
    least = left - right if op.name.startswith("g") else right - left  # at least 0, or 1
    least = least - (0 if op.name.endswith("e") else 1)
    for row in {i for i in index if i not in (0, term)}:
        offset = least - row + term
        if not _depends_on_axes(offset, {row, term}) and isinstance(row, Expr):
            return row, offset
    return None


def _depends_on_axes(e: Dim, axes: set[Dim]) -> bool:
    names = {s for a in axes for s in symbols(a)}
    return any(s in names for s in symbols(e))


def _integer_tensor_element(value: Value, index: Index, makers: Makers) -> Dim | None:
    """Return an element of an integer tensor as an expression of its index, or None."""
    op = makers.get(value)
    if op is None:
        return None
    number = uniform_number(value, makers)
    if number is not None and kind_of(value.type.dtype) in "iu":
        return int(number)
    match op.name:
        case "iota":
            return index[op.attrs["dim"]]
        case "dim":
            return dim_of(op.attrs, "expr")
        case "convert" if kind_of(op.operands[0].type.dtype) in "iu":
            return _integer_tensor_element(op.operands[0], index, makers)
        case "add" | "sub":
            a, b = (_integer_tensor_element(v, index, makers) for v in op.operands)
            if a is None or b is None:
                return None
            return a + b if op.name == "add" else a - b
    if op.name in MOVES:
        return _integer_tensor_element(op.operands[0], operand_index_of_movement(op, index), makers)
    return None


def _lower_triangle_offset(value: np.ndarray, index: Index, term: Dim) -> tuple[Dim, Dim] | None:
    """Return the row axis and the offset of a mask constant that is a lower triangle, else None."""
    axes = [(d, i) for d, i in enumerate(index) if i != 0]
    if len(axes) != 2 or axes[1][1] != term or value.ndim != len(index) or any(n == 0 for n in value.shape):
        return None
    matrix: np.ndarray = value.reshape([value.shape[d] for d, _ in axes])
    first = int(matrix[0].sum())
    if not first or not np.array_equal(matrix, np.tril(np.ones_like(matrix), first - 1)):
        return None
    return axes[0][1], first - 1
