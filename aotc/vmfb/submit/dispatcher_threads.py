"""Dispatchers: a small pool of threads that run submissions, started on demand.

No lock is held: threads communicate through atomic operations of lists and deques, so that a signal handler may submit
and signal at any point. A *box* is a list with one submission. The thread that pops the submission owns it; threads
skip empty boxes.
"""

from __future__ import annotations

import atexit
import threading
from _thread import TIMEOUT_MAX
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Protocol, TypeVar

from aotc.vmfb.errors import CallError
from aotc.vmfb.host.interruption import RUNNING
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.limits import DISPATCHERS, EXIT_SECONDS, MOST_DISPATCHERS


class Task(Protocol):
    """Interface of a unit of work for a dispatcher."""

    def run(self) -> None:
        """Run the unit of work; must not raise."""


class Queue(Protocol):
    """Interface of a queue with submissions of its own, which asks for dispatchers when some are ready."""

    def request_dispatcher(self) -> None:
        """Wake or start a dispatcher if any submission of the queue is ready."""


Box = list[Task]
Content = TypeVar("Content")


def take_from_box(box: list[Content]) -> Content | None:
    """Pop the content of a box; return None if another thread took it."""
    try:
        return box.pop()
    except IndexError:
        return None


class Bell:
    """Binary semaphore: a thread waits until another one rings. A ring before the wait is not lost."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = new_lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake the thread that waits, or the next one that will."""
        with suppress(RuntimeError):  # it has already been rung
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Wait for a ring, at most ``seconds``; return True if the bell was rung."""
        return self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0), TIMEOUT_MAX))


def start_thread(name: str, life: Callable[[], None]) -> None:
    """Start a daemon thread that runs ``life``.

    Raises
    ------
    CallError
        If the system cannot start one.
    """
    try:
        threading.Thread(target=life, name=name, daemon=True).start()
    except RuntimeError as error:
        raise CallError("", "cannot start a thread for submitted calls", error) from None


# Seconds that an idle dispatcher sleeps after a wake-up that found no work; it is not woken earlier. Waking a thread
# takes 15 us. A submission whose fence nobody waits for may start this much later.
LINGER_SECONDS = 100e-6


class Dispatchers:
    """The process's queue of ready submissions, and the pool of threads that run them.

    Attributes
    ----------
    ready : deque of Box
        Ready submissions, in the order in which they became ready.
    """

    def __init__(self) -> None:
        self.ready: deque[Box] = deque()
        count = min(max(DISPATCHERS, usable_cores()), MOST_DISPATCHERS)
        self._free = list(range(count))  # numbers of threads that may still be started
        self._most = count
        self._idle: list[Bell] = []
        self._coming: list[None] = []  # one for each thread on its way: woken or started
        self._idents: set[int] = set()
        self._settling: dict[int, list[Queue]] = {}  # by thread: queues that it polls itself meanwhile
        self._pausing: list[Bell] = []
        self._posted = 0
        self._ended = False

    def enqueue(self, box: Box) -> None:
        """Append a ready submission to the queue, and wake a thread for it."""
        self.ready.append(box)
        self._posted += 1
        if threading.get_ident() not in self._settling:
            self.wake_threads()

    def wake_threads(self) -> None:
        """Wake or start threads until there is one for each ready submission, or all are busy."""
        while len(self._coming) < len(self.ready) and self._wake_or_start_thread():
            pass

    def are_enough_awake(self) -> bool:
        """Return True if enough threads have been woken for all ready submissions."""
        return len(self._coming) >= len(self.ready)

    def finish_task(self, end: Callable[..., None], *arguments: Any) -> None:
        """Report the end of this thread's task by ``end(*arguments)``, without waking a thread for its first successor.

        This thread runs the successor itself. The successor's data is in this core's cache, and a sleeping thread would
        start 50 us later (300 us on a virtual machine). For further ready submissions other threads are woken before
        this one continues.
        """
        me = threading.get_ident()
        if me in self._idents:
            self._settling[me] = []
        try:
            end(*arguments)
        finally:
            self._settling.pop(me, None)

    def poll_queue_later(self, queue: Queue) -> bool:
        """Let this thread poll ``queue`` after its task has ended; return False if this thread is not ending a task.

        No other thread then needs to be woken for the queue.
        """
        queues = self._settling.get(threading.get_ident())
        if queues is not None:
            queues.append(queue)
        return queues is not None

    def hand_over_ready(self) -> None:
        """Wake other threads for ready submissions now, because this thread may be busy for long."""
        queues = self._settling.pop(threading.get_ident(), None)
        if queues is not None:
            for queue in queues:
                queue.request_dispatcher()
            self.wake_threads()

    def may_run_on_waiting_thread(self) -> bool:
        """Return True: a thread that waits for a ready submission may run it itself."""
        return True

    def waiting_thread_finished(self) -> None:
        """Do nothing: waiting threads that run submissions are not counted here."""

    def remove_box(self, box: Box) -> None:
        """Remove an empty box if it was queued last; other empty boxes are skipped later."""
        try:
            last = self.ready.pop()
        except IndexError:
            return
        if last is not box:
            self.enqueue(last)  # a thread may have polled in between and gone to sleep

    def ensure_thread(self) -> None:
        """Start a thread if none is running."""
        if not self._idents and not self._coming:
            self._wake_or_start_thread()

    def raise_thread_limit(self, count: int) -> None:
        """Raise the maximum number of threads to ``count``."""
        while self._most < count:
            self._most += 1
            self._free.insert(0, self._most - 1)

    def is_dispatcher(self) -> bool:
        """Return True if the calling thread is a dispatcher."""
        return threading.get_ident() in self._idents

    def _wake_or_start_thread(self) -> bool:
        """Wake a sleeping thread, or start one.

        Return False if all are busy. A busy thread polls when its task ends.
        """
        self._coming.append(None)
        try:
            self._idle.pop().ring()
            return True
        except IndexError:
            pass
        try:
            number = self._free.pop()
        except IndexError:
            self._coming.pop()
            return False
        try:
            start_thread(f"aotc-dispatcher-{number}", lambda: self._run_thread(number))
        except CallError:
            self._coming.pop()
            self._free.append(number)
            if not self._idents:
                raise
            return False
        return True

    def _run_thread(self, number: int) -> None:
        """Run dispatcher thread ``number`` until the interpreter exits."""
        me = threading.get_ident()
        self._idents.add(me)
        self._coming.pop()
        try:
            self._run_ready_submissions(Bell())
        finally:
            self._idents.discard(me)
            self._free.append(number)

    def _run_ready_submissions(self, bell: Bell) -> None:
        """Run ready submissions until the interpreter exits; without any, sleep until ``bell`` rings."""
        useful = True  # has this thread run anything since it was woken?
        while not self._ended:
            try:
                box = self.ready.popleft()
            except IndexError:
                if useful or not self._pause_after_idle_wakeup(bell):
                    self._wait_for_submission(bell)
                useful = False
                continue
            task = take_from_box(box)
            if task is not None:
                useful = True
                self.wake_threads()
                task.run()
            del box, task  # results belong to the user: do not keep them alive while this thread sleeps

    def _pause_after_idle_wakeup(self, bell: Bell) -> bool:
        """Sleep briefly after a wake-up that found no work; no submission wakes this thread meanwhile.

        A caller that waits for each submission runs it itself, so that every wake-up would be in vain. After the pause,
        or :meth:`end_pause`, the thread polls by itself. Return True if anything was submitted meanwhile.
        """
        posted = self._posted
        self._coming.append(None)
        self._pausing.append(bell)
        bell.wait(LINGER_SECONDS)
        with suppress(ValueError):
            self._pausing.remove(bell)
        self._coming.pop()
        return self._posted != posted or bool(self.ready)

    def end_pause(self) -> None:
        """End one :meth:`_pause_after_idle_wakeup`, because a waiting caller needs a dispatcher."""
        if self._pausing:
            with suppress(IndexError):
                self._pausing.pop().ring()

    def _wait_for_submission(self, bell: Bell) -> None:
        """Sleep until another thread rings ``bell`` for a new submission."""
        self._idle.append(bell)
        if not self.ready and not self._ended:  # else it was posted before the bell was in the list
            bell.wait()
        try:
            self._idle.remove(bell)
        except ValueError:  # it was rung, or is about to be: this thread is one of those on their way
            with suppress(IndexError):
                self._coming.pop()

    def end_threads(self) -> None:
        """End all threads at interpreter exit, before objects that they use are freed.

        Wait for native calls to return.
        """
        self._ended = True
        for task in list(RUNNING.values()):
            task.stop(CallError("", "the interpreter ends"))
        end = monotonic() + EXIT_SECONDS
        while self._idents and monotonic() < end:
            self._coming.append(None)
            try:
                self._idle.pop().ring()
            except IndexError:
                self._coming.pop()
            sleep(0.001)


class Process:
    """State that all submissions of a process share.

    Attributes
    ----------
    generation : int
        Number of forks between the first process and this one.
    dispatchers : Dispatchers
    """

    def __init__(self) -> None:
        self.generation = 0
        self.reset()

    def reset(self) -> None:
        """Start without threads and without ready submissions."""
        self.dispatchers = Dispatchers()

    def reset_after_fork(self) -> None:
        """Reset in a forked child: it has none of its parent's threads, and the parent runs the submissions."""
        self.generation += 1
        RUNNING.clear()
        self.reset()


PROCESS = Process()
after_fork(PROCESS.reset_after_fork)
atexit.register(lambda: PROCESS.dispatchers.end_threads())
