"""Rendezvous of ranks by TCP: rank 0 listens, all others introduce themselves, and each pair gets a connection.

A connection of another program is closed at its first invalid message; it neither delays nor fails the start. Rank 0
generates a random secret. The ranks that have joined prove their identity to each other with it.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hmac import compare_digest
from time import monotonic, sleep
from typing import Any

from aotc.vmfb.errors import CallError
from aotc.vmfb.ranks.frames import VERSION, BadFrame, FrameReader, send_frame
from aotc.vmfb.ranks.loss import POLL_SECONDS, Peer, fact_difference, facts_of_rank, rank_list
from aotc.vmfb.ranks.ranks import Ranks, split_address

# Seconds that a rank waits after its own timeout for the message of rank 0, which names the missing ranks.
_GRACE = 0.5

# Seconds between two attempts to connect to rank 0, and for one of them.
_RETRY_SECONDS, _CONNECT_SECONDS = 0.05, 2.0

# Seconds for the connections between ranks that have met, at least: the timeout may nearly be over.
_PAIRING_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Result of the rendezvous: all ranks, their connections to rank 0, and the secret and addresses for each pair."""

    peers: tuple[Peer, ...]
    controls: Mapping[int, socket.socket]
    listener: socket.socket
    addresses: tuple[tuple[str, int], ...]
    secret: str


def meet(ranks: Ranks, facts: Mapping[str, str]) -> Meeting:
    """Join the rendezvous, and compare ``facts`` between all ranks.

    Raises
    ------
    CallError
        On all ranks, if a rank is missing at the timeout, or if facts differ.
    """
    if not ranks.address:
        raise CallError(
            "", "TCP needs the address of rank 0", hint="Ranks(..., address='host:port'), or AOTC_RANKS_ADDRESS"
        )
    deadline = monotonic() + ranks.timeout
    mine = facts_of_rank(facts, ranks.size)
    return _serve(ranks, mine, deadline) if ranks.rank == 0 else _join(ranks, mine, deadline)


def _introduction(ranks: Ranks, facts: Mapping[str, str], listener: socket.socket) -> dict[str, Any]:
    return {
        "version": VERSION, "rank": ranks.rank, "host": socket.gethostname(), "process": os.getpid(),
        "listens": list(listener.getsockname()[:2]), "facts": dict(facts),
    }  # fmt: skip


def _listen(host: str, port: int, count: int) -> socket.socket:
    """Return a socket that listens on an address of this machine."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(max(128, count))
            listener.setblocking(False)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        hint = "give a free port in the address" if error.errno == errno.EADDRINUSE else "give an address of this host"
        raise CallError("", f"cannot listen at {host}:{port}: {error.strerror}", hint=hint) from error
    return listener


# On rank 0.


class _JoinedRanks:
    """The ranks that have joined, on rank 0."""

    def __init__(self, ranks: Ranks, own: dict[str, Any]) -> None:
        self.size = ranks.size
        self.rows: dict[int, dict[str, Any]] = {0: own}
        self.sockets: dict[int, socket.socket] = {}

    def missing(self) -> list[int]:
        return [rank for rank in range(self.size) if rank not in self.rows]

    def admit(self, sock: socket.socket, row: dict[str, Any]) -> None:
        """Add the rank that introduces itself by ``row``, or send it an error message and close its connection."""
        match row:
            case {"version": int(version), "rank": int(rank), "facts": dict(facts)} if _is_row(row):
                if not all(isinstance(value, str) for value in facts.values()):
                    raise BadFrame("a fact is not text")
            case _:
                raise BadFrame("not an introduction")
        refusal = ""
        if version != VERSION:
            refusal = f"rank {rank} has version {version} of the protocol between ranks, rank 0 has {VERSION}"
        elif not 0 < rank < self.size:
            refusal = f"rank {rank} is out of range: rank 0 expects {self.size} ranks"
        elif rank in self.rows:
            refusal = f"rank {rank} joined twice: as process {self.rows[rank]['process']} and {row['process']}"
        if refusal:
            send_frame(sock, {"error": refusal})
            raise BadFrame(refusal)
        self.rows[rank] = row
        self.sockets[rank] = sock
        self.tell({"missing": self.missing()})

    def remove(self, sock: socket.socket) -> None:
        """Remove the rank of a connection that ended; the rank may join again."""
        for rank in [rank for rank, other in self.sockets.items() if other is sock]:
            del self.rows[rank], self.sockets[rank]

    def tell(self, message: dict[str, Any]) -> None:
        for sock in self.sockets.values():
            send_frame(sock, message)

    def fail(self, text: str) -> CallError:
        """Send an error message to all ranks that have joined, and return the error."""
        self.tell({"error": text})
        for sock in self.sockets.values():
            sock.close()
        return CallError("", text)


def _serve(ranks: Ranks, facts: dict[str, str], deadline: float) -> Meeting:
    """Run the rendezvous on rank 0: accept all ranks, compare their facts, and send the table of addresses to each."""
    listener = _listen(*split_address(ranks.address), ranks.size)
    try:
        table = _JoinedRanks(ranks, _introduction(ranks, facts, listener))
        _receive_introductions(listener, deadline, table.admit, table.remove, lambda: not table.missing())
        missing = table.missing()
        if missing:
            raise table.fail(f"{rank_list(missing)} of {ranks.size} did not join within {ranks.timeout:g} s")
        rows = [table.rows[rank] for rank in range(ranks.size)]
        differs = fact_difference([row["facts"] for row in rows])
        if differs:
            raise table.fail(differs)
        secret = os.urandom(32).hex()
        # Of the rows only these: facts may be long, and each rank knows that all have its own.
        ranks_rows = [{name: row[name] for name in ("host", "process", "listens")} for row in rows]
        table.tell({"secret": secret, "ranks": ranks_rows})
        return Meeting(_peers(ranks_rows), table.sockets, listener, _addresses(ranks_rows), secret)
    except BaseException:
        listener.close()
        raise


def _receive_introductions(
    listener: socket.socket, deadline: float, admit: Callable[[socket.socket, dict[str, Any]], None],
    remove: Callable[[socket.socket], None] | None, complete: Callable[[], bool],
) -> None:  # fmt: skip
    """Accept connections and call ``admit`` with the first message of each, until ``complete()`` or the deadline.

    Connections that ``admit`` refuses are closed. ``remove`` is called when an admitted connection ends. If ``remove``
    is None, admitted connections are not read any further, because the data that follow are for another reader.
    """
    strangers: dict[socket.socket, FrameReader] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ)
        while not complete() and (left := deadline - monotonic()) > 0:
            for key, _ in selector.select(min(left, POLL_SECONDS)):
                sock: Any = key.fileobj
                if sock is listener:
                    for new in _accepted(listener):
                        strangers[new] = FrameReader(new)
                        selector.register(new, selectors.EVENT_READ)
                    continue
                try:
                    reader = strangers.get(sock)
                    if reader is None:  # an admitted rank sends nothing more before the others are there
                        sock.recv(1)
                        raise ConnectionResetError
                    message = reader.read()
                    if message is not None:
                        admit(sock, message)
                        del strangers[sock]
                        if remove is None:
                            selector.unregister(sock)
                except (OSError, BadFrame):
                    selector.unregister(sock)
                    strangers.pop(sock, None)
                    if remove is not None:
                        remove(sock)
                    sock.close()
    for sock in strangers:
        sock.close()


def _accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """Accept and yield all pending connections of ``listener``."""
    while True:
        try:
            sock, _ = listener.accept()
        except OSError:  # nobody, or somebody who has gone, or no more files: the others are tried later
            return
        _configure(sock)
        yield sock


# On the other ranks.


def _join(ranks: Ranks, facts: dict[str, str], deadline: float) -> Meeting:
    """Join the rendezvous on any other rank: connect to rank 0, retrying until the deadline, and receive the table."""
    host, port = split_address(ranks.address)
    last: object = "nothing was tried"
    missing: list[int] = [0]
    while True:
        try:
            with (
                _closed_on_error(_connect(host, port, deadline)) as sock,
                _closed_on_error(_listen(sock.getsockname()[0], 0, ranks.size)) as listener,
            ):
                send_frame(sock, _introduction(ranks, facts, listener))
                secret, rows = _answer(sock, ranks.size, deadline + _GRACE, missing)
                return Meeting(_peers(rows), {0: sock}, listener, _addresses(rows), secret)
        except (OSError, BadFrame) as error:
            last = error
        if monotonic() > deadline:
            what = f"{rank_list(missing)} of {ranks.size} did not join within {ranks.timeout:g} s"
            why = f"rank 0 at {ranks.address}: {last}" if 0 in missing else ""
            raise CallError("", what, why or None)
        sleep(_RETRY_SECONDS)


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Connect to an address; raise if TCP has connected the socket to itself."""
    sock = socket.create_connection((host, port), max(0.01, min(deadline - monotonic(), _CONNECT_SECONDS)))
    if sock.getsockname() == sock.getpeername():  # a client's port that happened to be the one that is tried
        sock.close()
        raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
    _configure(sock)
    return sock


def _answer(sock: socket.socket, size: int, deadline: float, missing: list[int]) -> tuple[str, list[dict[str, Any]]]:
    """Receive the secret and the table of all ranks from rank 0; ``missing`` is set to the ranks it waits for."""
    reader = FrameReader(sock)
    with selectors.DefaultSelector() as selector:
        selector.register(sock, selectors.EVENT_READ)
        while (left := deadline - monotonic()) > 0:
            selector.select(left)
            try:
                message = reader.read()
            except ConnectionError:
                missing[:] = [0]
                raise
            match message:
                case {"missing": [*ranks]} if all(isinstance(rank, int) for rank in ranks):
                    missing[:] = ranks
                case {"error": str(text)}:
                    raise CallError("", text)
                case {"secret": str(secret), "ranks": list(rows)} if len(rows) == size and all(map(_is_row, rows)):
                    return secret, rows
                case None:
                    pass
                case _:
                    raise BadFrame("another program answers there")
    raise TimeoutError("no answer")


def _is_row(row: object) -> bool:
    match row:
        case {"host": str(), "process": int(), "listens": [str(), int()]}:
            return True
    return False


@contextmanager
def _closed_on_error(sock: socket.socket) -> Iterator[socket.socket]:
    try:
        yield sock
    except BaseException:
        sock.close()
        raise


def _peers(rows: list[dict[str, Any]]) -> tuple[Peer, ...]:
    return tuple(Peer(rank, row["host"], row["process"]) for rank, row in enumerate(rows))


def _addresses(rows: list[dict[str, Any]]) -> tuple[tuple[str, int], ...]:
    return tuple((row["listens"][0], row["listens"][1]) for row in rows)


# Between all.


def connect_pairs(
    ranks: Ranks, meeting: Meeting, deadline: float, check: Callable[[], None]
) -> dict[int, socket.socket]:
    """Connect to all other ranks: connect to lower ranks, and accept connections of higher ranks.

    ``check`` raises if a rank is lost meanwhile.

    Raises
    ------
    CallError
        If the connections are not complete in time.
    """
    pairs: dict[int, socket.socket] = {}
    deadline = max(deadline, monotonic() + _PAIRING_SECONDS)

    def admit(sock: socket.socket, row: dict[str, Any]) -> None:
        """Accept the connection of a rank with a higher number that knows the secret."""
        match row:
            case {"secret": str(secret), "rank": int(rank)} if compare_digest(secret.encode(), meeting.secret.encode()):
                if ranks.rank < rank < ranks.size and rank not in pairs:
                    pairs[rank] = sock
                    return
        raise BadFrame("a stranger")

    def complete() -> bool:
        check()
        return len(pairs) == ranks.size - 1

    try:
        for rank in range(ranks.rank):
            check()
            pairs[rank] = _connect_pair(meeting.addresses[rank], deadline, check)
            send_frame(pairs[rank], {"secret": meeting.secret, "rank": ranks.rank})
        _receive_introductions(meeting.listener, deadline, admit, None, complete)
        absent = [rank for rank in range(ranks.size) if rank != ranks.rank and rank not in pairs]
        if absent:
            raise CallError("", f"{rank_list(absent)} joined, but no connection came from there")
    except BaseException:
        for sock in pairs.values():
            sock.close()
        raise
    finally:
        meeting.listener.close()
    return pairs


def _connect_pair(address: tuple[str, int], deadline: float, check: Callable[[], None]) -> socket.socket:
    """Connect to another rank, retrying until the deadline; ``check`` raises if a rank is lost."""
    while True:
        try:
            return _connect(*address, deadline)
        except OSError as error:
            check()
            if monotonic() > deadline:
                raise CallError("", f"no connection to the rank at {address[0]}:{address[1]}: {error}") from error
        sleep(_RETRY_SECONDS)


def _configure(sock: socket.socket) -> None:
    sock.setblocking(False)
    with suppress(OSError):  # it has ended already: the next read says so
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
