"""Early end of a running call: checks of its stop word, and the calls of the host (Python) that may set it."""

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
def call_host_notice(call, pool, now):
    """Call the host's notice function with Python's lock held, so that the host handles signals.

    The host may stop the call.
    """
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
def poll_host(call):
    """Return True if the call should end, after a notice to the host (Python) if one is due."""
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
        call_host_notice(call, pool, now)
        return acquire(at(call, abi.CALL_STOP)) != 0
    if call[abi.CALL_SINCE] == 0 and call[abi.CALL_EVERY] > 0:
        call[abi.CALL_SINCE] = now
    elif now - call[abi.CALL_SINCE] >= call[abi.CALL_PERIOD] and pool[abi.POOL_RELEASE] != 0:
        call_host_notice(call, pool, now)
        return acquire(at(call, abi.CALL_STOP)) != 0
    return False


@njit
def poll_host_rarely(call):
    """Return True if the call should end; only every ``SMALL_TURNS`` uses read the clock and may notify the host."""
    call[abi.CALL_TURNS] -= 1
    if call[abi.CALL_TURNS] > 0:
        return acquire(at(call, abi.CALL_STOP)) != 0
    call[abi.CALL_TURNS] = SMALL_TURNS
    return poll_host(call)


@njit
def is_stop_requested(pool, call):
    """Return True if the call should end, without a notice to the host; for threads other than the caller's."""
    if acquire(at(call, abi.CALL_STOP)) != 0:
        return True
    if acquire(at(pool, abi.POOL_HALT)) != 0:
        release(at(call, abi.CALL_STOP), 1)
        return True
    return False


def poll_stop_on_caller(call):
    """Return 1 to a kernel on the caller's thread if it should return early, else 0.

    Exported as ``aotc_poll_call``.
    """
    return 1 if poll_host(call) else 0


def poll_stop_on_worker(monitor):
    """Return 1 to a kernel on a worker's thread if it should return early, else 0.

    Exported as ``aotc_poll_worker``. ``monitor`` points to the monitor words of the run that the kernel belongs to.
    """
    run = words_at(monitor[MONITOR_RUN - MONITOR])
    return 1 if is_stop_requested(words_at(run[MONITOR_POOL]), words_at(run[CALL])) else 0
