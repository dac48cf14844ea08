"""Concurrent calls: the division of the pool's workers among the calls that run at the same time.

A call reserves one of the pool's *run* records for its first graph with work for several threads, until the call ends.
Workers join the open run with the fewest workers. Between two claims a worker moves to another run that has two workers
fewer, so the numbers of workers of two calls that could use more differ by at most one.

If calls are on different logical devices, each device with active calls gets an equal share of the cores, and divides
it among its calls. A worker joins the run that lacks most of its share. Shares that a device does not use are lent to
others until its next call. Callers are threads as well: with more calls fewer workers take part, so that there are
never more active threads than cores. A worker may act on counts that are out of date; it corrects that at its next
check.
"""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import (
    FUTEX_WAKE_PRIVATE,
    acquire,
    address_of,
    at,
    exchange,
    fetch_add,
    fetch_or,
    futex,
    release,
    words_at,
)
from aotc.kernels.cpu.executor.words import (
    COUNT,
    DEVICES,
    DONE,
    EPOCH,
    FIRST_RUN,
    HELD,
    MONITOR,
    MONITOR_POOL,
    MONITOR_RUN,
    OPEN,
    PRESENT,
    RUN_WORDS,
    SEAT_BITS,
    SEATS,
    SLEEPERS,
    TAKEN,
    THREADS,
    WAKE,
    worker_monitor,
)
from aotc.kernels.limits import RUNS
from aotc.vmfb.abi import CALL_DEVICES, POOL_CORES

# Unit in which the shares of concurrent calls in one thread are counted: the least common multiple of 1 to 16, so that
# up to 16 calls have exactly equal shares.
SHARE_UNITS = 720720


@njit
def run_record_at(pool, number):
    """Return the pointer to the run record with an index."""
    return at(pool, FIRST_RUN + number * RUN_WORDS)


@njit
def wake_workers(pool, workers):
    """Wake up to ``workers`` sleeping workers."""
    if workers > 0 and fetch_add(at(pool, SLEEPERS), 0) > 0:
        fetch_add(at(pool, WAKE), 1)
        futex(at(pool, WAKE), FUTEX_WAKE_PRIVATE, workers, words_at(0))


@njit
def reserve_run(pool, call, threads):
    """Reserve a run record for a call that can use ``threads`` threads; return its address, or 0 if all are in use."""
    for number in range(RUNS):
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) == 0 and exchange(at(run, TAKEN), 1) == 0:
            run[MONITOR] = worker_monitor()
            run[MONITOR_RUN] = address_of(run)
            run[MONITOR_POOL] = address_of(pool)
            run[DEVICES] = call[CALL_DEVICES]
            release(at(run, THREADS), threads)
            if fetch_add(at(pool, HELD), 1) > 0:
                fetch_add(at(pool, EPOCH), 1)  # workers of the others may have to leave
            return address_of(run)
    return 0


@njit
def release_run(pool, run):
    """Release a run record, and wake workers for the other active calls."""
    release(at(run, TAKEN), 0)
    if fetch_add(at(pool, HELD), -1) > 1:
        fetch_add(at(pool, EPOCH), 1)
        wake_workers(pool, run[THREADS])


@njit
def count_wanted_and_present_workers(pool):
    """Return the number of workers that all active calls could use, and the number that they have.

    The calls could use as many threads as they request, but all of them together no more than the pool has cores, or
    than the largest request.
    """
    held = acquire(at(pool, HELD))
    seen, parameters, most, present = 0, 0, 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            threads = acquire(at(run, THREADS))
            parameters += threads
            most = max(most, threads)
            present += acquire(at(run, PRESENT))
    return min(parameters, max(most, pool[POOL_CORES])) - seen, present


@njit
def count_most_useful_workers(pool):
    """Return the largest number of workers that a single active call could use."""
    held = acquire(at(pool, HELD))
    seen, most = 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            most = max(most, acquire(at(run, THREADS)) - 1)
    return most


@njit
def count_missing_workers(pool):
    """Return the number of further workers that the active calls could use; negative if there are too many."""
    wanted, present = count_wanted_and_present_workers(pool)
    return wanted - present


@njit
def can_use_another_worker(run, several):
    """Return True if a run is open and one more worker could help.

    With ``several`` calls at the same time, unfinished commands are required.
    """
    if acquire(at(run, OPEN)) == 0 or acquire(at(run, PRESENT)) >= acquire(at(run, THREADS)) - 1:
        return False
    return not several or acquire(at(run, DONE)) < run[COUNT]


@njit
def devices_of_active_calls(pool, held):
    """Return the bit set of logical devices of all active calls; 0 if they all use the same ones."""
    seen, every, same = 0, 0, True
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            same = same and (seen == 0 or run[DEVICES] == every)
            every |= run[DEVICES]
            seen += 1
    return 0 if same else every


@njit
def count_calls_on_device(pool, held, device):
    """Return the number of active calls on a logical device, which is given as a bit mask."""
    seen, count = 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            count += 1 if run[DEVICES] & device else 0
    return count


@njit
def fair_thread_share(pool, run, held, devices):
    """Return the number of threads that a call is entitled to, in :data:`SHARE_UNITS`; 0 if ``devices`` is 0.

    Each logical device of the bit mask ``devices`` has an equal share of the cores, and divides it among its calls.
    """
    parts, share = 0, 0
    while devices != 0:
        device = devices & -devices
        devices ^= device
        parts += 1
        if run[DEVICES] & device:
            share += pool[POOL_CORES] * SHARE_UNITS // max(count_calls_on_device(pool, held, device), 1)
    return share // parts if parts > 0 else 0


@njit
def missing_thread_share(pool, run, held, devices):
    """Return a run's fair share of threads minus its workers, in :data:`SHARE_UNITS`; for comparisons between runs."""
    return fair_thread_share(pool, run, held, devices) - acquire(at(run, PRESENT)) * SHARE_UNITS


@njit
def least_served_run(pool, held, devices):
    """Return the address of the open run that lacks most of its fair share of threads; 0 if no run can use a worker."""
    seen, found, most = 0, 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_record_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            if can_use_another_worker(run, held > 1):
                missing = missing_thread_share(pool, run, held, devices)
                if found == 0 or missing > most:
                    found, most = address_of(run), missing
    return found


@njit
def run_to_join(pool):
    """Return the address of the run that an idle worker should join, or 0."""
    held = acquire(at(pool, HELD))
    if held > 1 and count_missing_workers(pool) <= 0:
        return 0
    return least_served_run(pool, held, devices_of_active_calls(pool, held) if held > 1 else 0)


@njit
def may_join_next_graph(pool):
    """Return True if an idle worker may be useful for the next graph of an active call."""
    held = acquire(at(pool, HELD))
    return held == 1 or (held > 1 and count_missing_workers(pool) > 0)


@njit
def should_worker_change_run(pool, run):
    """Return True if a worker should leave this run: another run lacks more workers, or too many are active."""
    held = acquire(at(pool, HELD))
    if held <= 1:
        return False
    if count_missing_workers(pool) < 0:
        return True
    devices = devices_of_active_calls(pool, held)
    found = least_served_run(pool, held, devices)
    if found == 0:
        return False
    there = missing_thread_share(pool, words_at(found), held, devices)
    return there > missing_thread_share(pool, run, held, devices) + SHARE_UNITS


@njit
def reserve_participant_number(run, hint):
    """Reserve a participant number of a run, which selects scratch memory; return 0 if all are in use."""
    threads = run[THREADS]
    me = 1 + hint % (threads - 1)
    for _ in range(1, threads):
        bit = 1 << (me % SEAT_BITS)
        if fetch_or(at(run, SEATS + me // SEAT_BITS), bit) & bit == 0:
            fetch_add(at(run, PRESENT), 1)
            return me
        me = me + 1 if me + 1 < threads else 1
    return 0


@njit
def release_participant_number(run, me):
    """Release a participant number of a run."""
    fetch_add(at(run, PRESENT), -1)
    fetch_add(at(run, SEATS + me // SEAT_BITS), -(1 << (me % SEAT_BITS)))
