"""Executor trials, for tests and benchmarks: shuffled order, no work stealing, slow threads, and a log of claims.

``AOTC_SHUFFLE=SEED`` starts a trial for a whole process; it records no claims (``docs/debugging.md``). The layout of
the trial's words is in :mod:`aotc.vmfb.abi`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from aotc.vmfb import abi
from aotc.vmfb.memory.pointers import aligned_bytes

_FIELDS = (
    *(abi.ROW_RUN, abi.ROW_COMMAND, abi.ROW_FIRST, abi.ROW_LAST),
    *(abi.ROW_BEGAN, abi.ROW_ENDED, abi.ROW_WHO, abi.ROW_DEVICES),
)
_KEPT: list[Trial] = []  # never freed: a worker may read a trial after it has ended


class Claim(NamedTuple):
    """A range of items that a thread took from a command and ran.

    Attributes
    ----------
    run : int
        Number of the graph's execution, in order of start.
    command : int
        Address of the command's words.
    first, last : int
        The items: ``last`` is exclusive.
    began, ended : int
        Logical clock, the same for all claims of the trial.
    who : int
        The participant; 0 is the calling thread.
    devices : int
        Bits of the call's logical devices (:mod:`aotc.vmfb.host.logical_devices`).
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
    """Settings and log of a trial; active while :func:`aotc.vmfb.devices.cpu.native.set_trial` has its address.

    Parameters
    ----------
    claims : int
        Maximum number of recorded claims; later ones are dropped.
    """

    def __init__(self, claims: int = 0) -> None:
        size = 8 * (abi.TRIAL_HEADER + abi.ROW_WORDS * claims)
        memory, self.address = aligned_bytes(size, abi.ALIGNMENT)
        first = self.address - memory.ctypes.data
        self._memory = memory[first : first + size].view(np.int64)
        self._memory[abi.TRIAL_CAPACITY] = claims
        _KEPT.append(self)

    def shuffle(self, seed: int) -> None:
        """Shuffle ready work by ``seed``, 0 or more. The order is reproducible with one thread only."""
        self._memory[abi.TRIAL_ORDER], self._memory[abi.TRIAL_RUNS] = 2 * seed + 1, 0

    def forbid_stealing(self, threads: int) -> None:
        """Let command ``n`` of each shared graph be run by participant ``n % threads`` alone.

        Calls must have ``threads`` threads, and no others may run at the same time: nobody runs the commands of a
        thread that is missing.
        """
        self._memory[abi.TRIAL_ORDER] = 2 * threads

    def allow_stealing(self) -> None:
        """Let all participants take items of all commands, in the program's order."""
        self._memory[abi.TRIAL_ORDER] = 0

    def slow_down(self, who: int, factor: int) -> None:
        """Let each claim of participant ``who`` take ``factor`` times its processor time; 0 is the caller."""
        self._memory[abi.TRIAL_SLOW], self._memory[abi.TRIAL_FACTOR] = who + 1, factor

    def slow_down_command(self, address: int, factor: int) -> None:
        """Let each claim of the command whose words are at ``address`` take ``factor`` times its time."""
        self._memory[abi.TRIAL_SLOW], self._memory[abi.TRIAL_FACTOR] = address, factor

    def claims(self) -> list[Claim]:
        """Return the claims since the last call of this method, in order of their ends.

        Raises
        ------
        OverflowError
            If there were more claims than the trial can record.
        """
        count, most = int(self._memory[abi.TRIAL_ROWS]), int(self._memory[abi.TRIAL_CAPACITY])
        if count > most:
            raise OverflowError(f"{count} claims, {most} are recorded")
        rows = self._memory[abi.TRIAL_HEADER : abi.TRIAL_HEADER + abi.ROW_WORDS * count].reshape(count, abi.ROW_WORDS)
        found = [Claim(*[int(row[field]) for field in _FIELDS]) for row in rows]
        self._memory[abi.TRIAL_ROWS] = 0
        return sorted(found, key=lambda claim: claim.ended)
