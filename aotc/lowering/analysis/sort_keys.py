"""Recognize comparators that order by keys: ``f(x) < f(y)``, or several of these in lexicographic order.

Before, the comparator of ``jnp.sort`` on f32::

    region(%x, %y) { %a = select (eq %x, 0), 0, %x ...  %b = the same of %y  %r = lt_total %a, %b }

After: one :class:`SortKey` whose value is ``%a``, ascending. A comparator of several keys is
``or(lt(a, b), and(eq(a, b), rest))``, as JAX writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aotc.ir.opset import SCALARS
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.vmfb.dtypes import DTYPES, kind_of
from aotc.vmfb.float_formats import SMALL_FLOATS

ASCENDING = {name: row.symbol == "<" for name, row in SCALARS.items() if row.symbol in ("<", ">")}


@dataclass(frozen=True, slots=True)
class SortKey:
    """One key of a sort: the comparator's ``value`` for the first element of each pair, and its direction."""

    value: Value
    ascending: bool


def key_bytes(dtype: str) -> int:
    """Return the bytes of the unsigned key of a value of ``dtype``."""
    return 2 if dtype in SMALL_FLOATS else max(DTYPES[dtype].bits, 8) // 8


def sort_keys(region: Region) -> tuple[SortKey, ...] | None:
    """Return the keys of a comparator, the most significant first, or None if it is not a comparison of keys."""
    makers = {v: op for op in region.ops for v in op.results}
    keys: list[SortKey] = []
    (rest,) = region.results
    while True:
        op = makers.get(rest)
        if op is None:
            return None
        if op.name in ASCENDING:
            key = _key_of_comparison(op, region, makers)
            return None if key is None else (*keys, key)
        parts = _lexicographic_parts(op, makers)
        if parts is None:
            return None
        less, same, rest = parts
        key = _key_of_comparison(less, region, makers)
        equal = _equality_of_less(same, less)
        if key is None or not equal:
            return None
        keys.append(key)


def _lexicographic_parts(op: Op, makers: Mapping[Value, Op]) -> tuple[Op, Op, Value] | None:
    """Match ``or(less, and(same, rest))`` with any order of operands; return its three parts, or None."""
    if op.name != "or":
        return None
    for less, both in (op.operands, op.operands[::-1]):
        compare, conjunction = makers.get(less), makers.get(both)
        if compare is None or conjunction is None or compare.name not in ASCENDING or conjunction.name != "and":
            continue
        for same, rest in (conjunction.operands, conjunction.operands[::-1]):
            equal = makers.get(same)
            if equal is not None and _equality_of_less(equal, compare):
                return compare, equal, rest
    return None


def _equality_of_less(same: Op, less: Op) -> bool:
    row = SCALARS.get(same.name)
    fits = row is not None and row.symbol == "==" and row.total == SCALARS[less.name].total
    return fits and set(same.operands) == set(less.operands)


def _key_of_comparison(op: Op, region: Region, makers: Mapping[Value, Op]) -> SortKey | None:
    """Return the key of a comparison ``op`` whose sides are the same function of the two elements, or None.

    Floats must be compared in total order. Other comparisons are false for NaN, which no order of keys can express.
    """
    left, right = op.operands
    if kind_of(left.type.dtype) not in "biuf" or (kind_of(left.type.dtype) == "f" and not SCALARS[op.name].total):
        return None
    other = {p: region.params[n ^ 1] for n, p in enumerate(region.params)}
    if not _are_mirrored_expressions(left, right, other, makers):
        return None
    first = _compared_elements(left, region, makers)
    if first == {0}:
        return SortKey(left, ASCENDING[op.name])
    return SortKey(right, not ASCENDING[op.name]) if first == {1} else None


def _compared_elements(value: Value, region: Region, makers: Mapping[Value, Op]) -> set[int]:
    """Return the elements of the compared pair (0: first, 1: second) on which ``value`` depends."""
    needed = values_behind(value, makers)
    return {n % 2 for n, p in enumerate(region.params) if p in needed}


def values_behind(value: Value, makers: Mapping[Value, Op]) -> set[Value]:
    """Return ``value`` and all values from which it is computed."""
    stack, values = [value], {value}
    while stack:
        if (op := makers.get(stack.pop())) is not None:
            more = set(op.operands) - values
            values |= more
            stack += more
    return values


def _are_mirrored_expressions(
    left: Value, right: Value, other: Mapping[Value, Value], makers: Mapping[Value, Op]
) -> bool:
    """Return True if both are the same expression with the two compared elements exchanged."""
    stack, seen = [(left, right)], set()
    while stack:
        a, b = pair = stack.pop()
        if pair in seen:
            continue
        seen.add(pair)
        if a in other or b in other:
            if other.get(a) is not b:
                return False
            continue
        one, two = makers.get(a), makers.get(b)
        if one is None or two is None:
            if a is not b:
                return False
            continue
        if one.name != two.name or a.type != b.type or one.regions or not _have_equal_attributes_and_arrays(one, two):
            return False
        stack += zip(one.operands, two.operands, strict=True)
    return True


def _have_equal_attributes_and_arrays(one: Op, two: Op) -> bool:
    """Return True if two ops have the same attributes; arrays must have the same dtype, shape and bits."""
    if one.attrs.keys() != two.attrs.keys():
        return False
    for name, x in one.attrs.items():
        y = two.attrs[name]
        if isinstance(x, np.ndarray) or isinstance(y, np.ndarray):
            x, y = np.asarray(x), np.asarray(y)
            if (x.dtype, x.shape, x.tobytes()) != (y.dtype, y.shape, y.tobytes()):
                return False
        elif x != y:
            return False
    return True
