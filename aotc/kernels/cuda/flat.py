"""How large the blocks of threads are whose threads run an item each."""

from __future__ import annotations

from collections.abc import Set

from aotc.ir.dims.algebra import product
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import leaves, operands
from aotc.ir.loop.ir import Buffer, Kernel, Let, Load, walk
from aotc.kernels.limits import (
    FLAT_THREADS,
    GATHERED_ROW,
    GATHERING_THREADS,
    WRITING_ITEMS,
    WRITING_SHARE,
    WRITING_THREADS,
)
from aotc.vmfb.dtypes import size_of


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


def _is_short_row(buffer: Buffer) -> bool:
    row = buffer.shape[-1]
    return isinstance(row, int) and FLAT_THREADS <= row <= GATHERED_ROW // size_of(buffer.dtype)
