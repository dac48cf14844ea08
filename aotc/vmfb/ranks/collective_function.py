"""Implementations of a bundle's collectives as custom calls, for host arrays and for GPU arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from time import perf_counter_ns
from typing import Any

import numpy as np

from aotc.vmfb.errors import BundleError
from aotc.vmfb.ranks.collective_log import CollectiveLog
from aotc.vmfb.ranks.collectives import Collective, cuts_arrays, is_collective, run_collective
from aotc.vmfb.ranks.gpu_calls import GpuCall, GpuTransport, RankGpu, RankNumber, collective_arrays
from aotc.vmfb.ranks.layout import RANK_CALL
from aotc.vmfb.ranks.link import Link


class RankNumberFunction:
    """Implementation of the custom call ``aotc.partition_id``: the number of this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, out: np.ndarray) -> None:
        """Write the number of this rank to the result ``out``."""
        out[...] = self._rank

    def on_gpu(self, where: str, gpu: RankGpu, row: Mapping[str, Any], extents: Sequence[Any]) -> GpuCall:
        """Prepare ``partition_id`` for a GPU: a call that stores the number of this rank in GPU memory."""
        if [*extents] != [4]:
            raise BundleError(where, "the number of a rank is no word", f"{[*extents]} bytes", "[4]")
        return RankNumber(self._rank)


class CollectiveFunction:
    """Implementation of one kind of collective, such as ``all_reduce``, for all its custom calls in a bundle.

    Parameters
    ----------
    name : str
        Name of the custom call, such as ``aotc.all_reduce``.
    link : Link
        The connection to the other ranks, for host arrays.
    gpus : GpuTransport
        The exchange of GPU arrays.
    log : CollectiveLog
        Receives the times of executions while the module records them.
    """

    def __init__(self, name: str, link: Link, gpus: GpuTransport, log: CollectiveLog) -> None:
        self._op, self._link, self._gpus, self._log = name.removeprefix(RANK_CALL), link, gpus, log
        self._known: dict[int, Collective] = {}  # by serial number: a bundle's facts of it never change

    def __call__(self, *arrays: np.ndarray, **facts: Any) -> None:
        """Run the collective on host arrays.

        ``arrays`` are the operands and a token, then the results and the next token; ``facts`` are the attributes of
        the custom call.
        """
        count, collective, log = len(arrays) // 2, self._collective(facts), self._log
        start = perf_counter_ns() if log.rows is not None else 0
        run_collective(collective, self._link, arrays[: count - 1], arrays[count:-1])
        if start:
            log.add(collective, sum(array.nbytes for array in arrays[: count - 1]), start)
        arrays[-1][...] = 0

    def on_gpu(self, where: str, gpu: RankGpu, row: Mapping[str, Any], extents: Sequence[Any]) -> GpuCall:
        """Prepare one custom call for a GPU; all ranks must prepare the same custom calls in the same order.

        Parameters
        ----------
        where : str
            The bundle, for messages.
        gpu : RankGpu
        row : mapping
            The manifest's entry of the custom call.
        extents : sequence of int
            Bytes of each operand and each result.

        Raises
        ------
        BundleError
            If the sizes are not those of the collective.
        RankLost, CallError
            If the ranks' GPUs cannot be connected.
        """
        check_collective_attributes(where, self._op, row["attributes"], self._link.size)
        collective = self._collective(row["attributes"])
        call = self._gpus.call(gpu, collective, collective_arrays(where, collective, row, extents, self._link.size))
        return _LoggedGpuCall(call, collective, sum(extents[: len(row["operands"]) - 1]), self._log)

    def _collective(self, facts: Mapping[str, Any]) -> Collective:
        serial = facts["serial"]
        if serial not in self._known:
            rows = {key: tuple(map(tuple, facts[key])) for key in ("groups", "pairs") if key in facts}
            self._known[serial] = Collective(self._op, **{**facts, **rows})
        return self._known[serial]


class _LoggedGpuCall:
    """Wrapper of a GPU collective that logs its execution times while the log is active; it then waits for the GPU."""

    def __init__(self, call: GpuCall, collective: Collective, size: int, log: CollectiveLog) -> None:
        self.is_recorded = call.is_recorded
        self._call, self._collective, self._bytes, self._log = call, collective, size, log

    def __call__(self, gpu: RankGpu, stream: int, addresses: Sequence[int]) -> None:
        """See :class:`aotc.vmfb.ranks.gpu_calls.GpuCall`."""
        if self._log.rows is None:
            self._call(gpu, stream, addresses)
            return
        gpu.wait()
        start = perf_counter_ns()
        self._call(gpu, stream, addresses)
        gpu.wait()
        self._log.add(self._collective, self._bytes, start)


def check_collective_attributes(where: str, op: str, facts: Mapping[str, Any], ranks: int) -> None:
    """Check the attributes of a collective's custom call; with damaged ones NCCL would access other arrays' memory.

    Raises
    ------
    BundleError
        If ``op`` is unknown; if groups do not contain each rank exactly once; if groups differ in size although ``op``
        splits arrays into one part for each rank; or if pairs, serial number or reduction are malformed.
    """
    if not is_collective(op):
        hint = "a newer aotc may have compiled the bundle"
        raise BundleError(where, f"there is no collective {op!r}", hint=hint)
    groups, pairs = facts.get("groups", []), facts.get("pairs", [])
    rows = [*groups, *pairs]
    numbers = isinstance(groups, list) and isinstance(pairs, list) and all(
        isinstance(row, list) and all(type(rank) is int and 0 <= rank < ranks for rank in row) for row in rows
    )
    whole = numbers and (not groups or sorted(rank for row in groups for rank in row) == list(range(ranks)))
    paired = numbers and all(len(row) == 2 for row in pairs) and all(
        len({row[end] for row in pairs}) == len(pairs) for end in (0, 1)
    )
    words = type(facts.get("serial")) is int and isinstance(facts.get("reduction", ""), str)
    if not whole or not paired or not words or (cuts_arrays(op) and len({len(row) for row in groups}) > 1):
        raise BundleError(where, "the facts of a collective are damaged", str(dict(facts))[:200])


def rank_functions(calls: Sequence[str], link: Link, gpus: GpuTransport, log: CollectiveLog) -> dict[str, Any]:
    """Return, by name, the implementations of those custom ``calls`` that are collectives."""
    number = RankNumberFunction(link.rank)
    own = [name for name in calls if name.startswith(RANK_CALL)]
    return {n: number if n == f"{RANK_CALL}partition_id" else CollectiveFunction(n, link, gpus, log) for n in own}
