"""What the statements of a kernel read and write, and which output may therefore take an input's memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from aotc.ir.dims import Dim
from aotc.ir.dims_symbols import symbols
from aotc.ir.loop_ir import (
    Alloc,
    Apply,
    Buffer,
    ExternalCall,
    For,
    If,
    Index,
    Let,
    Load,
    Scalar,
    Stmt,
    Store,
    Tile,
    While,
    children,
)


@dataclass(frozen=True, slots=True)
class Access:
    """A read or a write of ``buffer`` by one statement.

    Attributes
    ----------
    index : tuple of Dim or None
        The one element; None where the statement touches many, as a tile and a called function do.
    write : bool
        Does it write? A statement that may do both is two accesses.
    loops : tuple of For or While
        The loops around it, the outermost first.
    """

    buffer: Buffer
    index: tuple[Dim, ...] | None
    write: bool
    loops: tuple[For | While, ...] = ()


def operands(stmt: Stmt) -> tuple[Scalar, ...]:
    """Return the scalars that ``stmt`` itself computes, without those of the statements in it."""
    match stmt:
        case Let(value=value) | Store(value=value) | If(cond=value) | While(pred=value):
            return (value,)
    return ()


def bounds_of(stmt: Stmt) -> tuple[Dim, ...]:
    """Return the index expressions of ``stmt`` that are no element of a buffer: ends of loops, sizes, offsets."""
    match stmt:
        case For(begin=begin, end=end):
            return begin, end
        case Alloc(buffer=buffer):
            return buffer.shape
        case Tile():
            levels = (d for level in stmt.levels for d in level)
            return stmt.out_base, stmt.out_row, stmt.a_base, stmt.a_row, stmt.a_inner, stmt.b_base, *levels
    return ()


def leaves(scalars: Iterable[Scalar]) -> Iterator[Load | Index]:
    """Yield every load and every index expression in ``scalars``."""
    stack = list(scalars)
    while stack:
        match stack.pop():
            case Apply(args=args):
                stack += args
            case Load() | Index() as leaf:
                yield leaf


def accesses(body: tuple[Stmt, ...], loops: tuple[For | While, ...] = ()) -> Iterator[Access]:
    """Yield every access in ``body`` in the order of its text; what a statement reads comes before what it writes."""
    for stmt in body:
        inside = (*loops, stmt) if isinstance(stmt, For | While) else loops
        if not isinstance(stmt, While):
            yield from _own(stmt, loops)
        for block in children(stmt):
            yield from accesses(block, inside)
            if isinstance(stmt, While) and block is stmt.cond:
                yield from _own(stmt, inside)


def _own(stmt: Stmt, loops: tuple[For | While, ...]) -> Iterator[Access]:
    for leaf in leaves(operands(stmt)):
        if isinstance(leaf, Load):
            yield Access(leaf.buffer, leaf.index, False, loops)
    match stmt:
        case Store(buffer=buffer, index=index, reduce=reduce):
            if reduce:
                yield Access(buffer, index, False, loops)
            yield Access(buffer, index, True, loops)
        case Tile(out=out, a=a, b=b):
            yield Access(a, None, False, loops)
            yield Access(b, None, False, loops)
            yield Access(out, None, True, loops)
        case ExternalCall(args=args):
            for buffer, _ in args:
                yield Access(buffer, None, False, loops)
                yield Access(buffer, None, True, loops)


def may_overwrite(body: tuple[Stmt, ...], source: Buffer, target: Buffer) -> bool:
    """May ``target`` be given the memory of ``source``?

    Yes if one store writes it, and each element of ``source`` is read only where that store then writes the same
    element: by loads of its index, in the same turn of the loops that the index counts, and not after it.
    """
    touched = [a for a in accesses(body) if a.buffer.name in (source.name, target.name)]
    if not touched or touched[-1].index is None or not _writes_once(touched[-1]):
        return False
    *reads, write = touched
    turn = write.loops
    return all(
        r.buffer.name == source.name and not r.write and r.index == write.index and r.loops[: len(turn)] == turn
        for r in reads
    )


def _writes_once(write: Access) -> bool:
    """Does ``write`` name a new element in every turn of the loops around it?"""
    counted = {s.name for e in write.index or () for s in symbols(e)}
    for loop in reversed(write.loops):
        if isinstance(loop, While):
            return False
        if loop.var in counted:
            counted |= {s.name for e in (loop.begin, loop.end) for s in symbols(e)}
        elif (loop.begin, loop.end) != (0, 1):
            return False
    return write.write
