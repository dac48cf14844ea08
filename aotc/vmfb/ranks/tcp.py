"""Ranks connected by TCP: a connection for each pair, and a watch for lost ranks."""

from __future__ import annotations

import errno
import os
import select
import socket
import weakref
from collections.abc import Mapping
from time import monotonic
from zlib import crc32

import numpy as np

from aotc.vmfb.errors import CallError, RankLost
from aotc.vmfb.host.interruption import Watch
from aotc.vmfb.ranks.loss import CLOSED, POLL_SECONDS, LeftRanks, OneThread, Peer, array_bytes
from aotc.vmfb.ranks.ranks import Ranks
from aotc.vmfb.ranks.rendezvous import connect_pairs, meet
from aotc.vmfb.ranks.watch import LossWatch

_POLL_MILLISECONDS = int(POLL_SECONDS * 1000)

_OPEN: weakref.WeakSet[TcpLink] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close a forked child's copies of the connections, which would hide the end of its parent from other ranks."""
    for link in list(_OPEN):
        for sock in link.sockets():
            sock.close()


os.register_at_fork(after_in_child=_close_in_child)


class TcpLink:
    """This rank's connections to all others; see :class:`aotc.vmfb.ranks.link.Link`."""

    def __init__(
        self, rank: int, peers: tuple[Peer, ...], watch: LossWatch, pairs: Mapping[int, socket.socket]
    ) -> None:
        self.rank, self.size = rank, len(peers)
        self._peers, self._watch = peers, watch
        self._turn = OneThread()
        self._left = LeftRanks()
        self._failure: tuple[int, str] | None = None
        # The system sizes their buffers: a size of ours would be no faster, and on many systems the limit is lower.
        self._channels = {other: _Channel(other, sock) for other, sock in pairs.items()}
        self._shut = weakref.finalize(self, _shut, watch, list(pairs.values()))  # also when the interpreter ends
        _OPEN.add(self)

    def sockets(self) -> list[socket.socket]:
        """Return all sockets of the link."""
        return [*self._watch.sockets(), *(channel.sock for channel in self._channels.values())]

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send and receive arrays, keyed by rank; see :meth:`.Link.exchange`."""
        with self._turn:
            if self._failure is not None:
                raise RankLost(*self._failure)
            if self._watch.lost is not None:
                raise self._lost(what, waiting=False)
            if not self._shut.alive:
                raise CallError("", f"this rank {CLOSED} before {what}")
            try:
                self._move(sends, receives, what)
            except _Ended as ended:
                self._watch.report(ended.rank)
                raise self._lost(what, waiting=True) from None
            except RankLost:
                raise
            except BaseException as error:  # half of the data may be on the way: nothing can follow
                self.close(f"failed ({type(error).__name__})")
                raise

    def lost(self, what: str) -> RankLost | None:
        """Return the error for a lost rank, or None."""
        if self._failure is not None:
            return RankLost(*self._failure)
        if self._watch.lost is None and (left := self._left.overdue(self._watch.closed)) is not None:
            self._watch.report(left)
        return self._lost(what, waiting=True) if self._watch.lost is not None else None

    def close(self, why: str = CLOSED) -> None:
        """Send the other ranks the reason ``why``, and close the connections."""
        if self._shut.alive:
            self._watch.leave(why)
            self._shut()

    def _lost(self, what: str, *, waiting: bool) -> RankLost:
        loss = self._watch.lost
        assert loss is not None
        self._failure = loss.rank, loss.text(self._peers[loss.rank], what, waiting=waiting)
        self.close()
        return RankLost(*self._failure)

    def _move(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send and receive arrays over all channels at once, until all are complete or a rank is lost."""
        mark = crc32(what.encode())
        busy: dict[int, _Channel] = {}
        for rank, array in receives.items():
            if rank != self.rank:
                busy[rank] = self._channels[rank]
                busy[rank].begin_receive(array, mark)
        for rank, array in sends.items():
            if rank == self.rank:
                array_bytes(receives[rank])[:] = array_bytes(array)
            else:
                busy[rank] = self._channels[rank]
                busy[rank].begin_send(array, mark)
        poll = select.poll()
        by_number = {}
        for channel in busy.values():
            if wanted := channel.progress(what):
                by_number[channel.number] = channel
                poll.register(channel.number, wanted)
        interruption = Watch()
        while by_number:
            ready = poll.poll(_POLL_MILLISECONDS)
            if self._watch.lost is not None:
                raise self._lost(what, waiting=True)
            interruption.raise_pending_exception()
            for number, _ in ready:
                channel = by_number[number]
                wanted = channel.progress(what)
                if wanted:
                    poll.modify(number, wanted)
                else:
                    poll.unregister(number)
                    del by_number[number]


def _shut(watch: LossWatch, pairs: list[socket.socket]) -> None:
    watch.leave()
    for sock in pairs:
        sock.close()


class _Ended(Exception):
    """The connection to a rank ended while data were being sent or received."""

    def __init__(self, rank: int) -> None:
        self.rank = rank


# Before the data of each message: its number on this connection, crc32 of the collective's name, bytes of data.
_HEADER = np.dtype([("serial", "<u4"), ("mark", "<u4"), ("bytes", "<u8")])

_SERIAL_MASK = (1 << 32) - 1

# Bytes that one system call moves at most, so that both directions of a connection advance together.
_PIECE = 1 << 20


class _Channel:
    """Connection to one rank, with the pending data in both directions."""

    def __init__(self, rank: int, sock: socket.socket) -> None:
        self.rank, self.sock, self.number = rank, sock, sock.fileno()
        self._send_header, self._receive_header = np.zeros((), _HEADER), np.zeros((), _HEADER)
        self._head_out, self._head_in = array_bytes(self._send_header), array_bytes(self._receive_header)
        self._out: list[memoryview] = []
        self._in: list[memoryview] = []
        self._sent = self._received = 0
        self._expected = (0, 0, 0)
        self._header_left = 0

    def begin_send(self, array: np.ndarray, mark: int) -> None:
        """Queue an array for sending, behind a header with ``mark``, the checksum of the collective."""
        data = array_bytes(array)
        self._send_header[()] = (self._sent & _SERIAL_MASK, mark, len(data))
        self._sent += 1
        self._out = [self._head_out, data]

    def begin_receive(self, array: np.ndarray, mark: int) -> None:
        """Prepare to receive an array; its header must have ``mark``, the checksum of the collective."""
        data = array_bytes(array)
        self._expected = (self._received & _SERIAL_MASK, mark, len(data))
        self._received += 1
        self._in = [self._head_in, data]
        self._header_left = _HEADER.itemsize

    def progress(self, what: str) -> int:
        """Send and receive without blocking; return the ``poll`` events to wait for, 0 if all data are transferred."""
        try:
            sending = bool(self._out) and self._send()
            receiving = bool(self._in) and self._receive(what)
        except OSError:
            raise _Ended(self.rank) from None
        return (select.POLLOUT if sending else 0) | (select.POLLIN if receiving else 0)

    def _send(self) -> bool:
        """Send data without blocking; return True if some remain."""
        try:
            while self._out:
                self._out = _after(self._out, self.sock.sendmsg([view[:_PIECE] for view in self._out]))
                if self._in:  # let the other direction advance
                    break
        except (BlockingIOError, InterruptedError):
            pass
        return bool(self._out)

    def _receive(self, what: str) -> bool:
        """Receive data without blocking; return True if some are missing."""
        try:
            while self._in:
                count = self.sock.recvmsg_into([view[:_PIECE] for view in self._in])[0]
                if not count:
                    raise ConnectionResetError(errno.ECONNRESET, "the connection ended")
                self._in = _after(self._in, count)
                if self._header_left > 0:
                    self._header_left -= count
                    if self._header_left <= 0:
                        self._check_header(what)
        except (BlockingIOError, InterruptedError):
            pass
        return bool(self._in)

    def _check_header(self, what: str) -> None:
        """Raise CallError if the received header belongs to another collective than ``what``."""
        found = tuple(self._receive_header.item())
        if found != self._expected:
            names = ("message {}", "collective {:08x}", "{} bytes")
            found_text, expected = (
                ", ".join(name.format(value) for name, value in zip(names, row, strict=True))
                for row in (found, self._expected)
            )
            raise CallError(
                "", f"rank {self.rank} is in another collective than {what}", found_text, expected,
                hint="all ranks must make the same calls in the same order",
            )  # fmt: skip


def _after(views: list[memoryview], count: int) -> list[memoryview]:
    """Drop the first ``count`` bytes of a list of views; return the rest."""
    while views and count >= len(views[0]):
        count -= len(views[0])
        views = views[1:]
    return [views[0][count:], *views[1:]] if count else views


def tcp_link(ranks: Ranks, facts: Mapping[str, str]) -> TcpLink:
    """Connect to all ranks by TCP.

    Raises
    ------
    CallError
        If a rank is missing at the timeout, or facts differ.
    RankLost
        If a rank ends after all have joined.
    """
    deadline = monotonic() + ranks.timeout
    meeting = meet(ranks, facts)
    watch = LossWatch(ranks.rank, ranks.size, meeting.controls)

    def check() -> None:
        if watch.lost is not None:
            peer = meeting.peers[watch.lost.rank]
            raise RankLost(watch.lost.rank, watch.lost.text(peer, "all ranks were connected", waiting=False))

    try:
        return TcpLink(ranks.rank, meeting.peers, watch, connect_pairs(ranks, meeting, deadline, check))
    except BaseException as error:
        watch.leave(f"failed ({type(error).__name__})")
        raise
