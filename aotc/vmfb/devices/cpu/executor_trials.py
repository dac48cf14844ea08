"""Trials of the executor, for tests: a random order of what may run in any, slow participants, a trace of claims.

``AOTC_SHUFFLE=SEED`` makes one for a whole process, which records nothing (``docs/debugging.md``). The words are
described in :mod:`aotc.vmfb.abi`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aotc.vmfb.abi import (
    ALIGNMENT,
    ROW_BEGAN,
    ROW_COMMAND,
    ROW_DEVICES,
    ROW_ENDED,
    ROW_FIRST,
    ROW_LAST,
    ROW_RUN,
    ROW_WHO,
    ROW_WORDS,
    TRIAL_CAPACITY,
    TRIAL_FACTOR,
    TRIAL_HEADER,
    TRIAL_ROWS,
    TRIAL_RUNS,
    TRIAL_SEED,
    TRIAL_SLOW,
)
from aotc.vmfb.memory.pointers import aligned_bytes

_FIELDS = ROW_RUN, ROW_COMMAND, ROW_FIRST, ROW_LAST, ROW_BEGAN, ROW_ENDED, ROW_WHO, ROW_DEVICES
_KEPT: list[Trial] = []  # never freed: a worker may read a trial after it has ended


class Claim(NamedTuple):
    """What a participant ran at once.

    Attributes
    ----------
    run : int
        Number of the graph's run, in the order in which they began.
    command : int
        Address of the command's words.
    first, last : int
        Its items: the last is not among them.
    began, ended : int
        Numbers of one clock, that of all claims of the trial.
    who : int
        The participant; 0 is the caller.
    devices : int
        The logical devices of the call, a bit for each (:mod:`aotc.vmfb.host.logical_devices`).
    """

    run: int
    command: int
    first: int
    last: int
    began: int
    ended: int
    who: int
    devices: int


class Trial:
    """A trial, which counts while :func:`aotc.vmfb.devices.cpu.native.hold_trial` says so.

    Parameters
    ----------
    claims : int
        How many are recorded; later ones are not.
    """

    def __init__(self, claims: int = 0) -> None:
        size = 8 * (TRIAL_HEADER + ROW_WORDS * claims)
        memory, self.address = aligned_bytes(size, ALIGNMENT)
        first = self.address - memory.ctypes.data
        self._memory = memory[first : first + size].view(np.int64)
        self._memory[TRIAL_CAPACITY] = claims
        _KEPT.append(self)

    def shuffle(self, seed: int) -> None:
        """Run what follows in an order that ``seed`` decides, 0 or more: with one thread alone, else the system too."""
        self._memory[TRIAL_SEED], self._memory[TRIAL_RUNS] = 2 * seed + 1, 0

    def slow_down(self, who: int, factor: int) -> None:
        """Let participant ``who`` take ``factor`` times as long for each claim; 0 is the caller."""
        self._memory[TRIAL_SLOW], self._memory[TRIAL_FACTOR] = who + 1, factor

    def claims(self) -> list[Claim]:
        """Return the claims since this was last called, in the order in which they ended.

        Raises
        ------
        OverflowError
            If there were more than are recorded.
        """
        count, most = int(self._memory[TRIAL_ROWS]), int(self._memory[TRIAL_CAPACITY])
        if count > most:
            raise OverflowError(f"{count} claims, {most} are recorded")
        rows = self._memory[TRIAL_HEADER : TRIAL_HEADER + ROW_WORDS * count].reshape(count, ROW_WORDS)
        found = [Claim(*[int(row[field]) for field in _FIELDS]) for row in rows]
        self._memory[TRIAL_ROWS] = 0
        return sorted(found, key=lambda claim: claim.ended)
