"""Calls under a limit on memory: who waits, in which order, what ends a wait, what is refused."""

import os
import signal
import threading
import time

import numpy as np
import pytest
from support import tiny

from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.arena import ArenaPool
from aotc.vmfb.memory.memory_limit import LimitedPool
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir


def until(condition):
    """Wait for what other threads are about to do."""
    end = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


def started(work, *args):
    thread = threading.Thread(target=work, args=args, daemon=True)
    thread.start()
    return thread


def test_an_arena_above_the_limit_is_refused_with_both_sizes():
    pool = LimitedPool(1000)
    with pytest.raises(CallError, match=r"needs 1,001 bytes[^$]*memory_limit, 1,000 bytes"):
        pool.take_arena(1001)
    pool.return_arena(pool.take_arena(1000))
    found = {"in_use": 0, "idle": 1000, "high_water": 1000, "idle_results": 0, "limit": 1000, "waiting": 0}
    assert pool.stats() == found


def test_first_come_first_served():
    """A small request does not overtake a large one, though it would fit."""
    pool, order = LimitedPool(1000), []
    first = pool.take_arena(600)

    def work(name, size):
        arena = pool.take_arena(size)
        order.append(name)
        pool.return_arena(arena)

    threads = []
    for n, size in enumerate((900, 200, 900, 300)):
        threads.append(started(work, n, size))
        until(lambda n=n: pool.waiting_calls() == n + 1)
    assert order == []
    pool.return_arena(first)
    for thread in threads:
        thread.join(20)
    assert sorted(order) == [0, 1, 2, 3]
    assert order[0] == 0
    assert pool.high_water <= 1000


def test_never_more_than_the_limit():
    pool, wrong, rng = LimitedPool(4096), [], np.random.default_rng(0)

    def work(sizes):
        for size in sizes:
            arena = pool.take_arena(int(size))
            if pool.allocated_bytes() > 4096:
                wrong.append(pool.allocated_bytes())
            pool.return_arena(arena)

    threads = [started(work, rng.integers(1, 4097, 200)) for _ in range(8)]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    assert pool.high_water <= 4096


def test_calls_that_grow_do_not_wait_for_each_other():
    """Each holds some and asks for more: all at once they would have half of what they need."""
    pool, done = LimitedPool(1000), []

    def work(name):
        pool.begin_stepwise_allocation()
        try:
            small = pool.take_further_arena(300, 0)
            large = pool.take_further_arena(600, 300)
            pool.return_arena(large)
            pool.return_arena(small)
        finally:
            pool.end_stepwise_allocation()
        done.append(name)

    def plain(name):
        pool.return_arena(pool.take_arena(700))
        done.append(name)

    threads = [started(work if n % 2 else plain, n) for n in range(12)]
    for thread in threads:
        thread.join(20)
    assert sorted(done) == list(range(12))
    with pytest.raises(CallError, match="needs 1,100 bytes"):
        pool.take_further_arena(600, 500)


def test_a_call_that_ended_early_counts_no_more():
    """Its arena was never given back; it is gone with the call."""
    pool = LimitedPool(1000)
    lost = pool.take_arena(1000)
    thread = started(lambda: pool.return_arena(pool.take_arena(1000)))
    until(lambda: pool.waiting_calls() == 1)
    del lost
    thread.join(20)
    assert not thread.is_alive()


def test_an_interrupt_ends_a_wait():
    pool = LimitedPool(1000)
    first = pool.take_arena(1000)

    def interrupt():
        until(lambda: pool.waiting_calls() == 1)
        os.kill(os.getpid(), signal.SIGINT)

    thread = started(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pool.take_arena(10)
    thread.join(20)
    assert pool.waiting_calls() == 0
    pool.return_arena(first)
    assert pool.take_arena(1000) is first


def test_an_interrupt_that_comes_as_a_wait_begins_leaves_nothing_behind(monkeypatch):
    pool = LimitedPool(1000)
    held = pool.take_arena(1000)
    serve = pool._grant_waiting

    def interrupted():
        monkeypatch.setattr(pool, "_grant_waiting", serve)
        raise KeyboardInterrupt

    monkeypatch.setattr(pool, "_grant_waiting", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pool.take_arena(600)
    assert pool.waiting_calls() == 0
    pool.return_arena(held)
    pool.return_arena(pool.take_arena(1000))


def test_a_forked_child_waits_for_nobody():
    pool = LimitedPool(1000)
    held = pool.take_arena(1000)
    started(lambda: pool.return_arena(pool.take_arena(500)))
    until(lambda: pool.waiting_calls() == 1)
    child = os.fork()
    if child == 0:
        pool.take_arena(1000)
        os._exit(17)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17
    pool.return_arena(held)


def test_idle_arenas_are_freed_for_larger_ones_and_by_trim():
    pool = ArenaPool()
    pool.return_arena(pool.take_arena(100))
    large = pool.take_arena(1000)  # the small one goes first
    assert pool.stats() == {"in_use": 1000, "idle": 0, "high_water": 1000, "idle_results": 0}
    pool.return_arena(large)
    assert pool.trim() == 1000
    assert pool.stats() == {"in_use": 0, "idle": 0, "high_water": 1000, "idle_results": 0}


def test_calls_of_a_module():
    """``grow`` takes an arena of four bytes an element; 40 calls of 8 threads share the room of one."""
    limit = 4 * 1000
    module = load(tiny.bundle(), threads=1, memory_limit=limit)
    wrong = []

    def work(seed):
        x = np.arange(900 + seed, dtype=np.float32)
        for _ in range(5):
            if not np.array_equal(module.invoke("grow", x)[0], x * 6):
                wrong.append(seed)

    threads = [started(work, n) for n in range(8)]
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert wrong == []
    memory = module.stats()["memory"]["cpu"]
    assert 0 < memory["high_water"] <= limit
    assert memory["in_use"] == memory["waiting"] == 0
    with pytest.raises(CallError, match=r"this call needs 8,000 bytes"):
        module.invoke("grow", np.ones(2000, np.float32))
    assert module.trim() > 0
    assert module.stats()["memory"]["cpu"]["idle"] == 0


def test_submissions_wait_too():
    """As many at a time as have room; the others stay in their queue."""
    x = np.arange(1000, dtype=np.float32)
    module = load(tiny.bundle(), threads=1, memory_limit=f"{2 * x.nbytes / 1000} kB")
    fences = [module.submit("grow", x) for _ in range(100)]
    for fence in fences:
        np.testing.assert_array_equal(fence.result(20)[0], x * 6)
    assert module.stats()["memory"]["cpu"]["high_water"] <= 2 * x.nbytes


@pytest.mark.parametrize("limit", [0, -1, 1.5, True, "1XB", "0 MB"])
def test_a_limit_is_a_number_of_bytes(limit):
    with pytest.raises(CallError, match="memory_limit is"):
        load(tiny.bundle(), memory_limit=limit)
