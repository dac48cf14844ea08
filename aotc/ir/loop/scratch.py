"""Memory that a kernel allocates: sizes of buffers, and their offsets in thread-local scratch memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Expr, is_static, product
from aotc.ir.loop.ir import Alloc, Buffer, Kernel, Stmt, walk
from aotc.vmfb.abi import ALIGNMENT, GPU_ALIGNMENT
from aotc.vmfb.dtypes import size_of


def buffer_bytes(buffer: Buffer) -> int:
    """Return the bytes of a private, scratch or shared buffer."""
    size = product(buffer.shape)
    if isinstance(size, Expr):
        raise InternalError(f"kernels: {buffer.space} buffer {buffer.name} has a symbolic shape")
    return size * size_of(buffer.dtype)


def shared_array_bytes(size: int) -> int:
    """Return the bytes that an array of ``size`` bytes occupies in a GPU block's shared memory.

    Sizes are rounded up to the alignment of the next array, so that their total is the one that the linker reports.
    """
    return -(-size // GPU_ALIGNMENT) * GPU_ALIGNMENT


def shared_bytes_of_buffers(buffers: Iterable[Buffer]) -> int:
    """Return the total bytes of shared memory that ``buffers`` occupy."""
    return sum(shared_array_bytes(buffer_bytes(buffer)) for buffer in buffers)


def shared_bytes(block: Sequence[Stmt]) -> int:
    """Return the bytes of shared memory that the statements of ``block`` allocate."""
    buffers = (s.buffer for s in walk(tuple(block)) if isinstance(s, Alloc) and s.buffer.space == "shared")
    return shared_bytes_of_buffers(dict.fromkeys(buffers))


def _in_arena(buffer: Buffer) -> bool:
    return buffer.space == "scratch" and is_static(buffer.shape)


def scratch_layout(kernel: Kernel) -> tuple[dict[str, int], int]:
    """Return the byte offset of every scratch buffer of ``kernel``, and the total of bytes."""
    offsets: dict[str, int] = {}
    end = 0
    for stmt in walk(kernel.body):
        if isinstance(stmt, Alloc) and _in_arena(stmt.buffer) and stmt.buffer.name not in offsets:
            offsets[stmt.buffer.name] = end
            end += -(-buffer_bytes(stmt.buffer) // ALIGNMENT) * ALIGNMENT
    return offsets, end


def scratch_bytes(kernel: Kernel) -> int:
    """Return the bytes of scratch memory that one worker of ``kernel`` needs."""
    return scratch_layout(kernel)[1]
