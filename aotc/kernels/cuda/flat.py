"""How large the blocks of threads are whose threads run an item each."""

from __future__ import annotations

from collections.abc import Set

from aotc.ir.dims.algebra import product
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import leaves, operands
from aotc.ir.loop.ir import Buffer, Kernel, Let, Load, walk
from aotc.vmfb.dtypes import size_of

# Threads of a block, each with an item of its own: several warps hide each other's latency; a small grid still spreads
# over all multiprocessors.
FLAT_THREADS = 128


# Threads of a block of a large grid that reads little, each with an item of its own: a block is soon done, and
# multiprocessors take on no more of them in a time. An H200: writes of 64 and 256 MB by vectors take 15.9 and 58.5 us,
# 20.8 and 80.2 by blocks of 128, copies as long.
WRITING_THREADS = 256
# Threads of a block of a large grid that reads anywhere in rows, each with an item of its own: those of a row are then
# on one multiprocessor, whose cache brings the row once. An H200: ``take_along_axis`` of 4096 x 4096 f32 takes 55 us,
# by blocks of 128 85.
GATHERING_THREADS = 1024
# Items of a grid that is large: all multiprocessors have several blocks of it.
WRITING_ITEMS = 1 << 18
# Times the bytes read that a kernel writes, at least, which reads little: loads take longer than a block takes to
# begin.
WRITING_SHARE = 4


def flat_threads(kernel: Kernel) -> int:
    """Return the threads of a block of a kernel without loops over threads."""
    read, written = (sum(product(b.shape) * size_of(b.dtype) for b in side) for side in (kernel.inputs, kernel.outputs))
    if not (isinstance(kernel.grid, int) and isinstance(read, int) and isinstance(written, int)):
        return FLAT_THREADS
    if kernel.grid < WRITING_ITEMS:
        return FLAT_THREADS
    if _gathers_from_rows(kernel):
        return GATHERING_THREADS
    return WRITING_THREADS if written >= WRITING_SHARE * read else FLAT_THREADS


def _gathers_from_rows(kernel: Kernel) -> bool:
    """Do items read anywhere in a row that the first-level cache holds, and neighbouring ones in the same?"""
    statements = list(walk(kernel.body))
    named = {s.var.name for s in statements if isinstance(s, Let)}
    loads = (x for s in statements for x in leaves(operands(s)) if isinstance(x, Load) and len(x.index) > 1)
    return any(_is_anywhere(load, named) and _is_short_row(load.buffer) for load in loads)


def _is_anywhere(load: Load, named: Set[str]) -> bool:
    """Is the last index alone something that the kernel has read or computed?"""
    *rows, last = ({s.name for s in symbols(i)} & named for i in load.index)
    return bool(last) and not any(rows)


# Bytes of a row that blocks of so many threads are for: the first-level cache of a multiprocessor has at least 128 KiB,
# of which a block may have a half. Not measured beyond 16 KiB.
GATHERED_ROW = 64 << 10


def _is_short_row(buffer: Buffer) -> bool:
    row = buffer.shape[-1]
    return isinstance(row, int) and FLAT_THREADS <= row <= GATHERED_ROW // size_of(buffer.dtype)
