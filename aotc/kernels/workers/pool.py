"""The compiler processes and threads of this process: started early, kept, shared out work."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import get_ident
from typing import Any, TypeAlias

from aotc.diagnostics import CallbackFailed, InternalError
from aotc.kernels.limits import LONGEST_TEXT, MOST_JOBS, OWN_TEXT, THREAD_STACK, THREAD_TEXT
from aotc.kernels.workers.worker import START, read_frame, target_from, write_frame
from aotc.vmfb.process.children import python_command

Here: TypeAlias = Callable[[dict[str, Any]], dict[str, Any]]
"""Answers a request as a compiler process does."""


def default_jobs() -> int:
    """Return how many compile at the same time: one for each core that this process may use."""
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0))))


def nothing() -> None:
    """Do nothing while others compile."""


class Refusal(Exception):
    """A user's function cannot be compiled: its symbol, and why."""

    def __init__(self, symbol: str, reason: str) -> None:
        super().__init__(reason)
        self.symbol, self.reason = symbol, reason


class CompilerPool:
    """Compiler processes and threads that live as long as this process."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock, self._stacks = threading.Lock(), threading.Lock()
        self._helpers = _Helpers()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._begin_again)

    def start(self, jobs: int, *kinds: str) -> None:
        """Have ``jobs`` processes, with this one, ready or starting, new ones for ``kinds`` of targets besides CPUs."""
        with self._lock:
            while len(self._idle) < max((jobs or default_jobs()) - 1, 1):
                self._idle.append(_spawn(*kinds))

    def run(
        self, requests: Sequence[dict[str, Any]], jobs: int, done: Callable[[int], None], here: Here | None = None,
        meanwhile: Callable[[], object] = nothing,
    ) -> list[bytes]:  # fmt: skip
        """Answer all requests; the largest go first, before them what is not a kernel.

        Small kernels are answered ``here``, by threads of this process, if that is given; all else by processes, which
        go on with small ones. All are as many as the ``jobs``. The caller's thread answers the largest; another one, if
        there is any, does ``meanwhile`` before it helps. Who needs what that makes calls it again, also if it fails.

        Raises
        ------
        InternalError
            If a kernel cannot be compiled: its text and the worker's report.
        Refusal
            If a user's function cannot be compiled.
        CallbackFailed
            If ``done`` does.
        """
        work = _Waiting(requests, done, self._lock, here is not None)
        processes, threads = work.shares(jobs or default_jobs())

        def serve() -> None:
            process = self._take()
            try:
                while (n := work.next(also_large=True)) is not None:
                    process = work.ask(process, n)
            finally:
                with self._lock:
                    self._idle.append(process)

        def answer() -> None:
            while here is not None and (n := work.next(also_large=False)) is not None:
                work.settle(n, here({**requests[n], "id": n}))

        servers = _threads("aotc-asks", [serve] * processes, work.errors)
        helping: list[Future[None]] = []
        try:
            helps = partial(_reporting, answer, work.errors)
            calls = [partial(_both, meanwhile, helps), *[helps] * (threads - 2)] if threads > 1 else []
            self._start(servers, calls, helping)
            if not calls:
                _both(meanwhile, nothing)
            if threads:
                helps()
            _await(helping)
            for t in servers:
                t.join()
        except BaseException:  # an interrupt: what is being compiled is not wanted any more
            work.errors.append("interrupted")
            for process in list(work.busy.values()):
                process.kill()
            _await(helping)  # what LLVM is at cannot be stopped
            raise
        if work.errors:
            raise _failure(work.errors[0])
        return [r for r in work.results if r is not None]

    def _start(
        self, threads: Sequence[threading.Thread], calls: Sequence[Callable[[], None]], helping: list[Future[None]]
    ) -> None:
        """Start ``threads``, and have kept ones make ``calls``; LLVM needs room on their stacks."""
        if threads or calls:
            with self._stacks:  # their size is the process's
                before = threading.stack_size(THREAD_STACK)
                try:
                    for t in threads:
                        t.start()
                    for call in calls:
                        helping.append(Future())
                        self._helpers.make(call, helping[-1])
                finally:
                    threading.stack_size(before)

    def _take(self) -> subprocess.Popen[bytes]:
        with self._lock:
            while self._idle:
                process = self._idle.pop(0)
                if process.poll() is None:
                    return process
        return _spawn()

    def close(self) -> None:
        """End all processes."""
        for process in self._idle:
            process.kill()
        self._idle.clear()

    def _begin_again(self) -> None:
        """Leave the processes to the parent, in a forked child; the lock may be that of a thread which is not there."""
        self._lock, self._stacks = threading.Lock(), threading.Lock()
        self._helpers = _Helpers()
        self._idle.clear()


class _Helpers:
    """Threads that stay, as many as there were calls at a time.

    One has a machine of LLVM's, and memory that the system need not clear again: new ones for each run take 2 to 3 ms.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], None], Future[None]]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def make(self, call: Callable[[], None], future: Future[None]) -> None:
        """Have a thread make ``call``, a new one if none is idle, and say so to ``future``."""
        self._calls.put((call, future))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, name="aotc-compiles", daemon=True).start()

    def _serve(self) -> None:
        while True:
            call, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    call()
                finally:
                    future.set_result(None)
            del call, future  # what they hold is not wanted while this thread waits
            self._idle.release()


class _Waiting:
    """The requests of one run: which wait, the largest first, who is at one, and what came of the others."""

    def __init__(
        self, requests: Sequence[dict[str, Any]], done: Callable[[int], None], lock: threading.Lock, here: bool
    ) -> None:
        self.requests, self.done, self.lock = requests, done, lock
        order = sorted(range(len(requests)), key=lambda n: -_size(requests[n]))
        small = {n for n in order if here and _is_small(requests[n])}
        self.large = deque(n for n in order if n not in small)
        self.small = deque(n for n in order if n in small)
        self.results: list[bytes | None] = [None] * len(requests)
        self.errors: list[str | Exception] = []
        self.busy: dict[int, subprocess.Popen[bytes]] = {}
        self.finished = 0

    def shares(self, jobs: int) -> tuple[int, int]:
        """Return how many processes, and how many threads of this one, with the caller's, are to answer.

        There is one besides the caller's even for a single request: it has other things to do.
        """
        small = [_size(self.requests[n]) for n in self.small]
        large = len(self.large)
        processes = min(large, max(jobs - 1, 1) if small else jobs)
        rest = sum(small[1:])  # what others could do while one does the longest
        threads = min(max(len(small), 2), 1 + max(1, rest // THREAD_TEXT)) if small else 0
        return processes, min(jobs - processes, threads)

    def next(self, also_large: bool) -> int | None:
        """Return the largest that waits, and waits no more; None if there is none, or one has failed."""
        with self.lock:
            queue = self.large if also_large and self.large else self.small
            return queue.popleft() if queue and not self.errors else None

    def ask(self, process: subprocess.Popen[bytes], n: int) -> subprocess.Popen[bytes]:
        """Have ``process`` answer a request, and return the process that did."""
        self.busy[get_ident()] = process
        answer, process = _ask(process, {**self.requests[n], "id": n}, self.errors)
        self.settle(n, answer)
        return process

    def settle(self, n: int, answer: dict[str, Any]) -> None:
        """Keep the answer to a request, or what it says is wrong."""
        if "refused" in answer:
            self.errors.append(Refusal(self.requests[n]["symbol"], answer["refused"]))
        elif "error" in answer:
            self.errors.append(f"{self.requests[n].get('text', 'the executor')}\n{answer['error']}")
        else:
            self.results[n] = answer["object"]
        with self.lock:
            self.finished += 1
            self.done(self.finished)


def _size(request: dict[str, Any]) -> int:
    return len(request["text"]) if "text" in request else LONGEST_TEXT


def _is_small(request: dict[str, Any]) -> bool:
    """Is this a kernel for a CPU whose compilation no interrupt need wait for?"""
    return _size(request) <= OWN_TEXT and target_from(request["target"]).kind == "cpu"


def _threads(name: str, calls: Sequence[Callable[[], None]], errors: list[str | Exception]) -> list[threading.Thread]:
    """Return threads that are to make calls."""
    return [threading.Thread(target=_reporting, args=(call, errors), name=name, daemon=True) for call in calls]


def _both(meanwhile: Callable[[], object], helps: Callable[[], None]) -> None:
    with suppress(Exception):
        meanwhile()
    helps()


def _await(helping: Sequence[Future[None]]) -> None:
    """Wait for helpers; there is nothing left for those that have not begun."""
    wait([f for f in helping if not f.cancel()])


def _reporting(call: Callable[[], None], errors: list[str | Exception]) -> None:
    """Make a call; whatever goes wrong, who waits for it must hear of it: threads have no other way."""
    try:
        call()
    except (CallbackFailed, MemoryError) as error:
        errors.append(error)
    except Exception as error:
        errors.append(str(error))


def _failure(found: str | Exception) -> Exception:
    return found if isinstance(found, Exception) else InternalError(f"a kernel could not be compiled:\n{found}")


def _spawn(*kinds: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command(START, *kinds),
        env={**os.environ, "NUMBA_DISABLE_INTEL_SVML": "1"},  # LLVM would call functions that no bundle has
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for this process, which ends that one
    )


def _ask(
    process: subprocess.Popen[bytes], request: dict[str, Any], errors: Sequence[object]
) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """Return the answer and the process that gave it; a dead process is replaced once, unless there are ``errors``."""
    for attempt in range(2):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, request)
            answer = read_frame(process.stdout)
        except (OSError, ValueError):  # its end of the pipe is closed, or half a message came
            answer = None
        if answer is not None:
            return answer, process
        process.kill()
        code = process.wait()
        if errors:
            break
        if attempt == 0:
            process = _spawn()
    what = request.get("text", "the executor")
    raise InternalError(f"the compiler process died twice (exit {code}) on:\n{what}")


POOL = CompilerPool()
