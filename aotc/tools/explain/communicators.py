"""Memory of a sharded model besides its arenas: NCCL's communicators on GPUs, buffers of the exchange on CPUs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from aotc.display.document import Block, Column, Line, table
from aotc.display.units import count_text, size_text
from aotc.tools.explain.collectives import bytes_of, collective_steps, mesh_axes_of_groups, rank_calls
from aotc.tools.flow import Flow
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.ranks.collectives import buffer_bytes
from aotc.vmfb.ranks.layout import RANK_CALL, Mesh, mesh_of

# Bytes of the first communicator of a process on a GPU, and of each further one, after their first collective. NCCL
# 2.28.9 between two H200 with NVLink, without multicast, measured as the memory that the driver reports in use.
NCCL_FIRST, NCCL_FURTHER = 860 << 20, 486 << 20
NCCL_SOURCE = "NCCL 2.28.9 between two H200: 860 MiB for the first communicator, 486 MiB for another one"


@dataclass(frozen=True, slots=True)
class CommunicatorMemory:
    """The memory of one rank for the collectives of the same groups.

    Attributes
    ----------
    axes : str
        The axes of the mesh that the groups span.
    group : int
        Ranks in the largest group.
    collectives : int
        Collectives of the program, or of all programs of the bundle on a GPU.
    bytes : int
        Of a communicator of NCCL; on a CPU the temporary arrays of its largest collective.
    is_estimate : bool
        True for NCCL, whose memory depends on its version and on the machine.
    """

    axes: str
    group: int
    collectives: int
    bytes: int
    is_estimate: bool


def communicators_of(opened: OpenedBundle, flow: Flow) -> tuple[CommunicatorMemory, ...]:
    """Return the communicators of a rank.

    Empty for a model of one device; on a CPU also for a bundle without debug information, which has the sizes.
    """
    entry = opened.manifest.get("mesh")
    if entry is None:
        return ()
    if flow.variant["kind"] == "cuda":
        return _on_gpu(mesh_of(entry), flow)
    has_sizes = bool((opened.manifest.get("debug") or {}).get("kernels"))
    return _on_cpu(mesh_of(entry), opened, flow) if has_sizes else ()


def _on_gpu(mesh: Mesh, flow: Flow) -> tuple[CommunicatorMemory, ...]:
    """Return NCCL's communicators: one for each distinct list of groups, all made when the bundle is loaded."""
    counts: dict[tuple[tuple[int, ...], ...], int] = {}
    for call in rank_calls(flow.variant).values():
        groups = _groups_of(mesh, call["attributes"])
        counts[groups] = counts.get(groups, 0) + 1
    return tuple(
        CommunicatorMemory(
            mesh_axes_of_groups(mesh, groups), max(map(len, groups)), count, NCCL_FURTHER if n else NCCL_FIRST, True
        )
        for n, (groups, count) in enumerate(counts.items())
    )


def _on_cpu(mesh: Mesh, opened: OpenedBundle, flow: Flow) -> tuple[CommunicatorMemory, ...]:
    sizes: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for call, kernel, _ in collective_steps(opened, flow):
        groups, op = _groups_of(mesh, call["attributes"]), call["name"].removeprefix(RANK_CALL)
        operands = kernel.inputs[:-1]  # the last one is the token that orders collectives
        members = max(map(len, groups))
        most = max((buffer_bytes(op, bytes_of(x), members) for x in operands), default=0)
        sizes.setdefault(groups, []).append(most)
    return tuple(
        CommunicatorMemory(mesh_axes_of_groups(mesh, groups), max(map(len, groups)), len(found), max(found), False)
        for groups, found in sizes.items()
    )


def _groups_of(mesh: Mesh, facts: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of a collective; a permutation uses the communicator of all ranks, as do those without."""
    return tuple(map(tuple, facts.get("groups", ()))) or (tuple(range(mesh.size)),)


def rank_bytes(rows: tuple[CommunicatorMemory, ...]) -> int:
    """Return the bytes of a rank: communicators exist together, buffers one at a time."""
    sizes = [row.bytes for row in rows]
    return sum(sizes) if any(row.is_estimate for row in rows) else max(sizes, default=0)


def communicator_blocks(rows: tuple[CommunicatorMemory, ...]) -> list[Block]:
    """Return a table of the communicators, and what a rank has in all."""
    if not rows:
        return []
    estimated = any(row.is_estimate for row in rows)
    columns = [Column("axes"), Column("ranks", True), Column("collectives", True), Column("bytes", True)]
    cells = [(r.axes, str(r.group), str(r.collectives), f"{'~' * r.is_estimate}{size_text(r.bytes)}") for r in rows]
    if estimated:
        what = f"{count_text(len(rows), 'communicator')} of each rank: about {size_text(rank_bytes(rows))} of its GPU"
        text = f"{what}, an estimate from {NCCL_SOURCE}"
    else:
        what = f"buffers of the exchange on each rank: {size_text(rank_bytes(rows))}, for one collective at a time"
        text = f"{what}; without the system's buffers of connections"
    return [table(columns, cells), Line(text)]
