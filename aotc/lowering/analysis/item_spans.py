"""Which bytes of its arrays the items of a kernel's grid touch: an interval for each of many blocks of items.

Index expressions are evaluated over intervals, for all blocks at once: a loop's variable is anything between its ends,
the item's number anything in the block. What cannot be known, such as an index that was read from memory, is anything
that the array's shape allows; so an interval may be too large, and is never too small. Windows, strides, dilation,
padding, reversal and broadcasts need no rules of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from aotc.ir.dims import Atom, Dim, Expr, Sym
from aotc.ir.dims_symbols import evaluate
from aotc.ir.loop_access import AccessWalker, Levels
from aotc.ir.loop_ir import Buffer, For, Kernel
from aotc.vmfb.dtypes import size_of

Ends: TypeAlias = tuple[np.ndarray, np.ndarray]
"""The least and the greatest value, for each block; both count."""

_FAR = np.int64(1) << 40  # beyond all arrays, and small enough to be added up


@dataclass(frozen=True, slots=True)
class ItemSpans:
    """The bytes of one array that blocks of items touch: from ``begins`` to before ``ends``, empty if equal."""

    begins: np.ndarray
    ends: np.ndarray


def item_spans(
    kernel: Kernel, edges: Sequence[int], sizes: Mapping[str, int] = MappingProxyType({})
) -> list[ItemSpans]:
    """Return what the items from each of ``edges`` to before the next touch of each buffer, inputs first.

    ``sizes`` are those of the kernel's dims.
    """
    first, last = np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64) - 1
    buffers = (*kernel.inputs, *kernel.outputs)
    walker = _ItemWalker(first, last, {b.name: _Hull(first) for b in buffers}, sizes)
    walker.block(kernel.body, _Scope({name: walker.just(sizes[name]) for name in kernel.dims}))
    return [walker.hulls[b.name].spans(size_of(b.dtype), walker.count(b)) for b in buffers]


class _Hull:
    """The elements of a buffer that were touched so far, counted from its first."""

    def __init__(self, like: np.ndarray) -> None:
        self.least = np.full(like.shape, _FAR)
        self.most = np.full(like.shape, -_FAR)

    def add(self, ends: Ends) -> None:
        self.least = np.minimum(self.least, ends[0])
        self.most = np.maximum(self.most, ends[1])

    def spans(self, size: int, count: int) -> ItemSpans:
        """Return the bytes of ``count`` elements of ``size`` that were touched."""
        begins = _between(self.least, 0, count) * size
        return ItemSpans(begins, np.maximum(begins, _between(self.most + 1, 0, count) * size))


@dataclass
class _Scope:
    """The loop variables of a block of statements, and expressions over them that are known already."""

    values: dict[str, Ends]
    known: dict[Expr, Ends] = field(default_factory=dict)


@dataclass
class _ItemWalker(AccessWalker[_Scope]):
    first: np.ndarray
    last: np.ndarray
    hulls: dict[str, _Hull]
    sizes: Mapping[str, int]

    def count(self, buffer: Buffer) -> int:
        return prod(evaluate(d, self.sizes) for d in buffer.shape)

    def just(self, number: int) -> Ends:
        """Return the ends of a number that is the same for all blocks."""
        here = np.full(self.first.shape, number)
        return here, here

    def named(self, name: str, e: Dim, scope: _Scope) -> _Scope:
        scope.values[name] = self.value(e, scope)
        return scope

    def whole(self, buffer: Buffer) -> None:
        self.add(buffer, self.any_of(self.count(buffer)))

    def loop(self, stmt: For, scope: _Scope) -> None:
        begin, end = self.value(stmt.begin, scope)[0], self.value(stmt.end, scope)[1]
        if stmt.kind == "parallel":
            begin, end = self.first, self.last + 1
        self.block(stmt.body, _Scope({**scope.values, stmt.var: (begin, np.maximum(begin, end - 1))}))

    def element(self, buffer: Buffer, index: tuple[Dim, ...], scope: _Scope) -> None:
        """Note an element; an index is within the array, whatever its interval says.

        Its number in the array is looked at too: quotients and remainders of one number join in it.
        """
        if buffer.name not in self.hulls:
            return
        least = most = np.zeros(self.first.shape, np.int64)
        number: Dim = 0
        for e, dim in zip(index, buffer.shape, strict=True):
            number = number * dim + e
            low, high = self.value(e, scope)
            extent = evaluate(dim, self.sizes)
            top = max(extent - 1, 0)
            least = least * extent + _between(low, 0, top)
            most = most * extent + _between(high, 0, top)
        low, high = self.value(number, scope)
        self.add(buffer, (np.maximum(least, np.minimum(low, most)), np.minimum(most, np.maximum(high, least))))

    def run(self, buffer: Buffer, base: Dim, levels: Levels, scope: _Scope) -> None:
        if buffer.name not in self.hulls:
            return
        least, most = self.value(base, scope)
        for extent, step in levels:
            turns = np.maximum(self.value(extent, scope)[1] - 1, 0)
            low, high = _times((np.zeros_like(turns), turns), self.value(step, scope))
            least, most = least + np.minimum(low, 0), most + np.maximum(high, 0)
        self.add(buffer, (least, most))

    def add(self, buffer: Buffer, ends: Ends) -> None:
        if buffer.name in self.hulls:
            self.hulls[buffer.name].add(ends)

    def any_of(self, count: int) -> Ends:
        zero = np.zeros(self.first.shape, np.int64)
        return zero, zero + max(count - 1, 0)

    # ------------------------------------------------------------ expressions

    def value(self, e: Dim, scope: _Scope) -> Ends:
        """Return what ``e`` is at least and at most."""
        if not isinstance(e, Expr):
            return self.just(int(e))
        found = scope.known.get(e)
        if found is None:
            least = most = np.full(self.first.shape, e.const)
            for monomial, coefficient in e.terms:
                part = self.atom(monomial[0], scope)
                for atom in monomial[1:]:
                    part = _times(part, self.atom(atom, scope))
                low, high = (part[0] * coefficient, part[1] * coefficient)
                least, most = least + np.minimum(low, high), most + np.maximum(low, high)
            found = scope.known[e] = _between(least, -_FAR, _FAR), _between(most, -_FAR, _FAR)
        return found

    def atom(self, atom: Atom, scope: _Scope) -> Ends:
        if isinstance(atom, Sym):
            known = scope.values.get(atom.name)
            return (np.full(self.first.shape, -_FAR), np.full(self.first.shape, _FAR)) if known is None else known
        (a, b), (c, d) = self.value(atom.a, scope), self.value(atom.b, scope)
        match atom.fn:
            case "max":
                return np.maximum(a, c), np.maximum(b, d)
            case "min":
                return np.minimum(a, c), np.minimum(b, d)
            case "//":
                return _divided(a, b, c, d)
        quotient = _divided(a, b, c, d)
        same = (quotient[0] == quotient[1]) & (c == d)
        safe = np.maximum(c, 1)
        return np.where(same, a % safe, 0), np.where(same, b % safe, np.maximum(d, 1) - 1)


def _between(x: np.ndarray, least: Any, most: Any) -> np.ndarray:
    """Return ``x`` cut to an interval: ``np.clip`` takes five times as long for a few numbers."""
    return np.minimum(np.maximum(x, least), most)


def _divided(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> Ends:
    """Return the ends of quotients by something from ``c`` to ``d``, which is positive where it is used."""
    c, d = np.maximum(c, 1), np.maximum(d, 1)
    return np.minimum(a // c, a // d), np.maximum(b // c, b // d)


def _times(x: Ends, y: Ends) -> Ends:
    """Return the ends of products; factors are cut so that they fit in a word."""
    most = np.int64(1) << 31
    (a, b), (c, d) = ((_between(low, -most, most), _between(high, -most, most)) for low, high in (x, y))
    corners = np.stack([a * c, a * d, b * c, b * d])
    far = np.stack([np.abs(v) >= most for v in (a, b, c, d)]).any(0)
    return np.where(far, -_FAR, corners.min(0)), np.where(far, _FAR, corners.max(0))
