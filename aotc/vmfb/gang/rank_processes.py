"""The child processes of a gang: their start, their replies, their errors and their end."""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from time import monotonic
from typing import Any

from aotc.vmfb import errors
from aotc.vmfb.errors import BundleError, CallError, RankLost, error_of_message
from aotc.vmfb.host.children import python_command
from aotc.vmfb.host.interruption import Watch
from aotc.vmfb.host.locks import after_fork
from aotc.vmfb.ranks.frames import BadFrame, FrameReader, send_frame
from aotc.vmfb.ranks.loss import POLL_SECONDS

_CHILD = "from aotc.vmfb.gang.rank_process import serve; serve()"

# Seconds after the first failure in which other ranks report theirs: the cause may be another rank's. Ranks notice a
# lost one within some POLL_SECONDS, and an error is to reach the caller within a second.
_FAILURE_SECONDS = 0.3

# Seconds in which ranks end by themselves when the gang is closed.
_CLOSE_SECONDS = 1.0

_OPEN: weakref.WeakSet[RankProcesses] = weakref.WeakSet()


@after_fork
def _close_in_child() -> None:
    """Close a forked child's copies of the connections: they would hide the end of this process from the ranks."""
    for processes in list(_OPEN):
        processes.close_connections()


class _Rank:
    """One child process and its socket."""

    def __init__(self, number: int, process: subprocess.Popen[bytes], sock: socket.socket) -> None:
        self.number, self.process, self.sock = number, process, sock
        self.reader = FrameReader(sock)

    def loss(self, during: str) -> RankLost:
        """Return the error of a process that ended."""
        with suppress(subprocess.TimeoutExpired):  # its connection may end a little earlier
            self.process.wait(_FAILURE_SECONDS)
        status = self.process.returncode
        verb = "ended"
        if status is not None:
            verb = f"was killed by {_signal_name(-status)}" if status < 0 else f"ended with status {status}"
        host = socket.gethostname()
        return RankLost(self.number, f"rank {self.number} ({host}, process {self.process.pid}) {verb} {during}")


class RankProcesses:
    """The ranks of a gang.

    Parameters
    ----------
    size : int
        Number of ranks.
    memory : int
        Descriptor of the shared memory.
    files : sequence of int
        Other descriptors that the ranks need.
    """

    def __init__(self, size: int, memory: int, files: Sequence[int] = ()) -> None:
        self._owner = os.getpid()
        self._ranks: list[_Rank] = []
        life, self._life = os.pipe()
        _OPEN.add(self)
        try:
            with _interrupts_blocked():
                for number in range(size):
                    self._start(number, life, memory, files)
        except BaseException as error:
            self.kill()
            if isinstance(error, OSError):
                raise CallError("", f"the system starts no process for a rank: {error.strerror}") from None
            raise
        finally:
            os.close(life)

    def _start(self, number: int, life: int, memory: int, files: Sequence[int]) -> None:
        """Start the process of rank ``number``, connected by a socket.

        The process inherits the descriptors ``files``.
        """
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            kept = theirs.fileno(), life, memory
            command = python_command(_CHILD, *map(str, kept))
            passed = (*kept, *files)
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=passed)
        self._ranks.append(_Rank(number, process, ours))

    @property
    def identifiers(self) -> tuple[int, ...]:
        """The process of each rank."""
        return tuple(rank.process.pid for rank in self._ranks)

    def refuse_in_fork(self) -> None:
        """Raise CallError in a forked child of the gang's process."""
        if os.getpid() != self._owner:
            message = f"the gang belongs to process {self._owner}, which this one was forked from"
            raise CallError("", message, hint="aotc.gang in this process")

    def ask(self, messages: Sequence[Mapping[str, Any]], during: str) -> list[dict[str, Any]]:
        """Send each rank its message, and return the reply of each.

        Raises
        ------
        Error
            The error of a rank. All ranks have been ended then.
        """
        try:
            for rank, message in zip(self._ranks, messages, strict=True):
                send_frame(rank.sock, dict(message))  # a rank that has ended is noticed below
            return self._replies(during)
        except BaseException:
            self.kill()
            raise

    def _replies(self, during: str) -> list[dict[str, Any]]:
        """Wait for the reply of each rank.

        After a failure, wait briefly for those of the others, and raise the cause.
        """
        replies: dict[int, dict[str, Any]] = {}
        failures: dict[int, CallError | BundleError] = {}
        end, interruption = float("inf"), Watch()
        with selectors.DefaultSelector() as selector:
            for rank in self._ranks:
                selector.register(rank.sock, selectors.EVENT_READ, rank)
            while selector.get_map() and monotonic() < end:
                for key, _ in selector.select(POLL_SECONDS):
                    found = _reply_of_rank(key.data, during)
                    if found is None:
                        continue
                    selector.unregister(key.data.sock)
                    if isinstance(found, dict):
                        replies[key.data.number] = found
                    else:
                        failures[key.data.number] = found
                        end = min(end, monotonic() + _FAILURE_SECONDS)
                interruption.raise_pending_exception()
        if failures:
            raise cause(failures)
        return [replies[rank.number] for rank in self._ranks]

    def close(self) -> None:
        """End all ranks: those that wait for a call end by themselves, others are killed."""
        if os.getpid() != self._owner:
            return
        for rank in self._ranks:
            rank.sock.close()
        end = monotonic() + _CLOSE_SECONDS
        for rank in self._ranks:
            with suppress(subprocess.TimeoutExpired):
                rank.process.wait(max(0.0, end - monotonic()))
        self.kill()

    def end_call(self) -> None:
        """Kill all ranks while another thread waits for their replies; it frees the rest."""
        for rank in self._ranks:
            rank.process.kill()

    def kill(self) -> None:
        """Kill all ranks that have not ended."""
        if os.getpid() != self._owner:
            return
        self.end_call()
        for rank in self._ranks:
            rank.process.wait()
        self.close_connections()

    def close_connections(self) -> None:
        """Close this process's ends of all connections."""
        for rank in self._ranks:
            rank.sock.close()
        life, self._life = self._life, -1
        if life >= 0:
            os.close(life)


def _reply_of_rank(rank: _Rank, during: str) -> dict[str, Any] | CallError | BundleError | None:
    """Return a rank's reply, its error, or None if neither is complete."""
    try:
        message = rank.reader.read()
    except (OSError, BadFrame):
        return rank.loss(during)
    if message is None or "error" not in message:
        return message
    return _error_of_rank(message["error"])


def _error_of_rank(facts: Mapping[str, Any]) -> CallError | BundleError:
    """Return the error that a rank has described."""
    known = getattr(errors, facts["kind"], None) if facts["kind"] else None
    kind: type[CallError | BundleError] = CallError
    if isinstance(known, type) and issubclass(known, CallError | BundleError):
        kind = known
    more = {} if facts["rank"] is None else {"rank": facts["rank"]}
    return error_of_message(kind, facts["text"], more)


def cause(failures: Mapping[int, CallError | BundleError]) -> CallError | BundleError:
    """Return the failure to raise: an error of the program before the loss of a process, before its consequences."""
    own = {rank: error for rank, error in failures.items() if not isinstance(error, RankLost)}
    ended = {rank: error for rank, error in failures.items() if getattr(error, "rank", None) == rank}
    rank, error = min((own or ended or failures).items(), key=_rank_number)
    if own and (len(own) < len(failures) or len({str(e) for e in own.values()}) > 1):
        return error_of_message(type(error), f"rank {rank}: {error}", vars(error))
    return error


def _rank_number(item: tuple[int, CallError | BundleError]) -> int:
    return item[0]


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Let processes that are started inside never see Ctrl-C, which a terminal sends to all: the gang ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
