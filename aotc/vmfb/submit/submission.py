"""Submissions: calls that run when what they wait for is done.

The way of one: :func:`submit` checks it, so that what can be known is said to the caller; it counts what it waits for
and is told as each is settled; then it is ready, and a dispatcher runs it, or whoever waits for it in
:meth:`~aotc.vmfb.submit.fence.Fence.result`, if no dispatcher has begun. A call under way is stopped by what
:func:`aotc.vmfb.host.interruption.notice` raises on its thread.
"""

from __future__ import annotations

from _thread import get_ident
from collections.abc import Collection, Sequence
from typing import Any

from aotc.vmfb.arguments import Argument, dtype_text, take_over
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.errors import BundleError, DeadlineExceeded, FenceCancelled, VmError
from aotc.vmfb.host.interruption import RUNNING, ask
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.deadlines import CLOCK
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Dispatchers, take
from aotc.vmfb.submit.fence import Fence, FenceResult, quick
from aotc.vmfb.submit.limited import queue_of
from aotc.vmfb.submit.memory_order import Lies, Touch, Turn, give_away, place, still_owned, taker, touched
from aotc.vmfb.submit.stream_queue import Lane

# Errors that a call raises by contract. Any other exception is a defect of aotc, or is meant for the thread.
_EXPECTED = (VmError, BundleError, MemoryError)


class Submission(Fence):
    """The fence of a call that was submitted; see :class:`Fence` for how to wait for it."""

    __slots__ = (
        "_call", "_donate", "_early", "_fate", "_generation", "_hidden", "_home", "_lane", "_lies", "_mortal", "_out",
        "_remote", "_rows", "_tokens", "_turn", "_values", "_where",
    )  # fmt: skip

    def __init__(self, call: SubmittedCall, values: list[Any], out: Sequence[Any] | None, donate: bool) -> None:
        super().__init__()
        self._call: SubmittedCall | None = call
        self._where, self._rows, self._home = call.where, call.results, call.home
        self._values, self._out, self._donate = values, out, donate
        self._generation = PROCESS.generation
        self._remote = call.remote
        self._lane = queue_of(call)
        self._hidden = self._remote and _writes_are_hidden(call, values, out, donate)
        self._mortal = False  # has it a deadline?
        self._early: tuple[SubmittedCall, EarlyResults] | None = None  # while it runs, and if it failed
        self._turn: Turn | None = None
        self._lies: Lies | None = None  # where its results lie, if that is memory of the caller's
        self._tokens: list[int] = []  # one for each settled fence that is still to be heard of; 0 goes last
        self._fate: dict[int, VmError | None] = {}  # set once: None by the end of the call, else why it is to end

    # ------------------------------------------------------------ for the user

    @property
    def label(self) -> str:
        """Return what it is, for messages."""
        return f"a submission of {self._where}"

    @property
    def results(self) -> tuple[FenceResult, ...]:
        """Return the results, which may not exist yet: arguments of later submissions."""
        rows = [(row["dtype"], tuple(row["dims"]), row.get("device", self._home)) for row in self._rows]
        return tuple([FenceResult(self, n, *row) for n, row in enumerate(rows)])

    def part(self, number: int) -> list[Any]:
        """Return one result in a list, which is empty if it is not whole yet; the call may go on.

        Raises
        ------
        VmError or other
            The error that the call failed with, unless the result was whole before.
        """
        early, outcome = self._early, self._outcome
        if early is not None and (outcome is None or outcome[1] is not None):
            call, results = early
            if results.is_ready(number):
                return [call.early_result(results, number)]
        return super().part(number)

    def end_early_results(self) -> None:
        """Let no more results become whole before the call ends: it fails, or is to end."""
        if self._early is not None:
            self._early[1].freeze()

    def _wait_for_part(self, number: int, timeout: float | None) -> None:
        call = self._call
        if call is None or not call.has_early_results or self._generation != PROCESS.generation:
            self.wait(timeout)
        else:
            super()._wait_for_part(number, timeout)

    def signal(self) -> bool:
        """Refuse: the call settles it."""
        raise VmError(self._where, "the fence of a submission is settled by its call", hint="aotc.Fence(), to signal")

    def fail(self, error: BaseException) -> bool:
        """Refuse: the call settles it."""
        raise VmError(self._where, "the fence of a submission is settled by its call", hint="cancel()")

    def cancel(self) -> bool:
        """Cancel the call, also one under way, which then ends within milliseconds; its arguments are as they were.

        The fence fails with :class:`~aotc.FenceCancelled`, when the call has ended; at once if it is on a GPU, whose
        kernels end by themselves. Return False if it was done before.
        """
        return self._stop_with(FenceCancelled(self._where, "the submission was cancelled"))

    def _wait(self, timeout: float | None) -> None:
        """Wait until it is done; run it on this thread if it is ready and nobody has begun."""
        if self._generation != PROCESS.generation:
            raise foreign(self._where, self)
        if timeout is None and not self._tokens and not self._donate and not (self._remote and self._mortal):
            self._help()
        if self._outcome is None:
            super()._wait(timeout)

    def _abandon(self) -> None:
        self.cancel()

    # ------------------------------------------------------------ how it ends early

    def expire(self) -> None:
        """The deadline has passed."""
        self._stop_with(DeadlineExceeded(self._where, "the deadline of the submission passed before it was done"))

    def stop(self, error: VmError) -> None:
        """End the call under way, as nobody waits for it."""
        self._stop_with(error)

    @property
    def stopped(self) -> VmError | None:
        """Return why the call is to end, or None."""
        return self._fate.get(0)

    def _stop_with(self, error: VmError) -> bool:
        fate = self._fate.setdefault(0, error)
        if fate is error:
            self.end_early_results()
            if take(self._box) is not None:  # nobody has begun
                self._end((), error)
            else:
                ask()
                if self._hidden:
                    self._leave_behind(error)
        return fate is not None

    def _leave_behind(self, error: VmError) -> None:
        """Fail, while what GPUs have begun goes on: the thread that runs the call waits for it, and frees arrays."""
        turn = self._turn
        if turn is not None:
            turn.leave()
        self._settle((), error)

    # ------------------------------------------------------------ how it becomes ready

    def start_when(self, fences: Collection[Fence], before: Collection[Fence]) -> None:
        """Become ready when all fences are settled; if one of the first fails, so does this one."""
        needed = [f for f in dict.fromkeys(fences) if f._outcome is None or f._root is not None] if fences else []
        others = [f for f in dict.fromkeys(before) if f._outcome is None] if before else []
        if not needed and not others:
            self._post()
            return
        self._tokens.extend(range(len(needed) + len(others) + 1))  # the last is this function's
        for fence in needed:
            fence.add_done_callback(self._hear)
        for fence in others:
            fence.add_done_callback(self._pass)
        if self._tokens.pop() == 0:
            self._post()

    @quick
    def _hear(self, fence: Fence) -> None:
        """A fence that this one waits for is settled."""
        if fence._root is not None:
            if take(self._box) is not None:
                self._root = fence._root
                self._end((), _consequence(self._where, fence._root))
            return
        self._pass(fence)

    @quick
    def _pass(self, _: Fence) -> None:
        """Memory that this one writes to is no longer touched."""
        if self._tokens.pop() == 0:
            self._post()

    def lies_of(self, result: int, writes: bool) -> list[Touch]:
        """Return what memory of the caller's who is given this result touches, too."""
        lies = self._lies
        return [] if lies is None else lies.touches(result, writes)

    @property
    def _queue(self) -> Lane | Dispatchers:
        return self._lane or PROCESS.dispatchers

    def _post(self) -> None:
        if self._generation == PROCESS.generation:
            self._queue.post(self._box)
        elif take(self._box) is not None:
            self._end((), foreign(self._where, self))

    # ------------------------------------------------------------ how it runs

    def run(self) -> None:
        """Run the call, for whoever took this out of its box; every error is the fence's."""
        results: tuple[Any, ...] = ()
        failed: BaseException | None = None
        try:
            results = tuple(self._made())
        except BaseException as error:
            ends = isinstance(error, SystemExit)  # the executor stops all calls
            failed = VmError(self._where, "the interpreter ends") if ends else error
        PROCESS.dispatchers.settle(self._end, results, failed)

    def _help(self) -> None:
        """Run the call on this thread if it is ready; what is meant for the thread, as Ctrl-C, is not for the call."""
        box, queue = self._box, self._queue
        if take(box) is None:
            return
        queue.withdraw(box)
        if not queue.admit():
            box.append(self)
            queue.post(box)
            return
        made: list[Any] = []
        error = None
        try:
            made = self._made()
        except _EXPECTED as found:
            error = found
        except BaseException:
            box.append(self)  # it has written nothing but results, and begins again
            queue.post(box)
            raise
        finally:
            queue.release()
        self._end(tuple(made), error)

    def _made(self) -> list[Any]:
        """Make the call."""
        call, me = self._call, get_ident()
        assert call is not None
        outer = RUNNING.get(me)
        RUNNING[me] = self
        try:
            stopped = self._fate.get(0)
            if stopped is not None:
                raise stopped
            values = [v.fence.result()[v.number] if type(v) is FenceResult else v for v in self._values]
            if self._donate:
                _note_given(call, values)
            early = EarlyResults() if call.has_early_results else None
            self._early = None if early is None else (call, early)
            made = call.run(values, self._out, self._donate, early)
        finally:
            if outer is None:
                RUNNING.pop(me, None)
            else:
                RUNNING[me] = outer
        return [still_owned(x) for x in made] if self._donate else made

    def _end(self, results: tuple[Any, ...], error: BaseException | None) -> None:
        if self._turn is not None:
            self._turn.leave()  # it is there until then: results are placed meanwhile
        self._call = self._out = self._turn = None
        self._values = []
        error = self._fate.setdefault(0, None) or error
        if error is not None:
            results = ()
        if isinstance(error, _EXPECTED):
            error.__traceback__ = None  # its frames hold the arguments
        if error is not None:
            self.end_early_results()
        self._placed = results
        place(self, results)
        if self._outcome is None:  # else nobody waited for its end
            self._settle(results, error)
        if error is None:
            self._early = None

    def follow(self, key: Any, fence: Fence, number: int, value: Any) -> None:
        """Note that an argument is there, ``value``, in memory that is found under this key by :mod:`.memory_order`."""
        turn, call = self._turn, self._call
        if turn is None or call is None:
            return
        turn.follow(key)
        if isinstance(value, DeviceArray):  # which may be given away before this one runs
            for n, (a, v) in enumerate(zip(call.arguments, self._values)):
                is_it = type(v) is FenceResult and v.fence is fence and v.number == number
                if is_it and not (self._donate and a.donated):
                    self._values[n] = value.reader()


def _writes_are_hidden(call: SubmittedCall, values: Sequence[Any], out: Sequence[Any] | None, donate: bool) -> bool:
    """Does the call write nothing that anybody else can look at: what is given away on a GPU, and its own?"""
    given = [v for v, a in zip(values, call.arguments) if donate and a.donated]
    return out is None and all(isinstance(v, DeviceArray) and v.ordinal >= 0 for v in given)


def foreign(where: str, fence: Fence) -> VmError:
    """Return the error for a fence of the process that this one was forked from."""
    return VmError(where, f"{fence.label} belongs to the process before a fork, which runs it", hint="submit it here")


def _consequence(where: str, root: tuple[str, BaseException]) -> VmError:
    label, error = root
    first = str(error).partition("\n")[0]
    failed = VmError(where, f"it waits for {label}, which failed: {type(error).__name__}: {first}")
    failed.__cause__ = error
    return failed


# ---------------------------------------------------------------- what is checked at once


def submit(
    call: SubmittedCall, values: Sequence[Any], wait: Any, deadline: Any, donate: bool, out: Sequence[Any] | None
) -> Submission:
    """Submit a call; the parameters are those of :meth:`aotc.vmfb.module.LoadedModule.submit`."""
    where = call.where
    fences = [] if wait == () else _checked_fences(where, wait)
    seconds = call.limits.deadline(where, deadline)
    if len(values) != len(call.arguments):
        expected = f"{len(call.arguments)}: {', '.join(map(str, call.arguments))}"
        raise VmError(where, "wrong number of arguments", len(values), expected)
    given: Sequence[Any] = values
    if any(isinstance(v, Fence) for v in values):
        given = [_single(where, a, v) if isinstance(v, Fence) else v for a, v in zip(call.arguments, values)]
    taken = [a.donated for a in call.arguments] if donate else [False] * len(given)
    prepared = [_prepared(where, a, v, t) for a, v, t in zip(call.arguments, given, taken)]
    if out is not None and (not isinstance(out, list | tuple) or len(out) != len(call.results)):
        found = len(out) if isinstance(out, list | tuple) else type(out).__name__
        raise VmError(where, "out is no list of buffers", found, f"{len(call.results)}, None where none is given")
    made = Submission(call, prepared, out, donate)
    coming = [v.fence for v in prepared if type(v) is FenceResult]
    made._turn = turn = Turn()
    buffers, late = _buffers(where, out), [0]
    while late:  # results may be made meanwhile, and were placed without this one
        touches, made._lies = touched(turn.number, prepared, taken, buffers)
        needed, before = turn.enter(made, touches)
        late = [n for n, v in enumerate(prepared) if type(v) is FenceResult and v.fence._placed] if coming else []
        if late:
            turn.leave()
        for n in late:
            value = prepared[n].fence._placed[prepared[n].number]
            prepared[n] = _prepared(where, call.arguments[n], value, taken[n])
    try:
        PROCESS.dispatchers.have_one()
        if seconds is not None:
            made._mortal = True
            CLOCK.add(seconds, made)
    except VmError:
        turn.leave()
        raise
    if donate:
        _note_given(call, given)
        _note_given(call, prepared)
        take_over(call.arguments, prepared, prepared, donate, now=False)
    made.start_when(fences + coming + needed, before)
    return made


def _buffers(where: str, out: Sequence[Any] | None) -> list[Any]:
    """Return the arrays that results are to be written to, None for those without one; none was given away."""
    if out is None:
        return []
    from aotc.vmfb.devices.interop.foreign import buffer_of  # for those who have such arrays
    buffers = [buffer_of(x) for x in out]
    for n, (x, buffer) in enumerate(zip(out, buffers)):
        label = taker(x) or taker(buffer)
        if label:
            what, hint = f"out[{n}] was given to {label} with donate=True", "the result that is in its memory"
            raise VmError(where, what, expected="an array that is the caller's", hint=hint)
    return buffers


def _note_given(call: SubmittedCall, values: Sequence[Any]) -> None:
    """Note which of these the caller has given away: also the array that a result of a fence is, once there is one."""
    for argument, value in zip(call.arguments, values):
        if argument.donated:
            give_away(value, call.where)


def _checked_fences(where: str, wait: Any) -> list[Fence]:
    if not isinstance(wait, list | tuple) or not all(isinstance(f, Fence) for f in wait):
        raise VmError(where, "wait is no list of fences", repr(wait)[:80], "fences that submit or aotc.Fence() made")
    for fence in wait:
        _check_fence(where, fence)
    return list(wait)


def _check_fence(where: str, fence: Fence) -> None:
    """Refuse a fence that can never let a submission run."""
    if fence._root is not None:
        raise _consequence(where, fence._root)
    if isinstance(fence, Submission) and not fence.done and fence._generation != PROCESS.generation:
        raise foreign(where, fence)


def _single(where: str, argument: Argument, fence: Fence) -> FenceResult:
    """Return the only result of a fence that was given for an argument."""
    results = fence.results
    if len(results) != 1:
        hint = "fence[0], fence[1]..." if results else "wait=[fence]"
        what = f"{argument.label} is a fence with {len(results)} results"
        raise VmError(where, what, expected="one result", hint=hint)
    return results[0]


def _prepared(where: str, argument: Argument, value: Any, is_taken: bool) -> Any:
    """Return an argument as an array, or as the result that it will be; what is known of it fits."""
    label = taker(value)
    if label:
        what = f"{argument.label} was given to {label} with donate=True"
        raise VmError(where, what, expected="an array that is the caller's", hint="the result that is in its memory")
    if not isinstance(value, FenceResult):
        value = argument.as_ours(value, where)
    if isinstance(value, DeviceArray):  # the call takes it where it is
        argument.check_kept(value, where)
        argument.check_type(dtype_text(value.dtype), value.shape, where)
        return value if is_taken else value.reader()
    if not isinstance(value, FenceResult):
        return argument.prepare(value, where)
    _check_fence(where, value.fence)
    if value.fence.done:
        return _prepared(where, argument, value.fence.result()[value.number], is_taken)
    argument.check_type(value.dtype, value.dims, where)
    return value
