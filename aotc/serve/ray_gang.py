"""A sharded model on the machines of a Ray cluster: one actor for each rank, whole arrays in and out.

The actors are in a placement group with a bundle of resources for each host, so Ray starts all of them or none, and the
ranks of a bundle share a host. Ray places and watches the ranks; they exchange data with each other, not through Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aotc.vmfb.api.module_ranks import WholeFunction
from aotc.vmfb.bundle import open_bundle
from aotc.vmfb.errors import ArgumentValueError, BundleError, CallError, RankLost
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.module import load
from aotc.vmfb.ranks.layout import mesh_of
from aotc.vmfb.ranks.ranks import Ranks

STRICT_PACK, PACK = "STRICT_PACK", "PACK"

# Seconds in which ranks report a lost one after the first report. Ray notices the death of an actor within a second.
_REPORT_SECONDS = 5.0


class RankActor:
    """One rank, in a process of Ray's."""

    def __init__(self) -> None:
        self._functions: dict[str, WholeFunction] = {}

    def address(self) -> str:
        """Return an address of this process's host on which rank 0 can listen."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((host, 0))
            return f"{host}:{sock.getsockname()[1]}"

    def load(self, path: str, ranks: Mapping[str, Any], keywords: Mapping[str, Any]) -> int:
        """Load the bundle as one of the ranks; return the number of the process."""
        module = load(path, ranks=Ranks(**ranks), **keywords)
        self._functions = {name: WholeFunction(module, name) for name in module.functions}
        self._is_first = module.rank == 0
        return os.getpid()

    def call(self, name: str, *arrays: np.ndarray) -> list[np.ndarray]:
        """Run a function on whole arrays; rank 0 returns the whole results."""
        results = self._functions[name].call(arrays)
        return [np.asarray(x) for x in results] if self._is_first else []


class RayGang:
    """A sharded model whose ranks are actors of Ray; see :func:`aotc.gang` for ranks on one host without Ray.

    Calls take and return whole arrays, and run one at a time. After the loss of a rank, the call raises, and the next
    one starts all ranks again.

    Parameters
    ----------
    path : str or path
        The bundle, under the same path on each machine.
    hosts : int
        Hosts among which the ranks are divided equally. The ranks of a host are neighbours, so the last axis of the
        mesh stays inside a host if its size divides their number.
    threads : int
        Cores and threads of each rank.
    gpus : int
        GPUs of each rank: 0 or 1.
    timeout : float
        Seconds until the cluster has placed the ranks, and until all have joined.
    weights : path, optional
        As for :func:`aotc.load`, on each machine.

    Attributes
    ----------
    strategy : str
        Ray's strategy of the placement group: ``STRICT_PACK`` for one host, else ``PACK``.
    starts : int
        Number of times that the ranks have been started.

    Raises
    ------
    CallError
        If a value is invalid, or the cluster has no room for the ranks in time.
    BundleError
        If the bundle is not for several ranks.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, hosts: int = 1, threads: int = 1, gpus: int = 0, timeout: float = 60.0,
        weights: str | os.PathLike[str] | None = None,
    ) -> None:  # fmt: skip
        self.path = os.path.abspath(path)
        bundle = open_bundle(self.path)
        entry = bundle.manifest.get("mesh")
        if entry is None:
            raise BundleError(bundle.where, "the bundle is for one device and takes no ranks", hint="aotc.serve.ray")
        self.mesh = mesh_of(entry)
        if hosts < 1 or self.mesh.size % hosts:
            what = f"{self.mesh.size} ranks are not divided equally among the hosts"
            raise ArgumentValueError(bundle.where, what, hosts, f"a divisor of {self.mesh.size}")
        self.starts, self.timeout = 0, timeout
        self.strategy = STRICT_PACK if hosts == 1 else PACK
        self._per_host, self._gpus = self.mesh.size // hosts, gpus
        self._threads, self._lock = threads, new_lock()
        self._keywords = {"threads": threads, "weights": None if weights is None else os.path.abspath(weights)}
        share = {"CPU": self._per_host * threads, **({"GPU": self._per_host * gpus} if gpus else {})}
        self._group = placement_group([share] * hosts, strategy=self.strategy)
        self._actors: list[Any] = []
        self.processes: tuple[int, ...] = ()
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    def invoke(self, name: str, *arrays: Any) -> list[np.ndarray]:
        """Run a function on flat, whole arrays.

        Raises
        ------
        RankLost
            If a rank, or its machine, ended. State and donated values are lost; the next call starts the ranks again.
        CallError
            If an argument does not fit, or the ranks cannot be started.
        """
        with self._lock:
            if not self._actors:
                self._start()
            shared = [ray.put(np.asarray(x)) for x in arrays]
            first, *_ = self._results([actor.call.remote(name, *shared) for actor in self._actors])
            return first

    def close(self) -> None:
        """End the ranks, and free their resources."""
        self._kill()
        remove_placement_group(self._group)

    def __enter__(self) -> RayGang:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self) -> None:
        """Place an actor for each rank, and let all join."""
        if not self._group.wait(self.timeout):
            need = f"{self._per_host * self._threads} cores" + (f" and {self._per_host} GPUs" if self._gpus else "")
            hosts = self.mesh.size // self._per_host
            what = f"the cluster has no room for {self.mesh.size} ranks after {self.timeout:g} s"
            raise CallError(self.path, what, expected=f"{hosts} x {need}, each on one host")
        kind = ray.remote(num_cpus=self._threads, num_gpus=self._gpus, max_restarts=0)(RankActor)
        for rank in range(self.mesh.size):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank // self._per_host)
            self._actors.append(kind.options(scheduling_strategy=place).remote())
        (address,) = self._results([self._actors[0].address.remote()])
        loads = []
        for rank, actor in enumerate(self._actors):
            # Ray shows an actor its own GPU alone
            local = 0 if self._gpus else rank % self._per_host
            about = {
                "rank": rank, "size": self.mesh.size, "address": address, "transport": "tcp", "timeout": self.timeout,
                "local_rank": local,
            }  # fmt: skip
            loads.append(actor.load.remote(self.path, about, self._keywords))
        self.processes = tuple(self._results(loads))
        self.starts += 1

    def _results(self, calls: Sequence[Any]) -> list[Any]:
        """Return the results of all actors; after an error end them, and raise its cause."""
        failures: dict[int, Exception] = {}
        left, found = dict(enumerate(calls)), {}
        while left:
            done, _ = ray.wait(list(left.values()), timeout=_REPORT_SECONDS if failures else None)
            if not done:
                break
            for rank in [rank for rank, call in left.items() if call in done]:
                try:
                    found[rank] = ray.get(left.pop(rank), timeout=self.timeout)
                except (RayTaskError, RayActorError, GetTimeoutError) as error:
                    failures[rank] = error
        if failures:
            self._kill()
            raise _cause_of(failures)
        return [found[rank] for rank in sorted(found)]

    def _kill(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            with suppress(Exception):  # it has ended
                ray.kill(actor, no_restart=True)


def _cause_of(failures: Mapping[int, Exception]) -> Exception:
    """Return the error to raise: one of the program, else the loss that the other ranks name."""
    causes = {rank: getattr(error, "cause", None) for rank, error in failures.items()}
    own = [e for e in causes.values() if isinstance(e, CallError | BundleError) and not isinstance(e, RankLost)]
    lost = [e for e in causes.values() if isinstance(e, RankLost)]
    if own or lost:
        return [*own, *lost][0]
    rank, error = min(failures.items(), key=_rank_of)
    text = str(error).splitlines()[0] if str(error) else type(error).__name__
    if isinstance(error, RayActorError):
        return RankLost(rank, f"rank {rank} ended: {text}")
    return CallError("", f"rank {rank}: {text}")


def _rank_of(item: tuple[int, Exception]) -> int:
    return item[0]
