"""Links between ranks, and the bytes that a rank sends in a collective."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinkModel:
    """A connection between ranks: a message of ``b`` bytes takes ``latency + b / bandwidth`` seconds.

    Attributes
    ----------
    latency : float
        Seconds of a step of a ring.
    bandwidth : float
        Bytes that a rank sends in a second.
    source : str
        The origin of both figures.
    """

    name: str
    latency: float
    bandwidth: float
    source: str


_NCCL = "latency of a ring step in NCCL 2.28, src/graph/tuning.cc"

LINKS = {
    link.name: link
    for link in (
        LinkModel("nvlink", 3.4e-6, 280e9, f"{_NCCL}; all_reduce of 64 MiB measured on two H200: 245 us"),
        LinkModel("pcie", 5.7e-6, 63e9, f"{_NCCL}; PCIe 5.0 x16, one direction, from its signal rate"),
        LinkModel("ib", 14e-6, 50e9, f"{_NCCL}; InfiniBand NDR, 400 Gb/s"),
        LinkModel("ethernet", 14e-6, 12.5e9, f"{_NCCL}; 100 Gb/s"),
        LinkModel("loopback", 70e-6, 0.2e9, "TCP between two processes of a busy host with 2 cores, measured"),
    )
}
"""Links by name."""

DEFAULT_LINK = "nvlink"


def sent_by_ring(op: str, size: int, ranks: int) -> tuple[int, int]:
    """Return the bytes that a rank sends in a ring algorithm, and its number of steps.

    ``size`` is the number of bytes of the operands, ``ranks`` the number of ranks in a group.
    """
    match op:
        case "collective_permute":
            return size, 1
        case "collective_broadcast":
            return (size, ranks - 1) if ranks > 1 else (0, 0)
        case "all_reduce":
            return 2 * size * (ranks - 1) // ranks, 2 * (ranks - 1)
        case "all_gather":
            return size * (ranks - 1), ranks - 1
    return size * (ranks - 1) // ranks, ranks - 1  # reduce_scatter and all_to_all
