"""Named tuples that the device functions of templates pass to each other, instead of single numbers.

Numba passes a named tuple as its members, in registers. Members are int32 unless stated otherwise; an integer literal
or the result of ``&`` is int64 to Numba, so that callers convert it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.cuda import types


class Ring(NamedTuple):
    """A position in a ring buffer of shared memory: its stage, and the parity of the phase that its barriers wait for.

    The parity flips whenever the ring buffer wraps around (PTX ISA, mbarrier phase parity).
    """

    stage: Any
    parity: Any


class TilePlace(NamedTuple):
    """The matmul of a batch that a tile belongs to, and its first row and column."""

    z: Any
    row: Any
    col: Any


class Extents(NamedTuple):
    """The extents of a matmul: rows and columns of the result, and terms of the contraction."""

    rows: Any
    cols: Any
    depth: Any


class Sizes(NamedTuple):
    """The extents of a result; for attention, queries and keys."""

    rows: Any
    cols: Any


class TileGrid(NamedTuple):
    """The tiles of a launch: their number, tiles down and across a result, and stages of a tile's contraction."""

    count: Any
    down: Any
    across: Any
    iterations: Any


class HeadGrid(NamedTuple):
    """The tiles of an attention launch: their number, tiles of queries in a head, and heads."""

    count: Any
    down: Any
    heads: Any


class WarpRows(NamedTuple):
    """The 16 queries of a warp: head and first query; and the calling thread's lane."""

    z: Any
    row: Any
    lane: Any


class Consumer(NamedTuple):
    """What stays the same for all tiles of a consumer warpgroup of attention.

    The fields are the kernel's tables, the extents, the addresses of shared memory and of its queries, and its number.
    ``leads`` (a bool) is true for the thread that releases stages.
    """

    pointers: Any
    dims: Any
    sizes: Any
    base: Any
    queries: Any
    number: Any
    leads: Any


class KeyStages(NamedTuple):
    """The keys of a tile of attention: the tile's first row, number of stages, and parity of its queries' barrier."""

    row: Any
    iterations: Any
    parity: Any


class WarpRing(NamedTuple):
    """The addresses of a warp's ring buffer and of its barriers."""

    stages: Any
    barriers: Any


class KeyRange(NamedTuple):
    """The keys of a warp: the first one, the number of stages, and the keys before which no mask is needed."""

    first: Any
    iterations: Any
    whole: Any


def next_stage(cuda: Any, stages: int) -> Callable[[Ring], Ring]:
    """Return the device function that advances a :class:`Ring` of ``stages`` stages by one."""
    i32 = types.int32

    @cuda.jit(device=True, inline="always")
    def following(ring):
        stage, parity = i32(ring.stage + 1), ring.parity
        if stage == stages:
            stage, parity = i32(0), i32(parity ^ 1)
        return Ring(stage, parity)

    return following


def named_tuple_members(builder: ir.IRBuilder, record: ir.Value) -> list[ir.Value]:
    """Return the members of a named tuple that a device function received."""
    count = record.type.count if isinstance(record.type, ir.ArrayType) else len(record.type.elements)
    return [builder.extract_value(record, n) for n in range(count)]
