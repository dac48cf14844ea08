"""What instructions mean: a block of threads, its shared memory and its barriers, in Python and NumPy.

:func:`run` calls a kernel's Python once for each thread, all threads of a block at a time. An instruction that touches
more than its operands finds the block in :func:`here`. Copies and products are done when they are begun, which is one
of the orders that the machine may take.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from aotc.ir.loop.ir import WARP

# Seconds that a thread of a simulated block waits for other threads before it reports a deadlock. A simulated tile
# takes some tenths of a second.
PATIENCE_SECONDS = 20


_HERE = threading.local()


class PhaseBarrier:
    """A barrier whose phase ends after so many arrivals, and when all bytes that were announced have come."""

    def __init__(self, arrivals: int) -> None:
        self._arrivals = self._left = arrivals
        self._bytes = self._phase = 0
        self._changed = threading.Condition()

    def change(self, arrivals: int, size: int) -> None:
        """Let ``arrivals`` threads arrive, and ``size`` bytes be awaited; less than 0 of those have come."""
        with self._changed:
            self._left -= arrivals
            self._bytes += size
            if self._left == self._bytes == 0:
                self._left, self._phase = self._arrivals, self._phase + 1
                self._changed.notify_all()

    def meet(self) -> None:
        """Arrive, and wait for the end of the phase."""
        with self._changed:
            parity = self._phase % 2
        self.change(1, 0)
        self.wait(parity)

    def wait(self, parity: int) -> None:
        """Wait for the end of the phase that has this parity; of the one before the first, if it is 1."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase % 2 != parity, PATIENCE_SECONDS):
                raise TimeoutError(f"a thread waits for ever for phase {self._phase}")


@dataclass(frozen=True, slots=True)
class Array:
    """What a tensor map says: an array in memory, and the box that is copied of its last two dimensions."""

    elements: np.ndarray
    box: tuple[int, int]

    def part(self, column: int, row: int, *others: int) -> np.ndarray:
        """Return the elements of the box at ``column`` and ``row``; 0 outside of the array."""
        width, height = self.box
        found = np.zeros((height, width), self.elements.dtype)
        inside = self.elements[(*reversed(others),)][row : row + height, column : column + width]
        found[: inside.shape[0], : inside.shape[1]] = inside
        return found


@dataclass(frozen=True, slots=True)
class Patches:
    """What a tensor map by windows says: images, the box, its corners and the steps of its pixels, innermost first."""

    elements: np.ndarray
    box: tuple[int, int]
    low: tuple[int, ...]
    high: tuple[int, ...]
    strides: tuple[int, ...]

    def part(self, place: Sequence[int], tap: Sequence[int]) -> np.ndarray:
        """Return the channels from ``place[0]`` on of the pixels from the others on; 0 outside of the array."""
        channels, pixels = self.box
        first, *at = map(int, place)
        *extents, width = self.elements.shape[1:]
        found = np.zeros((pixels, channels), self.elements.dtype)
        for pixel in range(pixels):
            moved = [i + int(t) for i, t in zip(at, tap)][::-1]
            inside = all(0 <= i < n for i, n in zip((at[-1], *moved), (len(self.elements), *extents)))
            own = self.elements[(at[-1], *moved)][first : first + channels] if inside and first < width else []
            found[pixel, : len(own)] = own
            at = self._next(at, extents[::-1])
        return found

    def _next(self, at: Sequence[int], extents: Sequence[int]) -> list[int]:
        *spatial, image = at
        for d, extent in enumerate(extents):
            spatial[d] += self.strides[d]
            if spatial[d] <= extent - 1 + self.high[d]:
                return [*spatial, image]
            spatial[d] = self.low[d]
        return [*spatial, image + 1]


class Cluster:
    """Blocks that run at a time and read each other's memory.

    Attributes
    ----------
    blocks : list of ThreadBlock
    """

    def __init__(self, threads: int) -> None:
        self.blocks: list[ThreadBlock] = []
        self._together = threading.Barrier(threads, timeout=PATIENCE_SECONDS)

    def meet(self) -> None:
        """Wait for all threads of all blocks."""
        self._together.wait()

    def abort(self) -> None:
        """Let no thread wait any more."""
        self._together.abort()
        for block in self.blocks:
            block.abort()


class ThreadBlock:
    """The state of a block.

    Attributes
    ----------
    number : int
        Of the block.
    memory : numpy.ndarray
        Its shared memory, as bytes.
    barriers : dict
        By address.
    named : dict
        The barriers that have numbers and not addresses.
    functions : mapping of str to callable
        What kernels call that is emitted from the loop IR.
    cluster : Cluster
        The blocks that read each other's memory.
    rank : int
        The number of the block among them.
    """

    def __init__(
        self, number: int, threads: int, shared: int, functions: Mapping[str, Callable[..., Any]], cluster: Cluster
    ) -> None:
        self.number, self.functions = number, functions
        self.cluster, self.rank = cluster, len(cluster.blocks)
        cluster.blocks.append(self)
        self.memory = np.full(shared, 0xFF, np.uint8)  # NaN in every float dtype: nothing else shows in a sum
        self.barriers: dict[int, PhaseBarrier] = {}
        self.together = threading.Barrier(threads, timeout=PATIENCE_SECONDS)
        self.named: dict[int, PhaseBarrier] = {}
        self._registers: list[Any] = [None] * threads
        self._groups = {
            count: [threading.Barrier(count, timeout=PATIENCE_SECONDS) for _ in range(threads // count)]
            for count in (WARP, 128)
        }
        self._locks = [threading.Lock() for _ in range(threads // 128)]
        self._known: list[dict[Hashable, Any]] = [{} for _ in range(threads // 128)]

    @contextmanager
    def warpgroup(self) -> Iterator[Callable[[Hashable, Callable[[], Any]], Any]]:
        """Do something together with the other threads of the calling one's warpgroup.

        What is given returns what a function computes, which is called by one of the threads that give the same key.
        """
        group = _HERE.thread // 128
        meeting = self._groups[128][group]
        meeting.wait()
        yield partial(self._once, group)
        if meeting.wait() == 0:
            self._known[group].clear()

    def _once(self, group: int, key: Hashable, compute: Callable[[], Any]) -> Any:
        with self._locks[group]:
            known = self._known[group]
            if key not in known:
                known[key] = compute()
            return known[key]

    def exchange(self, value: Any, count: int = WARP) -> list[Any]:
        """Return what each thread of the calling one's warp, or of its warpgroup of 128, has for ``value``."""
        meeting, first = self._groups[count][_HERE.thread // count], _HERE.thread // count * count
        self._registers[_HERE.thread] = value
        meeting.wait()
        found = self._registers[first : first + count]
        meeting.wait()
        return found

    def barrier(self, number: int, threads: int) -> PhaseBarrier:
        """Return the barrier that has a number, and waits for so many threads."""
        return self.named.setdefault(number, PhaseBarrier(threads))

    def abort(self) -> None:
        """Let no thread wait any more."""
        for barrier in (self.together, *self._groups[WARP], *self._groups[128]):
            barrier.abort()


def here() -> Any:
    """Return the calling thread's ``block`` and its number in it, ``thread``."""
    return _HERE


def swizzled(row: Any, byte: Any) -> Any:
    """Return where a byte of a row of 128 is, in a tile whose pieces of 16 bytes are swizzled."""
    return row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15)


class _Cuda:
    """What kernels use of ``numba.cuda``."""

    def __init__(self, blocks: int, threads: int) -> None:
        self.gridDim, self.blockDim = SimpleNamespace(x=blocks), SimpleNamespace(x=threads)

    threadIdx = property(lambda self: SimpleNamespace(x=_HERE.thread))
    blockIdx = property(lambda self: SimpleNamespace(x=_HERE.block.number))

    def syncthreads(self) -> None:
        _HERE.block.together.wait()

    def jit(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: function


@contextmanager
def _replaced(module: ModuleType, cuda: _Cuda):
    real, module.cuda = module.cuda, cuda
    try:
        yield
    finally:
        module.cuda = real


def run(
    module: ModuleType, make: Callable[[], Callable[..., None]], blocks: int, threads: int, shared: int,
    arguments: Sequence[Any], functions: Mapping[str, Callable[..., Any]], cluster: int = 1,
) -> None:  # fmt: skip
    """Run a kernel, one cluster of blocks after the other.

    Parameters
    ----------
    module : module
        Where the kernel is written: its ``cuda`` is replaced.
    make : callable
        Returns the kernel.
    blocks, threads, shared : int
        Of the launch, as :class:`aotc.vmfb.devices.cuda.launch.LaunchShape` has them.
    arguments : sequence
        Of the kernel; in the place of tensor maps there are :class:`Array`.
    functions : mapping of str to callable
        See :class:`ThreadBlock`.
    cluster : int
        So many blocks run at a time.
    """
    with _replaced(module, _Cuda(blocks, threads)):
        kernel = make()
        for first in range(0, blocks, cluster):
            together = Cluster(cluster * threads)
            for number in range(first, first + cluster):
                ThreadBlock(number, threads, shared, functions, together)
            _run_cluster(kernel, together, threads, arguments)


def _run_cluster(kernel: Callable[..., None], together: Cluster, threads: int, arguments: Sequence[Any]) -> None:
    errors: list[BaseException] = []

    def thread(block: ThreadBlock, number: int) -> None:
        _HERE.block, _HERE.thread = block, number
        try:
            with np.errstate(over="ignore"):
                kernel(*arguments)
        except BaseException as error:  # the caller raises it: threads have no other way
            errors.append(error)
            together.abort()

    running = [threading.Thread(target=thread, args=(block, n)) for block in together.blocks for n in range(threads)]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]
