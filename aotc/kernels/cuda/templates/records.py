"""Named tuples that the device functions of templates pass to each other instead of single numbers.

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
    """Position of a tile: index of its matmul in the batch, first row and first column."""

    z: Any
    row: Any
    col: Any


class Extents(NamedTuple):
    """Extents of a matmul: rows and columns of the result, and terms of the contraction."""

    rows: Any
    cols: Any
    depth: Any


class Sizes(NamedTuple):
    """Extents of a result; for attention, numbers of queries and keys."""

    rows: Any
    cols: Any


class TileGrid(NamedTuple):
    """Tiles of a launch: their number, the tiles down and across a result, and the stages of a tile's contraction."""

    count: Any
    down: Any
    across: Any
    iterations: Any


class HeadGrid(NamedTuple):
    """Tiles of an attention launch: their number, the tiles of queries in a head, and the number of heads."""

    count: Any
    down: Any
    heads: Any


class WarpRows(NamedTuple):
    """The 16 queries of a warp, as head and first query, and the calling thread's lane."""

    z: Any
    row: Any
    lane: Any


class Consumer(NamedTuple):
    """Values that stay the same for all tiles of a consumer warpgroup of attention.

    The fields are the kernel's tables, the extents, the addresses of shared memory and of the warpgroup's queries, and
    the index of the warpgroup. ``leads`` (a bool) is true for the thread that releases stages.
    """

    pointers: Any
    dims: Any
    sizes: Any
    base: Any
    queries: Any
    number: Any
    leads: Any


class KeyStages(NamedTuple):
    """The keys of an attention tile: first row of the tile, number of stages, parity of the barrier of its queries."""

    row: Any
    iterations: Any
    parity: Any


class WarpRing(NamedTuple):
    """Addresses of a warp's ring buffer and of its barriers."""

    stages: Any
    barriers: Any


class KeyRange(NamedTuple):
    """The keys of a warp: first key, number of stages, and number of keys before which no mask is needed."""

    first: Any
    iterations: Any
    whole: Any


def next_stage(cuda: Any, stages: int) -> Callable[[Ring], Ring]:
    """Return the device function that advances a :class:`Ring` of ``stages`` stages by one."""
    i32 = types.int32

    @cuda.jit(device=True, inline="always")
    def advance_stage(ring):
        stage, parity = i32(ring.stage + 1), ring.parity
        if stage == stages:
            stage, parity = i32(0), i32(parity ^ 1)
        return Ring(stage, parity)

    return advance_stage


def named_tuple_members(builder: ir.IRBuilder, record: ir.Value) -> list[ir.Value]:
    """Return the members of a named tuple that a device function received, as LLVM values."""
    count = record.type.count if isinstance(record.type, ir.ArrayType) else len(record.type.elements)
    return [builder.extract_value(record, n) for n in range(count)]
