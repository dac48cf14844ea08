"""Layout of the executor's memory: words of the pool, of runs, commands and participants; operands of commands."""

from __future__ import annotations

from numba import njit

from aotc.kernels.cpu.executor.atomics import address_of_export, pause, stack_words, yield_processor
from aotc.kernels.limits import RUNS
from aotc.vmfb import abi

# Words of the pool. Those of ``abi``; then, each on a cache line of its own:
ALIVE = abi.POOL_ALIVE
EPOCH, SLEEPERS, STOP, HELD, WAKE = range(24, 64, 8)
# How many workers runs wanted in this window and the one before; how many there ever were.
WANTED, WANTED_BEFORE, WINDOW, REFUSED, BORN = range(64, 69)
FIRST_RUN = 72  # where the runs lie, one after the other

# Words of a run: the monitor of its workers and its description; then, apart from each other, what changes.
MONITOR, MONITOR_RUN, MONITOR_POOL, NODE, CALL, CELLS, COUNT, THREADS = range(8)
TAKEN, OPEN, NUMBER, CONTROLS, DEVICES = range(8, 13)  # how many control commands its graph has; of the call
INSIDE, TAIL, DONE, PRESENT = range(16, 48, 8)
SEATS = PRESENT + 1  # a bit for each participant
SEAT_BITS = 32
RUN_WORDS = 80  # an inner run has those before PRESENT
# Who takes part: in a graph of the call; in one of a control command, who claimed that command, and who did not.
MEMBER, OWNER, HELPER = range(3)
POOL_WORDS = FIRST_RUN + RUNS * RUN_WORDS

# Words of a command's cell.
NEXT, FINISHED, PENDING, READY, PACE = range(5)

# Words of a participant: how far it lags behind others, and its number in a run. The caller's are in the call block.
LAG, SEAT = range(2)
PARTICIPANT_WORDS = 2

# Words of its tally: items that it ran of the command that it is at, steals, nanoseconds that it waited, and the time
# since when it does now, or 0.
MINE, STOLEN, WAITED, SINCE, TALLY_WORDS = range(5)
STATE = abi.STATE_WORDS

ALL = 1 << 30
# What a participant is to do: run the nodes of a call or of a control command, or its part in a run.
PART_POOL, PART_RUN, PART_WHO, PART_ROLE, PART_CALL, PART_CODE, PART_LENGTH, PART_MONITOR, PART_THREADS = range(9)
PART_WORDS = 9
CONDITION, BODY, BRANCH = range(3)  # where in a loop or a branch the nodes stand that are run

SECOND = 10**9
call_monitor, worker_monitor = address_of_export("aotc_poll_call"), address_of_export("aotc_poll_worker")
nodes_entry, claims_entry = address_of_export("aotc_run_nodes"), address_of_export("aotc_take_part")
part_words = stack_words(PART_WORDS)
time_words = stack_words(2)
place_words, dim_words = stack_words(abi.MAX_PLACES), stack_words(abi.MAX_DIMS)
run_words = stack_words(RUN_WORDS)
nesting_words = stack_words(3 * abi.MAX_NESTING)
participant_words, tally_words, dice_words = stack_words(PARTICIPANT_WORDS), stack_words(TALLY_WORDS), stack_words(1)


@njit
def operand_value(word, params):
    """Return the value of an operand word: a constant, or a parameter of the call."""
    if word & 1:
        return params[word >> 1]
    return word >> 1


@njit
def buffer_address(command, number, first, slots, params):
    """Return the address of buffer argument ``number`` of a command; ``first`` is the index of the first one's word."""
    at_place = first + abi.PLACE_WORDS * number
    return slots[command[at_place + abi.PLACE_SLOT]] + operand_value(command[at_place + abi.PLACE_OFFSET], params)


# Iterations after which a spinning thread yields its processor, as there may be more threads than cores: half of SPINS.
YIELD_AFTER = 2000


@njit
def spin_or_yield(iterations):
    """Execute one iteration of a wait: a spin hint, or after many ``iterations`` a yield to other threads."""
    if iterations > YIELD_AFTER:
        yield_processor()
    else:
        pause()
