"""Which commands are one graph, and which graphs several threads run: what plan_memory and schedule both go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from aotc.ir.program_ir import Branch, Copy, Launch, Loop, Step, space_of, walk
from aotc.lowering.analysis.costs.model import Costs

Run: TypeAlias = list[Launch | Copy]


def graphs(steps: Sequence[Step]) -> Iterator[Run]:
    """Yield the commands between two steps that are none, in loops and branches too; those of one memory each time."""
    lists = [tuple(steps)]
    for step in walk(steps):
        match step:
            case Loop(cond=cond, body=body):
                lists += [cond, body]
            case Branch(branches=branches):
                lists += branches
    for part in lists:
        run: Run = []
        for step in part:
            command = step if isinstance(step, Launch | Copy) else None
            if run and (command is None or begins_graph(command, run)):
                yield run
                run = []
            if command is not None:
                run.append(command)
        if run:
            yield run


def begins_graph(command: Launch | Copy, run: Run) -> bool:
    """Must ``command`` be in another graph than those before it, since that is of one memory, or moves one value?"""
    return bool(run) and (space_of(run[0]) != space_of(command) or space_of(command) < 0)


def shared_graphs(steps: Sequence[Step], costs: Costs) -> list[Run]:
    """Return the commands of each graph that its caller does not run alone."""
    return [run for run in graphs(steps) if not costs.is_serial(times_of(run, costs))]


def times_of(run: Sequence[Launch | Copy], costs: Costs) -> list[float]:
    """Return the nanoseconds of each command on one core."""
    return [costs.copy(step.size) if isinstance(step, Copy) else costs.of(step.kernel).ns for step in run]
