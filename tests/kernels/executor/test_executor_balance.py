"""Participants that are slow claim less at once, and what others do for them is counted. No speed is read off a clock.

A slow participant is one whose kernel waits until the others have run ten times as many items; then the time that it
waits for its last claim is ten times its items, in items.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from kernels.executor.test_executor import STRIDE, Command, Executor, aligned, graph, pointer

from aotc.vmfb import abi
from benchmarks.engines import load_module

pytestmark = pytest.mark.cpu

FACTOR, GRAIN = 10, 64
# slow(done, home; all, factor): the caller, whose scratch memory is at home, runs a claim until the others have run
# ``factor`` times its items, or all that were left; with a factor of 0 it works as the others do.
SLOW = """
define void @slow(ptr %buffers, ptr %dims, i64 %first, i64 %stop, ptr %scratch, ptr %monitor) {
entry:
  %done = load ptr, ptr %buffers
  %b1 = getelementptr ptr, ptr %buffers, i64 1
  %home = load ptr, ptr %b1
  %all = load i64, ptr %dims
  %d1 = getelementptr i64, ptr %dims, i64 1
  %factor = load i64, ptr %d1
  %items = sub i64 %stop, %first
  %before = load atomic i64, ptr %done seq_cst, align 8
  %more = mul i64 %items, %factor
  %wanted = add i64 %before, %more
  %left = sub i64 %all, %items
  %is_home = icmp eq ptr %scratch, %home
  %waits = icmp sgt i64 %factor, 0
  %is_slow = and i1 %is_home, %waits
  br i1 %is_slow, label %wait, label %work
wait:
  %now = load atomic i64, ptr %done seq_cst, align 8
  %enough = icmp sge i64 %now, %wanted
  %last = icmp sge i64 %now, %left
  %over = or i1 %enough, %last
  br i1 %over, label %out, label %wait
work:
  %turns = mul i64 %items, 200
  br label %head
head:
  %i = phi i64 [ 0, %work ], [ %j, %head ]
  call void asm sideeffect "", ""()
  %j = add i64 %i, 1
  %again = icmp slt i64 %j, %turns
  br i1 %again, label %head, label %out
out:
  %unused = atomicrmw add ptr %done, i64 %items seq_cst
  ret void
}
"""


class SlowCaller(Executor):
    """Calls of one command, whose claims are recorded."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.slow = load_module(SLOW)
        self.kernels = [self.slow.get_function_address("slow")]
        self.trial = aligned(abi.TRIAL_HEADER + abi.ROW_WORDS * 4096)
        self.trial[abi.TRIAL_CAPACITY] = 4096
        self.pool[abi.POOL_TRIAL] = self.trial.ctypes.data
        self.block = aligned(abi.CALL_WORDS)

    def claims(self, items: int, factor: int, threads: int = 2, commands: int = 1) -> list[tuple[int, int]]:
        """Run commands of so many items; return participant and items of each claim, in the order of their begins."""
        done, scratch, cells = aligned(1), aligned(STRIDE // 8 * threads), aligned(abi.STATE_WORDS * commands)
        command = Command(0, [(0, 0), (1, 0)], [items * commands, factor], items, GRAIN)
        code = self.prepare(graph([command] * commands), 2, commands)
        table, where = np.array([done.ctypes.data, scratch.ctypes.data]), np.array([scratch.ctypes.data])
        parts = {
            abi.CALL_POOL: self.pool, abi.CALL_SLOTS: table, abi.CALL_PARAMS: np.zeros(1, np.int64),
            abi.CALL_CELLS: cells, abi.CALL_SCRATCH: where, abi.CALL_CODE: code,
        }  # fmt: skip
        for word, array in parts.items():
            self.block[word] = array.ctypes.data
        self.block[abi.CALL_STRIDE], self.block[abi.CALL_LENGTH] = STRIDE, len(code)
        self.block[abi.CALL_THREADS], self.trial[abi.TRIAL_ROWS] = threads, 0
        assert self.library.aotc_run(pointer(self.block)) == 0
        assert done[0] == items * commands
        rows = self.trial[abi.TRIAL_HEADER :].reshape(-1, abi.ROW_WORDS)[: self.trial[abi.TRIAL_ROWS]]
        rows = rows[np.argsort(rows[:, abi.ROW_BEGAN])]
        return [(int(r[abi.ROW_WHO]), int(r[abi.ROW_LAST] - r[abi.ROW_FIRST])) for r in rows]


@pytest.fixture
def caller(tmp_path: Path) -> Iterator[SlowCaller]:
    made = SlowCaller(tmp_path / "executor.so")
    yield made
    made.library.aotc_pool_stop(pointer(made.pool))


def test_a_caller_of_a_tenth_of_the_speed(caller: SlowCaller) -> None:
    """Others wait less than a fifth of the time for it, and it runs a fraction of what would be its static share."""
    items = 40 * GRAIN
    caller.claims(items, FACTOR)
    for threads in (2, 3):
        own: list[int] = []
        while not own:  # the others may have run all before the caller began
            steals = int(caller.pool[abi.POOL_STEALS])
            found = caller.claims(items, FACTOR, threads)
            own = [size for who, size in found if who == 0]
        others = [size for who, size in found if who != 0]
        assert sum(own) + sum(others) == items
        assert max(others) == GRAIN
        assert own[-1] <= GRAIN // 4
        waited = FACTOR * own[-1] * (threads - 1)  # the longest that others could have waited, in items
        assert waited < items // 5
        assert FACTOR * sum(own) < FACTOR * items // threads // 4, "much less than with equal shares"
        assert int(caller.pool[abi.POOL_STEALS]) - steals >= max(sum(others) // (threads - 1) - -(-items // threads), 1)


def test_who_is_fast_again_claims_as_before(caller: SlowCaller) -> None:
    caller.claims(40 * GRAIN, FACTOR)
    assert caller.block[abi.CALL_LAG] > 0
    for _ in range(20):
        found = caller.claims(40 * GRAIN, 0)
        if {size for _, size in found} == {GRAIN}:
            return
    raise AssertionError(found)


def test_commands_of_one_claim_are_claimed_whole(caller: SlowCaller) -> None:
    caller.claims(40 * GRAIN, FACTOR)
    steals = int(caller.pool[abi.POOL_STEALS])
    for _ in range(20):
        assert [size for _, size in caller.claims(GRAIN, 0, commands=3)] == [GRAIN] * 3
    assert int(caller.pool[abi.POOL_STEALS]) == steals


def test_waiting_and_waking_are_counted(caller: SlowCaller) -> None:
    caller.claims(40 * GRAIN, FACTOR)
    assert caller.pool[abi.POOL_IDLE] >= 0
    before = int(caller.pool[abi.POOL_WAKEUPS])
    for _ in range(1000):
        ctypes.CDLL(None).usleep(1000)  # workers sleep after less
        caller.claims(40 * GRAIN, 0)
        if int(caller.pool[abi.POOL_WAKEUPS]) > before:
            return
    raise AssertionError("no worker was woken")


def test_nobody_waits_longer_than_there_was_time(caller: SlowCaller) -> None:
    """Also where a graph is finished at the very turn from which a wait counts."""
    begin = time.monotonic_ns()
    for n in range(3000):
        caller.claims(GRAIN * 10 + n % 50, 0)
    taken = time.monotonic_ns() - begin
    assert 0 <= caller.pool[abi.POOL_IDLE] <= 2 * taken
