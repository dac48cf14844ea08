"""The calls of a sharded bundle on all ranks over time: kernels, exchange of data, and waiting for other ranks.

A rank that begins a collective before another one waits for it. The time until the last rank whose data it needs has
begun is waiting, and the rest is transfer: the "Wait at NxN" pattern of Scalasca (Geimer et al., "The Scalasca
performance toolset architecture", 2010). It needs one clock for all ranks, which the processes of a host have.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from aotc.display.document import Block, Column, Document, Line, table
from aotc.display.places import short_location_text
from aotc.display.shown import DisplayedResult
from aotc.display.units import count_text, size_text, time_text
from aotc.tools.explain.collectives import mesh_axes_of_groups
from aotc.tools.simulate.links import sent_by_ring
from aotc.vmfb.errors import ArgumentValueError, CallError
from aotc.vmfb.gang.gang import Gang
from aotc.vmfb.gang.rank_recording import RankRecording
from aotc.vmfb.host.files import write_atomically
from aotc.vmfb.profile.perfetto import events_text, metadata_event, slice_event, trace_events
from aotc.vmfb.ranks.collectives import Collective, needed_ranks
from aotc.vmfb.ranks.layout import Mesh


@dataclass(frozen=True, slots=True)
class CollectiveRun:
    """An execution of a collective on one rank.

    Attributes
    ----------
    rank : int
    number : int
        The number of the collective, as in errors and in ``aotc explain collectives``.
    op : str
    axes : str
        The axes of the mesh over which it exchanges data.
    line : str
        The user's line of source.
    bytes, sent : int
        Bytes of the rank's operands; bytes that it sends by the algorithm of a ring.
    start : float
        Seconds since the profile began.
    seconds : float
        Duration, with the waiting.
    waited : float
        Seconds until the last rank whose data it needs has begun the collective.
    last_rank : int
        That rank; the rank itself if it waited for none.
    """

    rank: int
    number: int
    op: str
    axes: str
    line: str
    bytes: int
    sent: int
    start: float
    seconds: float
    waited: float
    last_rank: int


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The mean times of a call on one rank, in seconds.

    Attributes
    ----------
    rank : int
    place : str
        Its position on the axes of the mesh.
    call : float
    kernels : float
        Time in which kernels run.
    transfer, waiting : float
        Times of its collectives: exchange of data, and waiting for other ranks.
    """

    rank: int
    place: str
    call: float
    kernels: float
    transfer: float
    waiting: float


@dataclass(frozen=True, slots=True, repr=False)
class RanksProfile(DisplayedResult):
    """The calls of all ranks; ``print`` displays a table of ranks, and one of collectives.

    Attributes
    ----------
    function, target, mesh : str
    calls : int
        Number of recorded calls.
    ranks : tuple of RankTimes
    collectives : tuple of CollectiveRun
        In order of rank and time.
    events : tuple of dict
        The trace, in Chrome's trace event format.
    """

    function: str
    target: str
    mesh: str
    calls: int
    ranks: tuple[RankTimes, ...]
    collectives: tuple[CollectiveRun, ...]
    events: tuple[dict[str, Any], ...]

    def document(self) -> Document:
        """Return a table of the ranks, and one of the collectives."""
        columns = [
            Column("rank", True), Column("place", priority=1), Column("call", True), Column("kernels", True),
            Column("transfer", True), Column("waiting", True), Column("share", True, 2),
        ]  # fmt: skip
        rows = [
            (str(r.rank), r.place, time_text(r.call), time_text(r.kernels), time_text(r.transfer),
             time_text(r.waiting), f"{100 * r.waiting / r.call:.0f} %")
            for r in self.ranks
        ]  # fmt: skip
        blocks: list[Block] = [table(columns, rows)]
        if self.collectives:
            own = [
                Column("n", True), Column("op"), Column("axes"), Column("sends", True, 2), Column("runs", True, 3),
                Column("transfer", True), Column("waiting", True), Column("last", True, 1), Column("from"),
            ]  # fmt: skip
            blocks.append(table(own, map(self._collective_cells, self._numbers())))
        what = f"{count_text(self.calls, 'call')} of @{self.function} for {self.target}, mesh {self.mesh}"
        blocks.append(Line(f"{what}: means of a call"))
        return Document("", tuple(blocks))

    def _numbers(self) -> list[int]:
        return sorted({run.number for run in self.collectives})

    def _collective_cells(self, number: int) -> tuple[str, ...]:
        """Return a row of the table: sums of a call, on the mean rank."""
        runs = [run for run in self.collectives if run.number == number]
        one, each = runs[0], self.calls * len(self.ranks)
        waited = sum(run.waited for run in runs)
        transfer = sum(run.seconds for run in runs) - waited
        return (
            str(number), one.op, one.axes, size_text(one.sent), f"{len(runs) / each:.3g}", time_text(transfer / each),
            time_text(waited / each), _last_rank_text(runs), short_location_text(one.line),
        )  # fmt: skip

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the trace as JSON for Perfetto and Chrome, atomically.

        Raises
        ------
        CallError
            If the file cannot be written.
        """
        try:
            write_atomically(os.fspath(path), [events_text(self.events).encode()])
        except OSError as error:
            message = f"cannot write the trace: {error.strerror or error}"
            raise CallError(self.function, message, os.fspath(path)) from error


def _last_rank_text(runs: Sequence[CollectiveRun]) -> str:
    """Return the rank that others wait for longest, with its share of all waiting."""
    waits: dict[int, float] = {}
    for run in runs:
        if run.waited:
            waits[run.last_rank] = waits.get(run.last_rank, 0.0) + run.waited
    if not waits:
        return ""
    rank, seconds = max(waits.items(), key=_seconds)
    return f"{rank} ({100 * seconds / sum(waits.values()):.0f} %)"


def _seconds(item: tuple[int, float]) -> float:
    return item[1]


def profile_ranks(module: Gang, name: str, values: Sequence[Any], calls: int) -> RanksProfile:
    """Return the profile of some calls of a function of a gang, after warm-up calls.

    On GPUs one call is recorded, whose commands run one at a time on each rank.

    Raises
    ------
    CallError
        If the arguments do not fit, or the bundle has no debug information.
    RankLost
        If a rank ended.
    """
    if isinstance(calls, bool) or not isinstance(calls, int) or calls < 1:
        raise ArgumentValueError(module.name, "calls must be a positive integer", repr(calls))
    return ranks_profile(module.mesh, name, module.record(name, values, calls))


def ranks_profile(mesh: Mesh, name: str, recordings: Sequence[RankRecording]) -> RanksProfile:
    """Return the profile that recordings of all ranks show."""
    begun = min(recording.begun for recording in recordings)
    runs = _collective_runs(mesh, recordings, begun)
    times = tuple(
        _rank_times(mesh, rank, recording, [run for run in runs if run.rank == rank])
        for rank, recording in enumerate(recordings)
    )
    events: list[dict[str, Any]] = []
    for rank, recording in enumerate(recordings):
        title = f"rank {rank} ({times[rank].place})"
        events += _rank_events(rank, title, recording, [run for run in runs if run.rank == rank], begun)
    first = recordings[0]
    return RanksProfile(name, first.target, str(mesh), len(first.spans), times, tuple(runs), tuple(events))


def _collective_runs(mesh: Mesh, recordings: Sequence[RankRecording], begun: int) -> list[CollectiveRun]:
    """Return all executions; the n-th one of a collective on one rank is the n-th one on each rank of its group."""
    starts: dict[tuple[int, int], list[int]] = {}
    for rank, recording in enumerate(recordings):
        for row in recording.collectives:
            starts.setdefault((rank, row.collective.serial), []).append(row.start)
    found = []
    for rank, recording in enumerate(recordings):
        turns: dict[int, int] = {}
        for c, size, start, end in recording.collectives:
            turn = turns[c.serial] = turns.get(c.serial, -1) + 1
            others = {
                other: starts[other, c.serial][turn]
                for other in needed_ranks(c, rank, mesh.size)
                if turn < len(starts.get((other, c.serial), ()))
            }
            last = max(others, key=others.__getitem__, default=rank)
            waited = min(max(others.get(last, start) - start, 0), end - start)
            found.append(
                CollectiveRun(
                    rank, c.serial, c.op, mesh_axes_of_groups(mesh, c.groups, c.pairs), c.place, size,
                    _sent_bytes(c, size, mesh.size), (start - begun) / 1e9, (end - start) / 1e9, waited / 1e9,
                    last if waited else rank,
                )
            )  # fmt: skip
    return found


def _sent_bytes(c: Collective, size: int, ranks: int) -> int:
    members = max(map(len, c.groups), default=1 if c.pairs else ranks)
    return sent_by_ring(c.op, size, members)[0]


def _rank_times(mesh: Mesh, rank: int, recording: RankRecording, runs: Sequence[CollectiveRun]) -> RankTimes:
    calls = len(recording.spans)
    exchanges = [(row.start - recording.begun, row.end - recording.begun) for row in recording.collectives]
    busy = [(d.start, d.start + d.ns) for d in recording.dispatches]
    alone = _covered(busy + exchanges) - _covered(exchanges)  # a kernel may contain collectives
    waiting = sum(run.waited for run in runs)
    at = mesh.coordinates(rank)
    place = ", ".join(f"{axis} {at[axis]}" for axis, _ in mesh.axes)
    return RankTimes(
        rank, place, sum(span.ns for span in recording.spans) / 1e9 / calls, alone / 1e9 / calls,
        (sum(run.seconds for run in runs) - waiting) / calls, waiting / calls,
    )  # fmt: skip


def _covered(intervals: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of intervals."""
    total, reached = 0, 0
    for start, end in sorted(intervals):
        total += max(end - max(start, reached), 0)
        reached = max(reached, end)
    return total


# The track of collectives, behind those of the threads and of name scopes.
_TRACK = (1 << 20) + 1


def _rank_events(
    rank: int, title: str, recording: RankRecording, runs: Sequence[CollectiveRun], begun: int
) -> list[dict[str, Any]]:
    """Return the events of a rank, which is a process in the trace."""
    shift = (recording.begun - begun) / 1e3
    events = trace_events(recording.dispatches, recording.spans, title)
    events = [{**e, "ts": e["ts"] + shift} if "ts" in e else e for e in events]
    if runs:
        events.append(metadata_event("thread_name", _TRACK, "collectives"))
    for run in runs:
        start, ns, waited = (round(1e9 * x) for x in (run.start, run.seconds, run.waited))
        facts = {
            "number": run.number, "op": run.op, "bytes": run.bytes, "sends": run.sent, "axes": run.axes,
            "line": run.line, "waiting_ns": waited, "transfer_ns": ns - waited,
        }  # fmt: skip
        events.append(slice_event(f"{run.op} {run.number}", "collective", _TRACK, start, ns, facts))
        if waited:
            rank_facts = {"for": f"rank {run.last_rank}"}
            events.append(slice_event("waiting", "waiting", _TRACK, start, waited, rank_facts))
        events.append(slice_event("transfer", "transfer", _TRACK, start + waited, ns - waited, {}))
    return [{**e, "pid": rank + 1} for e in events]
