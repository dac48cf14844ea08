"""How the bytes that a kernel's items touch move with an item's number, for sizes that only a call knows.

Each access is bounded by two lines over the number: ``slope * p + start``, where both are expressions over the sizes of
the call. Loop variables stand at whichever of their ends is farther out; an index that was read from memory is
anything that its dim allows. So lines may be too far apart, and are never too near, whatever the sizes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from aotc.ir.dims.algebra import Atom, Call, Dim, Expr, Monomial, Sym, bounds, floordiv, maximum, minimum, product, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.access import AccessWalker, Levels
from aotc.ir.loop.ir import Buffer, For, Kernel
from aotc.vmfb.dtypes import size_of

ITEM, WITHIN = "number of the group", "item within it"  # no name of a size or a variable has a space


@dataclass(frozen=True, slots=True)
class ItemLine:
    """The byte ``slope * item + start`` of an array."""

    slope: Dim
    start: Dim


Lines: TypeAlias = tuple[ItemLine, ...] | None
"""Of each access of an array; None if one of them is not known."""

Ends: TypeAlias = tuple[Dim | None, Dim | None]
"""The least and the greatest value, which both count."""


@dataclass(frozen=True, slots=True)
class ItemLines:
    """What bounds the bytes of groups of ``group`` items of a kernel.

    Attributes
    ----------
    firsts, ends : tuple of Lines
        Of each buffer, inputs first: nowhere above the first byte of an access, and nowhere below its end.
    parts : tuple of Dim
        The largest number by which the kernel divides the number of an item, and the expression by which it does if
        there is one: as many may go through a row together.
    """

    group: Dim
    firsts: tuple[Lines, ...]
    ends: tuple[Lines, ...]
    parts: tuple[Dim, ...]


def item_lines(kernel: Kernel, group: Dim = 1) -> ItemLines:
    """Return the lines of a kernel over the number of ``group`` items."""
    buffers = (*kernel.inputs, *kernel.outputs)
    walker = _LineWalker({b.name: set() for b in buffers}, frozenset({*kernel.dims, ITEM}), group)
    walker.block(kernel.body, _Lines())
    sizes = {b.name: size_of(b.dtype) for b in buffers}
    firsts = (_outermost((_line(first, sizes[b.name]) for first, _ in walker.found[b.name]), -1) for b in buffers)
    ends = (_outermost((_line(last, sizes[b.name], 1) for _, last in walker.found[b.name]), 1) for b in buffers)
    return ItemLines(group, tuple(firsts), tuple(ends), walker.groups())


def _outermost(lines: Iterable[ItemLine | None], sign: int) -> Lines:
    """Return the lines without those that are inside of others by a number of bytes; None if one is not known."""
    farthest: dict[tuple[Dim, Dim], int] = {}
    for line in lines:
        if line is None:
            return None
        const = line.start.const if isinstance(line.start, Expr) else line.start
        key = line.slope, line.start - const
        farthest[key] = max(farthest.get(key, sign * const), sign * const)
    return tuple(ItemLine(slope, start + sign * const) for (slope, start), const in farthest.items())


def _line(e: Dim | None, size: int = 1, after: int = 0) -> ItemLine | None:
    """Return the line of ``after`` elements after element ``e``, of ``size`` bytes, or None if it is none."""
    if e is None:
        return None
    e = (e + after) * size
    if not isinstance(e, Expr):
        return ItemLine(0, e)
    slope: Dim = 0
    for monomial, coefficient in e.terms:
        rest = [a for a in monomial if not (isinstance(a, Sym) and a.name == ITEM)]
        if len(rest) == len(monomial) - 1:
            slope = slope + product(_alone(a) for a in rest) * coefficient
    start = e - slope * sym(ITEM)
    return None if _has_item(start) or _has_item(slope) else ItemLine(slope, start)


def _has_item(e: Dim) -> bool:
    return any(s.name == ITEM for s in symbols(e))


def _never_negative(e: Dim) -> bool:
    low = bounds(e)[0]
    return low is not None and low >= 0


def _alone(atom: Atom) -> Dim:
    return Expr(0, (((atom,), 1),))


@dataclass
class _Lines:
    """The variables of a block: what is equal to them, and between which ends they are, both of which count."""

    equal: Mapping[str, Dim] = field(default_factory=dict)
    ends: Mapping[str, Ends] = field(default_factory=dict)


@dataclass
class _LineWalker(AccessWalker[_Lines]):
    found: dict[str, set[Ends]]
    sizes: frozenset[str]
    group: Dim
    parts: set[Dim] = field(default_factory=set)

    def groups(self) -> tuple[Dim, ...]:
        """Return the numbers of items that may go through a row together."""
        wide = [part for part in self.parts if isinstance(part, Expr)]
        most = max((part for part in self.parts if isinstance(part, int)), default=1)
        return (most, *(wide if len(wide) == 1 else ()))

    def named(self, name: str, e: Dim, scope: _Lines) -> _Lines:
        return _Lines({**scope.equal, name: substitute(e, scope.equal)}, scope.ends)

    def whole(self, buffer: Buffer) -> None:
        self.note(buffer, (0, product(buffer.shape) - 1))

    def loop(self, stmt: For, scope: _Lines) -> None:
        if stmt.kind == "parallel":
            number = self.group * sym(ITEM) + sym(WITHIN, 0, self.group)
            inside = _Lines({stmt.var: number}, {WITHIN: (0, self.group - 1)})
        else:
            first = self.end(substitute(stmt.begin, scope.equal), scope, -1)
            last = self.end(substitute(stmt.end, scope.equal), scope, 1)
            ends = {**scope.ends, stmt.var: (first, None if last is None else last - 1)}
            inside = _Lines({k: v for k, v in scope.equal.items() if k != stmt.var}, ends)
        self.block(stmt.body, inside)

    def note(self, buffer: Buffer, ends: Ends) -> None:
        if buffer.name in self.found:
            self.found[buffer.name].add(ends)

    def element(self, buffer: Buffer, index: tuple[Dim, ...], scope: _Lines) -> None:
        """Note an element: dims whose index is not known count whole, the others join to its number.

        So do those whose index stays where it is from group to group, if only a call knows how many items that is.
        """
        if buffer.name not in self.found:
            return
        least: Dim = 0
        most: Dim = 0
        for e, dim in zip(index, buffer.shape, strict=True):
            here = substitute(e, scope.equal)
            least = least * dim + (0 if self.is_whole(here, scope, -1) else here)
            most = most * dim + (dim - 1 if self.is_whole(here, scope, 1) else here)
        self.note(buffer, (self.end(least, scope, -1), self.end(most, scope, 1)))

    def is_whole(self, index: Dim, scope: _Lines, sign: int) -> bool:
        """Is the whole of a dim the best that is known of an index?"""
        end = self.end(index, scope, sign)
        return end is None or (isinstance(self.group, Expr) and not _has_item(end))

    def run(self, buffer: Buffer, base: Dim, levels: Levels, scope: _Lines) -> None:
        if buffer.name not in self.found:
            return
        most: Dim | None = self.end(substitute(base, scope.equal), scope, 1)
        for extent, step in levels:
            far = self.end(substitute((extent - 1) * step, scope.equal), scope, 1)
            most = None if most is None or far is None or not _never_negative(step) else most + far
        self.note(buffer, (self.end(substitute(base, scope.equal), scope, -1), most))

    # ------------------------------------------------------------ expressions

    def end(self, e: Dim, scope: _Lines, sign: int) -> Dim | None:
        """Return what ``e`` is at least (``sign`` -1) or at most (1), in terms of the item's number and sizes."""
        if not isinstance(e, Expr):
            return e
        total: Dim = e.const
        for monomial, coefficient in e.terms:
            part = self.monomial(monomial, scope, sign if coefficient > 0 else -sign)
            if part is None:
                return None
            total = total + part * coefficient
        return total

    def monomial(self, monomial: Monomial, scope: _Lines, sign: int) -> Dim | None:
        fixed = [a for a in monomial if self.is_fixed(a) and _never_negative(_alone(a))]
        moving = [a for a in monomial if a not in fixed]
        ends = [self.atom(a, scope, sign) for a in moving]
        if len(moving) > 1:  # factors that are nowhere below 0 are least together, and most together
            least = [self.atom(a, scope, -1) for a in moving]
            if not all(e is not None and _never_negative(e) for e in least):
                return None
        known = [e for e in ends if e is not None]
        return product((*map(_alone, fixed), *known)) if len(known) == len(ends) else None

    def is_fixed(self, atom: Atom) -> bool:
        """Is an atom made of sizes of the call?"""
        return {s.name for s in symbols(_alone(atom))} <= self.sizes - {ITEM}

    def atom(self, atom: Atom, scope: _Lines, sign: int) -> Dim | None:
        if isinstance(atom, Sym):
            if atom.name in scope.ends:
                    return scope.ends[atom.name][sign > 0]
            return _alone(atom) if atom.name in self.sizes else None
        if self.is_fixed(atom):
            return _alone(atom)
        if atom.fn in ("//", "%") and _has_item(atom.a):
            self.parts.add(atom.b)
        match atom:
            case Call("//", a, b) if {s.name for s in symbols(b)} <= self.sizes - {ITEM}:
                whole = self.end(a, scope, sign)
                return None if whole is None else floordiv(whole, b)
            case Call("%", _, b) if sign < 0 or {s.name for s in symbols(b)} <= self.sizes - {ITEM}:
                return 0 if sign < 0 else b - 1
            case Call("max" | "min" as fn, a, b):
                return _extremum(fn, self.end(a, scope, sign), self.end(b, scope, sign), sign)
        return None


def _extremum(fn: str, a: Dim | None, b: Dim | None, sign: int) -> Dim | None:
    """Return what bounds ``fn`` of what is bounded by ``a`` and ``b``."""
    if (fn == "max") != (sign > 0):  # either does: rather the one that moves with the item
        some = [e for e in (a, b) if e is not None]
        return next((e for e in some if _has_item(e)), some[0] if some else None)
    if a is None or b is None:
        return None
    if _has_item(b):
        a, b = b, a
    if not _has_item(a):
        return maximum(a, b) if sign > 0 else minimum(a, b)
    line = _line(a)
    if sign < 0 or _has_item(b) or line is None or not _never_negative(line.slope):
        return None
    return line.slope * sym(ITEM) + maximum(line.start, b)  # items count from 0, so the line is above its start
