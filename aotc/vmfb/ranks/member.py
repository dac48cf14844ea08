"""The state of a loaded sharded module on one rank: collectives, parts of arrays, and one call at a time."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import msgpack
import numpy as np

from aotc.vmfb.arguments import dtype_text, type_text
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, BundleError, CallError, RankLost
from aotc.vmfb.host.install import install_command
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.collective_function import rank_functions
from aotc.vmfb.ranks.collective_log import CollectiveLog, CollectiveTime
from aotc.vmfb.ranks.cut import cut_of, layout_and_shapes
from aotc.vmfb.ranks.gpu_calls import GpuTransport, HostTransport
from aotc.vmfb.ranks.layout import Mesh, mesh_of, slices_of_rank
from aotc.vmfb.ranks.link import Link, open_link
from aotc.vmfb.ranks.ranks import GPU_TRANSPORTS, HOST, NCCL, Ranks, ranks_from_environment

if TYPE_CHECKING:
    from aotc.vmfb.bundle import OpenedBundle
    from aotc.vmfb.ranks.nccl.library import Nccl


class Member:
    """State of a loaded module that is one of several ranks: mesh, link and collectives.

    Attributes
    ----------
    mesh : Mesh
    rank : int
    local_rank : int
        Number of this rank among the ranks on the same host.
    functions : dict of str to CollectiveFunction
        Implementations of the bundle's collectives, by the names of their custom calls.
    """

    def __init__(
        self, where: str, mesh: Mesh, link: Link, gpus: GpuTransport, calls: Sequence[str], local_rank: int = -1
    ) -> None:
        self.where, self.mesh, self.link, self._gpus = where, mesh, link, gpus
        self.rank = link.rank
        self.local_rank = link.rank if local_rank < 0 else local_rank
        self._running = new_lock()
        self._log = CollectiveLog()
        self.functions = rank_functions(calls, link, gpus, self._log)

    @contextmanager
    def recording(self) -> Iterator[list[CollectiveTime]]:
        """Record the times of this rank's collectives in the block; yield the list that receives them.

        Calls on a GPU must run one command at a time meanwhile.
        """
        rows: list[CollectiveTime] = []
        self._log.rows = rows
        try:
            yield rows
        finally:
            self._log.rows = None

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Run the block as one call of the module; all ranks make the same calls in the same order.

        Raises
        ------
        RankLost
            If GPU work was aborted because a rank is lost.
        CallError
            If another thread of this process is in a call: ranks could run the two in different orders.
        """
        if not self._running.acquire(blocking=False):
            what = "another thread calls this rank's module, and other ranks could run the two calls in another order"
            raise CallError(self.where, what, hint="calls from one thread, in the same order on all ranks")
        try:
            self._gpus.begin_call()
            try:
                yield
            except (RankLost, ArgumentError, ArgumentValueError):  # the others know, or nothing has begun
                raise
            except BaseException as error:
                self._gpus.fail(error)
                raise
            finally:
                self._gpus.end_call()
        finally:
            self._running.release()

    def part(self, row: Mapping[str, Any], value: object) -> np.ndarray:
        """Return this rank's part of a whole array; a view if ``value`` is a NumPy array.

        Raises
        ------
        ArgumentValueError
            If the shape is not that of the whole array.
        """
        array = np.asarray(value)
        layout, whole, dims = layout_and_shapes(row)
        if array.shape != whole:
            found, expected = type_text(dtype_text(array.dtype), array.shape), type_text(row["dtype"], whole)
            hint = "a part is an argument of a call as it is" if array.shape == dims else ""
            raise ArgumentValueError(self.where, f"{row['name']} is not the whole array", found, expected, hint)
        return array[slices_of_rank(self.mesh, layout, self.rank, dims)]

    def gather(self, rows: Sequence[Mapping[str, Any]], values: Sequence[Any]) -> list[np.ndarray]:
        """Assemble whole arrays from the parts of all ranks; all ranks must call it with their own parts."""
        with self.calling():
            return [self._gathered(row, np.asarray(x, order="C"), n) for n, (row, x) in enumerate(zip(rows, values))]

    def _gathered(self, row: Mapping[str, Any], array: np.ndarray, number: int) -> np.ndarray:
        """Assemble the whole array of result ``number`` from this rank's part and the parts of other ranks."""
        _, whole, dims = layout_and_shapes(row)
        if array.shape != dims or array.dtype != to_numpy(row["dtype"]):
            found, expected = type_text(dtype_text(array.dtype), array.shape), type_text(row["dtype"], dims)
            raise ArgumentValueError(self.where, f"result {number} is not this rank's part", found, expected)
        if whole == dims:
            return array
        cut = cut_of(self.mesh, row)
        mine = cut.owners[self.rank] == self.rank
        sends = {r: array for r in range(self.mesh.size) if mine and r != self.rank}
        parts = {r: np.empty_like(array) for r in cut.distinct if r != self.rank}
        self.link.exchange(sends, parts, f"gather of result {number}")
        made = np.empty(whole, array.dtype)
        for rank, part in (parts | ({self.rank: array} if mine else {})).items():
            made[cut.slices[rank]] = part
        return made

    def fail(self, error: BaseException) -> None:
        """Disconnect from the other ranks, because this one cannot load the bundle."""
        self._gpus.close()
        self.link.close(f"failed ({type(error).__name__})")

    def close(self) -> None:
        """Disconnect from the other ranks; GPU work must be complete."""
        self._gpus.close()
        self.link.close()


def join_ranks(bundle: OpenedBundle, variant: Mapping[str, Any], ranks: Ranks | Link | None) -> Member | None:
    """Connect to the other ranks of a sharded bundle; return None if the bundle is for one device.

    Raises
    ------
    BundleError
        If the bundle is for another number of ranks, or if neither ``ranks`` nor the environment has this process's
        rank.
    """
    entry = bundle.manifest.get("mesh")
    if entry is None:
        if ranks is not None:
            hint = "leave out ranks= (--ranks), or compile it with shardings over a mesh"
            raise BundleError(bundle.where, "the bundle is not sharded: it has no ranks", hint=hint)
        return None
    mesh = mesh_of(entry)
    found = ranks if ranks is not None else ranks_from_environment()
    if found is None:
        hint = (
            f"aotc.gang(path) starts all ranks here; torchrun --nproc-per-node {mesh.size} ..., "
            f"mpirun -n {mesh.size} ...; aotc.load(path, ranks=aotc.Ranks(rank=..., size={mesh.size}, address=...))"
        )
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and this is one process"
        raise BundleError(bundle.where, message, hint=hint)
    if found.size != mesh.size:
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and there are {found.size}"
        raise BundleError(bundle.where, message, hint=f"start {mesh.size} processes")
    calls = [row["name"] for part in (variant, *variant.get("parts", ())) for row in part.get("custom_calls", ())]
    if not isinstance(found, Ranks):
        return Member(bundle.where, mesh, found, HostTransport(found), calls)
    digest = sha256(msgpack.packb(bundle.manifest)).hexdigest()[:16]
    facts = {"bundle": digest, "compiler": bundle.manifest["producer"], "target": variant["target"], "mesh": str(mesh)}
    way = found.gpus or os.environ.get("AOTC_RANKS_GPUS", "")
    library = _gpu_library(bundle.where, way) if variant["kind"] == "cuda" else None
    if variant["kind"] == "cuda":
        facts["GPUs exchange data by"] = f"NCCL {library.version}" if library else "memory of the host"
    link = open_link(found, facts)
    return Member(bundle.where, mesh, link, _transport_of(link, library), calls, found.local_rank)


def _gpu_library(where: str, way: str) -> Nccl | None:
    """Return the NCCL library for exchanges between GPUs, or None for exchanges through host memory.

    Raises
    ------
    CallError
        If ``nccl`` is required and not installed.
    """
    from aotc.vmfb.ranks.nccl.library import find_nccl, nccl  # only for ranks on GPUs

    if way and way not in GPU_TRANSPORTS:
        raise ArgumentValueError("AOTC_RANKS_GPUS", "unknown GPU transport", repr(way), ", ".join(GPU_TRANSPORTS))
    if way == HOST:
        return None
    found = nccl() if way == NCCL else find_nccl()
    if not isinstance(found, str):
        return found
    hint = f"for speed {install_command('nccl')}; Ranks(..., gpus='host') silences this"
    text = f"{where}: GPUs exchange data through memory of the host, which is slow: no NCCL ({found}); {hint}"
    warnings.warn(text, stacklevel=2)
    return None


def _transport_of(link: Link, library: Nccl | None) -> GpuTransport:
    if library is None:
        return HostTransport(link)
    from aotc.vmfb.ranks.nccl.calls import NcclTransport  # only for ranks on GPUs

    return NcclTransport(library, link)
