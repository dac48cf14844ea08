"""The threads that run submissions: a few for the whole process, started on demand, none for a call that waits.

No lock is held anywhere: what threads hand each other goes through atomic operations of lists and deques, so that a
signal handler may submit and signal, whatever it interrupts. Whoever takes the one entry out of a *box* has the right
to decide what becomes of the submission in it; an empty box is passed over.
"""

from __future__ import annotations

import atexit
import threading
from _thread import TIMEOUT_MAX
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any, Protocol

from aotc.vmfb.errors import VmError
from aotc.vmfb.host.interruption import RUNNING
from aotc.vmfb.host.locks import after_fork, new_lock
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.limits import DISPATCHERS, EXIT_SECONDS, MOST_DISPATCHERS


class Task(Protocol):
    """What a dispatcher does."""

    def run(self) -> None:
        """Do it; raises nothing."""


class Queue(Protocol):
    """What has submissions of its own for dispatchers."""

    def go_on(self) -> None:
        """Have a dispatcher look, if there is anything ready."""


Box = list[Task]


def take(box: Box) -> Task | None:
    """Return what is in a box, which is empty then; None if somebody else took it."""
    try:
        return box.pop()
    except IndexError:
        return None


class Bell:
    """What one thread sleeps at until another rings; if it was rung before, it does not sleep."""

    __slots__ = ("_lock",)

    def __init__(self) -> None:
        self._lock = new_lock()
        self._lock.acquire()

    def ring(self) -> None:
        """Wake whoever sleeps here, or will next."""
        with suppress(RuntimeError):  # it rings already
            self._lock.release()

    def wait(self, seconds: float | None = None) -> bool:
        """Sleep, ``seconds`` at most; tell whether it rang."""
        return self._lock.acquire(timeout=-1 if seconds is None else min(max(seconds, 0), TIMEOUT_MAX))


def start_thread(name: str, life: Callable[[], None]) -> None:
    """Start a daemon thread.

    Raises
    ------
    VmError
        If the system refuses.
    """
    try:
        threading.Thread(target=life, name=name, daemon=True).start()
    except RuntimeError as error:
        raise VmError("", "no thread can be started that runs what is submitted", error) from None


# Seconds that an idle dispatcher sleeps after a wake-up that found no work; it is not woken earlier. Waking a thread
# takes 15 us. A submission whose fence nobody waits for may start this much later.
LINGER_SECONDS = 100e-6


class Dispatchers:
    """The ready submissions of the process, and the threads that take them.

    Attributes
    ----------
    ready : deque of Box
        In the order in which they became ready.
    """

    def __init__(self) -> None:
        self.ready: deque[Box] = deque()
        count = min(max(DISPATCHERS, usable_cores()), MOST_DISPATCHERS)
        self._free = list(range(count))  # numbers of threads that could be started
        self._most = count
        self._idle: list[Bell] = []
        self._coming: list[None] = []  # an entry for each thread that was woken or started and has not looked yet
        self._idents: set[int] = set()
        self._settling: dict[int, list[Queue]] = {}  # by thread: where it looks itself for what it makes ready
        self._lingering: list[Bell] = []
        self._posted = 0
        self._ended = False

    def post(self, box: Box) -> None:
        """Have what is in ``box`` run soon."""
        self.ready.append(box)
        self._posted += 1
        if threading.get_ident() not in self._settling:
            self.send()

    def send(self) -> None:
        """Have threads come for what is ready, as far as there are any."""
        while len(self._coming) < len(self.ready) and self._send():
            pass

    def are_enough(self) -> bool:
        """Tell whether threads are coming for all that is ready."""
        return len(self._coming) >= len(self.ready)

    def settle(self, end: Callable[..., None], *arguments: Any) -> None:
        """Call what tells others of the end of this thread's task; it wakes none: it takes what becomes ready itself.

        What the next of a chain works on lies in its core's cache, and a thread that sleeps comes 50 us later (300 us
        on a virtual machine). For the rest of what is ready, it sends others before it goes on.
        """
        me = threading.get_ident()
        if me in self._idents:
            self._settling[me] = []
        try:
            end(*arguments)
        finally:
            self._settling.pop(me, None)

    def defer(self, queue: Queue) -> bool:
        """Tell whether this thread settles, and so looks into ``queue`` itself."""
        queues = self._settling.get(threading.get_ident())
        if queues is not None:
            queues.append(queue)
        return queues is not None

    def stop_settling(self) -> None:
        """Send others for what is ready: this thread may be busy for long."""
        queues = self._settling.pop(threading.get_ident(), None)
        if queues is not None:
            for queue in queues:
                queue.go_on()
            self.send()

    def admit(self) -> bool:
        """May a thread that waits for a submission run it itself?"""
        return True

    def release(self) -> None:
        """Note that it has."""

    def withdraw(self, box: Box) -> None:
        """Forget a box that is empty, if it was the last one to come: others are passed over later."""
        try:
            last = self.ready.pop()
        except IndexError:
            return
        if last is not box:
            self.post(last)  # a thread may have looked in between, and have gone to sleep

    def have_one(self) -> None:
        """Start a thread if there is none."""
        if not self._idents and not self._coming:
            self._send()

    def allow(self, count: int) -> None:
        """Let there be so many threads, if more are wanted."""
        while self._most < count:
            self._most += 1
            self._free.insert(0, self._most - 1)

    def is_dispatcher(self) -> bool:
        """Tell whether this thread is one of them."""
        return threading.get_ident() in self._idents

    def _send(self) -> bool:
        """Wake a thread, or start one; False if all are at work, and take it when they are done."""
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
            start_thread(f"aotc-dispatcher-{number}", lambda: self._live(number))
        except VmError:
            self._coming.pop()
            self._free.append(number)
            if not self._idents:
                raise
            return False
        return True

    def _live(self, number: int) -> None:
        me = threading.get_ident()
        self._idents.add(me)
        self._coming.pop()
        try:
            self._serve(Bell())
        finally:
            self._idents.discard(me)
            self._free.append(number)

    def _serve(self, bell: Bell) -> None:
        useful = True  # was there anything since this thread was woken?
        while not self._ended:
            try:
                box = self.ready.popleft()
            except IndexError:
                if useful or not self._linger(bell):
                    self._sleep(bell)
                useful = False
                continue
            task = take(box)
            if task is not None:
                useful = True
                self.send()
                task.run()
            del box, task  # results are the user's while this thread sleeps

    def _linger(self, bell: Bell) -> bool:
        """After this thread was woken for nothing, as whoever submits waits and so runs it: let it not be woken again.

        It looks by itself a little later, sooner if somebody is in a hurry. Tell whether there was anything meanwhile.
        """
        posted = self._posted
        self._coming.append(None)
        self._lingering.append(bell)
        bell.wait(LINGER_SECONDS)
        with suppress(ValueError):
            self._lingering.remove(bell)
        self._coming.pop()
        return self._posted != posted or bool(self.ready)

    def hurry(self) -> None:
        """Somebody waits who does not run it himself."""
        if self._lingering:
            with suppress(IndexError):
                self._lingering.pop().ring()

    def _sleep(self, bell: Bell) -> None:
        self._idle.append(bell)
        if not self.ready and not self._ended:  # else it was posted before the bell was there to be rung
            bell.wait()
        try:
            self._idle.remove(bell)
        except ValueError:  # it was rung, or is about to be, for something posted: this thread has come
            with suppress(IndexError):
                self._coming.pop()

    def end(self) -> None:
        """End the threads before the interpreter frees what they use; a library's function ends first."""
        self._ended = True
        for task in list(RUNNING.values()):
            task.stop(VmError("", "the interpreter ends"))
        end = monotonic() + EXIT_SECONDS
        while self._idents and monotonic() < end:
            self._coming.append(None)
            try:
                self._idle.pop().ring()
            except IndexError:
                self._coming.pop()
            sleep(0.001)


class Process:
    """What submissions of this process share.

    Attributes
    ----------
    generation : int
        How many forks lie between the first process and this one.
    dispatchers : Dispatchers
    """

    def __init__(self) -> None:
        self.generation = 0
        self.begin()

    def begin(self) -> None:
        """Begin without threads and ready submissions."""
        self.dispatchers = Dispatchers()

    def begin_again(self) -> None:
        """A forked child has none of its parent's threads, and its submissions are the parent's."""
        self.generation += 1
        RUNNING.clear()
        self.begin()


PROCESS = Process()
after_fork(PROCESS.begin_again)
atexit.register(lambda: PROCESS.dispatchers.end())
