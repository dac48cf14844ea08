"""Report on a simulated call of a sharded model on a cluster: kernels, collectives, and how far they overlap.

It is a simulation: times of kernels are those of the cost model, or measured ones that the bundle stores, and times of
collectives those of :mod:`aotc.tools.simulate.cluster`. No rank runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.ir.loop.ir import Kernel
from aotc.tools.explain.collectives import bytes_of, collective_steps, mesh_axes_of_groups
from aotc.tools.explain.schedule import copy_nanoseconds, costs_of_spaces, kernels_of
from aotc.tools.flow import Flow, flow_of
from aotc.tools.simulate.cluster import RankCluster
from aotc.tools.simulate.links import LinkModel
from aotc.tools.simulate.step import Exchange, SimulatedRun, Simulation
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.profile.stored_records import COSTS, PROFILE, stored_record
from aotc.vmfb.ranks.layout import RANK_CALL, Mesh, mesh_of


@dataclass(frozen=True, slots=True)
class StepCollective:
    """Collectives of a call that are alike.

    Attributes
    ----------
    op, axes : str
        Name of the collective, and the mesh axes of its groups.
    group, hosts : int
        Ranks of the largest group, and the most hosts that a group spans.
    bytes : int
        Bytes of the operands of a rank.
    algorithm : str
        The fastest algorithm and protocol of the slowest group.
    runs : int
        Executions in a call.
    seconds : float
        Time of one execution in the slowest group.
    """

    op: str
    axes: str
    group: int
    hosts: int
    bytes: int
    algorithm: str
    runs: int
    seconds: float


@dataclass(frozen=True, slots=True, repr=False)
class StepReport(DisplayedResult):
    """Simulated call of a function on all ranks of a mesh.

    Attributes
    ----------
    function, target : str
        The function, and the target of its code.
    mesh : str
        The mesh axes with their sizes; empty for a model of one device.
    ranks, ranks_per_host : int
        Number of ranks, and of those in a host.
    inside, between : LinkModel
        The links inside a host and between hosts.
    collectives : tuple of StepCollective
        Collectives by kind; the most seconds first.
    sequential, overlapped : SimulatedRun
        Times without and with overlap of kernels and collectives.
    """

    function: str
    target: str
    mesh: str
    ranks: int
    ranks_per_host: int
    inside: LinkModel
    between: LinkModel
    collectives: tuple[StepCollective, ...]
    sequential: SimulatedRun
    overlapped: SimulatedRun

    def document(self) -> Document:
        """Return a table of the collectives, one of the times, and the assumptions."""
        blocks: list[Block] = []
        if self.collectives:
            columns = [
                Column("op"), Column("axes"), Column("ranks", True), Column("hosts", True), Column("of", True),
                Column("algorithm", priority=1), Column("runs", True), Column("time", True),
            ]  # fmt: skip
            rows = [
                (c.op, c.axes, str(c.group), str(c.hosts), size_text(c.bytes), c.algorithm, f"{c.runs:,}",
                 time_text(c.seconds))
                for c in self.collectives
            ]  # fmt: skip
            blocks.append(table(columns, rows))
        columns = [
            Column("overlap"), Column("step", True), Column("kernels", True), Column("collectives", True),
            Column("share", True), Column("exposed", True), Column("share", True),
        ]  # fmt: skip
        runs = (("no", self.sequential), ("yes", self.overlapped))
        blocks.append(table(columns, [(name, *_cells_of_run(run)) for name, run in runs]))
        return Document("", (*blocks, *map(Line, self._assumptions())))

    def _assumptions(self) -> list[str]:
        hosts = -(-self.ranks // self.ranks_per_host)
        where = f"{count_text(self.ranks, 'rank')} in {count_text(hosts, 'host')}"
        mesh = f", mesh {self.mesh}" if self.mesh else ""
        links = [f"inside a host {_link_text(self.inside)}"]
        links += [f"between hosts {_link_text(self.between)}"] if hosts > 1 else []
        return [
            f"simulation of @{self.function} for {self.target}{mesh}: {where}; no rank was run",
            "kernels: the cost model of the target; collectives: the estimate of NCCL 2.30, src/graph/tuning.cc",
            *links,
        ]


def _cells_of_run(run: SimulatedRun) -> tuple[str, ...]:
    parts = (run.collectives, run.exposed)
    shares = (f"{part / run.seconds:.0%}".replace("%", " %") if run.seconds else "" for part in parts)
    cells = [cell for part, share in zip(parts, shares, strict=True) for cell in (time_text(part), share)]
    return time_text(run.seconds), time_text(run.kernels), *cells


def _link_text(link: LinkModel) -> str:
    return f"{link.name}, {link.bandwidth / 1e9:g} GB/s a rank: {link.source}"


def explain_step(opened: OpenedBundle, cluster: RankCluster, function: str = "", target: str = "") -> StepReport:
    """Return the simulated call of a bundle's function on a cluster; a model of one device runs on one rank.

    Raises
    ------
    BundleError
        If it has no such function or target, or stores no kernel text.
    """
    flow = flow_of(opened, function, None, target)
    entry = opened.manifest.get("mesh")
    mesh = Mesh((), ()) if entry is None else mesh_of(entry)
    kernels = kernels_of(opened, flow)
    try:
        exchanges = {
            step.number: _exchange(call, kernel) for call, kernel, step in collective_steps(opened, flow)
        } if entry else {}  # fmt: skip
        rows = _collective_rows(flow, mesh, exchanges, cluster)
        seconds = _seconds_of_steps(opened, flow, kernels)
        simulation = Simulation(flow, seconds, exchanges, mesh.size, cluster)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise BundleError(opened.where, f"the facts of a collective cannot be read: {error}") from error
    return StepReport(
        flow.function, flow.variant["target"], str(mesh), mesh.size, cluster.ranks_per_host, cluster.inside,
        cluster.between, rows, simulation.run(False), simulation.run(True),
    )  # fmt: skip


def _exchange(call: Mapping[str, Any], kernel: Kernel) -> Exchange:
    facts = call["attributes"]
    groups, pairs = (tuple(map(tuple, facts.get(key, ()))) for key in ("groups", "pairs"))
    size = sum(map(bytes_of, kernel.inputs[:-1]))  # the last one is the token that orders collectives
    return Exchange(call["name"].removeprefix(RANK_CALL), size, groups, pairs)


def _seconds_of_steps(opened: OpenedBundle, flow: Flow, kernels: Sequence[Kernel]) -> list[float]:
    """Return the time of each kernel and copy; loops, branches and collectives have 0."""
    costs = costs_of_spaces(flow, stored_record(opened, PROFILE) or stored_record(opened, COSTS))
    found = []
    for step in flow.steps:
        memories = flow.memories_of_step(step)
        if step.control:
            found.append(0.0)
        elif step.kernel < 0:
            _, begin, end = step.reads[0]
            found.append(copy_nanoseconds(costs, memories, end - begin) / 1e9)
        else:
            found.append(costs[memories[-1]].of(kernels[step.kernel], step.sizes).ns / 1e9)
    return found


def _collective_rows(
    flow: Flow, mesh: Mesh, exchanges: Mapping[int, Exchange], cluster: RankCluster
) -> tuple[StepCollective, ...]:
    """Return the collectives by kind, those with the most seconds in a call first."""
    counts: dict[Exchange, int] = {}
    for number, exchange in exchanges.items():
        counts[exchange] = counts.get(exchange, 0) + flow.runs_of(flow.steps[number].within)
    rows = [_collective_row(mesh, exchange, runs, cluster) for exchange, runs in counts.items()]
    return tuple(sorted(rows, key=lambda row: -row.runs * row.seconds))


def _collective_row(mesh: Mesh, exchange: Exchange, runs: int, cluster: RankCluster) -> StepCollective:
    groups = exchange.groups or exchange.pairs or (tuple(range(mesh.size)),)
    if exchange.pairs:
        slowest = max(cluster.permute_time(exchange.size, a, b) for a, b in exchange.pairs)
    else:
        slowest = max(cluster.seconds_of(exchange.op, exchange.size, group) for group in groups)
    return StepCollective(
        exchange.op, mesh_axes_of_groups(mesh, exchange.groups, exchange.pairs), max(map(len, groups)),
        max(map(cluster.hosts_of, groups)), exchange.size, slowest.algorithm, runs, slowest.seconds,
    )  # fmt: skip
