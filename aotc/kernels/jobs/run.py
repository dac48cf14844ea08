"""Schedule compile requests over processes and threads of this process.

A thread answers a request in two steps. Emission of LLVM IR is Python code and needs the GIL, so it does not run in
parallel; LLVM's part needs no lock. So one thread at a time emits, as long as there is a kernel to emit, and the others
compile emitted kernels to machine code.
"""

from __future__ import annotations

import subprocess
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from threading import get_ident
from typing import Any, TypeAlias

from aotc.diagnostics import CallbackFailed, InternalError
from aotc.kernels.jobs.pool import CompilerPool, ask_compiler_process, default_jobs
from aotc.kernels.worker import target_from
from aotc.options import DIRECT

Finish: TypeAlias = Callable[[], dict[str, Any]]
"""LLVM's part of answering a request; returns the answer that a compiler process would give."""
Begin: TypeAlias = Callable[[dict[str, Any]], Finish]
"""The Python part of answering a request."""


def do_nothing() -> None:
    """Do nothing: the default for ``meanwhile``."""


def _ignore_answer_count(count: int) -> None:
    """Ignore the number of answers: the default for ``done``."""


class Refusal(Exception):
    """A user's function cannot be compiled; ``symbol`` is its symbol, the text of the exception is the reason."""

    def __init__(self, symbol: str, reason: str) -> None:
        super().__init__(reason)
        self.symbol, self.reason = symbol, reason


# Characters of kernel text per helper thread. All kernels but the longest count: helpers compile them while the caller
# compiles the longest. One helper starts in any case, as the caller sometimes waits for Python's lock. 20 programs of
# 40 to 230 ms on two cores, with 2000, 1000, 500 and 250 characters: elapsed time 1, 0.88, 0.81 and 0.81, processor
# time 1 to 1.02.
THREAD_TEXT = 500
# Kernels that may wait as LLVM assembly, which is ten times as long as the kernel's text. Above this number, a thread
# compiles one to an object before another is emitted. With two threads, half of a network's kernels (10 to 30) wait at
# times. With a smaller bound, the order in which threads get Python's lock would decide.
MOST_EMITTED = 32


class WaitingRequests:
    """State of one run of compile requests: queues (largest first), busy processes, and results."""

    def __init__(self, requests: Sequence[dict[str, Any]], here: bool) -> None:
        self.requests = requests
        order = sorted(range(len(requests)), key=lambda n: -_request_size(requests[n]))
        small = {n for n in order if here and _is_small_cpu_kernel(requests[n])}
        self.large = deque(n for n in order if n not in small)
        self.small = deque(n for n in order if n in small)
        self.results: list[bytes | None] = [None] * len(requests)
        self.errors: list[str | Exception] = []
        self.busy: dict[int, subprocess.Popen[bytes]] = {}
        self.finished = 0
        self.done: Callable[[int], object] = _ignore_answer_count
        self.in_turn = True  # finish an emitted kernel before emitting the next?
        self._changed = threading.Condition()
        self._emitted: deque[tuple[int, Finish]] = deque()
        self._emitting = False

    def worker_counts(self, jobs: int) -> tuple[int, int]:
        """Return the number of processes to use, and the number of threads including the caller's.

        There is at least one helper thread besides the caller's, because the caller has other work.
        """
        processes = min(len(self.large), max(jobs - 1, 1) if self.small else jobs)
        threads = min(max(len(self.small), 2), 1 + max(1, self.helper_thread_count())) if self.small else 0
        return processes, min(jobs - processes, threads)

    def helper_thread_count(self) -> int:
        """Return the number of helper threads that have enough work while the caller compiles the largest kernel."""
        return sum(_request_size(self.requests[n]) for n in list(self.small)[1:]) // THREAD_TEXT

    def next_request(self) -> int | None:
        """Remove and return the index of the largest waiting request; None if none waits, or a request has failed."""
        with self._changed:
            queue = self.large or self.small
            return queue.popleft() if queue and not self.errors else None

    def next_thread_step(self) -> tuple[int, Finish | None] | None:
        """Return the next work of a compiler thread: the index of a request, and the function that finishes it.

        The function is None if the request must first be emitted, by :meth:`emit_request`. The result is None if there
        is no more work.
        """
        with self._changed:
            while not self.errors:
                may_emit = bool(self.small) and not self._emitting
                if self._emitted and (self.in_turn or not may_emit or len(self._emitted) >= MOST_EMITTED):
                    return self._emitted.popleft()
                if may_emit:
                    self._emitting = True
                    return self.small.popleft(), None
                if not self._emitting:
                    break
                self._changed.wait()
            return None

    def emit_request(self, n: int, begin: Begin) -> None:
        """Emit LLVM IR for request ``n`` by ``begin``, and queue the function that compiles the IR for any thread."""
        finish = begin(self.requests[n])
        with self._changed:
            self._emitting = False
            self._emitted.append((n, finish))
            self._changed.notify_all()

    def send_request(self, process: subprocess.Popen[bytes], n: int) -> subprocess.Popen[bytes]:
        """Send request ``n`` to a process and record the answer; return the process, or its replacement if it died."""
        self.busy[get_ident()] = process
        answer, process = ask_compiler_process(process, {**self.requests[n], "id": n}, self.errors)
        self.record_answer(n, answer)
        return process

    def record_answer(self, n: int, answer: dict[str, Any]) -> None:
        """Record a compiler's answer to request ``n``: an object, an error, or the refusal of a user's function."""
        if "refused" in answer:
            self.record_error(Refusal(self.requests[n]["symbol"], answer["refused"]))
        elif "error" in answer:
            self.record_error(f"{self.requests[n].get('text', 'the executor')}\n{answer['error']}")
        else:
            self.results[n] = answer["object"]
        with self._changed:
            self.finished += 1
            self.done(self.finished)

    def record_error(self, error: str | Exception) -> None:
        """Record an error of the run; no further request starts after it."""
        with self._changed:
            self.errors.append(error)
            self._changed.notify_all()

    @contextmanager
    def recording_exceptions(self) -> Iterator[None]:
        """Record exceptions of the block, in a helper thread, so that the waiting caller raises them."""
        try:
            yield
        except (CallbackFailed, MemoryError) as error:
            self.record_error(error)
        except Exception as error:
            self.record_error(str(error))


class CompilerRun:
    """A run of compile requests: those without a kernel text first, then the largest first.

    If ``begin`` is given, threads of this process compile small kernels by it. Processes answer all other requests, and
    then continue with small kernels. There are at most ``jobs`` threads and processes together. The caller's thread
    helps when it waits for the answers (:meth:`finish`); others may start earlier, in the background
    (:meth:`begin_ahead`). Use the run as a context manager, which stops unfinished work at the end.
    """

    def __init__(
        self, pool: CompilerPool, requests: Sequence[dict[str, Any]], jobs: int, begin: Begin | None = None
    ) -> None:
        self._pool, self._begin = pool, begin
        self._work = WaitingRequests(requests, begin is not None)
        self._processes, self._threads = self._work.worker_counts(jobs or default_jobs())
        self._servers: list[threading.Thread] = []
        self._helping: list[Future[None]] = []
        self._finished, self._stack = False, ExitStack()

    def __enter__(self) -> CompilerRun:
        if self._threads > 1:
            self._stack.enter_context(self._pool.short_switch_interval())
        return self

    def begin_ahead(self) -> None:
        """Start compiler processes and helper threads for which there are enough requests."""
        self._start_helpers(
            self._processes, [self._compile_small_kernels] * min(self._work.helper_thread_count(), self._threads - 1)
        )

    def finish(self, done: Callable[[int], object], meanwhile: Callable[[], object] = do_nothing) -> list[bytes]:
        """Wait for all answers and return them; ``done`` is called with the number of answers so far.

        A helper thread, if one has not started yet, runs ``meanwhile`` before it helps. Exceptions of ``meanwhile`` are
        ignored: a caller that needs its result calls it again.

        Raises
        ------
        InternalError
            If a kernel cannot be compiled; the message has its text and the worker's report.
        Refusal
            If a user's function cannot be compiled.
        CallbackFailed
            If ``done`` raises an exception.
        """
        work = self._work
        work.done, work.in_turn = done, self._threads == 1
        left = self._threads - 1 - len(self._helping)
        first: Callable[[], None] = partial(_meanwhile_then_help, meanwhile, self._compile_small_kernels)
        calls = [first, *[self._compile_small_kernels] * (left - 1)] if left > 0 else []
        self._start_helpers(self._processes - len(self._servers), calls)
        if not calls:
            _meanwhile_then_help(meanwhile, do_nothing)
        if self._threads:
            self._compile_small_kernels()
        _await_helpers(self._helping)
        for t in self._servers:
            t.join()
        self._finished = True
        if work.errors:
            raise _first_failure(work.errors[0])
        return [r for r in work.results if r is not None]

    def __exit__(self, *_: object) -> None:
        with self._stack:
            if not self._finished:
                self._abandon_compilation()

    def _abandon_compilation(self) -> None:
        self._work.record_error("interrupted")
        for process in list(self._work.busy.values()):
            process.kill()
        _await_helpers(self._helping)  # a running LLVM call cannot be stopped

    def _start_helpers(self, processes: int, calls: Sequence[Callable[[], None]]) -> None:
        servers = [
            threading.Thread(target=self._serve_requests, name="aotc-asks", daemon=True) for _ in range(processes)
        ]
        self._servers += servers
        self._pool.start_threads(servers, calls, self._helping)

    def _compile_small_kernels(self) -> None:
        """Compile small kernels in this thread until there are no more."""
        with self._work.recording_exceptions():
            while self._begin is not None and (step := self._work.next_thread_step()) is not None:
                n, finish = step
                if finish is None:
                    self._work.emit_request(n, self._begin)
                else:
                    self._work.record_answer(n, finish())

    def _serve_requests(self) -> None:
        """Send requests to a compiler process until there are no more."""
        with self._work.recording_exceptions():
            process = self._pool.take_process()
            try:
                while (n := self._work.next_request()) is not None:
                    process = self._work.send_request(process, n)
            finally:
                self._pool.return_process(process)


# Characters that a request without a kernel text counts as, for example the executor, which compiles longest. It is
# larger than any kernel text, so that such a request starts first.
LONGEST_TEXT = 1 << 20


def _request_size(request: dict[str, Any]) -> int:
    return len(request["text"]) if "text" in request else LONGEST_TEXT


# Characters of a kernel's text up to which the caller's process compiles it. Longer kernels go to a child process, as
# an interrupt (Ctrl-C) must wait until LLVM returns. None of 800 kernels of 71 programs took more than 0.3 s. Kernels
# of more than 3000 characters took 5 to 53 us a character.
OWN_TEXT = 40_000


def _is_small_cpu_kernel(request: dict[str, Any]) -> bool:
    """Return True if the request is a CPU kernel that compiles fast enough not to delay an interrupt.

    Numba's front end needs a process of its own.
    """
    direct = request.get("compiler", DIRECT) == DIRECT
    return direct and _request_size(request) <= OWN_TEXT and target_from(request["target"]).kind == "cpu"


def _meanwhile_then_help(meanwhile: Callable[[], object], helps: Callable[[], None]) -> None:
    with suppress(Exception):
        meanwhile()
    helps()


def _await_helpers(helping: Sequence[Future[None]]) -> None:
    """Wait for the helpers that run; cancel those that have not started."""
    wait([f for f in helping if not f.cancel()])


def _first_failure(found: str | Exception) -> Exception:
    return found if isinstance(found, Exception) else InternalError(f"a kernel could not be compiled:\n{found}")
