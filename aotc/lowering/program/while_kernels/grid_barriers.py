"""Place grid barriers in a loop's kernel, before accesses that conflict with those of another thread.

Each distributed loop assigns item ``i`` to the same thread. So if one loop writes, and a later one reads, only the
element of its own item, no barrier is needed between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import sym
from aotc.ir.loop.access import accesses, loads_and_indices
from aotc.ir.loop.ir import Buffer, For, GridBarrier, If, Load, Scalar, Stmt, While
from aotc.lowering.analysis.index_maps import linearize


@dataclass(frozen=True, slots=True)
class _ThreadAccesses:
    """Arrays accessed since the last barrier: at any element, or by each thread at its own items only."""

    read: frozenset[str] = frozenset()
    written: frozenset[str] = frozenset()
    own_read: frozenset[str] = frozenset()
    own_written: frozenset[str] = frozenset()

    def __or__(self, other: _ThreadAccesses) -> _ThreadAccesses:
        return _ThreadAccesses(
            self.read | other.read, self.written | other.written,
            self.own_read | other.own_read, self.own_written | other.own_written,
        )  # fmt: skip

    def conflicts_with(self, later: _ThreadAccesses) -> bool:
        """Return True if the accesses ``later`` may conflict with these accesses by another thread."""
        written, all_written = self.written, self.written | self.own_written
        all_read = self.read | self.own_read
        return bool(
            later.read & all_written
            or later.own_read & written
            or later.written & (all_written | all_read)
            or later.own_written & (written | self.read)
        )


def item_loop(stmt: Stmt) -> For | None:
    """Return the loop over items, if the statement distributes it over the threads of all blocks, else None."""
    match stmt:
        case For(kind="blocks", end=blocks, body=(For(kind="thread", end=threads, body=(For() as loop,)),)) if (
            loop.kind == "serial" and isinstance(blocks, int) and isinstance(threads, int)
        ):
            return loop if loop.step == blocks * threads else None
    return None


@dataclass
class BarrierPlacer:
    """Insert grid barriers that use ``counter`` between statements that every thread of all blocks executes."""

    counter: Buffer
    touched: _ThreadAccesses = field(default_factory=_ThreadAccesses)
    count: int = 0

    def with_barriers(self, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
        """Insert grid barriers between statements that conflict across threads."""
        stmts: list[Stmt] = []
        for stmt in body:
            match stmt:
                case While():
                    stmts.append(self._while_with_barriers(stmt))
                case If(cond, then, otherwise):
                    self._insert_barrier_on_conflict(_reads_of_value(cond), stmts)
                    stmts.append(self._if_with_barriers(cond, then, otherwise))
                case _:
                    self._insert_barrier_on_conflict(_accesses_of_statement(stmt), stmts)
                    stmts.append(stmt)
        return tuple(stmts)

    def _insert_barrier_on_conflict(self, later: _ThreadAccesses, stmts: list[Stmt]) -> None:
        """Append a barrier if ``later`` accesses conflict with those since the last one; record them."""
        if self.touched.conflicts_with(later):
            stmts.append(GridBarrier(self.counter))
            self.count += 1
            self.touched = _ThreadAccesses()
        self.touched = self.touched | later

    def _while_with_barriers(self, loop: While) -> While:
        """Return a loop with barriers; an iteration follows the statements before the loop, or another iteration."""
        before = self.touched
        while True:
            begin = self.touched
            test: list[Stmt] = [*self.with_barriers(loop.cond)]
            self._insert_barrier_on_conflict(_reads_of_value(loop.pred), test)
            after = self.touched
            step = self.with_barriers(loop.body)
            again = before | begin | self.touched
            if again == begin:
                self.touched = after
                return While(tuple(test), loop.pred, step)
            self.touched = again

    def _if_with_barriers(self, cond: Scalar, then: tuple[Stmt, ...], otherwise: tuple[Stmt, ...]) -> If:
        """Return a branch with barriers; the accesses of both arms count for the statements after it."""
        before = self.touched
        first = self.with_barriers(then)
        one, self.touched = self.touched, before
        second = self.with_barriers(otherwise)
        self.touched = self.touched | one
        return If(cond, first, second)


def _accesses_of_statement(stmt: Stmt) -> _ThreadAccesses:
    """Return a statement's accesses to memory that all threads share."""
    items = item_loop(stmt)
    item = sym(items.var, 0, items.end) if items is not None else None
    sets: dict[tuple[bool, bool], set[str]] = {(w, o): set() for w in (False, True) for o in (False, True)}
    for a in accesses((stmt,)):
        if a.buffer.space == "global":
            own = item is not None and a.index is not None and linearize(a.index, a.buffer.shape) == item
            sets[a.write, own].add(a.buffer.name)
    both = {own: sets[False, own] | sets[True, own] for own in (False, True)}
    mixed = both[False] & both[True]  # an array accessed in both ways counts as accessed anywhere
    for write in (False, True):
        sets[write, False] |= sets[write, True] & mixed
    parts = [frozenset(sets[key]) for key in ((False, False), (True, False), (False, True), (True, True))]
    return _ThreadAccesses(*parts)


def _reads_of_value(value: Scalar) -> _ThreadAccesses:
    """Return the reads of every thread that computes a value."""
    loads = [x for x in loads_and_indices([value]) if isinstance(x, Load)]
    return _ThreadAccesses(frozenset(x.buffer.name for x in loads if x.buffer.space == "global"))
