"""Copies of ops and regions with new values and names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.tensor.ir import Op, Region, Value, replaced_values


class Names:
    """Generator of readable value names that are unique in a function.

    The names in ``region`` are collected only when the first new name is needed: most passes change few functions.
    """

    def __init__(self, region: Region) -> None:
        self._region = region
        self._used: set[str] | None = None
        self._counts: dict[str, int] = {}

    def fresh(self, hint: str) -> str:
        """Return ``hint``, or ``hint_2``, ``hint_3``... if it is used."""
        if self._used is None:
            self._used = _names_in(self._region)
        name, count = hint, self._counts.get(hint, 1)
        while name in self._used:
            count += 1
            name = f"{hint}_{count}"
        self._counts[hint] = count
        self._used.add(name)
        return name


def _names_in(region: Region) -> set[str]:
    names = {v.name for v in (*region.params, *(v for op in region.ops for v in op.results))}
    return names.union(*(_names_in(r) for op in region.ops for r in op.regions))


def copy_region(region: Region, names: Names) -> Region:
    """Return ``region`` with new parameters and new results of ops."""
    return _copy_region(region, names, {})


def copy_ops(region: Region, values: Sequence[Value], names: Names) -> tuple[list[Op], tuple[Value, ...]]:
    """Return copies of the ops of ``region`` with ``values`` for its parameters, and the values of its results."""
    mapped = dict(zip(region.params, values, strict=True))
    ops = [_copy_op(op, names, mapped) for op in region.ops]
    return ops, replaced_values(region.results, mapped)


def _copy_op(op: Op, names: Names, mapped: dict[Value, Value]) -> Op:
    """Return a copy of ``op`` with new results, which ``mapped`` records."""
    regions = tuple([_copy_region(r, names, mapped) for r in op.regions])
    operands = replaced_values(op.operands, mapped)
    mapped.update((v, _copy_value(v, names)) for v in op.results)
    return replace(op, operands=operands, results=tuple([mapped[v] for v in op.results]), regions=regions)


def _copy_region(region: Region, names: Names, mapped: dict[Value, Value]) -> Region:
    mapped.update((v, _copy_value(v, names)) for v in region.params)
    ops = tuple([_copy_op(op, names, mapped) for op in region.ops])
    return Region(tuple([mapped[v] for v in region.params]), ops, replaced_values(region.results, mapped))


def _copy_value(v: Value, names: Names) -> Value:
    return Value(names.fresh(v.name), v.type)
