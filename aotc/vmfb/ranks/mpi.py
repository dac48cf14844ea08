"""Ranks connected by MPI, through ctypes and the standard ABI of MPI 5 (``mpi_abi.h``).

One binding serves every MPI with this ABI: MPICH (the wheel ``mpich``), Open MPI, Intel MPI. If a rank dies, its
launcher (mpirun, srun) ends all processes. If a rank closes its link or fails, ranks that wait for it raise an error.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import socket
import sys
import weakref
from collections.abc import Iterable, Mapping
from pathlib import Path
from time import monotonic, sleep
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

from aotc.vmfb.errors import ArgumentValueError, CallError, RankLost
from aotc.vmfb.host.install import install_command
from aotc.vmfb.host.interruption import Watch
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.loss import CLOSED, LeftRanks, Loss, OneThread, Peer, array_bytes, fact_difference, facts_of_rank
from aotc.vmfb.ranks.ranks import Ranks

_NAMES = ("libmpi_abi.so.1", "libmpi_abi.so.0", "libmpi_abi.so")

# Constants of mpi_abi.h. Handles are pointers.
_WORLD, _BYTE, _ERRORS_RETURN, _REQUEST_NULL = 0x101, 0x247, 0x143, 0x180
_THREAD_MULTIPLE = 4096
_ERROR_STRING = 512

# Tags of messages: data with their header, large data alone, and the word that a rank leaves.
_DATA, _LARGE, _BYE = 1, 2, 3

# Bytes up to which data are sent in one message with their header, which copies them. Messages of this size are sent
# at once by every MPI; a second message costs more than the copy.
_EAGER_BYTES = 8 << 10

# Before the data: crc32 of the collective's name, bytes of data.
_HEADER = np.dtype([("mark", "<u4"), ("reserved", "<u4"), ("bytes", "<u8")])

# Bytes of the reason for leaving.
_REASON = 256

# Seconds of a wait in which the processor is only yielded, and the pause between two looks after that. Ranks that share
# cores lose quanta of several milliseconds to a rank that spins: 4 ranks on 2 cores need 3 times as long for 64 KiB
# with 2 ms of yielding, and 2 ranks are no faster.
_YIELD_SECONDS, _PAUSE = 0.0002, 0.00005

# Seconds to wait until messages are cancelled. MPI cancels receives at once, and sends in general never.
_CANCEL_SECONDS = 0.2

# Seconds between two looks for ranks that leave, in a wait.
_BYE_SECONDS = 0.01

_Pointer = ctypes.c_void_p


def find_library() -> Path | str:
    """Return the path of the MPI library: ``AOTC_MPI_LIBRARY``, the one of the wheel ``mpich``, or the system's."""
    chosen = os.environ.get("AOTC_MPI_LIBRARY")
    if chosen:
        return chosen
    for name in _NAMES:
        path = Path(sys.prefix) / "lib" / name
        if path.exists():
            return path
    return _NAMES[0]


# Types of the arguments of each function; handles are pointers.
_INT, _OUT = ctypes.c_int, ctypes.c_void_p
_MESSAGE = (_Pointer, ctypes.c_int64, _Pointer, _INT, _INT, _Pointer, _OUT)
_FUNCTIONS: dict[str, tuple[type, ...]] = {
    "MPI_Initialized": (_OUT,),
    "MPI_Finalized": (_OUT,),
    "MPI_Init_thread": (_OUT, _OUT, _INT, _OUT),
    "MPI_Finalize": (),
    "MPI_Comm_set_errhandler": (_Pointer, _Pointer),
    "MPI_Comm_rank": (_Pointer, _OUT),
    "MPI_Comm_size": (_Pointer, _OUT),
    "MPI_Comm_dup": (_Pointer, _OUT),
    "MPI_Isend_c": _MESSAGE,
    "MPI_Irecv_c": _MESSAGE,
    "MPI_Testall": (_INT, _OUT, _OUT, _OUT),
    "MPI_Cancel": (_OUT,),
    "MPI_Error_string": (_INT, _OUT, _OUT),
}


class _Mpi:
    """The MPI library, loaded and initialized once in a process."""

    def __init__(self) -> None:
        path = find_library()
        try:
            library = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
            self._functions = {name: getattr(library, name) for name in _FUNCTIONS}
        except (OSError, AttributeError) as error:
            raise CallError(
                "", f"MPI cannot be loaded: {error}",
                hint=f"{install_command('mpi')}, or AOTC_MPI_LIBRARY=<libmpi_abi.so.1 of an MPI 5>",
            ) from error  # fmt: skip
        for name, types in _FUNCTIONS.items():
            self._functions[name].argtypes = types
        # Calls of one process are made one at a time, whatever level of threads MPI has. None of them waits.
        self._lock = new_lock()
        self.requests: set[_Requests] = set()  # incomplete ones: MPI reads or writes their arrays at any time
        if not self._flag("MPI_Initialized"):
            level = ctypes.c_int()
            self.call("MPI_Init_thread", None, None, _THREAD_MULTIPLE, ctypes.addressof(level))
            atexit.register(self._finalize)
        self.call("MPI_Comm_set_errhandler", _WORLD, _ERRORS_RETURN)

    def call(self, name: str, *arguments: int | None) -> None:
        """Call a function of MPI; pointers and handles are integers.

        Raises
        ------
        CallError
            With MPI's message.
        """
        with self._lock:
            status = self._functions[name](*arguments)
        if status:
            text, length = ctypes.create_string_buffer(_ERROR_STRING), ctypes.c_int()
            self._functions["MPI_Error_string"](status, ctypes.addressof(text), ctypes.addressof(length))
            raise CallError("", f"{name}: {text.value.decode(errors='replace')}")

    def communicator_integer(self, name: str, communicator: int) -> int:
        """Return the result of ``MPI_Comm_rank`` or ``MPI_Comm_size``."""
        value = ctypes.c_int()
        self.call(name, communicator, ctypes.addressof(value))
        return value.value

    def duplicate(self) -> int:
        """Return a new communicator of all ranks; each link has its own, so that their messages are separate."""
        made = ctypes.c_void_p()
        self.call("MPI_Comm_dup", _WORLD, ctypes.addressof(made))
        self.call("MPI_Comm_set_errhandler", made.value, _ERRORS_RETURN)
        return made.value or 0

    def finalized(self) -> bool:
        """Return True if MPI has ended in this process."""
        return self._flag("MPI_Finalized")

    def _flag(self, name: str) -> bool:
        value = ctypes.c_int()
        self.call(name, ctypes.addressof(value))
        return bool(value.value)

    def _finalize(self) -> None:
        if not self.finalized():
            self.call("MPI_Finalize")


_LOADED: list[_Mpi] = []


def _mpi() -> _Mpi:
    if not _LOADED:
        _LOADED.append(_Mpi())
    return _LOADED[0]


class _Requests:
    """Up to ``most`` pending MPI requests: sends and receives."""

    def __init__(self, mpi: _Mpi, communicator: int, most: int) -> None:
        self._mpi, self._communicator = mpi, communicator
        self._requests = (ctypes.c_void_p * most)()
        self._address = ctypes.addressof(self._requests)
        self._done = ctypes.c_int()
        self._alive: list[np.ndarray] = []
        mpi.requests.add(self)

    def start(self, name: str, data: np.ndarray, rank: int, tag: int) -> None:
        """Start ``MPI_Isend_c`` or ``MPI_Irecv_c`` for the bytes of an array; both support more than 2 GiB."""
        request = self._address + len(self._alive) * ctypes.sizeof(ctypes.c_void_p)
        address = data.__array_interface__["data"][0]
        self._mpi.call(name, address, data.nbytes, _BYTE, rank, tag, self._communicator, request)
        self._alive.append(data)

    def are_done(self) -> bool:
        """Return True if all requests are complete; the test also lets MPI make progress."""
        self._mpi.call("MPI_Testall", len(self._alive), self._address, ctypes.addressof(self._done), None)
        if self._done.value:
            self._mpi.requests.discard(self)
        return bool(self._done.value)

    def cancel(self) -> None:
        """Cancel incomplete requests, and wait a limited time for them, so that the caller may free the arrays."""
        for index in range(len(self._alive)):
            if self._requests[index] not in (None, _REQUEST_NULL):
                self._mpi.call("MPI_Cancel", self._address + index * ctypes.sizeof(ctypes.c_void_p))
        end = monotonic() + _CANCEL_SECONDS
        while not self.are_done() and monotonic() < end:
            sleep(_PAUSE)


class _LeaveNotice(NamedTuple):
    """Notice of a rank that leaves: the lost rank (itself or another), and its message counts to and from this rank."""

    lost: int
    sent: int
    received: int
    why: str


class MpiLink:
    """One rank of MPI; see :class:`aotc.vmfb.ranks.link.Link`."""

    def __init__(self, mpi: _Mpi, communicator: int) -> None:
        self._mpi, self._communicator = mpi, communicator
        self.rank = mpi.communicator_integer("MPI_Comm_rank", communicator)
        self.size = mpi.communicator_integer("MPI_Comm_size", communicator)
        self._peers: tuple[Peer, ...] = ()
        self._turn = OneThread()
        self._failure: tuple[int, str] | None = None
        self._overdue, self._looking = LeftRanks(), new_lock()
        self._open = True
        # A receive for each other rank waits for its word that it leaves.
        self._byes: dict[int, tuple[np.ndarray, _Requests]] = {}
        self._left: dict[int, _LeaveNotice] = {}
        # Messages to and from each rank so far. A word that a rank leaves may overtake its data.
        self._sent, self._received = [0] * self.size, [0] * self.size
        for rank in self._others():
            requests, word = _Requests(mpi, communicator, 1), np.zeros(_REASON, np.uint8)
            requests.start("MPI_Irecv_c", word, rank, _BYE)
            self._byes[rank] = (word, requests)
        self._said: _Requests | None = None
        self._at_exit = weakref.WeakMethod(self.close)
        atexit.register(_close, self._at_exit)  # before MPI ends: handlers run in reverse

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send and receive arrays, keyed by rank; see :meth:`.Link.exchange`."""
        with self._turn:
            if self._failure is not None:
                raise RankLost(*self._failure)
            if not self._open:
                raise CallError("", f"this rank {CLOSED} before {what}")
            try:
                self._move(sends, receives, what)
            except RankLost as error:
                self.close(self._left[error.rank].why, error.rank)
                raise
            except BaseException as error:
                self.close(f"failed ({type(error).__name__})")
                raise

    def lost(self, what: str) -> RankLost | None:
        """Return the error for a lost rank, or None; only MPI's launcher notices the end of a process."""
        if self._failure is not None:
            return RankLost(*self._failure)
        try:
            self._receive_notices((), (), what)
            left = self._overdue.overdue(self._left)
            if left is not None:
                self._fail(self._left[left], what)
        except RankLost as error:
            self.close(self._left[error.rank].why, error.rank)
            return error
        return None

    def agree(self, facts: Mapping[str, str]) -> None:
        """Compare facts between all ranks.

        Raises
        ------
        CallError
            On all ranks, if they differ.
        """
        mine = {"facts": facts_of_rank(facts, self.size), "host": socket.gethostname(), "process": os.getpid()}
        rows = [json.loads(text) for text in self._gather(json.dumps(mine).encode())]
        self._peers = tuple(Peer(rank, row["host"], row["process"]) for rank, row in enumerate(rows))
        differs = fact_difference([row["facts"] for row in rows])
        if differs:
            self.close()
            raise CallError("", differs)

    def close(self, why: str = CLOSED, lost: int | None = None) -> None:
        """Send the other ranks a notice that this rank leaves, or that it leaves because rank ``lost`` has left."""
        if not self._open:
            return
        self._open = False
        if self._mpi.finalized():
            return
        self._said = _Requests(self._mpi, self._communicator, self.size)
        with self._looking:
            self._send_notices(why, self.rank if lost is None else lost)

    def _send_notices(self, why: str, lost: int) -> None:
        """Send each other rank a :class:`_LeaveNotice` with the reason, the lost rank and the message counts."""
        assert self._said is not None
        for rank, (_, requests) in self._byes.items():
            bye = _LeaveNotice(lost, self._sent[rank], self._received[rank], why)
            word = np.frombuffer(" ".join(map(str, bye)).encode()[:_REASON].ljust(_REASON, b"\0"), np.uint8)
            self._said.start("MPI_Isend_c", word, rank, _BYE)
            if rank not in self._left:
                requests.cancel()

    def _others(self) -> list[int]:
        return [rank for rank in range(self.size) if rank != self.rank]

    def _gather(self, data: bytes) -> list[bytes]:
        """Gather a byte string of each rank on all ranks; return them by rank."""
        own = np.frombuffer(data, np.uint8)
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = len(own)
        what, others = "the start", self._others()
        self.exchange(
            dict.fromkeys(others, sizes[self.rank : self.rank + 1]), {r: sizes[r : r + 1] for r in others}, what
        )
        texts = [own if rank == self.rank else np.zeros(sizes[rank], np.uint8) for rank in range(self.size)]
        self.exchange(dict.fromkeys(others, own), {rank: texts[rank] for rank in others}, what)
        return [text.tobytes() for text in texts]

    def _move(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send and receive arrays by MPI; a checksum of ``what`` in each header detects different collectives."""
        mark = crc32(what.encode())
        requests = _Requests(self._mpi, self._communicator, 2 * (len(sends) + len(receives)))
        messages = {}
        try:
            for rank, array in receives.items():
                if rank != self.rank:
                    messages[rank] = _receive(requests, rank, array)
            for rank, array in sends.items():
                if rank == self.rank:
                    array_bytes(receives[rank])[:] = array_bytes(array)
                else:
                    _send(requests, rank, array, mark)
            self._wait(requests, sends.keys(), receives.keys(), what)
        except BaseException:
            requests.cancel()
            raise
        for rank, message in messages.items():
            target = receives[rank]
            found = message[: _HEADER.itemsize].view(_HEADER)[0]
            if (int(found["mark"]), int(found["bytes"])) != (mark, target.nbytes):
                raise _other_collective(rank, what)
            if target.nbytes <= _EAGER_BYTES:
                array_bytes(target)[:] = message[_HEADER.itemsize :].data
            self._received[rank] += 1
        for rank in sends:
            self._sent[rank] += 1

    def _wait(self, requests: _Requests, sends: Iterable[int], receives: Iterable[int], what: str) -> None:
        """Wait for MPI requests: poll first, then sleep between checks for interruption and for leave notices."""
        interruption, start = Watch(), monotonic()
        look = start + _BYE_SECONDS
        while not requests.are_done():
            now = monotonic()
            if now < start + _YIELD_SECONDS:
                os.sched_yield()
                continue
            sleep(_PAUSE)
            if now > look:
                look = now + _BYE_SECONDS
                interruption.raise_pending_exception()
                self._receive_notices(sends, receives, what)

    def _receive_notices(self, sends: Iterable[int], receives: Iterable[int], what: str) -> None:
        """Receive notices; raise if a needed rank has left, or if any rank has left because another one is lost."""
        with self._looking:  # a rank with a GPU has a thread that looks, too
            if not self._open:  # MPI may have ended
                return
            for rank, (word, requests) in self._byes.items():
                if rank in self._left or not requests.are_done():
                    continue
                lost, sent, received, why = word.tobytes().rstrip(b"\0").decode(errors="replace").split(" ", 3)
                bye = self._left[rank] = _LeaveNotice(int(lost), int(sent), int(received), why)
                if bye.lost != rank:
                    self._left[bye.lost] = bye
                    self._fail(bye, what)
        for rank, bye in sorted(self._left.items()):
            unsent = rank in receives and self._received[rank] >= bye.sent
            if unsent or (rank in sends and self._sent[rank] >= bye.received):
                self._fail(bye, what)

    def _fail(self, bye: _LeaveNotice, what: str) -> None:
        peer = self._peers[bye.lost] if self._peers else f"rank {bye.lost}"
        self._failure = bye.lost, Loss(bye.lost, bye.why).text(peer, what, waiting=True)
        raise RankLost(*self._failure)


def _close(method: weakref.WeakMethod[Any]) -> None:
    close = method()
    if close is not None:
        close()


def _send(requests: _Requests, rank: int, array: np.ndarray, mark: int) -> None:
    """Start to send an array: a small array in the message of its header, a large one in a second message."""
    eager = array.nbytes <= _EAGER_BYTES
    message = np.empty(_HEADER.itemsize + (array.nbytes if eager else 0), np.uint8)
    message[: _HEADER.itemsize].view(_HEADER)[0] = (mark, 0, array.nbytes)
    if eager:
        message[_HEADER.itemsize :] = array_bytes(array)
    requests.start("MPI_Isend_c", message, rank, _DATA)
    if not eager:
        requests.start("MPI_Isend_c", array, rank, _LARGE)


def _receive(requests: _Requests, rank: int, array: np.ndarray) -> np.ndarray:
    """Start to receive an array; return the buffer of the message with the header and, if small, the array."""
    eager = array.nbytes <= _EAGER_BYTES
    message = np.empty(_HEADER.itemsize + (array.nbytes if eager else 0), np.uint8)
    requests.start("MPI_Irecv_c", message, rank, _DATA)
    if not eager:
        requests.start("MPI_Irecv_c", array, rank, _LARGE)
    return message


def _other_collective(rank: int, what: str) -> CallError:
    return CallError(
        "", f"rank {rank} is in another collective than {what}",
        hint="all ranks must make the same calls in the same order",
    )  # fmt: skip


def mpi_link(ranks: Ranks, facts: Mapping[str, str]) -> MpiLink:
    """Join the ranks that MPI's launcher started.

    Raises
    ------
    CallError
        If there is no MPI library, or if facts differ.
    ArgumentValueError
        If ``ranks`` are not those of MPI.
    """
    mpi = _mpi()
    link = MpiLink(mpi, mpi.duplicate())
    if (link.rank, link.size) != (ranks.rank, ranks.size):
        link.close()
        raise ArgumentValueError(
            "Ranks", "these are not the ranks of MPI", f"rank {ranks.rank} of {ranks.size}",
            f"rank {link.rank} of {link.size}, as its launcher says",
        )  # fmt: skip
    link.agree(facts)
    return link
