"""The memory report of a bundle: bytes per function, and the space of every buffer.

Spaces: ``global`` is the caller's memory and the constants, ``arena`` the temporary memory of a call, ``scratch`` a
worker's part of the arena, ``private`` registers and stack, ``shared`` the memory of a block of GPU threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, product, static
from aotc.ir.loop.ir import Alloc, Kernel
from aotc.ir.loop.ir import walk as walk_kernel
from aotc.ir.loop.scratch import scratch_bytes
from aotc.ir.program.ir import Buffered, Launch, Storage, accessed_storages, step_memory_space, walk
from aotc.lowering.placement.memory_spaces import Space
from aotc.lowering.program.stack_to_scratch import stack_to_scratch
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class FunctionMemory:
    """Memory of a call besides its arguments and results.

    Attributes
    ----------
    arena : Dim
        Bytes that its commands share, in all memories.
    scratch : int
        Bytes per thread.
    buffers : tuple of (name, space, bytes, offset, first step, last step)
    """

    arena: Dim
    scratch: int
    buffers: tuple[tuple[str, str, Dim, Dim, int, int], ...]

    def manifest_entry(self) -> dict[str, int | None]:
        """Return the memory figures as an entry of the bundle manifest."""
        return {"arena": None if isinstance(self.arena, Expr) else int(self.arena), "scratch": self.scratch}


def function_memory(program: Buffered, arenas: Sequence[Dim], spaces: Sequence[Space]) -> FunctionMemory:
    """Return the memory of a call of a function: arena bytes, scratch bytes, and the buffers in the arena."""
    steps = list(walk(program.steps))
    makers: dict[Storage, str] = {}
    places: dict[Storage, None] = {}
    for step in steps:
        reads, writes = accessed_storages(step)
        places.update(dict.fromkeys((*reads, *writes)))
        for s in writes:
            makers.setdefault(s, step.kernel.name if isinstance(step, Launch) else "copy")
    rows = sorted(
        (_buffer_report_row(s, makers.get(s, ""), spaces) for s in places), key=lambda row: row[1] != "global"
    )
    return FunctionMemory(total_arena_bytes(arenas), scratch_bytes_per_thread(program, spaces), tuple(rows))


def total_arena_bytes(arenas: Sequence[Dim]) -> Dim:
    """Return the bytes of the arenas of all memories."""
    total: Dim = 0
    for size in arenas:
        total = total + size
    return total


def scratch_bytes_per_thread(program: Buffered, spaces: Sequence[Space]) -> int:
    """Return the scratch bytes of one thread; a GPU thread uses private memory instead."""
    steps = (step for step in walk(program.steps) if isinstance(step, Launch))
    launches = {(id(step.kernel.body), step_memory_space(step)): step for step in steps}  # equal layers share one body
    pairs = ((step.kernel, spaces[max(step_memory_space(step), 0)].target) for step in launches.values())
    return max((scratch_bytes(stack_to_scratch(k, target)) for k, target in pairs if target.kind != "cuda"), default=0)


def largest_specialisation_memory(memories: Sequence[FunctionMemory]) -> FunctionMemory:
    """Return the maximum over the specialisations of a function, of which the first is the general one."""
    general = memories[0]
    arena = general.arena
    if not isinstance(arena, Expr):
        arena = max(static(m.arena) for m in memories)
    return FunctionMemory(arena, max(m.scratch for m in memories), general.buffers)


def _buffer_report_row(s: Storage, maker: str, spaces: Sequence[Space]) -> tuple[str, str, Dim, Dim, int, int]:
    """Return the name, space, bytes, offset, first and last step of a storage."""
    if s.kind == "arena":
        device = spaces[s.space].device
        return maker, f"arena of {device}" if device else "arena", s.size, s.offset, s.first, s.last
    return f"{s.kind} {s.number}", "global", s.size, 0, s.first, s.last


def local_buffers_of_kernel(kernel: Kernel, threads_alone: bool) -> list[list[str | int]]:
    """Return the name, space, type and bytes of each local buffer of a kernel.

    With ``threads_alone`` each thread is a worker of its own, as on a GPU: scratch is then private.
    """
    rows: dict[str, list[str | int]] = {}
    for stmt in walk_kernel(kernel.body):
        if isinstance(stmt, Alloc):
            b = stmt.buffer
            space = "private" if threads_alone and b.space == "scratch" else b.space
            shape = ", ".join(map(str, b.shape))
            rows[b.name] = [b.name, space, f"{b.dtype}[{shape}]", manifest_size(product(b.shape) * size_of(b.dtype))]
    return list(rows.values())


def manifest_size(size: Dim) -> int | str:
    """Return a size in the form for the manifest: an integer, or the text of an expression over dims."""
    return str(size) if isinstance(size, Expr) else int(size)
