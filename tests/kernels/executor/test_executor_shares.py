"""Calls that run at the same time share the workers of the native executor."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernels.executor.test_executor import MOST, STRIDE, Command, Executor, Trace, aligned, graph, pointer, random_graph

from aotc.kernels.cpu.executor import concurrent_calls as executor_shares
from aotc.kernels.cpu.executor import worker_threads as executor_workers
from aotc.kernels.cpu.executor.words import (
    ALIVE,
    FIRST_RUN,
    HELD,
    OPEN,
    PRESENT,
    RUN_WORDS,
    TAKEN,
    THREADS,
    WANTED,
    WANTED_BEFORE,
)
from aotc.kernels.cpu.executor.worker_threads import KEEP_SECONDS
from aotc.kernels.limits import RUNS
from aotc.vmfb import abi

pytestmark = pytest.mark.cpu
PATIENCE = 60


@pytest.fixture
def executor(tmp_path: Path) -> Iterator[Executor]:
    made = Executor(tmp_path / "executor.so")
    yield made
    made.pool[abi.POOL_HALT] = 1
    while made.pool[HELD]:
        time.sleep(0.001)
    made.library.aotc_pool_stop(pointer(made.pool))


class Endless:
    """A call of one graph with more items than will ever be done, until it is stopped."""

    def __init__(self, executor: Executor, threads: int = MOST, devices: int = 0) -> None:
        code = executor.prepare(graph([Command(1, [(0, 0), (1, 0)], [], 1 << 40)]), 2, 1)
        memory = [np.zeros(1, np.int64), np.zeros(1, np.int8)]
        table = np.array([x.ctypes.data for x in memory], np.int64)
        params, cells, scratch = aligned(1), aligned(abi.STATE_WORDS), aligned(STRIDE // 8 * threads)
        where = np.array([scratch.ctypes.data], np.int64)
        self.block = aligned(abi.CALL_WORDS)
        parts = {
            abi.CALL_POOL: executor.pool, abi.CALL_SLOTS: table, abi.CALL_PARAMS: params, abi.CALL_CELLS: cells,
            abi.CALL_SCRATCH: where, abi.CALL_CODE: code,
        }  # fmt: skip
        for word, array in parts.items():
            self.block[word] = array.ctypes.data
        self.block[abi.CALL_STRIDE], self.block[abi.CALL_LENGTH] = STRIDE, len(code)
        self.block[abi.CALL_THREADS], self.block[abi.CALL_DEVICES] = threads, devices
        self.kept = memory, table, params, cells, where, scratch, code
        self.thread = threading.Thread(target=executor.library.aotc_run, args=(pointer(self.block),), daemon=True)
        self.thread.start()

    def stop(self) -> None:
        self.block[abi.CALL_STOP] = 1
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


def workers(executor: Executor) -> list[int]:
    """How many workers each run has."""
    return [int(executor.pool[FIRST_RUN + n * RUN_WORDS + PRESENT]) for n in range(RUNS)]


def soon(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.001)


def shares(executor: Executor, *wanted: int) -> None:
    """Wait until runs have so many workers."""
    soon(lambda: workers(executor)[: len(wanted)] == list(wanted), lambda: workers(executor))


def test_a_later_call_gets_half_of_the_workers_and_leaves_them(executor: Executor) -> None:
    executor.pool[abi.POOL_CORES] = MOST + 1
    first = Endless(executor)
    shares(executor, 4, 0)
    second = Endless(executor)
    shares(executor, 2, 2)
    second.stop()
    shares(executor, 4, 0)
    third, fourth = Endless(executor, threads=2), Endless(executor, threads=2)
    soon(lambda: sum(workers(executor)) == 3 and max(workers(executor)[1:3]) == 1, lambda: workers(executor))
    for call in (third, fourth):
        call.stop()
    shares(executor, 4, 0, 0)
    first.stop()
    assert executor.pool[HELD] == 0


def test_callers_count_as_threads(executor: Executor) -> None:
    """So that there are no more at work than cores: five callers on five cores have no workers."""
    executor.pool[abi.POOL_CORES] = MOST
    calls = []
    for others in (4, 3, 2, 1, 0):
        calls.append(Endless(executor))
        soon(lambda n=others: sum(workers(executor)) == n, lambda: workers(executor))  # type: ignore[misc]
    assert executor.pool[ALIVE] == 4
    for call in calls:
        call.stop()


def test_a_worker_that_a_call_under_way_may_want_again_is_kept(executor: Executor) -> None:
    """It has nothing to do while a second call shares the cores, for longer than idle workers are kept."""
    executor.pool[abi.POOL_CORES] = MOST
    first = Endless(executor)
    shares(executor, 4, 0)
    second = Endless(executor)
    soon(lambda: sum(workers(executor)) == 3, lambda: workers(executor))
    executor.pool[WANTED] = executor.pool[WANTED_BEFORE] = 0
    time.sleep(KEEP_SECONDS + 1)
    second.stop()
    shares(executor, 4, 0)
    first.stop()


@pytest.mark.parametrize(("others", "stays"), [(2, True), (3, True), (4, False)])
def test_a_worker_leaves_if_there_are_more_threads_than_cores(others: int, stays: bool, monkeypatch: Any) -> None:
    """Two workers that see the last free seat at once both take one: they look again when they have it."""
    pool = np.zeros(FIRST_RUN + RUNS * RUN_WORDS, np.int64)
    runs = [pool[FIRST_RUN + n * RUN_WORDS :] for n in range(2)]
    pool[HELD], pool[abi.POOL_CORES] = 2, 6  # for two callers and four workers
    for run in runs:
        run[TAKEN], run[OPEN], run[THREADS] = 1, 1, 6
    runs[0][PRESENT] = others
    done = []

    def fetch_add(words: Any, more: int) -> int:
        words[0] += more
        return int(words[0] - more)

    for module in (executor_shares, executor_workers):
        for name, function in (("at", lambda a, n: a[n:]), ("acquire", lambda a: int(a[0])), ("fetch_add", fetch_add)):
            monkeypatch.setattr(module, name, function)
    for name in ("run_record_at", "count_wanted_and_present_workers", "count_missing_workers"):
        monkeypatch.setattr(executor_shares, name, getattr(executor_shares, name).py_func)
    release = executor_shares.release_participant_number.py_func
    for name, function in {
        "reserve_participant_number": lambda run, hint: fetch_add(run[PRESENT:], 1) + 1,
        "release_participant_number": release, "participate_in_run": lambda *_: done.append(1),
        "count_missing_workers": executor_shares.count_missing_workers,
        "are_too_many_workers_active": executor_workers.are_too_many_workers_active.py_func,
    }.items():  # fmt: skip
        monkeypatch.setattr(executor_workers, name, function)
    assert executor_workers.join_run.py_func(pool, runs[1], 0, np.zeros(64, np.int64))
    assert bool(done) == stays
    assert runs[1][PRESENT] == 0


def test_calls_with_few_threads_are_served_side_by_side(executor: Executor) -> None:
    """Two calls of two threads each on four cores have a worker each."""
    executor.pool[abi.POOL_CORES] = 4
    calls = [Endless(executor, threads=2) for _ in range(2)]
    shares(executor, 1, 1)
    for call in calls:
        call.stop()


def test_small_calls_beside_a_long_one(executor: Executor) -> None:
    """They get workers of it, and run in order, each item once."""
    executor.pool[abi.POOL_CORES] = MOST
    long = Endless(executor)
    shares(executor, 4)
    rng = random.Random(1)
    for _ in range(300):
        commands = random_graph(rng)
        trace = Trace(commands)
        executor.run(executor.prepare(graph(commands), 4, len(commands)), trace.slots, trace.cells, MOST)
        trace.check()
    shares(executor, 4)
    long.stop()


def test_more_calls_than_runs(executor: Executor) -> None:
    calls = [Endless(executor, threads=2) for _ in range(RUNS + 3)]
    soon(lambda: executor.pool[HELD] == RUNS, lambda: executor.pool[HELD])
    for call in calls:
        call.stop()
    assert executor.pool[HELD] == 0
    last = Endless(executor)
    shares(executor, 4)
    last.stop()


def test_devices_have_equal_parts_however_many_calls(executor: Executor) -> None:
    """Of eight cores four are for three calls on one device, and four for the only call on the other."""
    executor.pool[abi.POOL_CORES] = 8
    first = [Endless(executor, 8, devices=1) for _ in range(3)]
    soon(lambda: sorted(workers(executor)[:3]) == [1, 2, 2], lambda: workers(executor))
    second = Endless(executor, 8, devices=2)
    soon(lambda: sum(workers(executor)[:3]) == 1 and workers(executor)[3] == 3, lambda: workers(executor))
    second.stop()  # what a device does not use is lent
    soon(lambda: sorted(workers(executor)[:3]) == [1, 2, 2], lambda: workers(executor))
    for call in first:
        call.stop()


def test_a_call_on_two_devices(executor: Executor) -> None:
    """It has all of one, and half of that which another call is on."""
    executor.pool[abi.POOL_CORES] = 8
    calls = [Endless(executor, 8, devices=3)]
    soon(lambda: workers(executor)[0] > 0, lambda: workers(executor))  # it is the first run
    calls.append(Endless(executor, 8, devices=1))
    shares(executor, 5, 1)
    calls.append(Endless(executor, 2, devices=2))  # which wants no more than one worker
    soon(lambda: sum(workers(executor)) == 5 and workers(executor)[2] == 1, lambda: workers(executor))
    for call in calls:
        call.stop()


def test_workers_that_a_call_cannot_use_serve_other_calls(executor: Executor) -> None:
    executor.pool[abi.POOL_CORES] = 6
    calls = [Endless(executor, 2, devices=1)]
    shares(executor, 1)
    calls.append(Endless(executor, 6, devices=2))
    shares(executor, 1, 3)
    for call in calls:
        call.stop()
