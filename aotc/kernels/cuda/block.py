"""Simulator of a CUDA thread block in Python and NumPy; it defines the meaning of the PTX instructions in kernels.

The simulator has the block's shared memory and barriers. :func:`simulate_kernel` calls a kernel's Python code once for
each thread; all threads of a block run concurrently. An instruction that accesses more than its operands finds the
block by :func:`simulated_thread`. Asynchronous copies and matmuls complete when they are issued, which is one of the
orders that the hardware may choose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np

from aotc.ir.loop.ir import WARP

# Seconds that a thread of a simulated block waits for other threads before it reports a deadlock. A simulated tile
# takes some tenths of a second.
PATIENCE_SECONDS = 20


_HERE = threading.local()


class PhaseBarrier:
    """A barrier in shared memory (mbarrier): a phase ends after all arrivals, and when all expected bytes arrived."""

    def __init__(self, arrivals: int) -> None:
        self._arrivals = self._left = arrivals
        self._bytes = self._phase = 0
        self._changed = threading.Condition()

    def count_arrivals(self, arrivals: int, size: int) -> None:
        """Count ``arrivals`` threads as arrived at the barrier, and expect ``size`` further copied bytes.

        A negative size stands for bytes that have been copied.
        """
        with self._changed:
            self._left -= arrivals
            self._bytes += size
            if self._left == self._bytes == 0:
                self._left, self._phase = self._arrivals, self._phase + 1
                self._changed.notify_all()

    def wait_for_all(self) -> None:
        """Arrive at the barrier and wait for the end of its phase."""
        with self._changed:
            parity = self._phase % 2
        self.count_arrivals(1, 0)
        self.wait(parity)

    def wait(self, parity: int) -> None:
        """Wait until the barrier's phase with this parity has ended; parity 1 of a new barrier has ended already."""
        with self._changed:
            if not self._changed.wait_for(lambda: self._phase % 2 != parity, PATIENCE_SECONDS):
                raise TimeoutError(f"a thread waits forever for phase {self._phase}")


@dataclass(frozen=True, slots=True)
class SimulatedTensorMap:
    """A simulated tensor map: an array, and the size of the box in its last two dims that a copy reads."""

    elements: np.ndarray
    box: tuple[int, int]

    def copied_box(self, column: int, row: int, *others: int) -> np.ndarray:
        """Return the box of the array that a TMA copy at ``column`` and ``row`` reads, padded with zeros."""
        width, height = self.box
        found = np.zeros((height, width), self.elements.dtype)
        inside = self.elements[(*reversed(others),)][row : row + height, column : column + width]
        found[: inside.shape[0], : inside.shape[1]] = inside
        return found


@dataclass(frozen=True, slots=True)
class SimulatedPatches:
    """A simulated im2col tensor map: images, size of the box, and bounds and strides of its pixels, innermost first."""

    elements: np.ndarray
    box: tuple[int, int]
    low: tuple[int, ...]
    high: tuple[int, ...]
    strides: tuple[int, ...]

    def copied_box(self, place: Sequence[int], tap: Sequence[int]) -> np.ndarray:
        """Return the box of pixels that an im2col copy reads, padded with zeros.

        ``place`` is the first channel and pixel, ``tap`` the offset of the convolution's window.
        """
        channels, pixels = self.box
        first, *at = map(int, place)
        *extents, width = self.elements.shape[1:]
        found = np.zeros((pixels, channels), self.elements.dtype)
        for pixel in range(pixels):
            moved = [i + int(t) for i, t in zip(at, tap)][::-1]
            inside = all(0 <= i < n for i, n in zip((at[-1], *moved), (len(self.elements), *extents)))
            own = self.elements[(at[-1], *moved)][first : first + channels] if inside and first < width else []
            found[pixel, : len(own)] = own
            at = self._next_pixel(at, extents[::-1])
        return found

    def _next_pixel(self, at: Sequence[int], extents: Sequence[int]) -> list[int]:
        """Return the position after ``at`` in the box: pixel coordinates, innermost first, then the image."""
        *spatial, image = at
        for d, extent in enumerate(extents):
            spatial[d] += self.strides[d]
            if spatial[d] <= extent - 1 + self.high[d]:
                return [*spatial, image]
            spatial[d] = self.low[d]
        return [*spatial, image + 1]


class Cluster:
    """A thread block cluster: blocks that run concurrently and access each other's shared memory.

    Attributes
    ----------
    blocks : list of ThreadBlock
    """

    def __init__(self, threads: int) -> None:
        self.blocks: list[ThreadBlock] = []
        self._together = threading.Barrier(threads, timeout=PATIENCE_SECONDS)

    def wait_for_all(self) -> None:
        """Wait for all threads of all blocks of the cluster (cluster barrier)."""
        self._together.wait()

    def abort_waiting_threads(self) -> None:
        """Wake all waiting threads with an error, because another thread has failed."""
        self._together.abort()
        for block in self.blocks:
            block.abort_waiting_threads()


class ThreadBlock:
    """State of a simulated thread block.

    Attributes
    ----------
    number : int
        Index of the block in the grid.
    memory : numpy.ndarray
        Shared memory, as bytes.
    barriers : dict
        Barriers in shared memory, by address.
    named : dict
        Barriers with a number instead of an address.
    functions : mapping of str to callable
        Device functions that are emitted from the loop IR.
    cluster : Cluster
        Blocks that access each other's memory.
    rank : int
        Index of the block in its cluster.
    arrays : dict
        Arrays in shared memory that are not in ``memory``.
    """

    def __init__(
        self, number: int, threads: int, shared: int, functions: Mapping[str, Callable[..., Any]], cluster: Cluster
    ) -> None:
        self.number, self.functions = number, functions
        self.cluster, self.rank = cluster, len(cluster.blocks)
        cluster.blocks.append(self)
        self.memory = np.full(shared, 0xFF, np.uint8)  # NaN in every float dtype: uninitialized elements show
        self.arrays: dict[int, np.ndarray] = {}
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
    def synchronized_warpgroup(self) -> Iterator[Callable[[Hashable, Callable[[], Any]], Any]]:
        """Synchronize the threads of the calling thread's warpgroup before and after the context.

        The context yields a function of a key and a computation. Only one of the threads with the same key runs the
        computation; all of them get its result.
        """
        group = _HERE.thread // 128
        meeting = self._groups[128][group]
        meeting.wait()
        yield partial(self._compute_once_per_group, group)
        if meeting.wait() == 0:
            self._known[group].clear()

    def _compute_once_per_group(self, group: int, key: Hashable, compute: Callable[[], Any]) -> Any:
        """Run a computation for the first thread of a group that passes ``key``; return its result to the others."""
        with self._locks[group]:
            known = self._known[group]
            if key not in known:
                known[key] = compute()
            return known[key]

    def exchange_values(self, value: Any, count: int = WARP) -> list[Any]:
        """Return the values that all threads of the caller's warp passed, or of its warpgroup if ``count`` is 128."""
        meeting, first = self._groups[count][_HERE.thread // count], _HERE.thread // count * count
        self._registers[_HERE.thread] = value
        meeting.wait()
        found = self._registers[first : first + count]
        meeting.wait()
        return found

    def named_barrier(self, number: int, threads: int) -> PhaseBarrier:
        """Return the barrier with a number (PTX ``bar``); its phase ends after ``threads`` arrivals."""
        return self.named.setdefault(number, PhaseBarrier(threads))

    def abort_waiting_threads(self) -> None:
        """Wake all waiting threads with an error, because another thread has failed."""
        for barrier in (self.together, *self._groups[WARP], *self._groups[128]):
            barrier.abort()


def simulated_thread() -> Any:
    """Return the simulated CUDA thread that runs the calling code, with its ``block`` and its index ``thread``."""
    return _HERE


def swizzled_tile_offset(row: Any, byte: Any) -> Any:
    """Return the offset of byte ``byte`` of the 128-byte row ``row`` in a tile with the 128-byte swizzle."""
    return row * 128 + (((byte >> 4) ^ (row & 7)) << 4) + (byte & 15)


class _SimulatedCuda:
    """Replacement of the functions of ``numba.cuda`` that kernels use."""

    def __init__(self, blocks: int, threads: int) -> None:
        self.gridDim, self.blockDim = SimpleNamespace(x=blocks), SimpleNamespace(x=threads)

    threadIdx = property(lambda self: SimpleNamespace(x=_HERE.thread))
    blockIdx = property(lambda self: SimpleNamespace(x=_HERE.block.number))

    def syncthreads(self) -> None:
        _HERE.block.together.wait()

    def jit(self, **_: Any) -> Callable[[Any], Any]:
        return lambda function: function


@contextmanager
def _module_with_simulated_cuda(module: ModuleType, cuda: _SimulatedCuda):
    """Replace ``cuda`` in a kernel's module during the context."""
    real, module.cuda = module.cuda, cuda
    try:
        yield
    finally:
        module.cuda = real


def simulate_kernel(
    module: ModuleType, make: Callable[[], Callable[..., None]], blocks: int, threads: int, shared: int,
    arguments: Sequence[Any], functions: Mapping[str, Callable[..., Any]], cluster: int = 1,
) -> None:  # fmt: skip
    """Run a CUDA kernel's Python code in the simulator, one cluster of blocks after the other.

    Parameters
    ----------
    module : module
        The module of the kernel; its ``cuda`` is replaced.
    make : callable
        Returns the kernel.
    blocks, threads, shared : int
        Launch parameters, as in :class:`aotc.vmfb.devices.cuda.launch.LaunchShape`.
    arguments : sequence
        Arguments of the kernel, with :class:`Array` (or :class:`SimulatedPatches`) in place of tensor maps.
    functions : mapping of str to callable
        See :class:`ThreadBlock`.
    cluster : int
        Blocks of a cluster.
    """
    with _module_with_simulated_cuda(module, _SimulatedCuda(blocks, threads)):
        simulate_blocks(make(), range(blocks), threads, shared, arguments, functions, cluster)


def simulate_blocks(
    kernel: Callable[..., None], blocks: Sequence[int], threads: int, shared: int, arguments: Sequence[Any],
    functions: Mapping[str, Callable[..., Any]] = MappingProxyType({}), cluster: int = 1,
) -> None:  # fmt: skip
    """Call ``kernel`` once for each thread, one cluster of blocks after the other.

    ``blocks`` are the indices of the blocks; the other parameters are those of :func:`simulate_kernel`.
    """
    for first in range(0, len(blocks), cluster):
        together = Cluster(cluster * threads)
        for number in blocks[first : first + cluster]:
            ThreadBlock(number, threads, shared, functions, together)
        _run_simulated_cluster(kernel, together, threads, arguments)


def _run_simulated_cluster(
    kernel: Callable[..., None], together: Cluster, threads: int, arguments: Sequence[Any]
) -> None:
    """Run all threads of a cluster concurrently; raise the first exception of any of them."""
    errors: list[BaseException] = []

    def run_thread(block: ThreadBlock, number: int) -> None:
        _HERE.block, _HERE.thread = block, number
        try:
            with np.errstate(over="ignore"):
                kernel(*arguments)
        except BaseException as error:  # handed to the caller, which raises it
            errors.append(error)
            together.abort_waiting_threads()

    running = [
        threading.Thread(target=run_thread, args=(block, n)) for block in together.blocks for n in range(threads)
    ]
    for t in running:
        t.start()
    for t in running:
        t.join()
    if errors:
        raise errors[0]
