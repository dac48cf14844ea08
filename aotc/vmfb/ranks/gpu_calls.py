"""Collectives on arrays in GPU memory: their checks, and their execution through memory of the host.

The host's way needs no library, and ranks may share a GPU. :mod:`aotc.vmfb.ranks.nccl.calls` is the fast way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from aotc.vmfb.dtypes import size_of, to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.ranks.collectives import Collective, run_collective, sizes_agree
from aotc.vmfb.ranks.link import Link


class RankGpu(Protocol):
    """Interface of a rank's GPU: see :class:`aotc.vmfb.devices.cuda.driver.Gpu`.

    Attributes
    ----------
    ranks : RankWatch or None
        What a wait for the GPU asks, again and again, whether a rank is lost.
    """

    ranks: RankWatch | None

    def enter(self) -> None: ...

    def wait(self) -> None: ...

    def upload(self, to: int, source: int, size: int) -> None: ...

    def download(self, to: int, source: int, size: int) -> None: ...

    def set_word(self, address: int, value: int, stream: int) -> None: ...

    def set_zeros(self, address: int, size: int, stream: int) -> None: ...

    def copy_on(self, stream: int, to: int, source: int, size: int) -> None: ...

    def destroy_collective_graphs(self) -> None: ...


class RankWatch(Protocol):
    """Interface of what knows whether ranks are lost while this one waits for its GPU."""

    def check(self) -> None:
        """Raise RankLost if a rank is lost, for a wait that has not ended."""

    def settle(self) -> None:
        """Raise RankLost if the work that a wait found complete was given up."""


class GpuCall(Protocol):
    """Interface of a collective on a GPU, for arrays of fixed sizes."""

    @property
    def is_recorded(self) -> bool:
        """Return True if a CUDA graph can contain it."""

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """Enqueue the collective on a stream, for operands and results at these addresses."""


class GpuTransport(Protocol):
    """Interface of a way in which ranks exchange arrays that are in GPU memory."""

    def call(self, gpu: RankGpu, collective: Collective, arrays: Arrays) -> GpuCall:
        """Return the collective on this rank's GPU; all ranks ask for the same ones in the same order."""

    def begin_call(self) -> None:
        """Begin a call of the module.

        Raises
        ------
        RankLost
            If the work on GPUs has been given up; then no call has begun.
        """

    def end_call(self) -> None:
        """End the call, which the host has waited for."""

    def fail(self, error: BaseException) -> None:
        """Leave the other ranks: a call has failed between its collectives."""

    def close(self) -> None:
        """Release what the ranks share."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Dtype and elements of the operands and results of a collective."""

    operands: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]


def arrays_of(where: str, c: Collective, row: Mapping[str, Any], extents: Sequence[Any], ranks: int) -> Arrays:
    """Return the arrays of a collective, without the tokens behind operands and results.

    Parameters
    ----------
    where : str
        The bundle, for messages.
    row : mapping
        The manifest's entry of the custom call.
    extents : sequence of int
        Bytes of each operand and each result, from the kernel's entry.
    ranks : int
        The number of all ranks.

    Raises
    ------
    BundleError
        If the sizes are not those of the collective: it would access memory of other arrays.
    """
    dtypes = [dtype for dtype, _ in (*row["operands"], *row["results"])]
    known = len(dtypes) == len(extents) and all(isinstance(size, int) for size in extents)
    rows = [(t, size // size_of(t)) for t, size in zip(dtypes, extents) if known]
    count = len(row["operands"])
    operands, results = tuple(rows[: count - 1]), tuple(rows[count:-1])
    members = len(c.groups[0]) if c.groups else ranks
    if not known or len(operands) != len(results) or not all(
        x == y and sizes_agree(c.op, n, m, members) for (x, n), (y, m) in zip(operands, results, strict=True)
    ):
        found = ", ".join(map(str, extents))
        raise BundleError(where, f"the arrays of {c} have sizes of another collective", f"{found} bytes")
    return Arrays(operands, results)


@dataclass(frozen=True, slots=True)
class RankNumber:
    """``partition_id``: the number of this rank, as a word in GPU memory."""

    rank: int
    is_recorded: bool = True

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """See :class:`GpuCall`."""
        gpu.set_word(addresses[-1], self.rank, stream)


@dataclass(frozen=True, slots=True)
class HostTransport:
    """Exchange through memory of the host, by the link between the ranks."""

    link: Link
    gpus: list[RankGpu] = field(default_factory=list)

    def call(self, gpu: RankGpu, collective: Collective, arrays: Arrays) -> GpuCall:
        """See :class:`GpuTransport`."""
        self.gpus.append(gpu)
        return HostCall(collective, self.link, arrays)

    def begin_call(self) -> None:
        """Do nothing: the link refuses by itself."""

    def end_call(self) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """See :class:`GpuTransport`; calls on CPUs fail by themselves when they exchange."""
        if self.gpus:
            self.link.close(f"failed ({type(error).__name__})")

    def close(self) -> None:
        """Do nothing: the link is closed by itself."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A collective whose operands are copied to the host, and its results back."""

    collective: Collective
    link: Link
    arrays: Arrays
    is_recorded: bool = False

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """See :class:`GpuCall`; the host waits for the GPU before and after."""
        operands, results = (
            [np.empty(count, to_numpy(dtype)) for dtype, count in rows]
            for rows in (self.arrays.operands, self.arrays.results)
        )
        for array, address in zip(operands, addresses):
            gpu.download(array.ctypes.data, address, array.nbytes)
        gpu.wait()
        run_collective(self.collective, self.link, operands, results)
        gpu.enter()
        for array, address in zip(results, addresses[len(operands) + 1 :]):
            gpu.upload(address, array.ctypes.data, array.nbytes)
        gpu.wait()
