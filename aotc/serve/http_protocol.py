"""HTTP/1.1 connections with limits of their number, times and sizes.

Offers of other protocols are ignored. Java's client and ``curl --http2`` offer an upgrade to HTTP/2 with each request,
which a server may ignore. The parser of ``httptools`` would treat the body of such a request as data of the other
protocol and lose it, so the offer is removed before parsing.

A connection has a timeout for a request head, one for a body, and one for being idle or not reading a response. No
timer is armed on the path of a request: one task checks all connections, several times within the shortest timeout.

Above the limit of connections idle ones are closed, the longest idle first. If none is idle, a new connection may only
send health checks. The number of such connections is small: the oldest is closed for a new one, because a health check
takes a millisecond.
"""

from __future__ import annotations

import asyncio
import json
import re
import ssl
from asyncio.sslproto import SSLProtocol
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from aotc.serve.auth import HEALTH_PATHS
from aotc.serve.errors import BAD, BUSY, HEAD_TOO_LONG, SLOW, RequestFault, client_error_text
from aotc.serve.http_io import TRANSPORT, Receive, Scope, Send, send_fault
from aotc.serve.limits import HANDSHAKES, SPARE_CONNECTIONS
from aotc.serve.settings import Settings

_OFFER = re.compile(rb"\r\n(?:upgrade|http2-settings):[^\r\n]*", re.IGNORECASE)
_STATUS = {BAD: b"400 Bad Request", HEAD_TOO_LONG: b"431 Request Header Fields Too Large", SLOW: b"408 Request Timeout"}


# Checks of a connection within its shortest timeout; it is closed at most a quarter of the timeout late.
LOOKS = 4
# Maximum seconds between two checks of all connections. A check of 512 takes 0.3 ms.
MOST_LOOK_SECONDS = 1.0


class Connections:
    """All HTTP connections of a server.

    Parameters
    ----------
    settings : Settings
        Limits of numbers and times.

    Attributes
    ----------
    idle : dict
        Connections without a request, the longest idle first.
    spare : dict
        Connections above the limit, the oldest first.
    open : set
        All connections.
    handshakes : dict
        Connections in the TLS handshake, the oldest first.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.open: set[GuardedConnection] = set()
        self.idle: dict[GuardedConnection, None] = {}
        self.spare: dict[GuardedConnection, None] = {}
        self.handshakes: dict[GuardedConnection, TlsConnection] = {}

    def add(self, connection: GuardedConnection) -> bool:
        """Add a connection; above the limit, close an idle connection for it.

        Return False if the new connection may only send health checks.
        """
        self.open.add(connection)
        if len(self.open) - len(self.spare) <= self.settings.connections:
            return True
        if self.idle:
            next(iter(self.idle)).drop()
            return True
        if len(self.spare) >= SPARE_CONNECTIONS:
            next(iter(self.spare)).drop()
        self.spare[connection] = None
        return False

    def begin_handshake(self, connection: GuardedConnection, tls: TlsConnection) -> None:
        """Add a connection in its TLS handshake; close the oldest handshake if there are too many."""
        if len(self.handshakes) >= HANDSHAKES:
            self.handshakes.pop(next(iter(self.handshakes))).drop()
        self.handshakes[connection] = tls

    def close_handshakes(self) -> None:
        """Close the connections in their TLS handshake."""
        while self.handshakes:
            self.handshakes.popitem()[1].drop()

    def remove(self, connection: GuardedConnection) -> None:
        """Remove a closed connection."""
        self.handshakes.pop(connection, None)
        self.open.discard(connection)
        self.idle.pop(connection, None)
        self.spare.pop(connection, None)

    async def watch(self) -> None:
        """Check all connections periodically and close those with an expired timeout."""
        settings, loop = self.settings, asyncio.get_running_loop()
        pause = min(settings.head_timeout, settings.body_timeout, settings.idle_timeout) / LOOKS
        while True:
            await asyncio.sleep(min(pause, MOST_LOOK_SECONDS))
            now = loop.time()
            for connection in list(self.open):
                connection.close_if_expired(now)


# Pipelined requests that may wait on a connection; with more it is closed. A read of 256 KiB may contain thousands,
# each of which takes memory; clients send one or a few.
MOST_PIPELINED = 64
# Bytes that asyncio reads at a time. The length of a request head is checked when the head ends; one that is this much
# longer than its limit and has not ended is refused.
READ_BYTES = 1 << 18


class GuardedConnection(HttpToolsProtocol):
    """An HTTP/1.1 connection with limits of times and sizes."""

    def __init__(self, guard: Connections, **uvicorn: Any) -> None:
        super().__init__(**uvicorn)
        self._guard, self._limits = guard, guard.settings
        self._answers = self.app
        self._all_may = True  # False: only health checks are allowed
        self._since = self.loop.time()  # start of the current state: head, body, response, idle
        self._head: int | None = 0  # bytes of an incomplete head or trailer; None between requests
        self._in_body = False
        self._unread = 0  # unread bytes of a response at the last check

    # ------------------------------------------------------------ received data

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Register the connection, and wait for its first request."""
        super().connection_made(transport)
        self._guard.handshakes.pop(self, None)
        self._all_may = self._guard.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Remove the connection."""
        self._guard.remove(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Process received bytes, without upgrade offers in a request head that arrives in one piece."""
        if self.transport.is_closing():
            return
        if self._head is None and not self._in_body:
            self._guard.idle.pop(self, None)
            self._head, self._since = 0, self.loop.time()
        if self.cycle is None or not self.cycle.more_body:
            end = data.find(b"\r\n\r\n")
            if end > 0 and _OFFER.search(data, 0, end):
                data = _OFFER.sub(b"", data[:end]) + data[end:]
        self._head = (self._head or 0) + len(data)
        super().data_received(data)
        # A head that ends within one read is measured when it ends; this check is for one that does not.
        if self._head is not None and self._head > self._limits.max_head + READ_BYTES and self.parser is not None:
            self._close_with_error(HEAD_TOO_LONG, self._too_long())

    def on_message_begin(self) -> None:
        """Begin a request head, including a head that arrived with the end of the previous request."""
        super().on_message_begin()
        if self._head is None:
            self._head, self._since = 0, self.loop.time()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Process a header field; trailer fields, which are not used, are ignored."""
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start a request, or refuse it with an error response."""
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        self._since, self._head, self._in_body = self.loop.time(), None, True
        self.scope["extensions"] = {TRANSPORT: {TRANSPORT: self.transport}}
        fault: RequestFault | None = None
        if size > self._limits.max_head:
            fault = self._too_long()
        elif len(hosts := [value for name, value in self.headers if name == b"host"]) > 1:  # the check needs one
            fault = RequestFault(BAD, "", "the request has several fields Host", len(hosts), "one")
        elif not self._all_may and self.url.partition(b"?")[0].decode("latin-1") not in HEALTH_PATHS:
            found, expected = len(self._guard.open), f"at most {self._limits.connections}"
            fault = RequestFault(BUSY, "", "too many connections", found, expected, "later, or --connections", retry=1)
        self.app = self._answers if fault is None else _RefusingApp(fault)
        super().on_headers_complete()
        if len(self.pipeline) > MOST_PIPELINED:
            self.drop()

    def on_body(self, body: bytes) -> None:
        """Process a part of a body."""
        self._head = None
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Record the end of a request."""
        self._in_body, self._head, self._since = False, None, self.loop.time()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Wait for the next request."""
        super().on_response_complete()
        self._since = self.loop.time()
        if self._head is None and not self._in_body and not self.pipeline and not self.transport.is_closing():
            self._guard.idle[self] = None

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed data."""
        self._close_with_error(BAD, RequestFault(BAD, "", "this is not an HTTP/1.1 request", hint="see RFC 9112"))

    # ------------------------------------------------------------ timeouts

    def close_if_expired(self, now: float) -> None:
        """Close the connection if its timeout has expired."""
        limits, passed = self._limits, now - self._since
        unread = self.transport.get_write_buffer_size()
        if self.transport.is_closing() or (self._in_body and self._ended):
            if passed > limits.idle_timeout:
                self.drop()
        elif self._in_body:
            if passed > limits.body_timeout:
                self._close_with_error(SLOW, "the body of the request was not read in its time")
        elif self._head is not None:
            if passed > limits.head_timeout:
                self._close_with_error(SLOW, "the head of the request was not read in its time")
        elif unread and self._ended:
            if unread < self._unread:
                self._since = now
            elif passed > limits.idle_timeout:
                self.drop()
        self._unread = unread

    @property
    def _ended(self) -> bool:
        """Return True if there is no unanswered request."""
        return self.cycle is None or self.cycle.response_complete

    def _too_long(self) -> RequestFault:
        expected = f"at most {self._limits.max_head} bytes"
        return RequestFault(
            HEAD_TOO_LONG, "", "the head of the request is too long", expected=expected, hint="--max-head-kb"
        )

    def _close_with_error(self, status: int, why: RequestFault | str) -> None:
        """Close the connection, with an error response if no response has started."""
        fault = why if isinstance(why, RequestFault) else RequestFault(status, "", why, hint="send it at once")
        if not self.pipeline and (self._ended or not self.cycle.response_started):
            body = json.dumps({"error": client_error_text(fault)}).encode()
            lines = (b"HTTP/1.1 " + _STATUS[status], b"content-type: application/json", b"connection: close")
            self.transport.write(b"\r\n".join((*lines, b"content-length: %d" % len(body), b"", body)))
            if self.cycle is not None:
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            self.loop.call_later(self._limits.head_timeout, self.drop)
            self.transport.close()
        else:
            self.drop()

    def drop(self) -> None:
        """Abort the connection."""
        self._guard.remove(self)
        self.transport.abort()


# Bytes of the read buffer of each TLS connection, which no memory budget counts. asyncio's default is 256 KiB; a TLS
# record has at most 16 KiB.
TLS_BUFFER_BYTES = 1 << 16


class TlsConnection(SSLProtocol):
    """TLS handshake and encryption of a connection.

    asyncio would create this object itself for a server with TLS, but then handshakes could not be limited.
    """

    max_size = TLS_BUFFER_BYTES

    def __init__(self, guard: Connections, context: ssl.SSLContext, connection: GuardedConnection) -> None:
        seconds: Any = guard.settings.head_timeout  # typeshed says int
        nobody: Any = None  # nobody waits for the end of the handshake
        super().__init__(
            connection.loop, connection, context, nobody, server_side=True,
            ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds,
        )  # fmt: skip
        self._guard, self._connection = guard, connection
        self._raw: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the handshake."""
        assert isinstance(transport, asyncio.Transport)
        self._raw = transport
        self._guard.begin_handshake(self._connection, self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        """Remove the connection."""
        self._guard.handshakes.pop(self._connection, None)
        super().connection_lost(exc)

    def drop(self) -> None:
        """Abort the connection."""
        if self._raw is not None:
            self._raw.abort()


class _RefusingApp:
    """An ASGI application that answers each request with the same error."""

    def __init__(self, fault: RequestFault) -> None:
        self._fault = fault

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        await send_fault(send, self._fault, close=True)
