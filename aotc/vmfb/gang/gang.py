"""A sharded model on this host: one child process for each rank, whole arrays in and out."""

from __future__ import annotations

import json
import os
import socket
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import (
    ArgumentValueError,
    BundleError,
    bundle_errors,
)
from aotc.vmfb.gang.base import BaseGang, GangState, rank_keywords
from aotc.vmfb.gang.rank_processes import RankProcesses
from aotc.vmfb.gang.shared_arrays import SharedFunction, mapped_memory, memory_file
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.module import suggest_valid_keywords
from aotc.vmfb.public_names import public_names
from aotc.vmfb.ranks.layout import Mesh, mesh_of

if TYPE_CHECKING:
    from aotc.vmfb.gang.rank_recording import RankRecording

Source = str | os.PathLike[str] | bytes | bytearray | memoryview

MOST_RANKS = 512  # processes of one host: a wrong number is an error before the host is filled with them


@suggest_valid_keywords
def gang(
    source: Source, *, ranks: int | None = None,
    threads: int | None = None, timeout: float = 30.0, weights: str | os.PathLike[str] | None = None,
    verify: bool = False, trusted_keys: Sequence[str | os.PathLike[str] | bytes] | None = None, untrusted: bool = False,
) -> Gang:  # fmt: skip
    """Run a sharded bundle on this host: ``with aotc.gang("model.vmfb") as module: y = module(x)``.

    One child process runs each rank of the bundle's mesh. Calls take and return whole arrays; each rank gets its parts
    in shared memory. Leaving the ``with`` block ends the processes, as the end of this process does.

    Parameters
    ----------
    source : str, path, bytes or buffer
        The bundle.
    ranks : int, optional
        Number of ranks that the bundle must be for; by default the number that it is for.
    threads : int, optional
        Threads of each rank; by default as ``AOTC_NUM_THREADS`` or ``OMP_NUM_THREADS`` say, else the cores of this
        process divided by the number of ranks.
    timeout : float
        Seconds to wait until all ranks have joined.
    weights : path, optional
        Replacement of the bundle's weights, as for :func:`aotc.load`: each rank loads this file.
    verify, trusted_keys, untrusted
        As for :func:`aotc.load`.

    Returns
    -------
    Gang
        It has the functions of the bundle, as a module has.

    Raises
    ------
    BundleError
        If it is not a bundle, is for one device, or is for another number of ranks.
    CallError
        If a rank cannot load it.
    RankLost
        If a process of a rank ended, at the start or in a call.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise ArgumentValueError("gang", "timeout must be positive", repr(timeout), "seconds")
    with bundle_errors(source):
        bundle = open_bundle(source)
    mesh = _mesh_of_bundle(bundle, ranks)
    keywords = rank_keywords(_threads_per_rank(threads, mesh.size), weights, verify, trusted_keys, untrusted)
    return Gang(source, bundle, mesh, keywords, float(timeout))


def _mesh_of_bundle(bundle: OpenedBundle, ranks: int | None) -> Mesh:
    """Return the mesh of a bundle for ``ranks`` ranks."""
    if ranks is not None and (not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1):
        raise ArgumentValueError("gang", "ranks must be a positive integer", repr(ranks))
    entry = bundle.manifest.get("mesh")
    if entry is None:
        hint = "leave out --ranks, or use aotc.load; or compile it with shardings over a mesh"
        raise BundleError(bundle.where, "the bundle is not sharded: it has no ranks", hint=hint)
    mesh = mesh_of(entry)
    if ranks not in (None, mesh.size):
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and there are {ranks}"
        raise BundleError(bundle.where, message, hint=f"ranks={mesh.size}, or compile it for a mesh of {ranks}")
    if mesh.size > MOST_RANKS:
        message = f"the bundle is for {mesh.size} ranks ({mesh}), and a gang has at most {MOST_RANKS} on one host"
        raise BundleError(bundle.where, message, hint="mpirun, torchrun or srun on several hosts")
    return mesh


def _threads_per_rank(threads: int | None, size: int) -> int | None:
    if threads is not None or any(os.environ.get(name) for name in ("AOTC_NUM_THREADS", "OMP_NUM_THREADS")):
        return threads
    return max(1, usable_cores() // size)


@public_names("rank_seconds")
class Gang(BaseGang):
    """A sharded model whose ranks are child processes; see :func:`gang`.

    Functions are attributes and items, as those of a module: ``module.decode``, ``module["decode"]``. They take and
    return whole NumPy arrays. Calls of several threads run one after another. An exception in a rank, or an interrupted
    call, ends the gang.

    Attributes
    ----------
    name : str
    mesh : Mesh
    functions : dict of str to Entry
    rank_seconds : tuple of float
        The time of the last call on each rank.
    """

    def __init__(
        self, source: Source, bundle: OpenedBundle, mesh: Mesh, keywords: Mapping[str, Any], timeout: float
    ) -> None:
        super().__init__(bundle, mesh, bool(keywords["weights"]), "aotc.gang")
        self.rank_seconds: tuple[float, ...] = ()
        self._shared = {name: SharedFunction(mesh, own) for name, own in self._part_signatures.items()}
        file = memory_file(max((shared.size for shared in self._shared.values()), default=0))
        try:
            self._memory = mapped_memory(file)
            with _bundle_path_for_children(source) as (path, files), _free_address() as address:
                self._processes = RankProcesses(mesh.size, file, files)
                self._finalizer = weakref.finalize(self, self._processes.close)
                asked = {"path": path, "keywords": dict(keywords)}
                ranks = [(rank, mesh.size, address, "tcp", timeout) for rank in range(mesh.size)]
                replies = self._processes.ask([{**asked, "ranks": row} for row in ranks], "while the gang started")
        finally:
            os.close(file)
        if replies[0]["signatures"] != {name: repr(own) for name, own in self._part_signatures.items()}:
            self.close()
            raise BundleError(bundle.where, "the file was replaced while the ranks loaded it", hint="aotc.gang again")

    @property
    def processes(self) -> tuple[int, ...]:
        """The process identifier of each rank."""
        return self._processes.identifiers

    def run(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Run a function of fixed sizes on whole arrays of the types of its signature; return whole results."""
        self._processes.refuse_in_fork()
        return super().run(name, arrays)

    def _call_ranks(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        shared = self._shared[name]
        shared.write(self._memory, arrays)
        replies = self._ask([{"call": name}] * self.mesh.size, f"during a call of {name}")
        self.rank_seconds = tuple(reply["seconds"] for reply in replies)
        return shared.read(self._memory)

    def step(self, name: str, array: np.ndarray, state: GangState) -> np.ndarray:
        """Run a function on a whole array and on the state on the ranks; see :meth:`BaseGang.step`."""
        self._processes.refuse_in_fork()
        return super().step(name, array, state)

    def _step_ranks(self, name: str, array: np.ndarray, state: int, dropped: Sequence[int]) -> np.ndarray:
        shared = self._shared[name]
        shared.write(self._memory, [array])
        row = {"step": name, "state": state, "dropped": list(dropped)}
        self._ask([row] * self.mesh.size, f"during a call of {name}")
        (first,) = shared.read(self._memory, 1)
        return first

    def record(self, name: str, arrays: Sequence[Any], calls: int) -> list[RankRecording]:
        """Record ``calls`` calls of a function on each rank.

        ``arrays`` are the flattened arguments, each whole (not sharded).

        Raises
        ------
        CallError
            As for :meth:`invoke`, and if the bundle has no debug information.
        """
        from aotc.vmfb.gang.rank_recording import recording_of_data  # only for profiles

        function = self._fixed_function(name, arrays)
        whole = function.whole_arrays(arrays)
        self._processes.refuse_in_fork()
        with self._lock, TemporaryDirectory(prefix="aotc-profile-") as folder:
            self._check_open()
            self._shared[function.name].write(self._memory, whole)
            files = [os.path.join(folder, f"{rank}.json") for rank in range(self.mesh.size)]
            rows = [{"record": function.name, "calls": calls, "file": file} for file in files]
            self._ask(rows, f"during a recording of {name}")
            return [recording_of_data(json.loads(Path(file).read_bytes())) for file in files]

    def _ask(self, messages: Sequence[Mapping[str, Any]], during: str) -> list[dict[str, Any]]:
        """Return the reply of each rank; an exception ends the gang. The caller has the lock."""
        with self._end_on_error():
            return self._processes.ask(messages, during)

    def _kill_ranks(self) -> None:
        self._processes.end_call()

    def _free_ranks(self) -> None:
        self._finalizer()

    def __enter__(self) -> Gang:
        return self


@contextmanager
def _bundle_path_for_children(source: Source) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Return a path of the bundle for child processes, and the descriptors that they need for it."""
    if isinstance(source, str | os.PathLike):
        yield os.path.abspath(source), ()
        return
    data = memoryview(source).cast("B")
    file = memory_file(len(data))
    try:
        with mapped_memory(file) as memory:
            memory[: len(data)] = data
        os.ftruncate(file, len(data))
        yield f"/dev/fd/{file}", (file,)
    finally:
        os.close(file)


@contextmanager
def _free_address() -> Iterator[str]:
    """Return an address of the loopback interface that no other process gets meanwhile.

    The port stays bound here, without listening: rank 0, which also sets SO_REUSEADDR, may listen at it.
    """
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{sock.getsockname()[1]}"
