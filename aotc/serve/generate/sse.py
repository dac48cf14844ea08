"""Token generation over HTTP: server-sent events, one for each token, or all tokens in one response."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Protocol

from aotc.serve.engine import Engine, Ticket
from aotc.serve.errors import LATE, RequestFault, client_error_text
from aotc.serve.generate.generation import generate
from aotc.serve.http_io import (
    JSON,
    ClientLeft,
    ClientWatch,
    Receive,
    Scope,
    Send,
    read_body,
    send_fault,
    trace_headers,
)
from aotc.serve.memory import Lease


class GenerationAnswer(Protocol):
    """Interface of a response to a generation request.

    Attributes
    ----------
    read : bool
        True if the request's body has been read.
    """

    read: bool

    async def send_token(self, index: int, token: int, done: str) -> None:
        """Send or collect a generated token; ``done`` is the finish reason with the last one."""

    async def fail(self, error: BaseException) -> None:
        """End the response with an error."""


class GenerateRoute:
    """ASGI application for generation requests; it stops when the client disconnects."""

    def __init__(self, engine: Engine, answer: Callable[[Send], GenerationAnswer]) -> None:
        self._engine, self._new_answer = engine, answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle one request."""
        answer = self._new_answer(send)
        try:
            with self._engine.memory.lease() as lease, self._engine.admit("generate") as ticket:
                await self._answer(scope, receive, answer, ticket, lease)
        except ClientLeft:
            return
        except Exception as error:
            await answer.fail(error)

    async def _answer(
        self, scope: Scope, receive: Receive, answer: GenerationAnswer, ticket: Ticket, lease: Lease
    ) -> None:
        """Read and parse the request, and generate its tokens into ``answer``."""
        engine, headers = self._engine, dict(scope["headers"])
        name, version = scope["path_params"]["model"], scope["path_params"].get("version", "")
        with ClientWatch(engine, receive) as watch:
            model, _ = engine.repository.find(name, version)
            ticket.model, ticket.statistics = model.name, model.statistics
            try:
                async with asyncio.timeout(engine.settings.timeout):
                    body = await read_body(headers, receive, engine.settings.max_body, lease)
                    answer.read = True
                    watch.begin()
                    document = await engine.conversion.read_tokens(body, name)
            except TimeoutError:
                raise RequestFault(LATE, name, "the request was not read and parsed in its time") from None
            del body
            await generate(engine, model, version, document, trace_headers(headers, engine), answer.send_token)


# Seconds that the error at the end of a stream may take to be sent; then the client is disconnected.
LAST_WORD_SECONDS = 0.5


class EventStreamAnswer:
    """Generation response as a stream of server-sent events."""

    def __init__(self, send: Send) -> None:
        self.read = False
        self._send, self._begun = send, False

    async def send_token(self, index: int, token: int, done: str) -> None:
        """Send a generated token as a server-sent event; the last one with the finish reason."""
        await self._event({"index": index, "token": token})
        if done:
            await self._event({"done": done, "tokens": index + 1}, more=False)

    async def _event(self, document: Mapping[str, Any], more: bool = True) -> None:
        if not self._begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._begun = True
        data = b"data: " + json.dumps(document).encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def fail(self, error: BaseException) -> None:
        """End the response with an error: as an event, within a short time, if the stream has started."""
        if self._begun:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    await self._event({"error": client_error_text(error)}, more=False)
        else:
            await send_fault(self._send, error, close=not self.read)


class CompleteAnswer:
    """Generation response with all tokens at once."""

    def __init__(self, send: Send) -> None:
        self.read = False
        self._send = send
        self._tokens: list[int] = []

    async def send_token(self, index: int, token: int, done: str) -> None:
        """Collect a generated token; send the response after the last one."""
        self._tokens.append(token)
        if done:
            body = json.dumps({"tokens": self._tokens, "done": done}).encode()
            headers = [(b"content-type", JSON), (b"content-length", b"%d" % len(body))]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            await self._send({"type": "http.response.body", "body": body})

    async def fail(self, error: BaseException) -> None:
        """End the response with an error."""
        await send_fault(self._send, error, close=not self.read)
