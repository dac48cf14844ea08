"""Submissions: asynchronous calls, which run when the fences that they wait for are settled.

Life cycle: :func:`submit` validates the call, so that errors known in advance are raised to the caller. The submission
counts the fences and results that it waits for and is notified as each is settled or can be read. Then it is ready, and
a dispatcher runs it, or a thread that waits for it in :meth:`~aotc.vmfb.submit.fence.Fence.result` if no dispatcher has
started. A running call is stopped by an exception that
:func:`aotc.vmfb.host.interruption.raise_if_interrupted` raises on its thread.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Collection, Sequence
from contextlib import suppress
from typing import Any

from aotc.vmfb.arguments import Argument, dtype_text, invalidate_donated_arrays
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.errors import ArgumentError, BundleError, CallError, DeadlineExceeded, FenceCancelled
from aotc.vmfb.host.interruption import RUNNING, request_interruption_checks
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.concurrency_limit import lane_for_calls
from aotc.vmfb.submit.deadlines import CLOCK
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Dispatchers, take_from_box
from aotc.vmfb.submit.fence import PART_FIRST_PAUSE, PART_LONGEST_PAUSE, Fence, FenceResult, mark_fast_callback
from aotc.vmfb.submit.memory_order import (
    MemoryAccess,
    OutputRegions,
    Turn,
    accessed_ranges,
    as_owned_by_caller,
    donation_label,
    record_donation,
    register_results,
)
from aotc.vmfb.submit.stream_queue import Lane

# Errors that a call raises by contract. Any other exception is a defect of aotc, or is meant for the thread.
_EXPECTED = (CallError, BundleError, MemoryError)


class Submission(Fence):
    """The fence of a submitted call; see :class:`Fence` for the ways to wait for it."""

    __slots__ = (
        "_call", "_donate", "_early", "_fate", "_generation", "_hidden", "_home", "_lane", "_lent", "_mortal", "_out",
        "_remote", "_rows", "_tokens", "_turn", "_values", "_waits", "_where",
    )  # fmt: skip

    def __init__(self, call: SubmittedCall, values: list[Any], out: Sequence[Any] | None, donate: bool) -> None:
        super().__init__()
        self._call: SubmittedCall | None = call
        self._where, self._rows, self._home = call.where, call.results, call.home
        self._values, self._out, self._donate = values, out, donate
        self._generation = PROCESS.generation
        self._remote = call.remote
        self._lane = lane_for_calls(call.executable, call.limits, call.remote)
        self._hidden = self._remote and _writes_are_hidden(call, values, out, donate)
        self._mortal = False  # does it have a deadline?
        self._early: tuple[SubmittedCall, EarlyResults] | None = None  # while it runs, and after a failure
        self._waits: list[ResultWait] = []  # submissions that wait for one of its results
        self._turn: Turn | None = None
        self._lent: OutputRegions | None = None  # where its results are, if they are in memory of the caller
        self._tokens: list[int] = []  # one for each settled fence still to be notified of; 0 is popped last
        self._fate: dict[int, CallError | None] = {}  # set once: None if the call ended, else why it stops

    # ------------------------------------------------------------ public interface

    @property
    def label(self) -> str:
        """Return text for error messages that names the submitted function."""
        return f"a submission of {self._where}"

    @property
    def results(self) -> tuple[FenceResult, ...]:
        """Return the results, which need not exist yet, for use as arguments of later submissions."""
        rows = [(row["dtype"], tuple(row["dims"]), row.get("device", self._home)) for row in self._rows]
        return tuple([FenceResult(self, n, *row) for n, row in enumerate(rows)])

    def read_result(self, number: int) -> list[Any]:
        """Return result ``number`` in a list, empty if it is not complete yet; the call may still be running.

        Raises
        ------
        CallError or other
            The error that the call failed with, unless the result was complete before.
        """
        early, outcome = self._early, self._outcome
        if early is not None and (outcome is None or outcome[1] is not None):
            call, results = early
            if results.is_ready(number):
                return [call.early_result(results, number)]
        return super().read_result(number)

    def has_result(self, number: int) -> bool:
        """Return True if result ``number`` can be read now; the call may still be running."""
        early, outcome = self._early, self._outcome
        if early is not None and (outcome is None or outcome[1] is not None) and early[1].is_ready(number):
            return True
        return super().has_result(number)

    def wait_for_result(self, number: int, waiter: Submission) -> None:
        """Notify the submission ``waiter`` when result ``number`` can be read, or when this submission is settled."""
        call = self._call
        if call is None or not call.has_early_results:
            self.add_done_callback(waiter.on_fence_settled)
            return
        wait = ResultWait(self, number, waiter)
        self._waits.append(wait)
        self.add_done_callback(wait.finish)
        if self._early is not None:
            wait.begin()

    def end_early_results(self) -> None:
        """Make no further results readable before the call ends, because the call has failed or is being stopped."""
        if self._early is not None:
            self._early[1].freeze()

    def _wait_for_result(self, number: int, timeout: float | None) -> None:
        call = self._call
        if call is None or not call.has_early_results or self._generation != PROCESS.generation:
            self.wait(timeout)
        else:
            super()._wait_for_result(number, timeout)

    def running(self) -> bool:
        """Return True if the call has started and not ended."""
        return self._outcome is None and not self._box

    def signal(self) -> bool:
        """Raise an error: a user cannot settle the fence of a submission, only its call can."""
        raise CallError(self._where, "the fence of a submission is settled by its call", hint="aotc.Fence(), to signal")

    def fail(self, error: BaseException) -> bool:
        """Raise an error: a user cannot settle the fence of a submission, only its call can."""
        raise CallError(self._where, "the fence of a submission is settled by its call", hint="cancel()")

    def cancel(self) -> bool:
        """Cancel the call; return False if it had already ended. A running call ends within milliseconds.

        The call's arguments are unchanged. The fence fails with :class:`~aotc.FenceCancelled` when the call has ended;
        at once if it runs on a GPU, whose kernels end by themselves.
        """
        return self._stop_with(FenceCancelled(self._where, "the submission was cancelled"))

    def _wait(self, timeout: float | None) -> None:
        """Wait until the submission is settled; run it on this thread if it is ready and no dispatcher has started."""
        if self._generation != PROCESS.generation:
            raise fence_of_parent_process_error(self._where, self)
        if timeout is None and not self._tokens and not self._donate and not (self._remote and self._mortal):
            self._run_on_waiting_thread()
        if self._outcome is None:
            super()._wait(timeout)

    def _on_awaiter_cancelled(self) -> None:
        self.cancel()

    # ------------------------------------------------------------ cancellation and deadlines

    def expire(self) -> None:
        """Stop the call, because its deadline has passed."""
        self._stop_with(DeadlineExceeded(self._where, "the deadline of the submission passed before it was done"))

    def stop(self, error: CallError) -> None:
        """Stop the running call with ``error`` as its result."""
        self._stop_with(error)

    @property
    def stopped(self) -> CallError | None:
        """Return the error that stops the call, or None."""
        return self._fate.get(0)

    def _stop_with(self, error: CallError) -> bool:
        """Stop the call with ``error``; return False if the call had already ended."""
        fate = self._fate.setdefault(0, error)
        if fate is error:
            self.end_early_results()
            if take_from_box(self._box) is not None:  # no thread has started
                self._finish((), error)
            else:
                request_interruption_checks()
                if self._hidden:
                    self._fail_before_end(error)
        return fate is not None

    def _fail_before_end(self, error: CallError) -> None:
        """Fail the fence while GPUs finish work in progress; the thread of the call waits for them and frees arrays."""
        turn = self._turn
        if turn is not None:
            turn.remove()
        self._resolve_all((), error)

    # ------------------------------------------------------------ waiting for fences

    def start_when(
        self, fences: Collection[Fence], before: Collection[Fence], results: Collection[FenceResult]
    ) -> None:
        """Make the submission ready when all fences are settled and all results can be read.

        The submission fails if one of ``fences`` fails, or a call fails before its result is complete. Failures of the
        submissions ``before`` do not matter: they only order.
        """
        needed = [f for f in dict.fromkeys(fences) if f._outcome is None or f._root is not None] if fences else []
        others = [f for f in dict.fromkeys(before) if f._outcome is None] if before else []
        parts = {(id(r.fence), r.number): r for r in results if not r.ready()}
        if not needed and not others and not parts:
            self._enqueue()
            return
        self._tokens.extend(range(len(needed) + len(others) + len(parts) + 1))  # the last one belongs to this function
        for fence in needed:
            fence.add_done_callback(self.on_fence_settled)
        for part in parts.values():
            submission: Any = part.fence
            submission.wait_for_result(part.number, self)
        for fence in others:
            fence.add_done_callback(self.on_precondition_done)
        if self._tokens.pop() == 0:
            self._enqueue()

    @mark_fast_callback
    def on_fence_settled(self, fence: Fence) -> None:
        """Callback of a fence that this submission waits for: fail with it, or count it as done."""
        if fence._root is not None:
            if take_from_box(self._box) is not None:
                self._root = fence._root
                self._finish((), _consequent_failure(self._where, fence._root))
            return
        self.on_precondition_done(fence)

    @mark_fast_callback
    def on_precondition_done(self, _: Fence) -> None:
        """Count a finished precondition, a readable result or the end of an earlier access.

        After the last one, enqueue.
        """
        if self._tokens.pop() == 0:
            self._enqueue()

    def output_regions(self, result: int, writes: bool) -> list[MemoryAccess]:
        """Return the caller's memory that a submission accesses if it has result ``result`` as an argument."""
        regions = self._lent
        return [] if regions is None else regions.accesses_of_reader(result, writes)

    @property
    def _queue(self) -> Lane | Dispatchers:
        return self._lane or PROCESS.dispatchers

    def _enqueue(self) -> None:
        if self._generation == PROCESS.generation:
            self._queue.enqueue(self._box)
        elif take_from_box(self._box) is not None:
            self._finish((), fence_of_parent_process_error(self._where, self))

    # ------------------------------------------------------------ running

    def run(self) -> None:
        """Run the call on a dispatcher that has popped this submission from its box; errors settle the fence."""
        results: tuple[Any, ...] = ()
        failed: BaseException | None = None
        try:
            results = tuple(self._run())
        except BaseException as error:
            ends = isinstance(error, SystemExit)  # the executor aborts all calls
            failed = CallError(self._where, "the interpreter ends") if ends else error
        PROCESS.dispatchers.finish_task(self._finish, results, failed)

    def _run_on_waiting_thread(self) -> None:
        """Run the call on this thread if it is ready. Exceptions meant for the thread, such as Ctrl-C, propagate."""
        box, queue = self._box, self._queue
        if take_from_box(box) is None:
            return
        queue.remove_box(box)
        if not queue.may_run_on_waiting_thread():
            box.append(self)
            queue.enqueue(box)
            return
        made: list[Any] = []
        error = None
        try:
            made = self._run()
        except _EXPECTED as found:
            error = found
        except BaseException:
            box.append(self)  # the call has written nothing but results: it can start again
            queue.enqueue(box)
            raise
        finally:
            queue.waiting_thread_finished()
        self._finish(tuple(made), error)

    def _run(self) -> list[Any]:
        """Run the call, with this submission registered as the one that the thread runs; return the results."""
        call, me = self._call, get_ident()
        assert call is not None
        outer = RUNNING.get(me)
        RUNNING[me] = self
        try:
            stopped = self._fate.get(0)
            if stopped is not None:
                raise stopped
            values = [v.read() if type(v) is FenceResult else v for v in self._values]
            if self._donate:
                _record_donated(call, values)
            early = EarlyResults() if call.has_early_results else None
            self._early = None if early is None else (call, early)
            for wait in self._waits:
                wait.begin()
            made = call.run(values, self._out, self._donate, early)
        finally:
            if outer is None:
                RUNNING.pop(me, None)
            else:
                RUNNING[me] = outer
        return [as_owned_by_caller(x) for x in made] if self._donate else made

    def _finish(self, results: tuple[Any, ...], error: BaseException | None) -> None:
        """Settle the fence with results or an error, and release all references to arguments."""
        if self._turn is not None:
            self._turn.remove()  # only now: results are placed while it is in the order
        self._call = self._out = self._turn = None
        self._values, self._waits = [], []
        error = self._fate.setdefault(0, None) or error
        if error is not None:
            results = ()
        if isinstance(error, _EXPECTED):
            error.__traceback__ = None  # its frames hold the arguments
        if error is not None:
            self.end_early_results()
        self._placed = results
        register_results(self, results)
        if self._outcome is None:  # else the fence was settled while the call was running
            self._resolve_all(results, error)
        if error is None:
            self._early = None

    def register_argument(self, key: Any, fence: Fence, number: int, value: Any) -> None:
        """Record that the argument which is result ``number`` of ``fence`` now exists as ``value``.

        Its memory is registered under ``key`` in :mod:`.memory_order`.
        """
        turn, call = self._turn, self._call
        if turn is None or call is None:
            return
        turn.add_key(key)
        if isinstance(value, DeviceArray):  # it may be donated before this submission runs
            for n, (a, v) in enumerate(zip(call.arguments, self._values)):
                is_it = type(v) is FenceResult and v.fence is fence and v.number == number
                if is_it and not (self._donate and a.donated):
                    self._values[n] = value.reader()


class ResultWait:
    """Lets a submission wait for a single result of a running call, by polling, because the call does not notify.

    Parameters
    ----------
    fence : Submission
        The call, which notifies when it ends.
    number : int
        Number of the result.
    waiter : Submission
    """

    __slots__ = ("__weakref__", "_box", "_fence", "_number", "_pause", "_starts")

    def __init__(self, fence: Submission, number: int, waiter: Submission) -> None:
        self._fence, self._number, self._pause = fence, number, PART_FIRST_PAUSE
        self._box = [waiter]  # the thread that pops it notifies the waiter
        self._starts = [True]

    @property
    def done(self) -> bool:
        """Return True if the waiter has been notified."""
        return not self._box

    def begin(self) -> None:
        """Start to poll, because the call has started."""
        if take_from_box(self._starts) is not None:
            with suppress(CallError):  # without a thread that polls, the waiter is notified when the call ends
                CLOCK.add_deadline(self._pause, self)

    def expire(self) -> None:
        """Poll the result, and schedule the next poll."""
        if self._box and self._fence.has_result(self._number):
            self.finish(self._fence)
        elif self._box and not self._fence.done:
            self._pause = min(2 * self._pause, PART_LONGEST_PAUSE)
            CLOCK.add_deadline(self._pause, self)

    @mark_fast_callback
    def finish(self, fence: Fence) -> None:
        """Notify the waiter that the result can be read, or that the call has ended."""
        waiter = take_from_box(self._box)
        if waiter is not None:
            (waiter.on_precondition_done if fence.has_result(self._number) else waiter.on_fence_settled)(fence)


def _writes_are_hidden(call: SubmittedCall, values: Sequence[Any], out: Sequence[Any] | None, donate: bool) -> bool:
    """Return True if nobody but this call's caller can see its writes: new arrays, or arguments donated on a GPU."""
    given = [v for v, a in zip(values, call.arguments) if donate and a.donated]
    return out is None and all(isinstance(v, DeviceArray) and v.ordinal >= 0 for v in given)


def fence_of_parent_process_error(where: str, fence: Fence) -> CallError:
    """Return the error for a fence of the parent process, which a forked child cannot wait for."""
    return CallError(where, f"{fence.label} belongs to the process before a fork, which runs it", hint="submit it here")


def _consequent_failure(where: str, root: tuple[str, BaseException]) -> CallError:
    label, error = root
    first = str(error).partition("\n")[0]
    failed = CallError(where, f"it waits for {label}, which failed: {type(error).__name__}: {first}")
    failed.__cause__ = error
    return failed


# ---------------------------------------------------------------- validation at submission


def submit(
    call: SubmittedCall, values: Sequence[Any], wait: Any, deadline: Any, donate: bool, out: Sequence[Any] | None
) -> Submission:
    """Submit a call; the parameters are those of :meth:`aotc.vmfb.module.LoadedModule.submit`."""
    where = call.where
    fences = [] if wait == () else _checked_fences(where, wait)
    seconds = call.limits.timeout_of_call(where, deadline)
    if len(values) != len(call.arguments):
        expected = f"{len(call.arguments)}: {', '.join(map(str, call.arguments))}"
        raise ArgumentError(where, "wrong number of arguments", len(values), expected)
    donated: Sequence[Any] = values
    if any(isinstance(v, Fence) for v in values):
        donated = [_single_result(where, a, v) if isinstance(v, Fence) else v for a, v in zip(call.arguments, values)]
    taken = [a.donated for a in call.arguments] if donate else [False] * len(donated)
    prepared = [_prepared_argument(where, a, v, t) for a, v, t in zip(call.arguments, donated, taken)]
    if out is not None and (not isinstance(out, list | tuple) or len(out) != len(call.results)):
        found = len(out) if isinstance(out, list | tuple) else type(out).__name__
        expected = f"{len(call.results)}, None where none is given"
        raise ArgumentError(where, "out is not a list of buffers", found, expected)
    made = Submission(call, prepared, out, donate)
    coming = [v for v in prepared if type(v) is FenceResult]
    made._turn = turn = Turn()
    buffers, late = _out_buffers(where, out), [0]
    while late:  # results may be created meanwhile and were then placed without this submission
        touches, made._lent = accessed_ranges(turn.number, prepared, taken, buffers)
        needed, before = turn.register_accesses(made, touches)
        late = [n for n, v in enumerate(prepared) if type(v) is FenceResult and v.fence._placed] if coming else []
        if late:
            turn.remove()
        for n in late:
            value = prepared[n].fence._placed[prepared[n].number]
            prepared[n] = _prepared_argument(where, call.arguments[n], value, taken[n])
    try:
        PROCESS.dispatchers.ensure_thread()
        if seconds is not None:
            made._mortal = True
            CLOCK.add_deadline(seconds, made)
    except CallError:
        turn.remove()
        raise
    if donate:
        _record_donated(call, donated)
        _record_donated(call, prepared)
        invalidate_donated_arrays(call.arguments, prepared, prepared, donate, now=False)
    whole = [v.fence for v, t in zip(prepared, taken) if t and type(v) is FenceResult]  # a call still reads its results
    made.start_when(fences + whole + needed, before, coming)
    return made


def _out_buffers(where: str, out: Sequence[Any] | None) -> list[Any]:
    """Import the ``out=`` array of each result, None for results without one; refuse donated arrays."""
    if out is None:
        return []
    from aotc.vmfb.devices.cuda.foreign import import_output_buffer  # imported only for calls with ``out=``
    buffers = [import_output_buffer(x) for x in out]
    for n, (x, buffer) in enumerate(zip(out, buffers)):
        label = donation_label(x) or donation_label(buffer)
        if label:
            what, hint = f"out[{n}] was given to {label} with donate=True", "the result that is in its memory"
            raise CallError(where, what, expected="an array that is the caller's", hint=hint)
    return buffers


def _record_donated(call: SubmittedCall, values: Sequence[Any]) -> None:
    """Record which arguments this call donates, including arrays that are results of fences."""
    for argument, value in zip(call.arguments, values):
        if argument.donated:
            record_donation(value, call.where)


def _checked_fences(where: str, wait: Any) -> list[Fence]:
    """Check the option ``wait=``: a list of fences, each of which can still be settled in this process."""
    if not isinstance(wait, list | tuple) or not all(isinstance(f, Fence) for f in wait):
        raise ArgumentError(
            where, "wait is not a list of fences", repr(wait)[:80], "fences that submit or aotc.Fence() made"
        )
    for fence in wait:
        _check_fence(where, fence)
    return list(wait)


def _check_fence(where: str, fence: Fence) -> None:
    """Refuse a fence that has failed or can never be settled in this process."""
    if fence._root is not None:
        raise _consequent_failure(where, fence._root)
    if isinstance(fence, Submission) and not fence.done and fence._generation != PROCESS.generation:
        raise fence_of_parent_process_error(where, fence)


def _single_result(where: str, argument: Argument, fence: Fence) -> FenceResult:
    """Return the only result of a fence that was passed as an argument; an error if it has several."""
    results = fence.results
    if len(results) != 1:
        hint = "fence[0], fence[1]..." if results else "wait=[fence]"
        what = f"{argument.label} is a fence with {len(results)} results"
        raise ArgumentError(where, what, expected="one result", hint=hint)
    return results[0]


def _prepared_argument(where: str, argument: Argument, value: Any, is_taken: bool) -> Any:
    """Convert an argument to an array, or keep it as a future result; check dtype and shape as far as they are known.

    ``is_taken`` is True if the call overwrites the argument.
    """
    label = donation_label(value)
    if label:
        what = f"{argument.label} was given to {label} with donate=True"
        raise CallError(where, what, expected="an array that is the caller's", hint="the result that is in its memory")
    if not isinstance(value, FenceResult):
        value = argument.import_foreign_array(value, where)
    if isinstance(value, DeviceArray):  # passed to the call without a copy
        argument.check_not_donated(value, where)
        argument.check_type(dtype_text(value.dtype), value.shape, where)
        return value if is_taken else value.reader()
    if not isinstance(value, FenceResult):
        return argument.prepare(value, where)
    if not value.ready():
        _check_fence(where, value.fence)
    elif value.fence.done:
        return _prepared_argument(where, argument, value.read(), is_taken)
    argument.check_type(value.dtype, value.dims, where)
    return value
