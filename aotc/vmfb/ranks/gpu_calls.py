"""Collectives on arrays in GPU memory: checks, interfaces, and execution through host memory.

Execution through host memory needs no library, and ranks may share a GPU. Execution by NCCL, in
:mod:`aotc.vmfb.ranks.nccl.calls`, is faster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from aotc.vmfb.dtypes import size_of, to_numpy
from aotc.vmfb.errors import BundleError
from aotc.vmfb.ranks.collectives import Collective, are_sizes_valid, run_collective
from aotc.vmfb.ranks.link import Link


class RankGpu(Protocol):
    """Interface of a rank's GPU: see :class:`aotc.vmfb.devices.cuda.driver.Gpu`.

    Attributes
    ----------
    ranks : RankWatch or None
        Polled during waits for the GPU; it raises if a rank is lost.
    """

    ranks: RankWatch | None

    def make_context_current(self) -> None: ...

    def wait(self) -> None: ...

    def upload(self, to: int, source: int, size: int) -> None: ...

    def download(self, to: int, source: int, size: int) -> None: ...

    def set_word(self, address: int, value: int, stream: int) -> None: ...

    def set_zeros(self, address: int, size: int, stream: int) -> None: ...

    def copy_on(self, stream: int, to: int, source: int, size: int) -> None: ...

    def destroy_collective_graphs(self) -> None: ...


class RankWatch(Protocol):
    """Interface of the check for lost ranks while this rank waits for its GPU."""

    def check(self) -> None:
        """Raise RankLost if a rank is lost; called repeatedly during a wait."""

    def settle(self) -> None:
        """Raise RankLost if the GPU work was aborted; called after a wait has ended."""


class GpuCall(Protocol):
    """Interface of a collective that is prepared for a GPU, for arrays of fixed sizes."""

    @property
    def is_recorded(self) -> bool:
        """Return True if CUDA graphs can contain the collective."""

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """Enqueue the collective on ``stream``; ``addresses`` are those of the operands, then of the results."""


class GpuTransport(Protocol):
    """Interface of a transport for arrays in GPU memory between ranks."""

    def call(self, gpu: RankGpu, collective: Collective, arrays: Arrays) -> GpuCall:
        """Prepare a collective on this rank's GPU; all ranks must prepare the same collectives in the same order."""

    def begin_call(self) -> None:
        """Begin a call of the module.

        Raises
        ------
        RankLost
            If GPU work was aborted because a rank is lost; the call then has not begun.
        """

    def end_call(self) -> None:
        """End the call; the host has waited for its GPU work."""

    def fail(self, error: BaseException) -> None:
        """Disconnect from the other ranks, because a call failed between its collectives."""

    def close(self) -> None:
        """Release the communicators and buffers that the transport shares with other ranks."""


@dataclass(frozen=True, slots=True)
class Arrays:
    """Dtype and number of elements of each operand and result of a collective."""

    operands: tuple[tuple[str, int], ...]
    results: tuple[tuple[str, int], ...]


def collective_arrays(where: str, c: Collective, row: Mapping[str, Any], extents: Sequence[Any], ranks: int) -> Arrays:
    """Return the operand and result sizes of a collective's custom call, without its tokens.

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
        If the sizes are invalid for the collective, which would then access memory of other arrays.
    """
    dtypes = [dtype for dtype, _ in (*row["operands"], *row["results"])]
    known = len(dtypes) == len(extents) and all(isinstance(size, int) for size in extents)
    rows = [(t, size // size_of(t)) for t, size in zip(dtypes, extents) if known]
    count = len(row["operands"])
    operands, results = tuple(rows[: count - 1]), tuple(rows[count:-1])
    members = len(c.groups[0]) if c.groups else ranks
    if not known or len(operands) != len(results) or not all(
        x == y and are_sizes_valid(c.op, n, m, members) for (x, n), (y, m) in zip(operands, results, strict=True)
    ):
        found = ", ".join(map(str, extents))
        raise BundleError(where, f"the arrays of {c} have sizes of another collective", f"{found} bytes")
    return Arrays(operands, results)


@dataclass(frozen=True, slots=True)
class RankNumber:
    """The custom call ``partition_id`` on a GPU: stores the number of this rank as a 32-bit word in GPU memory."""

    rank: int
    is_recorded: bool = True

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """See :class:`GpuCall`."""
        gpu.set_word(addresses[-1], self.rank, stream)


@dataclass(frozen=True, slots=True)
class HostTransport:
    """Transport of GPU arrays through host memory, by the link between the ranks."""

    link: Link
    gpus: list[RankGpu] = field(default_factory=list)

    def call(self, gpu: RankGpu, collective: Collective, arrays: Arrays) -> GpuCall:
        """See :class:`GpuTransport`."""
        self.gpus.append(gpu)
        return HostCall(collective, self.link, arrays)

    def begin_call(self) -> None:
        """Do nothing: the link raises the error when it is used."""

    def end_call(self) -> None:
        """Do nothing."""

    def fail(self, error: BaseException) -> None:
        """Close the link if collectives run on a GPU; see :class:`GpuTransport`."""
        if self.gpus:
            self.link.close(f"failed ({type(error).__name__})")

    def close(self) -> None:
        """Do nothing: the owner of the link closes it."""


@dataclass(frozen=True, slots=True)
class HostCall:
    """A collective on a GPU that copies operands to the host, runs there, and copies results back."""

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
        gpu.make_context_current()
        for array, address in zip(results, addresses[len(operands) + 1 :]):
            gpu.upload(address, array.ctypes.data, array.nbytes)
        gpu.wait()
