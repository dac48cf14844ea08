"""Reads and writes of a kernel's statements, and the analysis of which output may reuse an input's memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Generic, TypeAlias, TypeVar

from aotc.ir.dims.algebra import Dim, Expr, Sym, bounds, minimum, product, sym
from aotc.ir.dims.symbols import substitute_symbols, symbols
from aotc.ir.loop.forms.offsets import linearize
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    Either,
    ExternalCall,
    For,
    GridBarrier,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Prefetch,
    Scalar,
    Shuffle,
    Stmt,
    Store,
    Tile,
    Var,
    WarpMatch,
    While,
    children,
    walk,
)

Arms: TypeAlias = tuple[tuple[Scalar, bool], ...]
Levels: TypeAlias = Sequence[tuple[Dim, Dim]]
Scope = TypeVar("Scope")


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of ``buffer`` by one statement of a kernel.

    Attributes
    ----------
    index : tuple of Dim or None
        The index of a single element; None for a statement that accesses many, as tiles and called functions do.
    write : bool
        True for a write. A statement that may do both has two accesses.
    loops : tuple of For or While
        The enclosing loops, outermost first.
    arms : tuple of (Scalar, bool)
        The enclosing conditions, and whether each holds.
    """

    buffer: Buffer
    index: tuple[Dim, ...] | None
    write: bool
    loops: tuple[For | While, ...] = ()
    arms: Arms = ()


def statement_scalars(stmt: Stmt) -> tuple[Scalar, ...]:
    """Return the scalar expressions that ``stmt`` itself computes, without those of nested statements."""
    match stmt:
        case Let(value=value) | Store(value=value) | If(cond=value) | While(pred=value) | Either(cond=value):
            return (value,)
    return ()


def statement_sizes(stmt: Stmt) -> tuple[Dim, ...]:
    """Return the index expressions of ``stmt`` that do not index a buffer: loop bounds, sizes, offsets."""
    match stmt:
        case For(begin=begin, end=end):
            return begin, end
        case Alloc(buffer=buffer):
            return buffer.shape
        case Tile():
            levels = (d for level in stmt.levels for d in level)
            a = stmt.a_base, stmt.a_row, stmt.a_inner
            return stmt.out_base, stmt.out_row, *a, stmt.b_base, stmt.b_column, stmt.b_inner, *levels
    return ()


def statement_index_exprs(stmt: Stmt) -> Iterator[Dim]:
    """Yield all index expressions of ``stmt`` itself: indices of elements, of loads in its scalars, and its bounds."""
    yield from statement_sizes(stmt)
    if isinstance(stmt, Store | Prefetch):
        yield from stmt.index
    for leaf in loads_and_indices(statement_scalars(stmt)):
        yield from leaf.index if isinstance(leaf, Load) else (leaf.expr,)


def imported_functions(kernel: Kernel) -> tuple[str, ...]:
    """Return the names of the library functions that ``kernel`` calls, sorted."""
    called = {s.function for s in walk(kernel.body) if isinstance(s, ExternalCall)}
    return tuple(sorted(name for name in called if isinstance(name, str)))


def max_number_buffers(kernel: Kernel) -> frozenset[str]:
    """Return the buffers that accumulate by ``max_number``, whose result is arbitrary if an operand is NaN."""
    return frozenset(s.buffer.name for s in walk(kernel.body) if isinstance(s, Store) and s.reduce == "max_number")


def is_any_test_loop(stmt: Stmt) -> bool:
    """Return True if ``stmt`` is a loop over lanes that only tests whether a condition holds in any lane."""
    match stmt:
        case For(kind="lanes", body=(*lets, Store(index=(), reduce="max") as last)):
            return last.buffer.dtype == "i1" and all(isinstance(s, Let) for s in lets)
    return False


def with_scalars(body: tuple[Stmt, ...], new: Callable[[Scalar], Scalar]) -> tuple[Stmt, ...]:
    """Rewrite every scalar expression of ``body`` by ``new``."""

    def changed(stmt: Stmt) -> Stmt:
        """Return ``stmt`` with ``new`` applied to its scalars and to those of nested statements."""
        match stmt:
            case Let(value=value) | Store(value=value):
                return replace(stmt, value=new(value))
            case Either(cond=cond):
                return replace(stmt, cond=new(cond))
            case For(body=inner):
                return replace(stmt, body=with_scalars(inner, new))
            case If(cond, then, otherwise):
                return If(new(cond), with_scalars(then, new), with_scalars(otherwise, new))
            case While(cond, pred, inner):
                return While(with_scalars(cond, new), new(pred), with_scalars(inner, new))
        return stmt

    return tuple(map(changed, body))


def scalars_in(scalars: Iterable[Scalar]) -> list[Scalar]:
    """Return every scalar in ``scalars``, subexpressions included, each once."""
    by_identity: dict[int, Scalar] = {}
    stack = list(scalars)
    while stack:
        s = stack.pop()
        if id(s) not in by_identity:
            by_identity[id(s)] = s
            if isinstance(s, Apply):
                stack += s.args
    return list(by_identity.values())


def loads_and_indices(scalars: Iterable[Scalar]) -> Iterator[Load | Index]:
    """Yield every load and every index expression in ``scalars``."""
    stack = list(scalars)
    while stack:
        match stack.pop():
            case Apply(args=args):
                stack += args
            case Load() | Index() as leaf:
                yield leaf


def names_in(stmt: Stmt) -> set[str]:
    """Return the names of variables and symbols that ``stmt`` itself reads."""
    scalars = scalars_in(statement_scalars(stmt))
    return {x.name for x in scalars if isinstance(x, Var)} | {
        s.name for e in statement_index_exprs(stmt) for s in symbols(e)
    }


def definitions_of(scalar: Scalar, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """Return the statements of ``body`` that ``scalar`` depends on, transitively."""
    needed, statements = names_in(Let(Var("", scalar.dtype), scalar)), list[Stmt]()
    for stmt in reversed(body):
        if not isinstance(stmt, Let) or stmt.var.name in needed:
            statements.append(stmt)
            needed |= {name for s in walk((stmt,)) for name in names_in(s)}
    return tuple(reversed(statements))


def accesses(
    body: tuple[Stmt, ...], loops: tuple[For | While, ...] = (), arms: Arms = ()
) -> Iterator[Access]:
    """Yield every access in ``body`` in textual order; a statement's reads precede its writes."""
    for stmt in body:
        inside = (*loops, stmt) if isinstance(stmt, For | While) else loops
        if not isinstance(stmt, While):
            yield from _accesses_of_statement(stmt, loops, arms)
        for number, block in enumerate(children(stmt)):
            within = (*arms, (stmt.cond, number == 0)) if isinstance(stmt, If) else arms
            yield from accesses(block, inside, within)
            if isinstance(stmt, While) and block is stmt.cond:
                yield from _accesses_of_statement(stmt, inside, arms)


def _accesses_of_statement(stmt: Stmt, loops: tuple[For | While, ...], arms: Arms) -> Iterator[Access]:
    """Yield the accesses of ``stmt`` itself, reads first; those of nested statements are not among them."""
    for leaf in loads_and_indices(statement_scalars(stmt)):
        if isinstance(leaf, Load):
            yield Access(leaf.buffer, leaf.index, False, loops, arms)
    match stmt:
        case Store(buffer=buffer, index=index, reduce=reduce):
            if reduce:
                yield Access(buffer, index, False, loops, arms)
            yield Access(buffer, index, True, loops, arms)
        case GridBarrier(counter=counter):
            yield Access(counter, (), True, loops, arms)
        case Shuffle(to=to, source=source) | WarpMatch(to=to, source=source):
            yield Access(source, None, False, loops, arms)
            yield Access(to, None, True, loops, arms)
        case Tile(out=out, a=a, b=b):
            yield Access(a, None, False, loops, arms)
            yield Access(b, None, False, loops, arms)
            if stmt.adds:
                yield Access(out, None, False, loops, arms)
            yield Access(out, None, True, loops, arms)
        case ExternalCall(args=args) | Either(places=args):
            for buffer, _ in args:
                yield Access(buffer, None, False, loops, arms)
                yield Access(buffer, None, True, loops, arms)


def may_overwrite(touched: Iterable[Access], source: Buffer, target: Buffer) -> bool:
    """Return True if output ``target`` may share the memory of input ``source``, given a kernel's accesses ``touched``.

    Each element of ``source`` may only be read by loads for the store to the same element of ``target``: with the same
    index, in the same iteration of the loops that the index depends on, and not after the store. Several stores must
    provably write different elements, in different arms of conditions on loop variables.
    """
    writes: list[Access] = []
    waiting: list[Access] = []
    for a in touched:
        if a.buffer.name not in (source.name, target.name):
            continue
        if not a.write:
            waiting.append(a)
            continue
        if a.buffer.name != target.name or a.index is None or not _writes_each_element_once(a):
            return False
        if not all(_reads_written_element(r, a) for r in waiting):
            return False
        waiting = []
        writes.append(a)
    pairs = combinations(writes, 2)
    return bool(writes) and not waiting and all(_write_different_elements(one, other) for one, other in pairs)


def _reads_written_element(read: Access, write: Access) -> bool:
    """Return True if ``read`` loads the element that ``write`` writes in the same iteration, not after the write."""
    same = read.loops[: len(write.loops)] == write.loops and read.arms[: len(write.arms)] == write.arms
    return read.buffer.name != write.buffer.name and read.index == write.index and same


def _write_different_elements(one: Access, other: Access) -> bool:
    """Return True if two stores provably write different elements."""
    assert one.index is not None
    assert other.index is not None
    if _are_exclusive_stores(one, other):
        return True
    for a, b in zip(one.index, other.index):
        (low, high), (least, most) = (
            bounds(_narrowed_by_conditions(a, one.arms)),
            bounds(_narrowed_by_conditions(b, other.arms)),
        )
        if (high is not None and least is not None and high < least) or (
            most is not None and low is not None and most < low
        ):
            return True
    return False


def _are_exclusive_stores(one: Access, other: Access) -> bool:
    """Return True if two stores are in different arms of a condition, in loops that access different elements."""
    around = [x for x, y in zip(one.loops, other.loops) if x is y]
    alone = all(isinstance(loop, For) and loop.kind == "parallel" for loop in around)
    return alone and any(c == d and holds != fails for c, holds in one.arms for d, fails in other.arms)


def _narrowed_by_conditions(e: Dim, arms: Arms) -> Dim:
    """Return ``e`` with symbol ranges narrowed by the enclosing conditions ``symbol < number``."""
    for cond, holds in arms:
        match cond:
            case Apply(fn="lt", args=(Index(expr=Expr(const=0, terms=((((Sym() as s),), 1),))), Const(value=int(end)))):
                low = s.lo if holds else max(s.lo, end)
                extent = (end if s.extent is None else minimum(s.extent, end)) if holds else s.extent
                e = substitute_symbols(e, {t: sym(t.name, low, extent) for t in symbols(e) if t.name == s.name})
    return e


def _writes_each_element_once(write: Access) -> bool:
    """Return True if ``write`` accesses a different element in every iteration of its loops."""
    counted = {s.name for e in write.index or () for s in symbols(e)}
    for loop in reversed(write.loops):
        if isinstance(loop, While):
            return False
        if loop.var in counted:
            counted |= {s.name for e in (loop.begin, loop.end) for s in symbols(e)}
        elif (loop.begin, loop.end) != (0, 1):
            return False
    return write.write


class AccessWalker(ABC, Generic[Scope]):
    """Base of analyses: visits each element, range and buffer that statements access.

    A *scope* is the analysis's data about the variables at a statement.
    """

    def visit_block(self, body: Sequence[Stmt], scope: Scope) -> None:
        """Visit the accesses of a block's statements."""
        for stmt in body:
            for leaf in loads_and_indices(statement_scalars(stmt)):
                if isinstance(leaf, Load):
                    self.record_element_access(leaf.buffer, leaf.index, scope)
            match stmt:
                case For():
                    self.visit_loop(stmt, scope)
                    continue
                case Store(buffer=buffer, index=index):
                    self.record_element_access(buffer, index, scope)
                case Let(var=var, value=Index(expr=e)):
                    scope = self.scope_with_name(var.name, e, scope)
                case Tile():
                    self.visit_tile(stmt, scope)
                case Either(buffer=own, places=places):
                    for buffer, index in places:
                        levels = [(product(own.shape), 1)]
                        self.record_strided_accesses(buffer, linearize(index, buffer.shape), levels, scope)
                case ExternalCall(args=args):
                    for buffer, _ in args:
                        self.record_whole_buffer(buffer)
            for inner in children(stmt):
                self.visit_block(inner, scope)

    def visit_tile(self, t: Tile, scope: Scope) -> None:
        """Record the accesses of a tile: its result, and both operands over all levels."""
        group = t.form.group
        self.record_strided_accesses(t.out, t.out_base, [(t.rows, t.out_row), (t.cols, 1)], scope)
        terms = [(group, t.a_inner), *((n, a) for n, a, _ in t.levels)]
        self.record_strided_accesses(t.a, t.a_base, [(t.rows, t.a_row), *terms], scope)
        if t.form.scaled:
            (runs, _, chunk), _ = t.levels
            self.record_strided_accesses(t.b, t.b_base, [(chunk, 1), (runs, chunk)], scope)
            return
        columns: list[tuple[Dim, Dim]] = [(t.cols * group, 1)]
        if t.b_column != 0 or t.b_inner != 0:
            columns = [(t.cols, t.b_column or 1), (group, t.b_inner or 1)]
        self.record_strided_accesses(t.b, t.b_base, [*columns, *((n, b) for n, _, b in t.levels)], scope)

    @abstractmethod
    def visit_loop(self, stmt: For, scope: Scope) -> None:
        """Visit the body of a loop once, for all iterations."""

    @abstractmethod
    def scope_with_name(self, name: str, e: Dim, scope: Scope) -> Scope:
        """Return the scope with ``name`` bound to the index expression ``e``."""

    @abstractmethod
    def record_element_access(self, buffer: Buffer, index: tuple[Dim, ...], scope: Scope) -> None:
        """Record an access to the element ``index`` of ``buffer``."""

    @abstractmethod
    def record_strided_accesses(self, buffer: Buffer, base: Dim, levels: Levels, scope: Scope) -> None:
        """Record accesses to the elements ``base + i*step + j*step2 + ...``, one index per level (extent, step)."""

    @abstractmethod
    def record_whole_buffer(self, buffer: Buffer) -> None:
        """Record an access that may touch any element of ``buffer``."""
