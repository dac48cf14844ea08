"""Times of collectives in a cluster: ranks in hosts, one link inside a host and another between hosts.

NCCL estimates ``latency + bytes / bandwidth`` for each algorithm (ring, tree) and protocol (LL, LL128, Simple), and
uses the fastest. So do the times here. Source: NCCL 2.30, ``src/graph/tuning.cc``, for Hopper GPUs and Intel hosts,
without NVLink multicast (NVLS) and without in-network reduction.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import NamedTuple

from aotc.tools.simulate.links import LINKS, LinkModel, sent_by_ring
from aotc.vmfb.errors import ArgumentValueError

INSIDE, BETWEEN = ("nvlink", "pcie"), ("ib", "ethernet")
"""Links inside a host and between hosts for which NCCL has latencies."""

DEFAULT_BETWEEN, RANKS_PER_HOST = "ib", 8


class Protocol(NamedTuple):
    """A protocol of NCCL: its latencies in microseconds for a ring and a tree, by the kind of a hop.

    ``base`` is the latency of a call. ``nvlink``, ``pcie`` and ``network`` are those of a hop, ``overhead`` the least
    latency of a hop inside a host in a ring that spans hosts.
    """

    name: str
    base: tuple[float, float]
    nvlink: tuple[float, float]
    pcie: tuple[float, float]
    network: tuple[float, float]
    overhead: float


# baseLatencies, hwLatencies and getNetOverhead of tuning.cc; the first number of a pair is that of a ring.
PROTOCOLS = (
    Protocol("LL", (6.6, 6.8), (0.6, 0.6), (1.0, 1.0), (2.7, 5.0), 1.0),
    Protocol("LL128", (14.0, 14.0), (1.9, 1.25), (2.5, 1.9), (4.0, 8.5), 1.0),
    Protocol("Simple", (8.4, 8.4), (3.4, 4.0), (5.7, 4.0), (14.0, 14.0), 3.0),
)
# llMaxBws: the most GB/s of the protocol LL inside a host (Hopper), between two hosts, and between more.
_LL_LIMITS = (141.0, 39.0, 20.4)
# Shares of a link's bandwidth, by algorithm and protocol.
_RING_SHARES = {"LL": 0.5, "LL128": 0.92, "Simple": 1.0}
_TREE_SHARE, _TREE_LL, _TREE_LL128 = 0.92, 1 / 3.8, (7 / 9, 120 / 128)
# treeCorrectionFactor: factor of a tree's bandwidth for arrays of 64 bytes, 128 bytes, and so on.
_TREE_CORRECTIONS = {
    "LL": (1, 1, 1, 1, 0.9, 0.8, 0.7, 0.7, 0.7, 0.7, 0.6, 0.5, 0.4, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1, 1, 1, 1),
    "LL128": (1, 1, 1, 1, 1, 0.9, 0.8, 0.8, 0.8, 0.7, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.8, 0.9, 0.9, 0.9, 0.9, 1, 1, 1),
    "Simple": (
        0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.7, 0.7, 0.8, 0.9,
        0.9, 0.9,
    ),
}  # fmt: skip
# Factor of the latency of a ring between hosts for all_reduce with the protocol Simple ("plateau effect of ring").
_PLATEAU = 1.4

FORMULAS = (
    "ring: base + hops inside hosts and between hosts, each with its latency + bytes sent / bandwidth",
    "tree, for all_reduce: base + 2 hops for each other rank of a host + 2 log2(hosts) hops between hosts + 2 bytes / "
    "bandwidth",
    "bandwidth between hosts: that of all ranks of the group in a host together, at most that of the link inside",
    "collective_permute, all_to_all: base + hop + bytes / bandwidth, inside a host and between hosts at the same time",
)
"""The formulas as text."""


class CollectiveEstimate(NamedTuple):
    """Seconds of a collective, and the algorithm that takes this time: ``ring LL128``."""

    seconds: float
    algorithm: str


_NOTHING = CollectiveEstimate(0.0, "-")


@dataclass(frozen=True, slots=True)
class RankCluster:
    """Ranks in hosts: rank ``r`` is in host ``r // ranks_per_host``.

    Attributes
    ----------
    inside, between : LinkModel
        The links inside a host and between hosts. Each rank has its own.
    ranks_per_host : int
    """

    inside: LinkModel
    between: LinkModel
    ranks_per_host: int

    def hosts_of(self, ranks: Sequence[int]) -> int:
        """Return the number of hosts that these ranks are in."""
        return len({rank // self.ranks_per_host for rank in ranks})

    def seconds_of(self, op: str, size: int, ranks: Sequence[int]) -> CollectiveEstimate:
        """Return the time of a collective among ``ranks`` whose operands have ``size`` bytes on each."""
        count = len(ranks)
        if count < 2:
            return _NOTHING
        hosts = self.hosts_of(ranks)
        match op:
            case "all_reduce":
                return min(*self._ring_times(op, size, count, hosts), *self._tree_times(size, count, hosts))
            case "all_gather" | "reduce_scatter" | "collective_broadcast":
                return min(self._ring_times(op, size, count, hosts))
        return self._point_to_point(ranks, size / count)

    def permute_time(self, size: int, source: int, target: int) -> CollectiveEstimate:
        """Return the time in which one rank sends ``size`` bytes to another."""
        return _NOTHING if source == target else self._point_to_point((source, target), size)

    def _bandwidth(self, count: int, hosts: int) -> float:
        """Return the bytes a second of a ring of ``count`` ranks; it leaves a host by the links of its ranks there."""
        if hosts == 1:
            return self.inside.bandwidth
        return min(self.inside.bandwidth if count > hosts else inf, self.between.bandwidth * (count // hosts))

    def _protocols(self) -> Iterator[tuple[Protocol, tuple[float, float]]]:
        """Yield the protocols with the latencies of a hop inside a host; LL128 needs NVLink."""
        for protocol in PROTOCOLS:
            if self.inside.name == "nvlink":
                yield protocol, protocol.nvlink
            elif protocol.name != "LL128":
                yield protocol, protocol.pcie

    def _ring_times(self, op: str, size: int, count: int, hosts: int) -> Iterator[CollectiveEstimate]:
        sent, steps = sent_by_ring(op, size, count)
        own = self._bandwidth(count, hosts)
        crossings = 0 if hosts == 1 else 2 * (hosts - 1) if op == "all_reduce" else hosts - 1
        for protocol, hop in self._protocols():
            bandwidth = own * _RING_SHARES[protocol.name]
            if protocol.name == "LL":
                bandwidth = min(bandwidth, _ll_limit(hosts))
            inside = hop[0] if hosts == 1 else max(hop[0], protocol.overhead)
            between = protocol.network[0 if count > hosts else 1]
            latency = protocol.base[0] + (steps - crossings) * inside + crossings * between
            if op == "all_reduce" and hosts > 1 and protocol.name == "Simple":
                latency *= _PLATEAU
            yield CollectiveEstimate(latency / 1e6 + sent / bandwidth, f"ring {protocol.name}")

    def _tree_times(self, size: int, count: int, hosts: int) -> Iterator[CollectiveEstimate]:
        own = self._bandwidth(count, hosts) * _TREE_SHARE
        step = (size >> 6).bit_length() - 1
        for protocol, hop in self._protocols():
            bandwidth = own
            if protocol.name == "LL":
                bandwidth = min(own * _TREE_LL, _ll_limit(hosts))
            elif protocol.name == "LL128":
                bandwidth = own * _TREE_LL128[hosts > 1]
            factors = _TREE_CORRECTIONS[protocol.name]
            bandwidth *= factors[step] if 0 <= step < len(factors) else 1
            hops = (count // hosts - 1) * hop[1] + (hosts.bit_length() - 1) * protocol.network[1]
            latency = protocol.base[1] + 2 * hops
            yield CollectiveEstimate(latency / 1e6 + 2 * size / bandwidth, f"tree {protocol.name}")

    def _point_to_point(self, ranks: Sequence[int], each: float) -> CollectiveEstimate:
        """Return the time in which each rank sends ``each`` bytes to each other rank."""
        hosts = self.hosts_of(ranks)
        near = len(ranks) // hosts - 1
        away = len(ranks) - 1 - near
        times = []
        for protocol, hop in self._protocols():
            share, limit = _RING_SHARES[protocol.name], _ll_limit(hosts) if protocol.name == "LL" else inf
            inside = near * each / min(self.inside.bandwidth * share, limit)
            outside = away * each / min(self.between.bandwidth * share, limit)
            latency = protocol.base[0] + (protocol.network[1] if away else hop[0])
            times.append(CollectiveEstimate(latency / 1e6 + max(inside, outside), f"direct {protocol.name}"))
        return min(times)


def _ll_limit(hosts: int) -> float:
    return _LL_LIMITS[min(hosts, len(_LL_LIMITS)) - 1] * 1e9


def cluster_of(inside: str, between: str, ranks_per_host: int) -> RankCluster:
    """Return the cluster with these links.

    Raises
    ------
    ArgumentValueError
        If a link is unknown there, or a host has no rank.
    """
    for name, known, place in ((inside, INSIDE, "inside a host"), (between, BETWEEN, "between hosts")):
        if name not in known:
            raise ArgumentValueError("", f"there is no such link {place}", repr(name), " or ".join(known))
    if ranks_per_host < 1:
        raise ArgumentValueError("", "a host has at least one rank", str(ranks_per_host), "1 or more")
    return RankCluster(LINKS[inside], LINKS[between], ranks_per_host)
