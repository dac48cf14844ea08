"""A bufferized program: storages (pieces of memory), and a tree of steps that access them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from aotc.diagnostics import Loc
from aotc.ir.dims.algebra import Dim, maximum, static
from aotc.ir.loop.ir import Kernel
from aotc.vmfb.abi import ALIGNMENT


@dataclass(eq=False)
class Storage:
    """A piece of memory that has one or more values of the program.

    ``kind`` is ``argument``, ``result``, ``arena``, ``constant``, or ``fill`` (a constant that kernels generate where
    it is needed; no step refers to it). ``number`` is the number of the argument or result, or the byte offset of the
    constant. An arena storage gets its ``offset`` from ``plan_memory`` and is live from step ``first`` to step
    ``last``. ``space`` is the number of its memory space. ``result`` is the number of the result that reuses the memory
    of this donated argument; -1 if none does.
    """

    kind: str
    size: Dim
    number: int = 0
    offset: Dim = 0
    first: int = -1
    last: int = -1
    result: int = -1
    space: int = 0

    def touch(self, time: int) -> None:
        """Extend the live range of the storage to step ``time``."""
        self.first = time if self.first < 0 else self.first
        self.last = max(self.last, time)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Run a kernel; ``reads`` and ``writes`` are in the order of its buffers.

    ``begins`` are byte offsets into each storage of ``reads``, where the kernel's part starts; empty: all 0.
    """

    kernel: Kernel
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    loc: Loc
    begins: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copy ``size`` bytes."""

    source: Storage
    target: Storage
    size: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """Run ``cond``; while the byte in ``predicate`` is not 0, run ``body`` and ``cond`` again.

    ``iterations`` is the number of iterations of ``body``, None if unknown.
    """

    predicate: Storage
    cond: tuple[Step, ...]
    body: tuple[Step, ...]
    iterations: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Run the branch whose number is the i32 in ``index``; the last one if it is out of range."""

    index: Storage
    branches: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """Fail with ``message``, before any later step, if the byte in ``predicate`` is 0."""

    predicate: Storage
    message: str
    values: tuple[tuple[Storage, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bind:
    """Bind the symbol ``dim`` to the integer in ``value`` from here on; sizes of later steps may depend on it."""

    dim: Dim
    value: Storage
    dtype: str


Step: TypeAlias = Launch | Copy | Loop | Branch | Check | Bind


def walk(steps: Sequence[Step]) -> Iterator[Step]:
    """Yield every step, outer before inner, in the order of the program."""
    stack = list(reversed(steps))
    while stack:
        step = stack.pop()
        yield step
        match step:
            case Loop(cond=cond, body=body):
                stack += reversed((*cond, *body))
            case Branch(branches=branches):
                stack += reversed([inner for branch in branches for inner in branch])


def split_at_host_reads(steps: Sequence[Step]) -> list[tuple[list[Step], list[Check | Bind]]]:
    """Split ``steps`` where the host must read memory: (commands to submit, then checks and binds)."""
    cut: list[tuple[list[Step], list[Check | Bind]]] = [([], [])]
    for step in steps:
        if isinstance(step, Check | Bind):
            cut[-1][1].append(step)
            continue
        if cut[-1][1]:
            cut.append(([], []))
        cut[-1][0].append(step)
    return cut if not cut[-1][1] else [*cut, ([], [])]


def accessed_storages(step: Step) -> tuple[tuple[Storage, ...], tuple[Storage, ...]]:
    """Return the storages that a step itself reads, and those that it writes, without the steps in a loop or branch."""
    match step:
        case Launch(reads=reads, writes=writes):
            return reads, writes
        case Copy(source, target):
            return (source,), (target,)
        case Loop(predicate=place) | Branch(index=place) | Bind(value=place):
            return (place,), ()
        case Check(predicate=predicate, values=values):
            return (predicate, *(s for s, _ in values)), ()


def storages_with_offsets(step: Step) -> list[tuple[Storage, int]]:
    """Return the storages that a step itself reads, then those that it writes, each with a byte offset."""
    reads, writes = accessed_storages(step)
    begins = (step.begins if isinstance(step, Launch) else ()) or (0,) * len(reads)
    return [*zip(reads, begins, strict=True), *((s, 0) for s in writes)]


def accessed_storages_in_nested_steps(step: Step) -> tuple[tuple[Storage, ...], tuple[Storage, ...]]:
    """Return the storages that a step reads, and those that it writes, including the steps in a loop or branch."""
    if not isinstance(step, Loop | Branch):
        return accessed_storages(step)
    both = [accessed_storages(inner) for inner in walk([step])]
    reads, writes = (dict.fromkeys(s for pair in both for s in pair[n]) for n in range(2))
    return tuple(reads), tuple(writes)


def block_bytes(size: Dim) -> Dim:
    """Return the bytes to allocate for an array of ``size`` bytes: kernels may read an element of an empty one."""
    return maximum(size, 16)


# Bytes that guarded code leaves untouched after each block of memory, for the guard pages of the runtime's machine. The
# smallest page size of all supported processors; on machines with larger pages some guards protect nothing.
GUARD_BYTES = 4096


def place_after_guard_gap(total: Dim, size: Dim) -> tuple[Dim, Dim]:
    """Return the offset of a block of ``size`` bytes after a guard gap, and the new total size.

    ``total`` are the bytes used so far. Both totals are 64 bytes less than whole pages, as in the runtime's guarded
    memory. A block ends as near to its guard as its alignment allows.
    """
    begin = total + ALIGNMENT if total != 0 else 0
    block_size = block_bytes(size)
    room = (block_size + (GUARD_BYTES - 1)) // GUARD_BYTES * GUARD_BYTES
    return begin + (room - block_size) // ALIGNMENT * ALIGNMENT, begin + room + (GUARD_BYTES - ALIGNMENT)


def reused_arguments(steps: Sequence[Step]) -> dict[int, int]:
    """Return the number of the donated argument whose memory a result reuses, by the number of the result."""
    every = {s for step in walk(steps) for part in accessed_storages(step) for s in part}
    return {s.result: s.number for s in every if s.kind == "argument" and s.result >= 0}


# Bytes that are sampled at even distances from a constant. Constants with equal samples are compared in full.
SAMPLED_BYTES = 1024


@dataclass
class Constants:
    """Builder of the blob of constants: unique arrays at 64-byte aligned offsets.

    With ``guard_gaps``, gaps separate the arrays.
    """

    arrays: list[tuple[str, np.ndarray, int]] = field(default_factory=list)
    size: int = 0
    guard_gaps: bool = False
    _known: dict[tuple, list[tuple[np.ndarray, int]]] = field(default_factory=dict)

    def add(self, array: np.ndarray, name: str) -> int:
        """Return the offset of ``array`` in the blob; equal arrays, as functions share them, have one offset."""
        array = np.ascontiguousarray(array)
        flat = array.reshape(-1).view(np.uint8)
        sample = flat[:: max(flat.size // SAMPLED_BYTES, 1)].tobytes()
        alike = self._known.setdefault((array.dtype.name, array.shape, sample), [])
        for earlier, offset in alike:
            if earlier is array or _are_equal_bytes(flat, earlier.reshape(-1).view(np.uint8)):
                return offset
        if self.guard_gaps:
            offset, self.size = map(static, place_after_guard_gap(self.size, array.nbytes))
        else:
            offset, self.size = self.size, self.size + -(-array.nbytes // ALIGNMENT) * ALIGNMENT
        alike.append((array, offset))
        self.arrays.append((name, array, offset))
        return offset

    def parts(self) -> list[memoryview]:
        """Return the bytes of the blob as views of the arrays, with zeros for the gaps; no array is copied."""
        views: list[memoryview] = []
        at = 0
        for _, array, offset in self.arrays:
            views += [memoryview(bytes(offset - at))] if offset > at else []
            views.append(array.reshape(-1).view(np.uint8).data)
            at = offset + array.nbytes
        return [*views, memoryview(bytes(self.size - at))]


# Bytes of two constants that are compared at a time; the comparison allocates as many bytes.
COMPARED_BYTES = 16 << 20


def _are_equal_bytes(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if two byte arrays of equal length are equal.

    They are compared piecewise, because they may be as large as memory.
    """
    parts = range(0, a.size, COMPARED_BYTES)
    return all(np.array_equal(a[at : at + COMPARED_BYTES], b[at : at + COMPARED_BYTES]) for at in parts)


def step_memory_space(step: Launch | Copy) -> int:
    """Return the number of the memory space that a step accesses, or -1 if it accesses two."""
    spaces = {s.space for part in accessed_storages(step) for s in part}
    return spaces.pop() if len(spaces) == 1 else -1 if spaces else 0


@dataclass
class Pieces:
    """Constants that a GPU needs in its own memory, in a program with several memory spaces.

    Each row has the offset in the blob of all constants, the size in bytes, and the offset in the GPU's memory.
    """

    rows: list[tuple[int, int, int]] = field(default_factory=list)
    size: int = 0
    _known: dict[int, int] = field(default_factory=dict)

    def place(self, offset: int, size: int) -> int:
        """Return the offset in GPU memory of a constant of the blob; copy it there on first use."""
        if offset not in self._known:
            self._known[offset] = self.size
            self.rows.append((offset, size, self.size))
            self.size += -(-size // ALIGNMENT) * ALIGNMENT
        return self._known[offset]


@dataclass
class Buffered:
    """One bufferized function: its steps and all arena storages.

    Attributes
    ----------
    held : dict of str to tuple of int
        By the name of a loop kernel: the outputs whose memory must contain the initial state when the kernel starts.
    taken : dict of int to int
        By the number of a result: the donated argument whose memory it reuses.
    copies : tuple of str
        The copies of each call, the most expensive first, each with the reason.
    """

    steps: tuple[Step, ...]
    arena: list[Storage]
    kernels: dict[str, Kernel]
    held: dict[str, tuple[int, ...]] = field(default_factory=dict)
    taken: dict[int, int] = field(default_factory=dict)
    copies: tuple[str, ...] = ()
