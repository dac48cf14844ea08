"""The compiler processes and threads of this process: started early and reused."""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from queue import SimpleQueue
from typing import Any, TypeVar

from aotc.diagnostics import InternalError
from aotc.kernels.worker import START, read_frame, write_frame
from aotc.vmfb.host.children import python_command

Result = TypeVar("Result")


# Default upper bound of compiler processes and threads, on machines with more cores. Each process loads LLVM and Numba,
# and threads wait for Python's interpreter lock. 2, 4 and 8 threads take 0.56, 0.42 and 0.31 of the time of one (60
# kernels).
MOST_JOBS = 8


def default_jobs() -> int:
    """Return the default number of parallel compilations: one for each core that this process may use."""
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0))))


# Seconds after which a waiting thread requests Python's interpreter lock, during compilation; Python's default is 5 ms.
# Four programs on two cores with 5 ms, 1 ms and 0.3 ms: elapsed time 1, 0.98 and 0.96, processor time 1, 1.01 and 1.01.
# Shorter intervals gain nothing.
SHORT_INTERVAL = 0.0003
# Bytes of the stack of a compiler thread. LLVM recurses over the expressions of a kernel, and a system may give a
# thread a smaller stack than a process. This is twice the usual stack of a process; untouched stack memory costs
# nothing.
THREAD_STACK = 16 << 20


class CompilerPool:
    """The compiler processes and threads of this process, which live as long as the process."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock, self._stacks = threading.Lock(), threading.Lock()
        self._helpers = _HelperThreads()
        self._shortened, self._interval = 0, sys.getswitchinterval()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._reset_after_fork)

    def start_processes(self, jobs: int, *kinds: str) -> None:
        """Start idle compiler processes, one fewer than ``jobs``, because this process is one of the jobs.

        New processes load the compilers for the target ``kinds``, such as ``cuda``, in advance.
        """
        with self._lock:
            while len(self._idle) < max((jobs or default_jobs()) - 1, 1):
                self._idle.append(_spawn_compiler_process(*kinds))

    def start_threads(
        self, threads: Sequence[threading.Thread], calls: Sequence[Callable[[], Any]], helping: list[Future[Any]]
    ) -> None:
        """Start ``threads``, and run ``calls`` in pooled threads; append the futures of the calls to ``helping``.

        All threads have stacks that are large enough for LLVM.
        """
        if threads or calls:
            with self._stacks:  # the stack size is global to the process
                before = threading.stack_size(THREAD_STACK)
                try:
                    for t in threads:
                        t.start()
                    for call in calls:
                        helping.append(Future())
                        self._helpers.run_in_thread(call, helping[-1])
                finally:
                    threading.stack_size(before)

    def run_in_background(self, call: Callable[[], Result]) -> Future[Result]:
        """Run ``call`` in a pooled thread, and return its future."""
        helping: list[Future[Result]] = []
        self.start_threads([], [call], helping)
        return helping[0]

    def take_process(self) -> subprocess.Popen[bytes]:
        """Remove an idle compiler process from the pool, or start one."""
        with self._lock:
            while self._idle:
                process = self._idle.pop(0)
                if process.poll() is None:
                    return process
        return _spawn_compiler_process()

    def return_process(self, process: subprocess.Popen[bytes]) -> None:
        """Return a compiler process to the pool."""
        with self._lock:
            self._idle.append(process)

    @contextmanager
    def short_switch_interval(self) -> Iterator[None]:
        """Shorten the GIL's switch interval for the block: a thread back from LLVM needs the GIL for microseconds."""
        with self._lock:
            self._shortened += 1
            if self._shortened == 1:
                self._interval = sys.getswitchinterval()
                sys.setswitchinterval(min(self._interval, SHORT_INTERVAL))
        try:
            yield
        finally:
            with self._lock:
                self._shortened -= 1
                if not self._shortened:
                    sys.setswitchinterval(self._interval)

    def close(self) -> None:
        """End all idle compiler processes."""
        for process in self._idle:
            process.kill()
        self._idle.clear()

    def _reset_after_fork(self) -> None:
        """Reset the pool in a forked child: processes belong to the parent, and vanished threads may hold locks."""
        self._lock, self._stacks = threading.Lock(), threading.Lock()
        self._helpers = _HelperThreads()
        if self._shortened:
            self._shortened = 0
            sys.setswitchinterval(self._interval)
        self._idle.clear()


class _HelperThreads:
    """Pool of compiler threads that grows to the number of concurrent calls.

    A pooled thread keeps its LLVM target machine and its memory. A new thread would need 2 to 3 ms in each run to
    create them.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        self._idle = threading.Semaphore(0)

    def run_in_thread(self, call: Callable[[], Any], future: Future[Any]) -> None:
        """Run ``call`` in an idle or a new thread; ``future`` receives its result or exception."""
        self._calls.put((call, future))
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve_calls, name="aotc-compiles", daemon=True).start()

    def _serve_calls(self) -> None:
        while True:
            call, future = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:  # raised by the waiting thread; this one stays
                    future.set_exception(error)
            del call, future  # free what they reference while this thread waits
            self._idle.release()


def _spawn_compiler_process(*kinds: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command(START, *kinds),
        env={**os.environ, "NUMBA_DISABLE_INTEL_SVML": "1"},  # LLVM would call functions that bundles lack
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=os.sep,  # the process may outlive the folder of its caller, and Numba asks for its path
        process_group=0,  # Ctrl-C goes to this process, which ends the child
    )


def ask_compiler_process(
    process: subprocess.Popen[bytes], request: dict[str, Any], errors: Sequence[object]
) -> tuple[dict[str, Any], subprocess.Popen[bytes]]:
    """Send a request to a compiler process; return the answer, and the process that gave it.

    A process that has died is replaced once, unless there are ``errors``.
    """
    for attempt in range(2):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            write_frame(process.stdin, request)
            answer = read_frame(process.stdout)
        except (OSError, ValueError):  # its end of the pipe is closed, or the message is incomplete
            answer = None
        if answer is not None:
            return answer, process
        process.kill()
        code = process.wait()
        if errors:
            break
        if attempt == 0:
            process = _spawn_compiler_process()
    what = request.get("text", "the executor")
    raise InternalError(f"the compiler process died twice (exit {code}) on:\n{what}")


POOL = CompilerPool()
