"""What a bufferized program is made of: storage, and a tree of steps over it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np

from aotc.diagnostics import Loc
from aotc.ir.dims import Dim
from aotc.ir.loop_ir import Kernel


@dataclass(eq=False)
class Storage:
    """Memory of one or more values.

    ``kind`` is ``argument``, ``result``, ``arena`` or ``constant``; ``number``
    is that of the argument or result, or the byte offset of the constant; an
    arena storage gets its ``offset`` from ``plan_memory`` and is live from step
    ``first`` to step ``last``.
    """

    kind: str
    size: Dim
    number: int = 0
    offset: Dim = 0
    first: int = -1
    last: int = -1
    reads_left: int = 0
    depth: int = 0

    def touch(self, time: int) -> None:
        """Extend the life of the storage to step ``time``."""
        self.first = time if self.first < 0 else self.first
        self.last = max(self.last, time)


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    """Run a kernel; ``reads`` and ``writes`` are in the order of its buffers."""

    kernel: Kernel
    reads: tuple[Storage, ...]
    writes: tuple[Storage, ...]
    loc: Loc


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """Copy ``size`` bytes."""

    source: Storage
    target: Storage
    size: Dim


@dataclass(frozen=True, slots=True, eq=False)
class Loop:
    """Run ``cond``, and while the byte in ``predicate`` is not 0 run ``body`` and ``cond`` again."""

    predicate: Storage
    cond: tuple[Step, ...]
    body: tuple[Step, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Branch:
    """Run the branch whose number is the i32 in ``index``; the last one if it is out of range."""

    index: Storage
    branches: tuple[tuple[Step, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Check:
    """After all work: fail with ``message`` if the byte in ``predicate`` is 0."""

    predicate: Storage
    message: str
    values: tuple[tuple[Storage, str], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Bind:
    """Let ``dim``, a symbol, be the integer in ``value`` from here on; sizes of later steps may depend on it."""

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


def stretches(steps: Sequence[Step]) -> list[tuple[list[Step], Bind | None]]:
    """Cut ``steps`` at each :class:`Bind`: what the host submits at once, and the size that it reads after that."""
    cut: list[tuple[list[Step], Bind | None]] = []
    part: list[Step] = []
    for step in steps:
        if isinstance(step, Bind):
            cut.append((part, step))
            part = []
        else:
            part.append(step)
    return [*cut, (part, None)]


def touched(step: Step) -> tuple[tuple[Storage, ...], tuple[Storage, ...]]:
    """Return what a step itself reads and what it writes; the steps inside a loop or branch are not looked at."""
    match step:
        case Launch(reads=reads, writes=writes):
            return reads, writes
        case Copy(source, target):
            return (source,), (target,)
        case Loop(predicate=place) | Branch(index=place) | Bind(value=place):
            return (place,), ()
        case Check(predicate=predicate, values=values):
            return (predicate, *(s for s, _ in values)), ()


@dataclass
class Constants:
    """The blob of constants: unique arrays at 64-byte aligned offsets."""

    arrays: list[tuple[str, np.ndarray, int]] = field(default_factory=list)
    size: int = 0
    _known: dict[tuple, int] = field(default_factory=dict)

    def add(self, array: np.ndarray, name: str) -> int:
        """Return the offset of ``array`` in the blob."""
        array = np.ascontiguousarray(array)
        key: tuple = (array.dtype.name, array.shape, id(array))
        if array.nbytes <= 1 << 16:
            key = (array.dtype.name, array.shape, array.tobytes())
        offset = self._known.get(key)
        if offset is None:
            offset = self._known[key] = self.size
            self.arrays.append((name, array, offset))
            self.size += -(-array.nbytes // 64) * 64
        return offset

    def parts(self) -> list[memoryview]:
        """Return the bytes of the blob piece by piece, the gaps between arrays included; nothing is copied."""
        found: list[memoryview] = []
        for _, array, _ in self.arrays:
            found += [array.reshape(-1).view(np.uint8).data, memoryview(bytes(-array.nbytes % 64))]
        return found


@dataclass
class Buffered:
    """One function, bufferized: its steps and every arena storage."""

    steps: tuple[Step, ...]
    arena: list[Storage]
    kernels: dict[str, Kernel]
