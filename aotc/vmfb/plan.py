"""Plans: recorded calls for known shapes, which later calls replay, and the assertions on data in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.pointers import BYTES, EMPTY, PointerTable, read_scalar


class Unread:
    """Location of an integer in memory whose value is unknown while a plan is recorded; each call reads it."""

    __slots__ = ("dtype", "offset", "slot")

    def __init__(self, slot: int, offset: int, dtype: str) -> None:
        self.slot = slot
        self.offset = offset
        self.dtype = dtype


class Judgement:
    """Deferred assertion on data that a call computes: it fails if the byte at ``condition`` is 0.

    Attributes
    ----------
    after : int
        Number of completed submissions at which it is checked.
    condition : Unread
        The location of the byte.
    """

    __slots__ = ("_message", "_values", "_where", "after", "condition")

    def __init__(
        self, where: str, after: int, condition: Unread, message: str, values: Sequence[int | Unread]
    ) -> None:
        self._where, self._message, self._values = where, message, values
        self.after, self.condition = after, condition

    def failure(self, read: Callable[[int, int, str], int]) -> CallError:
        """Return the error of this failed assertion; ``read(slot, offset, dtype)`` reads the values in its message."""
        from aotc.vmfb.messages import render_message  # only for a failure

        values = [read(v.slot, v.offset, v.dtype) if isinstance(v, Unread) else v for v in self._values]
        return CallError(self._where, render_message(self._message, values))


class Plan:
    """Recorded call of a function for known shapes: its memory, its submissions, its assertions.

    A plain class, for fast start-up (:class:`aotc.vmfb.abi.Record`).

    Attributes
    ----------
    arguments : int
        Number of arguments.
    results : tuple of (tuple of int, dtype)
        Shape and NumPy dtype of each result.
    arena : int
        Bytes of the arena.
    submissions : tuple of (int, tuple of int)
        Number of each submitted command buffer, in order, and its parameters.
    empty : tuple of int
        Arguments and results without elements, numbered as in the pointer table.
    judgements : tuple of Judgement
        In order; :func:`check_assertions` checks them after each submission.
    taken : tuple of (int, int)
        Results that share the memory of a donated argument, each with the argument's number: they are the same array,
        and command buffers use the argument's slot.
    others : tuple of int
        Bytes of the arena in each memory space except the first.
    homes : tuple of int
        The number of the memory space of each argument and result, if there are several.
    """

    __slots__ = (
        "arena", "arguments", "empty", "homes", "judgements", "others", "results", "submissions", "taken",
    )  # fmt: skip

    def __init__(
        self,
        arguments: int,
        results: tuple[tuple[tuple[int, ...], np.dtype], ...],
        arena: int,
        submissions: tuple[tuple[int, tuple[int, ...]], ...],
        empty: tuple[int, ...] = (),
        judgements: tuple[Judgement, ...] = (),
        taken: tuple[tuple[int, int], ...] = (),
        others: tuple[int, ...] = (),
        homes: tuple[int, ...] = (),
    ) -> None:
        self.arguments = arguments
        self.results = results
        self.arena = arena
        self.submissions = submissions
        self.empty = empty
        self.judgements = judgements
        self.taken = taken
        self.others = others
        self.homes = homes

    def slots_of_results(self) -> list[int]:
        """Return the slot of each result in the pointer table.

        A result in an argument's memory has the argument's slot.
        """
        layout, taken = Slots(self.arguments, len(self.results)), dict(self.taken)
        return [taken.get(n, layout.result_slot(n)) for n in range(len(self.results))]

    def assertions_by_submission(self) -> list[tuple[Judgement, ...]]:
        """Return, for each number of completed submissions from 0 on, the assertions to check at that point."""
        stages = range(len(self.submissions) + 1)
        return [tuple(j for j in self.judgements if j.after == stage) for stage in stages]


def check_assertions(judgements: Sequence[Judgement], read: Callable[[int, int, str], int]) -> None:
    """Check assertions in order; ``read(slot, offset, dtype)`` returns an integer in memory.

    Raises
    ------
    CallError
        If an assertion fails.
    """
    for judgement in judgements:
        place = judgement.condition
        if not read(place.slot, place.offset, place.dtype):
            raise judgement.failure(read)


def run_with_assertions(
    calls: Sequence[Callable[[], int]], judged: Sequence[Sequence[Judgement]], slots: PointerTable
) -> CallError | None:
    """Run the native calls of a plan in order, and check the assertions before the first and after each.

    Parameters
    ----------
    calls : sequence of callable
        The native call of each submission.
    judged : sequence of sequence of Judgement
        The result of :meth:`Plan.assertions_by_submission`.
    slots : PointerTable

    Returns
    -------
    CallError or None
        The error of the first failed assertion; later calls do not run.
    """
    failure = _first_failed_assertion(judged[0], slots)
    for call, after in zip(calls, judged[1:]):
        if failure is not None:
            break
        if call():
            raise SystemExit  # the interpreter exits, and this is a daemon thread
        failure = _first_failed_assertion(after, slots)
    return failure


def _first_failed_assertion(judgements: Sequence[Judgement], slots: PointerTable) -> CallError | None:
    """Return the error of the first failed assertion, or None."""
    for judgement in judgements:
        place = judgement.condition
        if not BYTES[slots[place.slot] + place.offset]:
            return judgement.failure(partial(read_scalar, slots))
    return None


def replace_empty_arrays(
    run: Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None], plan: Plan
) -> Callable[[Sequence[np.ndarray], Sequence[np.ndarray]], None]:
    """Wrap ``run(arrays, results)`` so that arrays without elements, which have no address, become :data:`EMPTY`."""

    def call(arrays: Sequence[np.ndarray], results: Sequence[np.ndarray]) -> None:
        every = [*arrays, *results]
        for n in plan.empty:
            every[n] = EMPTY
        run(every[: plan.arguments], every[plan.arguments :])

    return call
