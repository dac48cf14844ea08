"""The compiler processes of this process: started early, kept, shared out work."""

from __future__ import annotations

import atexit
import os
import subprocess
import threading
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from threading import get_ident
from typing import Any

from aotc.diagnostics import CallbackFailed, InternalError
from aotc.kernels.limits import LONGEST_TEXT, MOST_JOBS
from aotc.kernels.workers.worker import START, read_frame, write_frame
from aotc.vmfb.process.children import python_command


def default_jobs() -> int:
    """Return how many compiler processes to run: one for each core that this process may use."""
    return max(1, min(MOST_JOBS, len(os.sched_getaffinity(0))))


class Refusal(Exception):
    """A user's function cannot be compiled: its symbol, and why."""

    def __init__(self, symbol: str, reason: str) -> None:
        super().__init__(reason)
        self.symbol, self.reason = symbol, reason


class CompilerPool:
    """Compiler processes that live as long as this process."""

    def __init__(self) -> None:
        self._idle: list[subprocess.Popen[bytes]] = []
        self._lock = threading.Lock()
        atexit.register(self.close)
        os.register_at_fork(after_in_child=self._begin_again)

    def start(self, jobs: int, *kinds: str) -> None:
        """Have at least ``jobs`` processes ready or starting, new ones for ``kinds`` of targets besides CPUs."""
        with self._lock:
            while len(self._idle) < (jobs or default_jobs()):
                self._idle.append(_spawn(*kinds))

    def run(self, requests: Sequence[dict[str, Any]], jobs: int, done: Callable[[int], None]) -> list[bytes]:
        """Answer all requests; the largest go first, before them what is not a kernel.

        Raises
        ------
        InternalError
            If a kernel cannot be compiled: its text and the worker's report.
        Refusal
            If a user's function cannot be compiled.
        CallbackFailed
            If ``done`` does.
        """
        results: list[bytes | None] = [None] * len(requests)
        errors: list[str | Exception] = []
        queue = _largest_first(requests)
        finished = [0]
        busy: dict[int, subprocess.Popen[bytes]] = {}

        def serve() -> None:
            process = self._take()
            try:
                while not errors:
                    n = queue.get_nowait()
                    busy[get_ident()] = process
                    answer, process = _ask(process, {**requests[n], "id": n}, errors)
                    if "refused" in answer:
                        errors.append(Refusal(requests[n]["symbol"], answer["refused"]))
                    elif "error" in answer:
                        errors.append(f"{requests[n].get('text', 'the executor')}\n{answer['error']}")
                    else:
                        results[n] = answer["object"]
                    with self._lock:
                        finished[0] += 1
                        done(finished[0])
            except Empty:
                pass
            except CallbackFailed as error:
                errors.append(error)
            except Exception as error:  # whatever it is, the caller must hear of it: threads have no other way
                errors.append(str(error))
            finally:
                with self._lock:
                    self._idle.append(process)

        count = min(jobs or default_jobs(), len(requests))
        threads = [threading.Thread(target=serve, daemon=True) for _ in range(count)]
        try:
            for t in threads:
                t.start()
            for t in threads:
                t.join()
        except BaseException:  # an interrupt: what is being compiled is not wanted any more
            errors.append("interrupted")
            for process in list(busy.values()):
                process.kill()
            raise
        if errors:
            raise _failure(errors[0])
        return [r for r in results if r is not None]

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
        self._lock = threading.Lock()
        self._idle.clear()


def _largest_first(requests: Sequence[dict[str, Any]]) -> SimpleQueue[int]:
    """Return the numbers of the requests, in the order in which they are to be begun."""
    sizes = [len(r["text"]) if "text" in r else LONGEST_TEXT for r in requests]
    queue: SimpleQueue[int] = SimpleQueue()
    for n in sorted(range(len(requests)), key=lambda n: -sizes[n]):
        queue.put(n)
    return queue


def _failure(found: str | Exception) -> Exception:
    return found if isinstance(found, Exception) else InternalError(f"a kernel could not be compiled:\n{found}")


def _spawn(*kinds: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        python_command(START, *kinds),
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
