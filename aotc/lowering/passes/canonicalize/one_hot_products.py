"""Replace matmuls with a part of the identity matrix by selections.

JAX's forward mode emits such matmuls for all weights at once. ``[r == 512 + 32 * i + j]`` over (r, i, j) is the
identity matrix, sliced and reshaped. Contracting it with ``x[b, i]`` over ``i`` repeats each element of ``x`` 32 times,
in the rows from 512 on, and selects those with ``r % 32 == j``. Contracting over ``r`` gives a slice of ``x``. The
omitted terms are 0, except that an infinity or NaN elsewhere in ``x`` would have made the original sum NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr, Sym, is_static, product, static, sym
from aotc.ir.opset import MOVES
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.index_maps import Index, operand_index_of_movement
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import kind_of

# Ops followed from an operand of a matmul back to the comparison that makes it a part of the identity matrix.
IDENTITY_OPS = 16


_FLOATS = ("f16", "bf16", "f32", "f64")


@dataclass(frozen=True, slots=True)
class _OneHotPositions:
    """Positions of the ones in an array of 0 and 1: the indices with ``row == first + number``.

    ``digits`` are the dims whose indices are the digits of ``number``, the most significant first.
    """

    row: int
    digits: tuple[int, ...]
    first: int


def selection_for_one_hot_product(op: Op, b: Builder) -> Value | None:
    """Return the value that replaces a ``dot_general`` with a part of the identity matrix, or None for others."""
    for side, other in ((1, 0), (0, 1)):
        x, ones = op.operands[other], op.operands[side]
        if {x.type.dtype, ones.type.dtype} != {op.result.type.dtype}:
            continue
        if x.type.dtype not in _FLOATS and kind_of(x.type.dtype) not in "iu":
            continue
        if op.attrs["lhs_batch"] or not (is_static(x.type.shape) and is_static(ones.type.shape)):
            continue
        place = _one_hot_positions(ones, b) if product(ones.type.shape) != 0 else None
        if place is not None:
            return _one_hot_selection(op, place, side, b)
    return None


# --- where the ones are ------------------------------------------------------------


def _is_equality_test(v: Value, b: Builder) -> bool:
    """Return True if ``v`` is an equality test, converted and moved; only such values are analysed further."""
    for _ in range(IDENTITY_OPS):
        op = b.definitions.get(v)
        if op is None or op.name == "eq":
            return op is not None
        if op.name != "convert" and op.name not in MOVES:
            return False
        v = op.operands[0]
    return False


def _one_hot_positions(v: Value, b: Builder) -> _OneHotPositions | None:
    """Return the positions of the ones in ``v``, or None if it is not a part of the identity matrix."""
    if not _is_equality_test(v, b):
        return None
    shape = v.type.shape
    index: Index = tuple(sym(f"d{k}", 0, n) if n != 1 else 0 for k, n in enumerate(shape))
    for _ in range(IDENTITY_OPS):
        op = b.definitions.get(v)
        if op is None:
            return None
        if op.name == "eq":
            a, c = (_integer_element_expression(x, index, b) for x in op.operands)
            return None if a is None or c is None else _index_of_equality(a - c, shape)
        if op.name != "convert":
            before = _index_before_movement(op, index)
            if before is None:
                return None
            index = before
        v = op.operands[0]
    return None


def _index_before_movement(op: Op, index: Index) -> Index | None:
    """Return the index of the operand's element that a movement op copies to ``index``, or None."""
    try:
        return operand_index_of_movement(op, index) if op.name in MOVES else None
    except KeyError:
        return None


def _integer_element_expression(v: Value, index: Index, b: Builder) -> Dim | None:
    """Return the element of an integer array at ``index`` as an expression; None unless it is linear in the index."""
    for _ in range(IDENTITY_OPS):
        op = b.definitions.get(v)
        if op is None or v.type.dtype not in ("i32", "i64"):  # which no place overflows
            return None
        number = splat_of(v, b.definitions)
        if number is not None:
            return int(number)
        match op.name:
            case "iota":
                return index[op.attrs["dim"]]
            case "add" | "sub":
                left, right = (_integer_element_expression(x, index, b) for x in op.operands)
                if left is None or right is None:
                    return None
                return left + right if op.name == "add" else left - right
            case "convert":
                v = op.operands[0]
            case _:
                before = _index_before_movement(op, index)
                if before is None:
                    return None
                index, v = before, op.operands[0]
    return None


def _index_of_equality(difference: Dim, shape: Sequence[Dim]) -> _OneHotPositions | None:
    """Return the index at which two index expressions are equal, or None if their ``difference`` is not linear."""
    if not isinstance(difference, Expr):
        return None
    factors: dict[int, int] = {}
    for monomial, factor in difference.terms:
        atom = monomial[0]
        if len(monomial) > 1 or not isinstance(atom, Sym):
            return None
        factors[int(atom.name[1:])] = factor
    for row, sign in factors.items():
        strides = {d: -sign * factor for d, factor in factors.items() if d != row}
        digits = tuple(sorted(strides, key=strides.__getitem__, reverse=True))
        sizes = [static(shape[d]) for d in digits]
        right = [int(np.prod(sizes[k + 1 :])) for k in range(len(sizes))]
        first = -sign * difference.const
        inside = first >= 0 and first + int(np.prod(sizes)) <= static(shape[row])
        if abs(sign) == 1 and inside and digits and right == [strides[d] for d in digits]:
            return _OneHotPositions(row, digits, first)
    return None


# --- the selection -----------------------------------------------------------------


def _one_hot_selection(op: Op, ones: _OneHotPositions, side: int, b: Builder) -> Value | None:
    """Return the elements of the other operand that a one-hot operand selects, or None if the dims do not allow it.

    ``side`` is the number of the one-hot operand, whose ones are at ``ones``. Contracting over its row dim slices the
    other operand; contracting over digits repeats elements of the other operand.
    """
    x, part = op.operands[1 - side], op.operands[side]
    names = ("lhs_contract", "rhs_contract")
    partner = dict(zip(op.attrs[names[side]], op.attrs[names[1 - side]]))  # the summed dims of both
    free = [d for d in range(x.type.rank) if d not in partner.values()]
    summed = [d for d in (ones.row, *ones.digits) if d in partner]
    trivial = [d for d in partner if d not in summed]
    if not summed or any(part.type.shape[d] != 1 for d in trivial) or (ones.row in summed and len(summed) > 1):
        return None
    others = [d for d in range(part.type.rank) if d not in partner]
    at = {d: n + (len(free) if side == 1 else 0) for n, d in enumerate(others)}
    own = [n + (0 if side == 1 else len(others)) for n in range(len(free))]
    ordered = b.transpose(x, [*free, *(partner[d] for d in (*summed, *trivial))])
    sizes = [part.type.shape[d] for d in summed]
    ordered = b.reshape(ordered, [*(x.type.shape[d] for d in free), *sizes])
    terms, rest = _one_hot_terms(ordered, len(free), b)
    shape, digits = op.result.type.shape, [part.type.shape[d] for d in ones.digits]
    lead = terms.type.shape[: len(free)]
    if ones.row in summed:
        terms = b.slice_dim(terms, len(free), ones.first, ones.first + product(digits))
        return _broadcast_at_places(b.reshape(terms, [*lead, *digits]), [*own, *(at[d] for d in ones.digits)], shape, b)
    places = [len(free) + ones.digits.index(d) for d in summed]
    rows = b.broadcast(terms, [*range(len(free)), *places], [*lead, *digits])
    rows = _dims_merged_to_rows(rows, len(free), ones, static(part.type.shape[ones.row]), None, b)
    left = [d for d in ones.digits if d not in summed]
    sizes = [part.type.shape[d] for d in left]
    numbers = b.reshape(b.make("iota", (), {"dim": 0}, TensorType("i32", (product(sizes),))), sizes)
    one_positions = b.broadcast(numbers, [ones.digits.index(d) for d in left], digits)
    one_positions = _dims_merged_to_rows(one_positions, 0, ones, static(part.type.shape[ones.row]), -1, b)
    is_one = b.make(
        "eq",
        (
            _broadcast_at_places(one_positions, [at[ones.row]], shape, b),
            _broadcast_at_places(numbers, [at[d] for d in left], shape, b),
        ),
    )
    values = _broadcast_at_places(rows, [*own, at[ones.row]], shape, b), _broadcast_at_places(rest, own, shape, b)
    return b.make("select", (is_one, *values))


def _dims_merged_to_rows(
    x: Value, lead: int, ones: _OneHotPositions, rows: int, outside: int | None, b: Builder
) -> Value:
    """Return ``x`` with dims after ``lead`` merged to ``rows`` rows; rows without a one are ``outside`` (None: 0)."""
    count = product(x.type.shape[lead:])
    flat = b.reshape(x, [*x.type.shape[:lead], count])
    value = None if outside is None else b.constant(outside, TensorType(x.type.dtype))
    return b.pad(flat, value, low={lead: ones.first}, high={lead: rows - ones.first - count})


def _broadcast_at_places(x: Value, places: Sequence[int], shape: Sequence[Dim], b: Builder) -> Value:
    """Return ``x`` broadcast to ``shape``, with its dims as the dims ``places`` of the result."""
    order = sorted(range(len(places)), key=places.__getitem__)
    return b.broadcast(b.transpose(x, order), [places[k] for k in order], shape)


def _one_hot_terms(x: Value, free: int, b: Builder) -> tuple[Value, Value]:
    """Return the elements of ``x`` that a one-hot matmul selects, and its results for rows without a one."""
    lead, summed = x.type.shape[:free], tuple(range(free, x.type.rank))
    if kind_of(x.type.dtype) != "f":
        return x, b.constant(0, TensorType(x.type.dtype, lead))
    bad = b.convert(b.make("not", (b.make("is_finite", (x,)),)), "f32")
    count = b.reduce(bad, b.constant(0, TensorType("f32")), summed, b.combiner("add", "f32"))
    others = b.make("sub", (b.broadcast(count, range(free), x.type.shape), bad))
    values = []
    for of, value in ((others, b.make("add", (x, b.constant(0, x.type)))), (count, None)):
        value = value if value is not None else b.constant(0, TensorType(x.type.dtype, lead))
        spoilt = b.make("gt", (of, b.constant(0, of.type)))
        values.append(b.make("select", (spoilt, b.constant(np.nan, value.type), value)))
    return values[0], values[1]
