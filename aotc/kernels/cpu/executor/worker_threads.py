"""Worker threads of a process: their number, and their main loop."""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import (
    FUTEX_WAIT_PRIVATE,
    acquire,
    at,
    clock,
    exchange,
    fetch_add,
    futex,
    pause,
    start_thread,
    words_at,
    yield_processor,
)
from aotc.kernels.cpu.executor.concurrent_calls import (
    count_missing_workers,
    count_most_useful_workers,
    may_join_next_graph,
    release_participant_number,
    reserve_participant_number,
    run_to_join,
)
from aotc.kernels.cpu.executor.control import participate_in_run
from aotc.kernels.cpu.executor.words import (
    ALIVE,
    BORN,
    EPOCH,
    HELD,
    INSIDE,
    LAG,
    MEMBER,
    OPEN,
    REFUSED,
    SEAT,
    SECOND,
    SLEEPERS,
    STOP,
    WAKE,
    WANTED,
    WANTED_BEFORE,
    WINDOW,
    participant_words,
    time_words,
)
from aotc.vmfb.abi import POOL_WAKEUPS

# Period in seconds in which a worker that no run needed exits, so after 2 to 4 seconds; a start takes about 30 us.
KEEP_SECONDS = 2


@njit
def start_worker_threads(pool, workers):
    """Start worker threads; return the number that the system refused."""
    for started in range(workers):
        fetch_add(at(pool, ALIVE), 1)
        if start_thread(pool) != 0:
            fetch_add(at(pool, ALIVE), -1)
            return workers - started
    return 0


# Seconds before another thread is requested after the system refused one, because each refusal takes microseconds.
RETRY_SECONDS = 1


@njit
def start_missing_workers(pool, wanted):
    """Start workers until there are ``wanted``; after a refusal by the system, retry no earlier than a second later."""
    pool[WANTED] = max(pool[WANTED], wanted)
    alive = acquire(at(pool, ALIVE))
    if alive >= wanted:
        return
    now = clock(time_words())
    if pool[REFUSED] != 0 and now - pool[REFUSED] < RETRY_SECONDS * SECOND:
        return
    pool[REFUSED] = now if start_worker_threads(pool, wanted - alive) > 0 else 0


@njit
def should_worker_exit(pool):
    """Return True if this worker should exit because no recent run needed as many workers.

    After other calls have ended, the active calls may need all of these workers again. So the workers stay.
    """
    now = clock(time_words())
    since = acquire(at(pool, WINDOW))
    if now - since > KEEP_SECONDS * SECOND and exchange(at(pool, WINDOW), now) == since:
        pool[WANTED_BEFORE] = pool[WANTED]
        pool[WANTED] = 0
    most = max(pool[WANTED], pool[WANTED_BEFORE], count_most_useful_workers(pool))
    if acquire(at(pool, ALIVE)) <= most:
        return False
    if fetch_add(at(pool, ALIVE), -1) > most:
        return True
    fetch_add(at(pool, ALIVE), 1)
    return False


@njit
def sleep_until_work(pool):
    """Sleep until there is a run to join, for at most ``KEEP_SECONDS``."""
    timeout = time_words()
    timeout[0], timeout[1] = KEEP_SECONDS, 0
    woken = acquire(at(pool, WAKE))
    fetch_add(at(pool, SLEEPERS), 1)
    if run_to_join(pool) == 0 and acquire(at(pool, STOP)) == 0:
        futex(at(pool, WAKE), FUTEX_WAIT_PRIVATE, woken & 0xFFFFFFFF, timeout)
        if acquire(at(pool, WAKE)) != woken:
            fetch_add(at(pool, POOL_WAKEUPS), 1)
    fetch_add(at(pool, SLEEPERS), -1)


@njit
def are_too_many_workers_active(pool):
    """Return True if too many workers are active, this one included.

    Two workers may have seen the same free participant number. Without this check both would stay, because workers of a
    run only look again when another call begins or ends.
    """
    return acquire(at(pool, HELD)) > 1 and count_missing_workers(pool) < 0


@njit
def join_run(pool, run, hint, who):
    """Work on a run if it is open and has a free participant number; return True if other calls may need a worker."""
    helped = False
    fetch_add(at(run, INSIDE), 1)
    if fetch_add(at(run, OPEN), 0) == 1:
        me = reserve_participant_number(run, hint)
        if me != 0:
            if not are_too_many_workers_active(pool):
                who[SEAT] = me
                participate_in_run(pool, run, who, MEMBER)
            release_participant_number(run, me)
            helped = acquire(at(pool, HELD)) > 1
    fetch_add(at(run, INSIDE), -1)
    return helped


# Iterations, of about 15 ns, that a worker spins without work before it sleeps: about 60 us. The next call may be near,
# and waking a worker takes 50 us.
SPINS = 4000
# The same while a run is active, because its next graph comes sooner than a next call.
ACTIVE_SPINS = 20 * SPINS


def run_worker_thread(pool):
    """Run a worker thread's main loop: join runs, spin, sleep, exit when surplus."""
    hint = fetch_add(at(pool, BORN), 1)
    who = participant_words()
    who[LAG] = 0
    seen = 0
    spins = 0
    while acquire(at(pool, STOP)) == 0:
        epoch = acquire(at(pool, EPOCH))
        if epoch == seen:
            spins += 1
            if spins < SPINS:
                pause()
                continue
            if spins < ACTIVE_SPINS and may_join_next_graph(pool):
                yield_processor()
                continue
            if should_worker_exit(pool):
                return
            sleep_until_work(pool)
            spins = 0
            seen = -1
            continue
        seen = epoch
        found = run_to_join(pool)
        if found != 0:
            spins = 0
            if join_run(pool, words_at(found), hint, who):
                seen = -1
    fetch_add(at(pool, ALIVE), -1)
