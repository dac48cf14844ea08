"""Which commands are one graph, and whether one thread runs it: what plan_memory and schedule both go by."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate

from aotc.ir.program_ir import Branch, Copy, Launch, Loop, Step, walk
from aotc.lowering.analysis.cost_work import SERIAL_NS, copy_nanoseconds, nanoseconds

Run = list[Launch | Copy]


def graphs(steps: Sequence[Step]) -> Iterator[Run]:
    """Yield the commands between two steps that are none, in loops and branches too."""
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
            if isinstance(step, Launch | Copy):
                run.append(step)
            elif run:
                yield run
                run = []
        if run:
            yield run


def is_serial(run: Run) -> bool:
    """Is a graph so small that its caller runs it alone?"""
    return all(SERIAL_NS.holds(int(total)) for total in accumulate(map(_nanoseconds, run)))


def _nanoseconds(step: Launch | Copy) -> float:
    return copy_nanoseconds(step.size) if isinstance(step, Copy) else nanoseconds(step.kernel)
