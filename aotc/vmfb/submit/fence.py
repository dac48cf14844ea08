"""Fences: one-time events that carry results or an error, with callbacks."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from time import monotonic
from typing import Any, TypeVar

import numpy as np

from aotc.vmfb.devices.array import DeviceArray, converted_elements
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, FenceCancelled
from aotc.vmfb.public_names import public_names
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Bell, take_from_box

# Initial pause in seconds between two polls of an early result; it doubles after each poll. About the time in which a
# thread wakes up.
PART_FIRST_PAUSE = 50e-6
# Maximum pause in seconds between two polls of an early result. Polling this often uses less than 1 % of a core.
PART_LONGEST_PAUSE = 1e-3


Told = TypeVar("Told", bound=Callable[..., None])

_SETTLING: dict[int, deque[Fence]] = {}  # by thread: fences whose callbacks it still has to call


def mark_fast_callback(callback: Told) -> Told:
    """Mark a callback of the runtime as fast: a dispatcher calls it without handing over other work first."""
    callback.is_quick = True  # type: ignore[attr-defined]
    return callback


class CallableFlag(int):
    """A bool that can also be called without arguments, so that ``fence.done`` and ``future.done()`` both work."""

    def __call__(self) -> bool:
        return bool(self)

    def __repr__(self) -> str:
        return repr(bool(self))


YES, NO = CallableFlag(1), CallableFlag(0)


@public_names(
    "add_done_callback", "cancel", "cancelled", "done", "exception", "fail", "result", "results", "running", "signal",
    "wait",
)  # fmt: skip
class Fence:
    """A one-time event that others wait for: signalled, or failed with an error. It may carry results.

    A ``Fence()`` of the user is settled by :meth:`signal` or :meth:`fail`. A fence that
    :meth:`~aotc.vmfb.module.LoadedModule.submit` returns is settled by the call. ``await fence`` waits in a coroutine
    without occupying a thread. All methods may be called from any thread, and from signal handlers.
    """

    __slots__ = ("__weakref__", "_box", "_callbacks", "_outcome", "_placed", "_root", "restore")

    def __init__(self) -> None:
        self._box: list[Any] = [self]  # the thread that pops it settles this fence
        self._callbacks: list[Callable[[Fence], None]] = []
        self._outcome: tuple[tuple[Any, ...], BaseException | None] | None = None
        self._placed: tuple[Any, ...] = ()  # results, once their memory is recorded in the order of submissions
        self._root: tuple[str, BaseException] | None = None  # label and error of the fence that failed first
        self.restore: Callable[[list[Any]], Any] | None = None  # makes the structure of the function's result

    # ------------------------------------------------------------ fences of the user

    def signal(self) -> bool:
        """Settle this fence, so that its waiters may run. Return False if it was already settled."""
        return self._resolve((), None)

    def fail(self, error: BaseException) -> bool:
        """Settle this fence with an error, which fails all its waiters. Return False if it was already settled.

        Raises
        ------
        CallError
            If ``error`` is not an exception.
        """
        if not isinstance(error, BaseException):
            raise ArgumentError("", "a fence fails with an exception", type(error).__name__, "ArgumentError('', 'why')")
        return self._resolve((), error)

    def cancel(self) -> bool:
        """Settle this fence with :class:`~aotc.FenceCancelled`; return False if it was already settled."""
        return self._resolve((), FenceCancelled("", f"{self.label} was cancelled"))

    # ------------------------------------------------------------ waiting

    @property
    def done(self) -> CallableFlag:
        """True if the fence has been settled, with results or an error.

        May be called as of a ``Future``: ``fence.done()``.
        """
        return YES if self._outcome is not None else NO

    def cancelled(self) -> bool:
        """Return True if the fence was cancelled."""
        return self._outcome is not None and isinstance(self._outcome[1], FenceCancelled)

    def running(self) -> bool:
        """Return True if the call of the fence has started and not ended."""
        return False

    @property
    def label(self) -> str:
        """Return text for error messages that says where the fence comes from."""
        return "a fence of the user's"

    @property
    def results(self) -> tuple[FenceResult, ...]:
        """Return the results, which need not exist yet, for use as arguments of later submissions."""
        return ()

    def __getitem__(self, number: int) -> FenceResult:
        """Return the future result ``number``, for use as an argument of later submissions."""
        results = self.results
        try:
            return results[number]
        except IndexError:  # this also ends an iteration over a fence
            count = f"{len(results)} result{'s' * (len(results) != 1)}"
            raise IndexError(f"{self.label} has {count}: there is no result {number}") from None
        except TypeError:
            what = "a result of a fence is named by its number"
            raise ArgumentError("", what, repr(number)[:80], f"0 to {len(results) - 1}") from None

    def result(self, timeout: float | None = None) -> Any:
        """Wait, and return what the call returns.

        Parameters
        ----------
        timeout : float, optional
            Maximum seconds to wait. The submission continues after a timeout.

        Returns
        -------
        list of array, or pytree
            A list as ``invoke`` returns it for a fence of ``module.submit("main", x)``, empty for a user's fence; the
            structure of the function's result for a fence of ``module.main.submit(x)`` or ``module.submit(x)``.

        Raises
        ------
        TimeoutError
            If ``timeout`` has passed. A submission whose deadline has passed raises ``aotc.DeadlineExceeded``, which is
            a ``TimeoutError``, too: whoever waits again tests ``fence.done()``.
        CallError or other
            The error that the fence failed with.
        """
        self.wait(timeout)
        results = self.flat_results()
        return results if self.restore is None else self.restore(results)

    def flat_results(self) -> list[Any]:
        """Return the list of results of a settled fence, or raise its error."""
        assert self._outcome is not None
        results, error = self._outcome
        if error is not None:
            raise error.with_traceback(None)  # raised repeatedly, it would accumulate tracebacks
        return list(results)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return the error, or None."""
        self.wait(timeout)
        assert self._outcome is not None
        return self._outcome[1]

    def read_result(self, number: int) -> list[Any]:
        """Return result ``number`` in a list; an empty list if the result is not complete yet.

        Raises
        ------
        CallError or other
            The error that the fence failed with.
        """
        if self._outcome is None:
            return []
        return [self.flat_results()[number]]

    def has_result(self, number: int) -> bool:
        """Return True if result ``number`` can be read now."""
        return self._outcome is not None and self._outcome[1] is None

    def _wait_for_result(self, number: int, timeout: float | None) -> None:
        """Wait until result ``number`` is complete, or the fence is settled.

        This polls, because the running call does not notify waiters of single results.
        """
        bell, pause = Bell(), PART_FIRST_PAUSE
        end = None if timeout is None else monotonic() + timeout

        @mark_fast_callback
        def ring(_: Fence) -> None:
            bell.ring()

        self.add_done_callback(ring)
        PROCESS.dispatchers.end_pause()
        try:
            while self._outcome is None and not self.has_result(number):
                left = pause if end is None else min(pause, end - monotonic())
                if left <= 0:
                    raise TimeoutError(f"result {number} of {self.label} is not there after {timeout} s")
                bell.wait(left)
                pause = min(2 * pause, PART_LONGEST_PAUSE)
        finally:
            self._remove_callback(ring)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the fence is settled.

        Raises
        ------
        TimeoutError
            If that takes more than ``timeout`` seconds.
        CallError
            If ``timeout`` is not a number.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if self._outcome is None:
            self._wait(timeout)

    def _wait(self, timeout: float | None) -> None:
        """Wait on this thread until the fence is settled, or ``timeout`` seconds have passed."""
        bell = Bell()

        @mark_fast_callback
        def ring(_: Fence) -> None:
            bell.ring()

        self.add_done_callback(ring)
        PROCESS.dispatchers.end_pause()
        try:
            if not bell.wait(timeout) and self._outcome is None:
                raise TimeoutError(f"{self.label} is not done after {timeout} s")
        finally:
            self._remove_callback(ring)

    def __await__(self) -> Generator[Any, None, Any]:
        """Wait in a coroutine: a callback wakes the event loop when the fence is settled; no thread is occupied."""
        from asyncio import CancelledError, get_running_loop  # only for coroutines: the import takes 20 ms

        if self._outcome is None:
            loop = get_running_loop()
            future = loop.create_future()

            def wake() -> None:
                if not future.done():
                    future.set_result(None)

            @mark_fast_callback
            def call(_: Fence) -> None:
                with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                    loop.call_soon_threadsafe(wake)

            self.add_done_callback(call)
            PROCESS.dispatchers.end_pause()
            try:
                yield from future
            except CancelledError:
                self._remove_callback(call)
                self._on_awaiter_cancelled()
                raise
        return self.result()

    def add_done_callback(self, function: Callable[[Fence], None]) -> None:
        """Call ``function(fence)`` when the fence is settled, on the settling thread, or now if it already is.

        Exceptions of the callback are printed and otherwise ignored.

        Raises
        ------
        CallError
            If ``function`` is not callable.
        """
        if not callable(function):
            raise ArgumentError("", "a callback of a fence is not a function", type(function).__name__, "f(fence)")
        self._callbacks.append(function)
        if self._outcome is not None:
            self._notify_waiters()

    # ------------------------------------------------------------ settling

    def _resolve(self, results: tuple[Any, ...], error: BaseException | None) -> bool:
        if take_from_box(self._box) is None:
            return False
        self._resolve_all(results, error)
        return True

    def _resolve_all(self, results: tuple[Any, ...], error: BaseException | None) -> None:
        """Settle the fence and notify all waiters; only for the thread that popped the fence from its box."""
        if error is not None and self._root is None:
            self._root = self.label, error
        self._outcome = results, error
        if not self._callbacks:
            return
        if threading.current_thread() is threading.main_thread():
            PROCESS.dispatchers.enqueue([_CallbackTask(self)])  # on another thread: a signal handler may raise here
        else:
            self._notify_waiters()

    def _notify_waiters(self) -> None:
        """Call the callbacks of this fence, and of fences that fail with it, in a loop instead of a recursion."""
        me = threading.get_ident()
        queue = _SETTLING.get(me)
        if queue is not None:
            queue.append(self)
            return
        queue = _SETTLING[me] = deque([self])
        try:
            while queue:
                queue.popleft()._run_callbacks()
        finally:
            del _SETTLING[me]

    def _run_callbacks(self) -> None:
        """Call each callback of the settled fence; print their exceptions."""
        while self._callbacks:
            try:
                function = self._callbacks.pop(0)
            except IndexError:  # another thread took the last one
                return
            if not getattr(function, "is_quick", False):
                PROCESS.dispatchers.hand_over_ready()
            try:
                function(self)
            except Exception:
                sys.excepthook(*sys.exc_info())

    def _remove_callback(self, function: Callable[[Fence], None]) -> None:
        with suppress(ValueError):
            self._callbacks.remove(function)

    def _on_awaiter_cancelled(self) -> None:
        """Handle the cancellation of a coroutine that awaited this fence: do nothing, others may wait for it."""

    def __repr__(self) -> str:
        if self._outcome is None:
            return f"<{self.label}: not done>"
        error = self._outcome[1]
        return f"<{self.label}: done>" if error is None else f"<{self.label}: failed: {error!r}>"

    def __reduce__(self) -> Any:
        raise TypeError("a fence cannot be pickled: it belongs to its process")


def _check_timeout(timeout: Any) -> None:
    number = isinstance(timeout, int | float | np.integer | np.floating) and not isinstance(timeout, bool)
    if not number or timeout != timeout:  # NaN
        raise ArgumentValueError(
            "", "the timeout is not a duration", repr(timeout)[:80], "seconds, or None to wait for the end"
        )


class _CallbackTask:
    """Dispatcher task that calls the callbacks of a settled fence."""

    __slots__ = ("_fence",)

    def __init__(self, fence: Fence) -> None:
        self._fence = fence

    def run(self) -> None:
        """Call all callbacks of the settled fence."""
        self._fence._notify_waiters()


@public_names(
    "device", "done", "dtype", "exception", "fence", "number", "numpy", "ready", "result", "shape", "wait",
)  # fmt: skip
class FenceResult:
    """A result of a fence that may not exist yet; a later submission or call that has it as an argument waits for it.

    Attributes
    ----------
    fence : Fence
    number : int
    dtype : str
        As in the signature.
    dims : tuple of int or str
        As in the signature: a size known only at run time is a string.
    device : str
        Device of the result: a device of the model, or of this machine, such as ``cpu:0``, if the model names none.
    """

    __slots__ = ("device", "dims", "dtype", "fence", "number")

    def __init__(self, fence: Fence, number: int, dtype: str, dims: tuple[int | str, ...], device: str) -> None:
        self.fence = fence
        self.number = number
        self.dtype = dtype
        self.dims = dims
        self.device = device

    @property
    def shape(self) -> tuple[int | str, ...]:
        """Return the shape; sizes known only at run time are strings until the result exists."""
        outcome = self.fence._outcome
        return self.dims if outcome is None or outcome[1] is not None else outcome[0][self.number].shape

    @property
    def done(self) -> CallableFlag:
        """True if the result can be read, or never will be because the fence failed before it was complete."""
        return YES if self.fence.done or self.ready() else NO

    def ready(self) -> bool:
        """Return True if the result can be read now; the call may still compute other results."""
        return self.fence.has_result(self.number)

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the result can be read, or the fence has failed.

        Raises
        ------
        TimeoutError
            If that takes more than ``timeout`` seconds.
        CallError
            If ``timeout`` is not a number.
        """
        if timeout is not None:
            _check_timeout(timeout)
        if not self.done:
            self.fence._wait_for_result(self.number, timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Wait for this result alone, and return it; it is read-only until the call ends.

        Raises
        ------
        TimeoutError
            If ``timeout`` has passed.
        CallError or other
            The error that the fence failed with before the result was complete.
        """
        self.wait(timeout)
        return self.read()

    def read(self) -> Any:
        """Return the result at once if it can be read; otherwise wait for the fence."""
        found = self.fence.read_result(self.number)
        if found:
            return found[0]
        self.fence.wait()
        return self.fence.flat_results()[self.number]

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait as :meth:`result` does, and return the error, or None."""
        self.wait(timeout)
        return None if self.ready() else self.fence.exception()

    def __await__(self) -> Generator[Any, None, Any]:
        return self._awaited().__await__()

    async def _awaited(self) -> Any:
        """Wait in a coroutine until the result can be read, and return it."""
        from asyncio import sleep  # only for coroutines: the import takes 20 ms

        PROCESS.dispatchers.end_pause()
        pause = PART_FIRST_PAUSE
        while not self.done:
            await sleep(pause)
            pause = min(2 * pause, PART_LONGEST_PAUSE)
        return self.result()

    def numpy(self, timeout: float | None = None) -> np.ndarray:
        """Wait for this result alone, and return it as a NumPy array."""
        return np.asarray(self.result(timeout))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        made = self.result()
        return made.__array__(dtype, copy) if isinstance(made, DeviceArray) else converted_elements(made, dtype, copy)

    def __repr__(self) -> str:
        return f"<result {self.number} of {self.fence!r}>"
