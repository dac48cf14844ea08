"""Bound the bytes that each grid item of a kernel accesses by linear functions of the item number.

This analysis is for symbolic sizes, see :mod:`.access_intervals` for known ones. Each access lies between two lines
``slope * p + start``, where ``p`` is the item number and both coefficients are expressions over the sizes of the call.
A loop variable is replaced by the one of its ends that gives the wider bound. An index that was read from memory may be
any index of its dim. So for all sizes the bounds may be too wide, but are never too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from aotc.ir.dims.algebra import (
    Atom,
    Call,
    Dim,
    Expr,
    Monomial,
    Sym,
    bounds,
    expr_of_atom,
    floordiv,
    maximum,
    minimum,
    product,
    sym,
)
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.access import AccessWalker, Levels
from aotc.ir.loop.ir import Buffer, For, Kernel
from aotc.vmfb.dtypes import size_of

ITEM, WITHIN = "number of the group", "item within it"  # the spaces prevent clashes with names of sizes and variables


@dataclass(frozen=True, slots=True)
class ItemLine:
    """Linear function of the item number: the byte offset ``slope * item + start`` in an array."""

    slope: Dim
    start: Dim


Lines: TypeAlias = tuple[ItemLine, ...] | None
"""The lines of all accesses of an array; None if one of them is unknown."""

Ends: TypeAlias = tuple[Dim | None, Dim | None]
"""The least and the greatest value, both inclusive."""


@dataclass(frozen=True, slots=True)
class ItemLines:
    """Bounds of the bytes that groups of ``group`` items of a kernel access.

    Attributes
    ----------
    group : Dim
        The items of a group; lines are over the number of the group.
    firsts, ends : tuple of Lines
        For each buffer, inputs first: lower bounds of the first byte of the accesses, upper bounds of their end.
    parts : tuple of Dim
        The divisors of the item number in the kernel's indices: the largest integer, and the symbolic one if there is
            exactly one. With ``item // d`` as an index, ``d`` consecutive items access one row.
    """

    group: Dim
    firsts: tuple[Lines, ...]
    ends: tuple[Lines, ...]
    parts: tuple[Dim, ...]


def item_lines(kernel: Kernel, group: Dim = 1) -> ItemLines:
    """Return linear bounds, in the item number, of the bytes that groups of ``group`` items access."""
    buffers = (*kernel.inputs, *kernel.outputs)
    walker = _LineWalker({b.name: set() for b in buffers}, frozenset({*kernel.dims, ITEM}), group)
    walker.visit_block(kernel.body, _Lines())
    sizes = {b.name: size_of(b.dtype) for b in buffers}
    firsts = (
        _outermost_line((_byte_offset_line(first, sizes[b.name]) for first, _ in walker.found[b.name]), -1)
        for b in buffers
    )
    ends = (
        _outermost_line((_byte_offset_line(last, sizes[b.name], 1) for _, last in walker.found[b.name]), 1)
        for b in buffers
    )
    return ItemLines(group, tuple(firsts), tuple(ends), walker.item_divisors())


def _outermost_line(lines: Iterable[ItemLine | None], sign: int) -> Lines:
    """Return the outermost of parallel lines; None if one of them is None.

    ``sign`` is -1 for lower bounds, 1 for upper ones.
    """
    farthest: dict[tuple[Dim, Dim], int] = {}
    for line in lines:
        if line is None:
            return None
        const = line.start.const if isinstance(line.start, Expr) else line.start
        key = line.slope, line.start - const
        farthest[key] = max(farthest.get(key, sign * const), sign * const)
    return tuple(ItemLine(slope, start + sign * const) for (slope, start), const in farthest.items())


def _byte_offset_line(e: Dim | None, size: int = 1, after: int = 0) -> ItemLine | None:
    """Return the byte offset of element ``e + after`` as a linear function of item and sizes; or None."""
    if e is None:
        return None
    e = (e + after) * size
    if not isinstance(e, Expr):
        return ItemLine(0, e)
    slope: Dim = 0
    for monomial, coefficient in e.terms:
        rest = [a for a in monomial if not (isinstance(a, Sym) and a.name == ITEM)]
        if len(rest) == len(monomial) - 1:
            slope = slope + product(expr_of_atom(a) for a in rest) * coefficient
    start = e - slope * sym(ITEM)
    return None if _depends_on_item(start) or _depends_on_item(slope) else ItemLine(slope, start)


def _depends_on_item(e: Dim) -> bool:
    return any(s.name == ITEM for s in symbols(e))


def _is_never_negative(e: Dim) -> bool:
    low = bounds(e)[0]
    return low is not None and low >= 0


@dataclass
class _Lines:
    """Variables of a block of statements: the expressions that they equal, and their inclusive ranges."""

    equal: Mapping[str, Dim] = field(default_factory=dict)
    ends: Mapping[str, Ends] = field(default_factory=dict)


@dataclass
class _LineWalker(AccessWalker[_Lines]):
    """Walk a kernel and collect the bounds of every access as expressions over ITEM and the sizes.

    ``sizes`` are the names that may occur in a bound: the dims of the kernel, and ITEM. ``parts`` collects the divisors
    of the item number.
    """

    found: dict[str, set[Ends]]
    sizes: frozenset[str]
    group: Dim
    parts: set[Dim] = field(default_factory=set)

    def item_divisors(self) -> tuple[Dim, ...]:
        """Return the divisors for :attr:`ItemLines.parts`: numbers of consecutive items that may access one row."""
        wide = [part for part in self.parts if isinstance(part, Expr)]
        most = max((part for part in self.parts if isinstance(part, int)), default=1)
        return (most, *(wide if len(wide) == 1 else ()))

    def scope_with_name(self, name: str, e: Dim, scope: _Lines) -> _Lines:
        return _Lines({**scope.equal, name: substitute(e, scope.equal)}, scope.ends)

    def record_whole_buffer(self, buffer: Buffer) -> None:
        self.record_bounds(buffer, (0, product(buffer.shape) - 1))

    def visit_loop(self, stmt: For, scope: _Lines) -> None:
        """Walk a loop's body; the grid's variable becomes ``group * ITEM + WITHIN``, other variables get a range."""
        if stmt.kind == "parallel":
            number = self.group * sym(ITEM) + sym(WITHIN, 0, self.group)
            inside = _Lines({stmt.var: number}, {WITHIN: (0, self.group - 1)})
        else:
            first = self.bound_of_expression(substitute(stmt.begin, scope.equal), scope, -1)
            last = self.bound_of_expression(substitute(stmt.end, scope.equal), scope, 1)
            ends = {**scope.ends, stmt.var: (first, None if last is None else last - 1)}
            inside = _Lines({k: v for k, v in scope.equal.items() if k != stmt.var}, ends)
        self.visit_block(stmt.body, inside)

    def record_bounds(self, buffer: Buffer, ends: Ends) -> None:
        if buffer.name in self.found:
            self.found[buffer.name].add(ends)

    def record_element_access(self, buffer: Buffer, index: tuple[Dim, ...], scope: _Lines) -> None:
        """Record an access to one element, as bounds of its linear index.

        An index that is unknown may be any index of its dim. So may one that does not depend on the group, if the size
        of the group is symbolic.
        """
        if buffer.name not in self.found:
            return
        least: Dim = 0
        most: Dim = 0
        for e, dim in zip(index, buffer.shape, strict=True):
            value = substitute(e, scope.equal)
            least = least * dim + (0 if self.spans_whole_dim(value, scope, -1) else value)
            most = most * dim + (dim - 1 if self.spans_whole_dim(value, scope, 1) else value)
        self.record_bounds(
            buffer, (self.bound_of_expression(least, scope, -1), self.bound_of_expression(most, scope, 1))
        )

    def spans_whole_dim(self, index: Dim, scope: _Lines, sign: int) -> bool:
        """Return True if the only known bound of an index is the extent of its dim."""
        end = self.bound_of_expression(index, scope, sign)
        return end is None or (isinstance(self.group, Expr) and not _depends_on_item(end))

    def record_strided_accesses(self, buffer: Buffer, base: Dim, levels: Levels, scope: _Lines) -> None:
        """Record accesses to the elements at ``base`` plus ``i * step`` for each level, ``i`` below its extent."""
        if buffer.name not in self.found:
            return
        most: Dim | None = self.bound_of_expression(substitute(base, scope.equal), scope, 1)
        for extent, step in levels:
            far = self.bound_of_expression(substitute((extent - 1) * step, scope.equal), scope, 1)
            most = None if most is None or far is None or not _is_never_negative(step) else most + far
        self.record_bounds(buffer, (self.bound_of_expression(substitute(base, scope.equal), scope, -1), most))

    # ------------------------------------------------------------ expressions

    def bound_of_expression(self, e: Dim, scope: _Lines, sign: int) -> Dim | None:
        """Return the lower (``sign`` -1) or upper (1) bound of ``e``, over the item number and the sizes."""
        if not isinstance(e, Expr):
            return e
        total: Dim = e.const
        for monomial, coefficient in e.terms:
            part = self.bound_of_monomial(monomial, scope, sign if coefficient > 0 else -sign)
            if part is None:
                return None
            total = total + part * coefficient
        return total

    def bound_of_monomial(self, monomial: Monomial, scope: _Lines, sign: int) -> Dim | None:
        """Return a bound of a product, or None: non-negative sizes stay as they are, other factors become bounds."""
        fixed = [a for a in monomial if self.depends_on_sizes_only(a) and _is_never_negative(expr_of_atom(a))]
        moving = [a for a in monomial if a not in fixed]
        ends = [self.bound_of_atom(a, scope, sign) for a in moving]
        if len(moving) > 1:  # only for non-negative factors is the product of the bounds a bound of the product
            least = [self.bound_of_atom(a, scope, -1) for a in moving]
            if not all(e is not None and _is_never_negative(e) for e in least):
                return None
        factor_bounds = [e for e in ends if e is not None]
        return product((*map(expr_of_atom, fixed), *factor_bounds)) if len(factor_bounds) == len(ends) else None

    def depends_on_sizes_only(self, atom: Atom) -> bool:
        """Return True if an atom consists only of sizes of the call."""
        return {s.name for s in symbols(expr_of_atom(atom))} <= self.sizes - {ITEM}

    def bound_of_atom(self, atom: Atom, scope: _Lines, sign: int) -> Dim | None:
        """Return a bound of an atom, or None if none is known; record divisors of the item number in ``parts``."""
        if isinstance(atom, Sym):
            if atom.name in scope.ends:
                    return scope.ends[atom.name][sign > 0]
            return expr_of_atom(atom) if atom.name in self.sizes else None
        if self.depends_on_sizes_only(atom):
            return expr_of_atom(atom)
        if atom.fn in ("//", "%") and _depends_on_item(atom.a):
            self.parts.add(atom.b)
        match atom:
            case Call("//", a, b) if {s.name for s in symbols(b)} <= self.sizes - {ITEM}:
                whole = self.bound_of_expression(a, scope, sign)
                return None if whole is None else floordiv(whole, b)
            case Call("%", _, b) if sign < 0 or {s.name for s in symbols(b)} <= self.sizes - {ITEM}:
                return 0 if sign < 0 else b - 1
            case Call("max" | "min" as fn, a, b):
                return _bound_of_min_or_max(
                    fn, self.bound_of_expression(a, scope, sign), self.bound_of_expression(b, scope, sign), sign
                )
        return None


def _bound_of_min_or_max(fn: str, a: Dim | None, b: Dim | None, sign: int) -> Dim | None:
    """Return a bound of ``fn``, ``max`` or ``min``, of two values with the bounds ``a`` and ``b``."""
    if (fn == "max") != (sign > 0):  # either bound is valid: prefer the one that depends on the item
        some = [e for e in (a, b) if e is not None]
        return next((e for e in some if _depends_on_item(e)), some[0] if some else None)
    if a is None or b is None:
        return None
    if _depends_on_item(b):
        a, b = b, a
    if not _depends_on_item(a):
        return maximum(a, b) if sign > 0 else minimum(a, b)
    line = _byte_offset_line(a)
    if sign < 0 or _depends_on_item(b) or line is None or not _is_never_negative(line.slope):
        return None
    return line.slope * sym(ITEM) + maximum(line.start, b)  # items start at 0, so the line is never below its start
