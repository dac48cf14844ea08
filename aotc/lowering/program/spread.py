"""Which storages had better not share bytes: a command would wait for another one for their sake alone.

Two commands of a graph of which neither needs what the other makes may run at the same time. If the memory of one is
given to the other after it, they cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.program_ir import Storage, touched
from aotc.lowering.analysis.limits import SPREAD_COMMANDS
from aotc.lowering.program.graphs import Run


def waits(runs: Sequence[Run], arena: Sequence[Storage]) -> np.ndarray | None:
    """Return for each two storages whether sharing bytes makes a command of a graph wait, or None if no two do."""
    numbers = {s: n for n, s in enumerate(arena)}
    found = None
    for run in runs:
        if 1 < len(run) <= SPREAD_COMMANDS:
            found = np.zeros((len(arena), len(arena)), bool) if found is None else found
            _note(run, numbers, arena, found)
    return found if found is not None and found.any() else None


def _note(run: Run, numbers: dict[Storage, int], arena: Sequence[Storage], found: np.ndarray) -> None:
    """Mark the pairs of storages of which the later one is first touched by a command that need not wait."""
    touches: dict[int, list[int]] = {}  # by storage, the commands that touch it, in order
    for command, step in enumerate(run):
        for s in {s for part in touched(step) for s in part}:
            if s in numbers:
                touches.setdefault(numbers[s], []).append(command)
    rows = np.array(sorted(touches))
    if len(rows) < 2:
        return
    starts = np.array([touches[row][0] for row in rows])
    free = np.ascontiguousarray(~_before(run)[starts].T)  # by command, whose making need not wait for it
    loose = np.array([free[touches[row]].any(axis=0) for row in rows])
    first = np.array([arena[row].first for row in rows])
    last = np.array([arena[row].last for row in rows])
    loose &= last[:, None] < first[None, :]
    found[np.ix_(rows, rows)] |= loose | loose.T


def _before(run: Run) -> np.ndarray:
    """Return for each command those that it needs, itself among them: who wrote what it reads, as if nothing shared."""
    before = np.eye(len(run), dtype=bool)
    writer: dict[Storage, int] = {}
    readers: dict[Storage, list[int]] = {}
    for command, step in enumerate(run):
        reads, writes = touched(step)
        needs = {writer[s] for s in (*reads, *writes) if s in writer}
        needs.update(n for s in writes for n in readers.get(s, ()))
        for earlier in needs:
            before[command] |= before[earlier]
        for s in reads:
            if s.kind != "constant":
                readers.setdefault(s, []).append(command)
        for s in writes:
            writer[s], readers[s] = command, []
    return before
