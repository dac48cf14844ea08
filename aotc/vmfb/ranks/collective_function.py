"""The runtime's functions behind a bundle's collectives: on arrays of the host, and on a GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aotc.vmfb.ranks.collectives import Collective, run_collective
from aotc.vmfb.ranks.gpu_calls import GpuCall, GpuTransport, RankGpu, RankNumber, arrays_of
from aotc.vmfb.ranks.layout import RANK_CALL
from aotc.vmfb.ranks.link import Link


class RankNumberFunction:
    """``aotc.partition_id``: the number of this rank."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __call__(self, out: np.ndarray) -> None:
        """Fill in the result."""
        out[...] = self._rank

    def on_gpu(self, where: str, gpu: RankGpu, row: Mapping[str, Any], extents: Sequence[Any]) -> GpuCall:
        """Return the function for a GPU."""
        return RankNumber(self._rank)


class CollectiveFunction:
    """A collective, for all places of a bundle that call it.

    Parameters
    ----------
    name : str
        The custom call, as ``aotc.all_reduce``.
    link : Link
    gpus : GpuTransport
        How ranks exchange arrays in GPU memory.
    """

    def __init__(self, name: str, link: Link, gpus: GpuTransport) -> None:
        self._op, self._link, self._gpus = name.removeprefix(RANK_CALL), link, gpus
        self._known: dict[int, Collective] = {}  # by serial number: a bundle's facts of it never change

    def __call__(self, *arrays: np.ndarray, **facts: Any) -> None:
        """Run it on arrays of the host: operands and a token, then results and the next token."""
        count = len(arrays) // 2
        run_collective(self._collective(facts), self._link, arrays[: count - 1], arrays[count:-1])
        arrays[-1][...] = 0

    def on_gpu(self, where: str, gpu: RankGpu, row: Mapping[str, Any], extents: Sequence[Any]) -> GpuCall:
        """Return one of its places for a GPU; all ranks ask for the same places in the same order.

        Parameters
        ----------
        where : str
            The bundle, for messages.
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
        collective = self._collective(row["attributes"])
        return self._gpus.call(gpu, collective, arrays_of(where, collective, row, extents, self._link.size))

    def _collective(self, facts: Mapping[str, Any]) -> Collective:
        serial = facts["serial"]
        if serial not in self._known:
            rows = {key: tuple(map(tuple, facts[key])) for key in ("groups", "pairs") if key in facts}
            self._known[serial] = Collective(self._op, **{**facts, **rows})
        return self._known[serial]


def rank_functions(calls: Sequence[str], link: Link, gpus: GpuTransport) -> dict[str, Any]:
    """Return the functions of those custom ``calls`` that the runtime of a rank answers, by name."""
    number = RankNumberFunction(link.rank)
    own = [name for name in calls if name.startswith(RANK_CALL)]
    return {n: number if n == f"{RANK_CALL}partition_id" else CollectiveFunction(n, link, gpus) for n in own}
