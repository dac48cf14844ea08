"""Threads of the diamond by a simulated clock: commands, claims and predicted times are the bundle's.

A machine that others use cannot tell how long threads wait, and a prediction can: each thread claims items as the
executor does, with its own rule of how much a slow thread claims. Without stealing each command is one thread's.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import pytest

import aotc
from aotc.kernels.cpu.executor.claim_sizes import LAG_WHOLE, claim_size
from aotc.kernels.cpu.executor.words import LAG
from aotc.kernels.limits import LAG_MOST
from aotc.tools.explain.schedule import ScheduleRow, explain_schedule
from aotc.vmfb.bundle import open_bundle

pytestmark = pytest.mark.cpu

FACTOR = 10


@pytest.fixture(scope="module")
def rows():
    text = (Path(__file__).parents[1] / "support" / "programs" / "diamond.mlir").read_text()
    # A named target: predictions for "cpu" depend on the caches of this machine.
    return explain_schedule(open_bundle(aotc.compile(text, target="cpu:x86-64-v3"))).rows


@dataclass
class Simulated:
    """A run of a graph's commands on threads, with a clock of its own.

    ``pace(thread, command)`` of :meth:`run` returns how many times as long as predicted a thread takes for a command.
    """

    rows: tuple[ScheduleRow, ...]
    threads: int
    steals: bool = True
    end: float = 0.0
    busy: float = 0.0
    stolen: int = 0
    ready: list[int] = field(default_factory=list)

    def run(self, pace):
        """Run all commands; every thread claims from the first ready command that has items left for it."""
        rows, order = self.rows, count()
        taken, done = [0] * len(rows), [0] * len(rows)
        waits = [len(row.after) for row in rows]
        mine = [[0] * len(rows) for _ in range(self.threads)]
        lags = [{LAG: 0} for _ in range(self.threads)]
        best: dict[int, float] = {}
        self.ready = [n for n, left in enumerate(waits) if not left]
        idle = list(range(self.threads))
        events: list[tuple[float, int, int, int, int]] = []

        def claim(thread, now):
            own = [n for n in self.ready if taken[n] < rows[n].items and (self.steals or n % self.threads == thread)]
            if not own:
                return False
            n = own[0]
            most = claim_size.py_func(rows[n].items, rows[n].claim, lags[thread])
            items = min(most, rows[n].items - taken[n])
            taken[n] += items
            mine[thread][n] += items
            took = items * pace(thread, n) * rows[n].predicted / rows[n].items
            self.busy += took
            if rows[n].claim < rows[n].items:  # as note_pace does
                each = took / items
                best[n] = min(best.get(n, each), each)
                behind = LAG_WHOLE - int(LAG_WHOLE * best[n] / each)
                lags[thread][LAG] = min((lags[thread][LAG] + 3 * behind) // 4, LAG_MOST)
            heapq.heappush(events, (now + took, next(order), thread, n, items))
            return True

        idle = [thread for thread in idle if not claim(thread, 0.0)]
        while events:
            self.end, _, thread, n, items = heapq.heappop(events)
            done[n] += items
            if done[n] == rows[n].items:
                for later, row in enumerate(rows):
                    if n in row.after:
                        waits[later] -= 1
                        self.ready += [later] if not waits[later] else []
            idle = [t for t in (*idle, thread) if not claim(t, self.end)]
        assert done == [row.items for row in rows]
        share = [-(-row.items // self.threads) for row in rows]
        self.stolen = sum(max(own[n] - share[n], 0) for own in mine for n in range(len(rows)))
        return self

    @property
    def idle(self) -> float:
        """The part of the threads' time in which they wait."""
        return 1 - self.busy / (self.threads * self.end)


def products(rows):
    return [n for n, row in enumerate(rows) if "matmul" in row.kernel]


@pytest.mark.parametrize("threads", [2, 4, 8])
@pytest.mark.parametrize("branch", [0, 1])
def test_stealing_shares_a_slow_branch_among_all_threads(rows, threads, branch):
    """All threads work on its items: they wait less than a fifth of the time, and stealing makes the call shorter."""
    slow = products(rows)[branch]

    def pace(_, n):
        return FACTOR if n == slow else 1

    shared, owned = (Simulated(rows, threads, steals).run(pace) for steals in (True, False))
    assert shared.idle < 0.2
    assert shared.end < 0.7 * owned.end
    assert owned.idle > shared.idle


@pytest.mark.parametrize("threads", [2, 4, 8])
def test_stealing_moves_the_work_of_a_slow_thread(rows, threads):
    """The others run what it would have run, and its last claim is small."""

    def pace(thread, _):
        return FACTOR if thread == 1 else 1

    shared, owned = (Simulated(rows, threads, steals).run(pace) for steals in (True, False))
    assert shared.idle < 0.2
    assert shared.stolen > 0
    assert shared.end < 0.7 * owned.end
