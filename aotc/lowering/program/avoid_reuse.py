"""Find storages that should not share memory, because a command would then wait for another one without need.

Two commands of a graph may run at the same time if neither depends on the other's results. If one reuses memory of the
other, they cannot.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.program.ir import Storage, accessed_storages_in_nested_steps
from aotc.lowering.program.graphs import Run, data_dependences, is_control

COMMAND, CONTROL = range(1, 3)  # kinds of waits: a launch or copy for another one; a wait of, or for, a loop or branch


# Commands of a graph. Their order is a matrix that is quadratic in their number, in time and in memory: 2048 take a
# tenth of a second. A longer graph shares memory wherever it can.
SPREAD_COMMANDS = 2048


def waits_added_by_reuse(runs: Sequence[Run], arena: Sequence[Storage]) -> np.ndarray | None:
    """Return, for each pair of storages, the kind of wait that sharing memory would add (0: none).

    Returns
    -------
    ndarray of int8, shape (len(arena), len(arena)), or None
        None if no pair adds a wait.
    """
    numbers = {s: n for n, s in enumerate(arena)}
    waits = None
    for run in runs:
        if 1 < len(run) <= SPREAD_COMMANDS:
            waits = np.zeros((len(arena), len(arena)), np.int8) if waits is None else waits
            _mark_pairs_without_added_wait(run, numbers, arena, waits)
    return waits if waits is not None and waits.any() else None


def _mark_pairs_without_added_wait(
    run: Run, numbers: dict[Storage, int], arena: Sequence[Storage], waits: np.ndarray
) -> None:
    """Mark in ``waits`` the pairs of storages for which the first command of the later one does not wait anyway."""
    touches: dict[int, list[int]] = {}  # by storage, the commands that touch it, in order
    for command, step in enumerate(run):
        for s in {s for part in accessed_storages_in_nested_steps(step) for s in part}:
            if s in numbers:
                touches.setdefault(numbers[s], []).append(command)
    rows = np.array(sorted(touches))
    if len(rows) < 2:
        return
    starts = np.array([touches[row][0] for row in rows])
    control = np.array(list(map(is_control, run)))
    free = np.ascontiguousarray(
        ~_transitive_predecessor_masks(run)[starts].T
    )  # by command: storages whose first use need not wait for it
    loose = np.array([free[touches[row]].any(axis=0) for row in rows])
    long = np.array([(free[touches[row]] & control[touches[row], None]).any(axis=0) for row in rows])
    long |= loose & control[starts]
    first = np.array([arena[row].first for row in rows])
    last = np.array([arena[row].last for row in rows])
    loose &= last[:, None] < first[None, :]
    kinds = np.where(loose, np.where(long, CONTROL, COMMAND), 0).astype(np.int8)
    pairs = np.ix_(rows, rows)
    waits[pairs] = np.maximum(waits[pairs], np.maximum(kinds, kinds.T))


def _transitive_predecessor_masks(run: Run) -> np.ndarray:
    """Return, for each command, a mask of the commands that it depends on, itself included."""
    before = np.eye(len(run), dtype=bool)
    for command, some in enumerate(data_dependences(run)):
        for earlier in some:
            before[command] |= before[earlier]
    return before
