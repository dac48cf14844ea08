"""Compute which bytes of its arrays blocks of grid items of a kernel access: one interval per array and block.

The analysis is interval arithmetic over index expressions, vectorized over all blocks. A loop variable may be anything
in its range, the item number anything in the block. An unknown index, such as one read from memory, may be anything
that the shape of the array allows. So an interval may be too large, but never too small. Windows, strides, dilation,
padding, reversal and broadcasts need no special rules. Bounds that are the same for all blocks, like those of most loop
variables, are Python numbers; NumPy would take twenty times as long for them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from math import prod
from types import MappingProxyType
from typing import TypeAlias

import numpy as np

from aotc.ir.dims.algebra import Atom, Dim, Expr, Monomial, Sym
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.loop.access import AccessWalker, Levels
from aotc.ir.loop.forms.offsets import linearize
from aotc.ir.loop.ir import Buffer, For, Kernel
from aotc.vmfb.dtypes import size_of

Number: TypeAlias = int | np.ndarray
"""An array with one number per block, or a number that is the same for all blocks."""

Ends: TypeAlias = tuple[Number, Number]
"""The least and the greatest value, both inclusive."""

_FAR = 1 << 40  # stands for infinity: larger than any array, but sums of it do not overflow


@dataclass(frozen=True, slots=True, eq=False)
class ItemSpans:
    """Bytes of one array that each block of items accesses: ``[begins, ends)``, empty if both are equal."""

    begins: np.ndarray
    ends: np.ndarray


def item_spans(
    kernel: Kernel, edges: Sequence[int], sizes: Mapping[str, int] = MappingProxyType({})
) -> list[ItemSpans]:
    """Return the byte ranges that blocks of grid items access, per buffer, inputs first.

    Block ``n`` has the items from ``edges[n]`` up to but not including ``edges[n + 1]``. ``sizes`` are the values of
    the kernel's dims.
    """
    first, last = np.array(edges[:-1], np.int64), np.array(edges[1:], np.int64) - 1
    buffers = (*kernel.inputs, *kernel.outputs)
    walker = _ItemAccessWalker(first, last, {b.name: _AccessedIntervals() for b in buffers}, sizes)
    walker.visit_block(kernel.body, _Scope({name: (sizes[name], sizes[name]) for name in kernel.dims}))
    return [walker.hulls[b.name].spans(size_of(b.dtype), walker.element_count(b), first.shape) for b in buffers]


@dataclass
class _AccessedIntervals:
    """Intervals of the elements of a buffer accessed so far, by linear index; one for each block."""

    least: Number = _FAR
    most: Number = -_FAR

    def add_to_hull(self, ends: Ends) -> None:
        self.least, self.most = _elementwise_minimum(self.least, ends[0]), _elementwise_maximum(self.most, ends[1])

    def spans(self, size: int, count: int, blocks: tuple[int, ...]) -> ItemSpans:
        """Return the accessed byte ranges of a buffer of ``count`` elements of ``size`` bytes."""
        begins = _clamped_range(self.least, 0, count) * size
        ends = _elementwise_maximum(begins, _clamped_range(self.most + 1, 0, count) * size)
        return ItemSpans(np.full(blocks, begins, np.int64), np.full(blocks, ends, np.int64))


@dataclass
class _Scope:
    """Ranges of the variables of a block of statements, with caches for index expressions and elements."""

    values: dict[str, Ends]
    cached: dict[Expr, Ends] = field(default_factory=dict)
    places: dict[tuple[tuple[Dim, ...], tuple[Dim, ...]], Ends] = field(default_factory=dict)


@dataclass
class _ItemAccessWalker(AccessWalker[_Scope]):
    """Walk a kernel and extend the interval of each buffer by every access.

    ``first`` and ``last`` are the inclusive item numbers of each block.
    """

    first: np.ndarray
    last: np.ndarray
    hulls: dict[str, _AccessedIntervals]
    sizes: Mapping[str, int]

    def element_count(self, buffer: Buffer) -> int:
        return prod(evaluate(d, self.sizes) for d in buffer.shape)

    def scope_with_name(self, name: str, e: Dim, scope: _Scope) -> _Scope:
        scope.values[name] = self.value_range(e, scope)
        return scope

    def record_whole_buffer(self, buffer: Buffer) -> None:
        self.add_to_hull(buffer, self.whole_array_range(self.element_count(buffer)))

    def visit_loop(self, stmt: For, scope: _Scope) -> None:
        """Walk a loop's body; the grid's variable has the range of the block's items, others their whole range."""
        if stmt.kind == "parallel":
            iterations: Ends = self.first, self.last
        else:
            begin, end = self.value_range(stmt.begin, scope)[0], self.value_range(stmt.end, scope)[1]
            iterations = begin, _elementwise_maximum(begin, end - 1)
        self.visit_block(stmt.body, _Scope({**scope.values, stmt.var: iterations}))

    def record_element_access(self, buffer: Buffer, index: tuple[Dim, ...], scope: _Scope) -> None:
        """Add the accesses to the element at ``index`` to the interval of ``buffer``."""
        if buffer.name not in self.hulls:
            return
        key = index, buffer.shape
        interval = scope.places.get(key)
        if interval is None:
            interval = scope.places[key] = self.linear_index_range(index, buffer.shape, scope)
        self.add_to_hull(buffer, interval)

    def linear_index_range(self, index: tuple[Dim, ...], shape: tuple[Dim, ...], scope: _Scope) -> Ends:
        """Return the range of the linear index of an element, clamped to the array.

        If a symbol occurs in several dims, the range of the linearized expression is computed too, and the narrower
        bounds are used: the quotient and the remainder of one number combine in it.
        """
        least: Number = 0
        most: Number = 0
        for e, dim in zip(index, shape, strict=True):
            low, high = self.value_range(e, scope)
            extent = evaluate(dim, self.sizes)
            top = max(extent - 1, 0)
            least = least * extent + _clamped_range(low, 0, top)
            most = most * extent + _clamped_range(high, 0, top)
        mentioned = [symbols(e) for e in index]
        if len(set().union(*mentioned)) == sum(map(len, mentioned)):
            return least, most
        low, high = self.value_range(linearize(index, shape), scope)
        return _elementwise_maximum(least, _elementwise_minimum(low, most)), _elementwise_minimum(
            most, _elementwise_maximum(high, least)
        )

    def record_strided_accesses(self, buffer: Buffer, base: Dim, levels: Levels, scope: _Scope) -> None:
        """Add the elements at ``base`` plus a multiple of the step of each level, below its extent."""
        if buffer.name not in self.hulls:
            return
        least, most = self.value_range(base, scope)
        for extent, step in levels:
            iterations = _elementwise_maximum(self.value_range(extent, scope)[1] - 1, 0)
            low, high = _range_of_product((0, iterations), self.value_range(step, scope))
            least, most = least + _elementwise_minimum(low, 0), most + _elementwise_maximum(high, 0)
        self.add_to_hull(buffer, (least, most))

    def add_to_hull(self, buffer: Buffer, ends: Ends) -> None:
        if buffer.name in self.hulls:
            self.hulls[buffer.name].add_to_hull(ends)

    def whole_array_range(self, count: int) -> Ends:
        return 0, max(count - 1, 0)

    # ------------------------------------------------------------ expressions

    def value_range(self, e: Dim, scope: _Scope) -> Ends:
        """Return the range of the values of ``e``."""
        if not isinstance(e, Expr):
            return int(e), int(e)
        ends = scope.cached.get(e)
        if ends is None:
            least: Number = e.const
            most: Number = e.const
            for monomial, coefficient in e.terms:
                low, high = self.monomial_range(monomial, scope)
                if coefficient < 0:
                    low, high = high, low
                least, most = least + _scaled_range(low, coefficient), most + _scaled_range(high, coefficient)
            ends = scope.cached[e] = _clamped_range(least, -_FAR, _FAR), _clamped_range(most, -_FAR, _FAR)
        return ends

    def monomial_range(self, monomial: Monomial, scope: _Scope) -> Ends:
        """Return the range of a product of atoms, which are treated as independent."""
        return reduce(_range_of_product, (self.atom_range(atom, scope) for atom in monomial))

    def atom_range(self, atom: Atom, scope: _Scope) -> Ends:
        """Return the range of an atom.

        The range of a remainder follows that of its dividend if the quotient and the divisor are constant; otherwise a
        remainder is anything from 0 to below the divisor.
        """
        if isinstance(atom, Sym):
            return scope.values.get(atom.name, (-_FAR, _FAR))
        (a, b), (c, d) = self.value_range(atom.a, scope), self.value_range(atom.b, scope)
        match atom.fn:
            case "max":
                return _elementwise_maximum(a, c), _elementwise_maximum(b, d)
            case "min":
                return _elementwise_minimum(a, c), _elementwise_minimum(b, d)
            case "//":
                return _range_of_quotient(a, b, c, d)
        quotient = _range_of_quotient(a, b, c, d)
        same = (quotient[0] == quotient[1]) & (c == d)
        safe = _elementwise_maximum(c, 1)
        return _range_where(same, a % safe, 0), _range_where(same, b % safe, _elementwise_maximum(d, 1) - 1)


def _elementwise_minimum(x: Number, y: Number) -> Number:
    return min(x, y) if isinstance(x, int) and isinstance(y, int) else np.minimum(x, y)


def _elementwise_maximum(x: Number, y: Number) -> Number:
    return max(x, y) if isinstance(x, int) and isinstance(y, int) else np.maximum(x, y)


def _clamped_range(x: Number, least: int, most: int) -> Number:
    """Return ``x`` clamped to an interval; ``np.clip`` takes five times as long for a few numbers."""
    if isinstance(x, int):
        return least if x < least else most if x > most else x
    return np.minimum(np.maximum(x, least), most)


def _scaled_range(x: Number, times: int) -> Number:
    """Return ``x`` times a factor; a Python number is clamped so that sums of many products fit in 64 bits."""
    return x * times if isinstance(x, np.ndarray) else _clamped_range(x * times, -_FAR << 15, _FAR << 15)


def _range_where(condition: bool | np.ndarray, x: Number, y: Number) -> Number:
    if isinstance(condition, bool):
        return x if condition else y
    return np.where(condition, x, y)


def _range_of_quotient(a: Number, b: Number, c: Number, d: Number) -> Ends:
    """Return the range of ``[a, b] // [c, d]``; the divisor is positive wherever the quotient is used."""
    c, d = _elementwise_maximum(c, 1), _elementwise_maximum(d, 1)
    if isinstance(c, int) and c is d:
        return a // c, b // c
    return _elementwise_minimum(a // c, a // d), _elementwise_maximum(b // c, b // d)


def _range_of_product(x: Ends, y: Ends) -> Ends:
    """Return the range of products; factors are clamped so that the products fit in 64 bits."""
    most = 1 << 31
    a, b, c, d = (_clamped_range(end, -most, most) for end in (*x, *y))
    corners = (a * c, a * d, b * c, b * d)
    far = (a == -most) | (b == most) | (c == -most) | (d == most)
    return _range_where(far, -_FAR, reduce(_elementwise_minimum, corners)), _range_where(
        far, _FAR, reduce(_elementwise_maximum, corners)
    )
