"""Detection of lost ranks over TCP: a thread in each process, and one decision by rank 0 for all.

Each rank has a connection to rank 0, which the operating system closes when the process ends for any reason. Rank 0
decides which rank is lost, and sends the decision to all ranks before it raises an error itself, so that all report the
same rank. If rank 0 ends, the connections of all ranks end, and they report rank 0.
"""

from __future__ import annotations

import selectors
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic, sleep
from typing import Any

from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.ranks.frames import BadFrame, FrameReader, send_frame
from aotc.vmfb.ranks.loss import CLOSED, POLL_SECONDS, Loss

# Seconds that rank 0 waits for the connection of a reported rank to end by itself. It does so at once if the process
# ended; else the rank, or the network between the two, has failed.
_SUSPECT_SECONDS = 0.3

# Seconds that a rank waits for the decision of rank 0. Then it names the rank whose connection ended.
_DECISION_SECONDS = 0.8

# Seconds of silence after which the system asks the other machine, seconds between questions, and their number. A
# machine that is off or cut off is noticed in five seconds. One that is merely slow is not: its system answers. The
# connections with data have no such limit: their data stay unread while a rank computes.
_KEEPALIVE = (("TCP_KEEPIDLE", 2), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", 3), ("TCP_USER_TIMEOUT", 5_000))

# Characters of a reason that another rank prints.
_REASON = 500


class LossWatch:
    """Detector of lost ranks in one process, with a thread that waits for messages and closed connections.

    Parameters
    ----------
    rank, size : int
    connections : mapping of int to socket
        By rank: on rank 0 the connections to all other ranks, on other ranks the connection to rank 0.
    """

    def __init__(self, rank: int, size: int, connections: Mapping[int, socket.socket]) -> None:
        self.rank = rank
        self.size = size
        self.lost: Loss | None = None
        self.closed: dict[int, str] = {}
        self._connections = dict(connections)
        self._lock = new_lock()
        self._sending = new_lock()
        self._suspects: dict[int, float] = {}
        self._leaving = False
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        threading.Thread(target=self._run, name=f"aotc-rank-{rank}-watch", daemon=True).start()

    def sockets(self) -> list[socket.socket]:
        """Return all sockets; a forked child must close its copies, which would hide the end of this process."""
        return [*self._connections.values(), self._wake, self._woken]

    def report(self, rank: int) -> Loss:
        """Report that the connection to ``rank`` ended while it was needed; return the loss that all ranks report."""
        if self.rank and 0 not in self.closed:
            self._tell({"report": rank})
        elif self.rank:  # the one that decides has closed its module, and ranks that need it fail one after another
            self._decide(Loss(0, self.closed[0]))
        elif rank in self.closed:
            self._decide(Loss(rank, self.closed[rank]))
        else:
            self._suspects.setdefault(rank, monotonic())
            self._notify()
        end = monotonic() + _DECISION_SECONDS
        while self.lost is None:
            sleep(POLL_SECONDS / 10)
            if self.rank and 0 in self.closed:
                self._decide(Loss(0, self.closed[0]))
            elif monotonic() > end:
                self._decide(Loss(rank, self.closed.get(rank, "")))
        return self.lost

    def leave(self, why: str = CLOSED) -> None:
        """Send the other ranks the reason ``why`` this rank leaves: it closes its module, or it has failed."""
        with self._lock:
            if self._leaving:
                return
            self._leaving = True
        self._tell({"bye": self.rank, "why": why[:_REASON]})
        self._notify()

    def _notify(self) -> None:
        with suppress(OSError):  # the thread has ended
            self._wake.send(b"\0")

    def _decide(self, loss: Loss) -> None:
        with self._lock:
            if self.lost is not None:
                return
            if self.rank == 0:  # before a thread that reads the word can leave, which would be told first
                self._tell({"lost": loss.rank, "why": loss.why})
            self.lost = loss

    def _tell(self, message: dict[str, Any]) -> None:
        with self._sending:  # two threads must not mix their messages
            for sock in self._connections.values():
                send_frame(sock, message)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, sock in self._connections.items():
                _keep_alive(sock)
                selector.register(sock, selectors.EVENT_READ, (rank, FrameReader(sock)))
            selector.register(self._woken, selectors.EVENT_READ, None)
            while not self._leaving:
                for key, _ in selector.select(POLL_SECONDS if self._suspects else None):
                    if key.data is None:
                        self._woken.recv(64)
                    elif not self._receive(*key.data):
                        selector.unregister(key.fileobj)
                for rank, since in list(self._suspects.items()):
                    if monotonic() - since > _SUSPECT_SECONDS:
                        self._decide(Loss(rank, self.closed.get(rank, "")))
                        del self._suspects[rank]
        for sock in self.sockets():
            sock.close()

    def _receive(self, rank: int, reader: FrameReader) -> bool:
        """Handle the messages received from ``rank``; return False if its connection has ended."""
        try:
            while (message := reader.read()) is not None:
                self._handle(rank, message)
        except (OSError, BadFrame):
            if rank not in self.closed:
                self._decide(Loss(rank))
            return False
        return True

    def _handle(self, sender: int, message: dict[str, Any]) -> None:
        named = next((message[name] for name in ("bye", "lost", "report") if name in message), None)
        if not isinstance(named, int) or not 0 <= named < self.size:
            raise BadFrame("a message names no rank")
        match message:
            case {"bye": int(rank), "why": str(why)} if sender in (0, rank):
                self.closed[rank] = why
                if self.rank == 0:
                    self._tell(message)
                    if rank in self._suspects:
                        self._decide(Loss(rank, why))
            case {"lost": int(rank), "why": str(why)} if sender == 0:
                self._decide(Loss(rank, why))
            case {"report": int(rank)} if self.rank == 0:
                if rank in self.closed:
                    self._decide(Loss(rank, self.closed[rank]))
                else:
                    self._suspects.setdefault(rank, monotonic())
            case _:
                raise BadFrame("unknown message")


def _keep_alive(sock: socket.socket) -> None:
    with suppress(OSError):  # it has ended already: the next read says so
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
