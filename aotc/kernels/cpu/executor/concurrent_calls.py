"""How calls that run at the same time share the workers.

A call takes one of the pool's *runs* with its first graph that several threads can share, and keeps it until it ends. A
worker joins the open run that has the fewest workers, and leaves one between two claims when another has two fewer; so
no call has more than one worker more than another that could use it. Where calls are on different logical devices, each
device that has calls has as much of the cores as the others, a call its part of the devices that it is on, and workers
go where most is missing: what a device does not use is lent, and it has it back after a claim. Callers are threads as
well: the more calls, the fewer workers take part, so that there are never more threads at work than cores. Counts may
be out of date by the time they are used: then a worker is where it is not needed most until it looks again.
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
def run_at(pool, number):
    """Return a run by its number."""
    return at(pool, FIRST_RUN + number * RUN_WORDS)


@njit
def wake(pool, workers):
    """Wake up to ``workers`` sleeping workers."""
    if workers > 0 and fetch_add(at(pool, SLEEPERS), 0) > 0:
        fetch_add(at(pool, WAKE), 1)
        futex(at(pool, WAKE), FUTEX_WAKE_PRIVATE, workers, words_at(0))


@njit
def take_run(pool, call, threads):
    """Reserve a run record for this call; return its address, or 0 if all are in use."""
    for number in range(RUNS):
        run = run_at(pool, number)
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
def give_run(pool, run):
    """Release a run record and its workers for other calls."""
    release(at(run, TAKEN), 0)
    if fetch_add(at(pool, HELD), -1) > 1:
        fetch_add(at(pool, EPOCH), 1)
        wake(pool, run[THREADS])


@njit
def count_workers(pool):
    """Return how many workers all active calls could use, and how many they have.

    They could use as many threads as they ask for, or as there may be.
    """
    held = acquire(at(pool, HELD))
    seen, parameters, most, present = 0, 0, 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            threads = acquire(at(run, THREADS))
            parameters += threads
            most = max(most, threads)
            present += acquire(at(run, PRESENT))
    return min(parameters, max(most, pool[POOL_CORES])) - seen, present


@njit
def most_useful_workers(pool):
    """Return the largest number of workers that a single active call could use."""
    held = acquire(at(pool, HELD))
    seen, most = 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            most = max(most, acquire(at(run, THREADS)) - 1)
    return most


@njit
def missing_workers(pool):
    """Return how many more workers the active calls could use; negative if there are too many."""
    wanted, present = count_workers(pool)
    return wanted - present


@njit
def has_room(run, several):
    """Return True if one more worker could help this run."""
    if acquire(at(run, OPEN)) == 0 or acquire(at(run, PRESENT)) >= acquire(at(run, THREADS)) - 1:
        return False
    return not several or acquire(at(run, DONE)) < run[COUNT]


@njit
def devices_in_use(pool, held):
    """Return the bit set of logical devices of all active calls; 0 if they all use the same ones."""
    seen, every, same = 0, 0, True
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            same = same and (seen == 0 or run[DEVICES] == every)
            every |= run[DEVICES]
            seen += 1
    return 0 if same else every


@njit
def calls_on(pool, held, device):
    """Return the number of active calls on a logical device, given by its bit."""
    seen, count = 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            count += 1 if run[DEVICES] & device else 0
    return count


@njit
def share_of(pool, run, held, devices):
    """Return the number of threads a call is entitled to, in :data:`SHARE_UNITS`; 0 if all devices are equal.

    Each of ``devices`` has equally many, and divides them among its calls.
    """
    parts, share = 0, 0
    while devices != 0:
        device = devices & -devices
        devices ^= device
        parts += 1
        if run[DEVICES] & device:
            share += pool[POOL_CORES] * SHARE_UNITS // max(calls_on(pool, held, device), 1)
    return share // parts if parts > 0 else 0


@njit
def missing_in(pool, run, held, devices):
    """Return how many workers a run lacks to its fair share, in :data:`SHARE_UNITS`, up to a common constant."""
    return share_of(pool, run, held, devices) - acquire(at(run, PRESENT)) * SHARE_UNITS


@njit
def least_served(pool, held, devices):
    """Return the address of the open run that lacks most workers to its fair share, or 0."""
    seen, found, most = 0, 0, 0
    for number in range(RUNS):
        if seen >= held:
            break
        run = run_at(pool, number)
        if acquire(at(run, TAKEN)) != 0:
            seen += 1
            if has_room(run, held > 1):
                missing = missing_in(pool, run, held, devices)
                if found == 0 or missing > most:
                    found, most = address_of(run), missing
    return found


@njit
def run_to_join(pool):
    """Return the address of the run that an idle worker should join, or 0."""
    held = acquire(at(pool, HELD))
    if held > 1 and missing_workers(pool) <= 0:
        return 0
    return least_served(pool, held, devices_in_use(pool, held) if held > 1 else 0)


@njit
def is_hoped_for(pool):
    """Return True if the next graph of some active call could use one more worker."""
    held = acquire(at(pool, HELD))
    return held == 1 or (held > 1 and missing_workers(pool) > 0)


@njit
def is_needed_elsewhere(pool, run):
    """Return True if a worker should leave this run for another one, or because too many work."""
    held = acquire(at(pool, HELD))
    if held <= 1:
        return False
    if missing_workers(pool) < 0:
        return True
    devices = devices_in_use(pool, held)
    found = least_served(pool, held, devices)
    if found == 0:
        return False
    return missing_in(pool, words_at(found), held, devices) > missing_in(pool, run, held, devices) + SHARE_UNITS


@njit
def take_seat(run, hint):
    """Reserve a participant number, which selects scratch memory; return 0 if all are taken."""
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
def give_seat(run, me):
    """Release a participant number."""
    fetch_add(at(run, PRESENT), -1)
    fetch_add(at(run, SEATS + me // SEAT_BITS), -(1 << (me % SEAT_BITS)))
