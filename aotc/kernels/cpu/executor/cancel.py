"""How a call under way ends early: who looks at the stop word, and how the host has the word."""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import acquire, at, call_host, clock, release, words_at
from aotc.kernels.cpu.executor.words import CALL, MONITOR, MONITOR_POOL, MONITOR_RUN, time_words
from aotc.kernels.limits import SMALL_TURNS
from aotc.vmfb import abi

# Interval between two notices to the host, in durations of the last one. A notice takes 5 ms while other Python threads
# compute, because it needs the interpreter lock; so at most a fiftieth of the time is spent waiting for that lock
# (benchmarks/runtime/beside_threads.py).
HOST_SHARE = 50
# Maximum interval between two notices in nanoseconds, also across calls: HOST_SHARE times the 5 ms after which threads
# of CPython hand over the interpreter lock. Ctrl-C waits this long if a notice once took long because of many threads.
LONGEST_SILENCE = 250_000_000


@njit
def give_word(call, pool, now):
    """Call the host (Python) so that it can handle signals; the host may stop the call."""
    call_host(pool[abi.POOL_REGAIN], call[abi.CALL_STATE])
    answer = call_host(pool[abi.POOL_NOTICE], call[abi.CALL_ARGUMENT])
    if answer == 0:
        release(at(call, abi.CALL_STOP), 1)
    else:
        call_host(pool[abi.POOL_DROP], answer)
    call[abi.CALL_STATE] = call_host(pool[abi.POOL_RELEASE], 0)
    call[abi.CALL_SINCE] = clock(time_words())
    call[abi.CALL_PERIOD] = max(call[abi.CALL_EVERY], min(HOST_SHARE * (call[abi.CALL_SINCE] - now), LONGEST_SILENCE))


@njit
def poll(call):
    """Return True if the call should end; asks the host (Python) every few milliseconds."""
    if acquire(at(call, abi.CALL_STOP)) != 0:
        return True
    pool = words_at(call[abi.CALL_POOL])
    if acquire(at(pool, abi.POOL_HALT)) != 0:
        release(at(call, abi.CALL_STOP), 1)
        return True
    now = clock(time_words())
    asked = acquire(at(pool, abi.POOL_ASK))
    if asked != call[abi.CALL_ASKED] and pool[abi.POOL_RELEASE] != 0:
        call[abi.CALL_ASKED] = asked
        give_word(call, pool, now)
        return acquire(at(call, abi.CALL_STOP)) != 0
    if call[abi.CALL_SINCE] == 0 and call[abi.CALL_EVERY] > 0:
        call[abi.CALL_SINCE] = now
    elif now - call[abi.CALL_SINCE] >= call[abi.CALL_PERIOD] and pool[abi.POOL_RELEASE] != 0:
        give_word(call, pool, now)
        return acquire(at(call, abi.CALL_STOP)) != 0
    return False


@njit
def poll_seldom(call):
    """Return True if the call should end, like :func:`poll`, but checks the clock only after many calls."""
    call[abi.CALL_TURNS] -= 1
    if call[abi.CALL_TURNS] > 0:
        return acquire(at(call, abi.CALL_STOP)) != 0
    call[abi.CALL_TURNS] = SMALL_TURNS
    return poll(call)


@njit
def is_stopped(pool, call):
    """Return True if the call should end; used by workers, which never ask the host themselves."""
    if acquire(at(call, abi.CALL_STOP)) != 0:
        return True
    if acquire(at(pool, abi.POOL_HALT)) != 0:
        release(at(call, abi.CALL_STOP), 1)
        return True
    return False


def poll_call(call):
    """Return True to a kernel on the caller's thread if it should return early."""
    return 1 if poll(call) else 0


def poll_worker(monitor):
    """Return True to a kernel on a worker's thread if it should return early; ``monitor`` is the run's."""
    run = words_at(monitor[MONITOR_RUN - MONITOR])
    return 1 if is_stopped(words_at(run[MONITOR_POOL]), words_at(run[CALL])) else 0
