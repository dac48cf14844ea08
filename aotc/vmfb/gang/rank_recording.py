"""A recording of the calls of one rank, as plain data for the process of the gang."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter_ns
from typing import Any, NamedTuple

from aotc.vmfb.errors import CallError
from aotc.vmfb.module import LoadedModule
from aotc.vmfb.profile.records import Dispatch, Part, Span
from aotc.vmfb.profile.stepped import stepped_dispatches
from aotc.vmfb.ranks.collective_log import CollectiveTime
from aotc.vmfb.ranks.collectives import Collective


class RankRecording(NamedTuple):
    """The calls of one rank over time.

    Attributes
    ----------
    begun : int
        Time of ``time.perf_counter_ns`` from which the times of ``spans`` and ``dispatches`` count.
    target : str
    spans : list of Span
        The calls.
    dispatches : list of Dispatch
    collectives : list of CollectiveTime
        Their times are those of ``time.perf_counter_ns``.
    lost : int
        Claims that the recording had no room for.
    """

    begun: int
    target: str
    spans: list[Span]
    dispatches: list[Dispatch]
    collectives: list[CollectiveTime]
    lost: int


def record_calls_on_rank(
    module: LoadedModule, name: str, call: Callable[[], object], values: Sequence[Any], calls: int
) -> Any:
    """Return a recording of ``calls`` calls of a function as data for JSON; a call before them is not part of it.

    On a GPU it is one call, whose commands run one at a time.

    Parameters
    ----------
    name : str
        The function.
    call : callable
        Calls it.
    values : sequence of arrays
        Its arguments, for a call by steps.

    Raises
    ------
    CallError
        If a call fails, or the bundle has no debug information.
    """
    call()
    member = module.own_member()
    try:
        recording = module.profile()
    except CallError:  # not on a CPU, or not without debug information, which the other way says too
        begun = perf_counter_ns()
        with member.recording() as rows:
            made = stepped_dispatches(module.get_function(name), values, begun)
        spans = [Span(f"@{name}, by steps", 0, perf_counter_ns() - begun)]
        return _as_data(RankRecording(begun, module.target, spans, made, rows, 0))
    assert not isinstance(recording, dict)  # without a name it is no record
    with recording:
        call()  # the ranks begin to record at different times, and meet in the collectives of this call
        first = perf_counter_ns()
        with member.recording() as rows:
            for number in range(calls):
                with recording.span(f"@{name}, call {number}"):
                    call()
    begun = recording.begun
    dispatches = [d for d in recording.dispatches if d.start >= first - begun]
    spans = [span for span in recording.spans if span.name.startswith("@")]
    return _as_data(RankRecording(begun, module.target, spans, dispatches, rows, recording.lost))


def _as_data(recording: RankRecording) -> list[Any]:
    """Return a recording as lists; a collective is in a table, and its executions refer to it."""
    known = {row.collective.serial: row.collective for row in recording.collectives}
    numbers = {serial: number for number, serial in enumerate(known)}
    table = [[c.op, c.serial, c.groups, c.pairs, c.reduction, c.place] for c in known.values()]
    executions = [[numbers[row.collective.serial], *row[1:]] for row in recording.collectives]
    return [*recording._replace(collectives=[])[:4], table, executions, recording.lost]


def recording_of_data(data: Sequence[Any]) -> RankRecording:
    """Return the recording that :func:`record_calls_on_rank` has written as data."""
    begun, target, spans, dispatches, table, executions, lost = data
    known = [
        Collective(op, serial, tuple(map(tuple, groups)), tuple((a, b) for a, b in pairs), reduction, place)
        for op, serial, groups, pairs, reduction, place in table
    ]
    collectives = [CollectiveTime(known[number], *times) for number, *times in executions]
    found = [Dispatch._make([*row[:-1], [Part(*part) for part in row[-1]]]) for row in dispatches]
    return RankRecording(begun, target, [Span(*row) for row in spans], found, collectives, lost)
