"""A sharded model on the machines of a Ray cluster: one actor for each rank, whole arrays in and out.

The actors are in a placement group with a bundle of resources for each host, so Ray starts all of them or none, and the
ranks of a bundle share a host. Ray places and watches the ranks, and carries the parts of arguments and results. During
a call the ranks exchange data with each other, not through Ray.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from aotc.vmfb.api.buckets import has_buckets
from aotc.vmfb.bundle import OpenedBundle, open_bundle
from aotc.vmfb.errors import ArgumentValueError, BundleError, CallError, RankLost, bundle_errors
from aotc.vmfb.gang.base import BaseGang, GangState, rank_keywords
from aotc.vmfb.gang.rank_processes import cause
from aotc.vmfb.gang.states import RankStates
from aotc.vmfb.module import load
from aotc.vmfb.public_names import public_names
from aotc.vmfb.ranks.cut import Cut, FunctionCuts
from aotc.vmfb.ranks.layout import Mesh, mesh_of
from aotc.vmfb.ranks.ranks import Ranks

STRICT_PACK, PACK = "STRICT_PACK", "PACK"
CPU, GPU = "CPU", "GPU"

# Seconds in which ranks report a lost one after the first report. Ray notices the death of an actor within a second.
_REPORT_SECONDS = 5.0

# Ray's max_direct_call_object_size: Ray sends smaller arrays within the message of a call, without its object store.
_MESSAGE_BYTES = 100 << 10


class RankActor:
    """One rank, in a process of Ray's."""

    def address(self) -> str:
        """Return an address of this process's host on which rank 0 can listen."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as sock:
            sock.bind((host, 0))
            return f"{host}:{sock.getsockname()[1]}"

    def load(
        self, path: str, ranks: Mapping[str, Any], keywords: Mapping[str, Any]
    ) -> tuple[int, dict[str, str]]:
        """Load the bundle as one of the ranks; return the number of the process, and the signature of each function."""
        if not ray.get_gpu_ids():
            hide_gpus()
        module = load(path, ranks=Ranks(**ranks), **keywords)
        assert module.mesh is not None  # ``load`` refuses ranks for other bundles
        own = {name: entry for name, entry in module.functions.items() if not has_buckets(module.get_function(name))}
        cuts = {name: FunctionCuts(module.mesh, entry.signature).results for name, entry in own.items()}
        self._owned = {name: [cut.owners[module.rank] == module.rank for cut in row] for name, row in cuts.items()}
        self._module, self._states = module, RankStates(module)
        return os.getpid(), {name: repr(entry.signature) for name, entry in own.items()}

    def call(self, name: str, *parts: np.ndarray) -> list[np.ndarray]:
        """Run a function on this rank's parts; return its parts of results, without those that another rank returns."""
        results = self._module.invoke(name, *parts)
        return [np.asarray(x) for x, is_own in zip(results, self._owned[name], strict=True) if is_own]

    def step(self, name: str, part: np.ndarray, state: int, dropped: Sequence[int]) -> list[np.ndarray]:
        """Run a function on an array and on a state; return this rank's part of the first result, as :meth:`call`."""
        first = self._states.step(name, part, state, dropped)
        return [np.asarray(first)] if self._owned[name][0] else []


@public_names("starts", "strategy")
class RayGang(BaseGang):
    """A sharded model whose ranks are actors of Ray; see :func:`aotc.gang` for ranks on one host without Ray.

    Calls take and return whole arrays, and run one at a time. After the loss of a rank, or an error in one, the call
    raises, and the next one starts all ranks again.

    Parameters
    ----------
    path : str or path
        The bundle, under the same path on each machine.
    hosts : int
        Hosts among which the ranks are divided equally. The ranks of a host are neighbours, so the last axis of the
        mesh stays inside a host if its size divides their number.
    ranks : int, optional
        Number of ranks that the bundle must be for; by default the number that it is for.
    threads : int
        Cores and threads of each rank.
    gpus : int
        GPUs of each rank: 0 or 1.
    timeout : float
        Seconds until the cluster has placed the ranks, and until all have joined.
    weights : path, optional
        As for :func:`aotc.load`, on each machine.
    verify, trusted_keys, untrusted
        As for :func:`aotc.load`.
    group : PlacementGroup, optional
        A placement group with the bundles of resources of :func:`host_resources`, which closing does not remove. By
        default a new one.
    restart : bool
        Start the ranks again in the first call after their end. Else that call raises.

    Attributes
    ----------
    strategy : str
        Ray's strategy of a new placement group: ``STRICT_PACK`` for one host, else ``PACK``.
    starts : int
        Number of times that the ranks have been started.

    Raises
    ------
    CallError
        If a value is invalid, or the cluster has no room for the ranks in time.
    BundleError
        If the bundle is not for several ranks, or differs between machines.
    """

    def __init__(
        self, path: str | os.PathLike[str], *, hosts: int = 1, ranks: int | None = None, threads: int = 1,
        gpus: int = 0, timeout: float = 60.0, weights: str | os.PathLike[str] | None = None, verify: bool = False,
        trusted_keys: Sequence[str | os.PathLike[str] | bytes] | None = None, untrusted: bool = False,
        group: PlacementGroup | None = None, restart: bool = True,
    ) -> None:  # fmt: skip
        self.path = os.path.abspath(path)
        with bundle_errors(self.path):
            bundle = open_bundle(self.path)
        self._keywords = rank_keywords(threads, weights, verify, trusted_keys, untrusted)
        super().__init__(bundle, mesh_for_hosts(bundle, hosts, ranks), weights is not None, "RayGang")
        self._cuts = {name: FunctionCuts(self.mesh, own) for name, own in self._part_signatures.items()}
        self.starts, self.timeout = 0, timeout
        self.strategy = STRICT_PACK if hosts == 1 else PACK
        self._resources = host_resources(self.mesh, hosts, threads, gpus)
        self._threads, self._gpus, self._restarts = threads, gpus, restart
        self._is_closed, self._first_state = False, 0
        self._actors: list[Any] = []
        self._processes: tuple[int, ...] = ()
        self._owns_group = group is None
        self._group = placement_group(self._resources, strategy=self.strategy) if group is None else group
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def processes(self) -> tuple[int, ...]:
        """The process identifier of each rank, on its machine."""
        return self._processes

    def _prepare_ranks(self) -> None:
        if self._end and self._restarts and not self._is_closed:
            self._start()
            self._first_state = next(self._numbers)
        self._check_open()

    def _check_state(self, state: GangState) -> None:
        if state.number < self._first_state:
            raise CallError(self.name, "the state is lost: the ranks were started again", hint="begin with a new one")

    def _call_ranks(self, name: str, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        cuts = self._cuts[name]
        rows = self._parts_of_ranks(arrays, cuts.arguments)
        replies = self._results([actor.call.remote(name, *row) for actor, row in zip(self._actors, rows, strict=True)])
        return _whole_arrays(cuts.results, replies)

    def _step_ranks(self, name: str, array: np.ndarray, state: int, dropped: Sequence[int]) -> np.ndarray:
        cuts = self._cuts[name]
        rows = zip(self._actors, self._parts_of_ranks([array], cuts.arguments[:1]), strict=True)
        replies = self._results([actor.step.remote(name, part, state, dropped) for actor, (part,) in rows])
        (first,) = _whole_arrays(cuts.results[:1], replies)
        return first

    def _parts_of_ranks(self, arrays: Sequence[np.ndarray], cuts: Sequence[Cut]) -> list[list[Any]]:
        """Return the parts of each rank; those in the object store are there once for all ranks."""
        rows: list[list[Any]] = [[] for _ in range(self.mesh.size)]
        for array, cut in zip(arrays, cuts, strict=True):
            parts: dict[int, Any] = {}
            for owner in cut.distinct:
                part = np.asarray(array[cut.slices[owner]], order="C")
                parts[owner] = ray.put(part) if part.nbytes > _MESSAGE_BYTES else part
            for row, owner in zip(rows, cut.owners, strict=True):
                row.append(parts[owner])
        return rows

    def close(self) -> None:
        """End the ranks, and free their resources; a call of another thread fails. Closing twice is allowed."""
        self._is_closed = True
        super().close()

    def __enter__(self) -> RayGang:
        return self

    def _start(self) -> None:
        """Place an actor for each rank, and let all join."""
        if not self._group.wait(self.timeout):
            raise self._no_room()
        kind = ray.remote(num_cpus=self._threads, num_gpus=self._gpus, max_restarts=0)(RankActor)
        per_host = self.mesh.size // len(self._resources)
        for rank in range(self.mesh.size):
            place = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=rank // per_host)
            self._actors.append(kind.options(scheduling_strategy=place).remote())
        (address,) = self._results([self._actors[0].address.remote()], self.timeout)
        loads = []
        for rank, actor in enumerate(self._actors):
            # Ray shows an actor its own GPU alone
            local = 0 if self._gpus else rank % per_host
            about = {
                "rank": rank, "size": self.mesh.size, "address": address, "transport": "tcp", "timeout": self.timeout,
                "local_rank": local,
            }  # fmt: skip
            loads.append(actor.load.remote(self.path, about, self._keywords))
        loaded = self._results(loads)
        self._processes = tuple(process for process, _ in loaded)
        self._check_signatures([signatures for _, signatures in loaded])
        self.starts += 1
        if not self._is_closed:
            self._end = ""

    def _check_signatures(self, found: Iterable[Mapping[str, str]]) -> None:
        """Refuse ranks whose bundle has other functions than the one on this machine."""
        expected = {name: repr(signature) for name, signature in self._part_signatures.items()}
        for rank, signatures in enumerate(found):
            if signatures != expected:
                self._kill_ranks()
                what = f"the file on the machine of rank {rank} has other functions than the one on this machine"
                raise BundleError(self.path, what, hint="the same file on each machine")

    def _no_room(self) -> CallError:
        cores, gpus = (int(self._resources[0].get(key, 0)) for key in (CPU, GPU))
        need = f"{cores} cores" + (f" and {gpus} GPUs" if gpus else "")
        what = f"the cluster has no room for {self.mesh.size} ranks after {self.timeout:g} s"
        return CallError(self.path, what, expected=f"{len(self._resources)} x {need}, each on one host")

    def _results(self, calls: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Return the results of actors; after an error, or a timeout in seconds, end all and raise its cause."""
        with self._end_on_error():
            try:
                return self._wait_for_results(calls, timeout)
            except BaseException:
                self._kill_ranks()
                raise

    def _wait_for_results(self, calls: Sequence[Any], timeout: float | None) -> list[Any]:
        """Wait for the results of actors; after a failure, wait briefly for the others, and raise the cause."""
        failures: dict[int, CallError | BundleError] = {}
        left, found = dict(enumerate(calls)), {}
        while left:
            done, _ = ray.wait(list(left.values()), timeout=_REPORT_SECONDS if failures else timeout)
            if not done and not failures:
                raise self._no_room()
            if not done:
                break
            for rank in [rank for rank, call in left.items() if call in done]:
                try:
                    found[rank] = ray.get(left.pop(rank))
                except RayError as error:
                    failures[rank] = _error_of_rank(rank, error)
        if failures:
            raise cause(failures)
        return [found[rank] for rank in sorted(found)]

    def _kill_ranks(self) -> None:
        actors, self._actors = self._actors, []
        for actor in actors:
            with suppress(Exception):  # it has ended
                ray.kill(actor, no_restart=True)

    def _free_ranks(self) -> None:
        self._kill_ranks()
        if self._owns_group:
            remove_placement_group(self._group)


def hide_gpus() -> None:
    """Hide the GPUs of the machine from this process: Ray has assigned none to it."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


def mesh_for_hosts(bundle: OpenedBundle, hosts: int, ranks: int | None = None) -> Mesh:
    """Return the mesh of a bundle whose ranks are divided among hosts.

    Raises
    ------
    BundleError
        If the bundle is for one device, or for another number of ranks.
    ArgumentValueError
        If the ranks cannot be divided equally.
    """
    entry = bundle.manifest.get("mesh")
    if entry is None:
        raise BundleError(bundle.where, "the bundle is not sharded: it has no ranks", hint="aotc.serve.ray")
    mesh = mesh_of(entry)
    if ranks not in (None, mesh.size):
        raise BundleError(bundle.where, f"the bundle is for {mesh.size} ranks ({mesh}), and there are {ranks}")
    if isinstance(hosts, bool) or not isinstance(hosts, int) or hosts < 1 or mesh.size % hosts:
        what = f"{mesh.size} ranks are not divided equally among the hosts"
        raise ArgumentValueError(bundle.where, what, hosts, f"a divisor of {mesh.size}")
    return mesh


def host_resources(mesh: Mesh, hosts: int, threads: int, gpus: int) -> list[dict[str, float]]:
    """Return the bundles of resources of a placement group: for each host the cores and GPUs of its ranks.

    Parameters
    ----------
    mesh : Mesh
    hosts : int
        A divisor of the number of ranks.
    threads, gpus : int
        Cores and GPUs of each rank.
    """
    per_host = mesh.size // hosts
    row = {CPU: float(per_host * threads), **({GPU: float(per_host * gpus)} if gpus else {})}
    return [dict(row) for _ in range(hosts)]


def _whole_arrays(cuts: Sequence[Cut], replies: Sequence[Sequence[np.ndarray]]) -> list[np.ndarray]:
    """Return whole arrays, made of the parts that ranks own: those of a rank in the order of the arrays."""
    left, found = [iter(reply) for reply in replies], []
    for cut in cuts:
        whole = np.empty(cut.whole, cut.dtype)
        for rank in cut.distinct:
            whole[cut.slices[rank]] = next(left[rank])
        found.append(whole)
    return found


def _error_of_rank(rank: int, error: RayError) -> CallError | BundleError:
    """Return the error of a rank: its own, or RankLost if its process or its machine ended."""
    reason = getattr(error, "cause", None)
    if isinstance(reason, CallError | BundleError):
        return reason
    if isinstance(error, RayActorError | ObjectLostError):
        return RankLost(rank, f"rank {rank} ended: {_first_line(error)}")
    return CallError("", f"rank {rank}: {_first_line(reason or error)}")


def _first_line(error: BaseException) -> str:
    text = str(error).splitlines()[0] if str(error) else ""
    return text if isinstance(error, RayError) and text else f"{type(error).__name__}: {text}"
