"""Common functions for HTTP requests: bodies, errors, disconnected clients."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from aotc.serve.background_threads import join_in_background
from aotc.serve.engine import Engine
from aotc.serve.errors import (
    CANCELLED,
    CLOSED,
    COMPRESSED,
    TOO_LONG,
    UNAUTHORIZED,
    RequestFault,
    client_error_text,
    http_status_of,
)
from aotc.serve.limits import PIECE_BYTES
from aotc.serve.memory import Lease
from aotc.serve.tensors import Buffer

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
JSON = b"application/json"
TRANSPORT = "aotc.transport"  # the scope extension that holds the connection


async def send_fault(send: Send, error: BaseException, close: bool = False) -> None:
    """Send an error response; ``close`` also closes the connection, which an unread body requires.

    ``close`` also closes the connection, which is necessary if the body has not been read.
    """
    body = json.dumps({"error": client_error_text(error)}).encode()
    headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
    if isinstance(error, RequestFault) and error.retry:
        headers.append((b"retry-after", b"%d" % error.retry))
    if http_status_of(error) == UNAUTHORIZED:
        headers.append((b"www-authenticate", b"Bearer"))
    if close:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": http_status_of(error), "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def read_body(headers: Mapping[bytes, bytes], receive: Receive, most: int, lease: Lease) -> bytes:
    """Read the body of a request, and reserve its memory in ``lease``.

    Raises
    ------
    RequestFault
        If the body is too long, compressed or incomplete, or exceeds the memory budget.
    """
    length = headers.get(b"content-length", b"")
    if length.isdigit() and int(length[:20]) > most:
        raise _body_too_long_error(length.decode(), most)
    if headers.get(b"content-encoding", b"identity") != b"identity":
        found = headers[b"content-encoding"].decode("latin-1")[:40]
        raise RequestFault(COMPRESSED, "", "the body is compressed", found, hint="send it as it is")
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise ClientLeft
        part = event.get("body", b"")
        size += len(part)
        if size > most:
            raise _body_too_long_error(f"more than {most}", most)
        lease.grow(len(part))
        if not event.get("more_body", False):
            return part if not parts else await join_in_background([*parts, part])
        if parts and len(parts[-1]) < PIECE_BYTES:
            parts[-1] += part  # avoids an object, larger than its data, for each small part
        else:
            parts.append(part)


# Minimum average rate in bytes per second at which a client must read a response; a slower one is disconnected, so that
# it does not occupy memory for ever. 0.5 Mbit/s.
SLOWEST_READER = 1 << 16


async def send_parts(scope: Scope, send: Send, parts: list[Buffer], idle: float) -> None:
    """Send the body of a response in pieces as the client reads it, and remove sent pieces from ``parts``.

    A client that reads nothing for ``idle`` seconds, or less than :data:`SLOWEST_READER` on average, is disconnected:
    its connection is aborted, and the unread rest is freed.
    """
    size = sum(map(len, parts))
    if size <= PIECE_BYTES:
        await send({"type": "http.response.body", "body": b"".join(parts)})
        return
    try:
        async with asyncio.timeout(idle + size / SLOWEST_READER):
            for part in parts:
                for at in range(0, len(part), PIECE_BYTES):
                    piece = bytes(part[at : at + PIECE_BYTES])
                    size -= len(piece)
                    async with asyncio.timeout(idle):
                        await send({"type": "http.response.body", "body": piece, "more_body": size > 0})
    except TimeoutError:
        parts.clear()  # the error's traceback may live long and references it
        part = b""
        abort_connection(scope)
        await asyncio.sleep(0)  # lets the connection record the loss


def abort_connection(scope: Scope) -> None:
    """Abort the connection of a request, discarding unsent data.

    Do nothing behind a proxy such as Ray's, which owns the connection.
    """
    found = scope.get("extensions", {}).get(TRANSPORT)
    if found is not None:
        found[TRANSPORT].abort()


def _body_too_long_error(found: str, most: int) -> RequestFault:
    return RequestFault(TOO_LONG, "", "the body is too long", f"{found} bytes", f"at most {most}", "--max-body-mb")


def trace_headers(headers: Mapping[bytes, bytes], engine: Engine) -> Mapping[str, str]:
    """Return the headers of a trace context, if tracing is enabled."""
    if not engine.settings.traces:
        return {}
    return {key.decode("latin-1"): value.decode("latin-1") for key, value in headers.items()}


class ClientLeft(RequestFault):
    """The client has disconnected."""

    def __init__(self) -> None:
        super().__init__(CANCELLED, "", "the client has left")


# Seconds after which the server watches for the client to disconnect, which cancels the call. A shorter call ends by
# itself; watching costs a task, some 20 us.
WATCH_SECONDS = 5e-3


class ClientWatch:
    """Watch for a disconnect of a request's client, which cancels the request's task.

    As a context manager it converts the cancellation to an error. Watching starts shortly after :meth:`begin`: before
    that, reading the body reveals a disconnect.
    """

    def __init__(self, engine: Engine, receive: Receive) -> None:
        self._engine, self._receive = engine, receive
        self._gone = False
        self._task = asyncio.current_task()
        self._watcher: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """Start watching."""
        self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._begin)

    def _begin(self) -> None:
        self._watcher = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._gone = True
        if self._task is not None:
            self._task.cancel()

    def __enter__(self) -> ClientWatch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stop watching; convert the cancellation of a disconnected client to :class:`ClientLeft`."""
        if self._timer is not None:
            self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        task, self._task, self._watcher, self._timer = self._task, None, None, None  # they reference this object
        fault = self._why() if isinstance(error, asyncio.CancelledError) else None
        if fault is None:
            return
        if task is not None:
            task.uncancel()
        raise fault from None

    def _why(self) -> RequestFault | None:
        """Return the exception to raise for a cancelled request; None to propagate the cancellation."""
        if self._gone:
            return ClientLeft()
        if self._engine.closing:
            return RequestFault(CLOSED, "", "the server ended before the request was done", hint="another server")
        return None
