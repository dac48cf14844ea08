"""The memory that a kernel makes for itself: sizes, and places in a worker's scratch memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotc.diagnostics import InternalError
from aotc.ir.dims import Expr, is_static, product
from aotc.ir.loop_ir import Alloc, Buffer, Kernel, Stmt, walk
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import size_of


def bytes_of(buffer: Buffer) -> int:
    """Return the bytes of a private, scratch or shared buffer."""
    size = product(buffer.shape)
    if isinstance(size, Expr):
        raise InternalError(f"kernels: {buffer.space} buffer {buffer.name} has a symbolic shape")
    return size * size_of(buffer.dtype)


def bytes_of_all(buffers: Iterable[Buffer]) -> int:
    """Return the bytes of buffers that lie one after the other, each at a multiple of the alignment."""
    return sum(-(-bytes_of(buffer) // ALIGNMENT) * ALIGNMENT for buffer in buffers)


def shared_bytes(block: Sequence[Stmt]) -> int:
    """Return the bytes of shared memory of all arrays that statements make there."""
    made = (s.buffer for s in walk(tuple(block)) if isinstance(s, Alloc) and s.buffer.space == "shared")
    return bytes_of_all(dict.fromkeys(made))


def _in_arena(buffer: Buffer) -> bool:
    return buffer.space == "scratch" and is_static(buffer.shape)


def scratch_layout(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Return the byte offset of every scratch buffer of ``kernel``, and the bytes of all."""
    offsets: dict[str, int] = {}
    end = 0
    for stmt in walk(kernel.body):
        if isinstance(stmt, Alloc) and _in_arena(stmt.buffer) and stmt.buffer.name not in offsets:
            offsets[stmt.buffer.name] = end
            end += -(-bytes_of(stmt.buffer) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def scratch_bytes(kernel: Kernel) -> int:
    """Return the bytes of scratch memory that one worker of ``kernel`` needs."""
    return scratch_layout(kernel)[1]
