"""Requests for results over gRPC: one by one, or as a stream that is answered while it comes.

A request of a stream for results has one answer; those are in the order of the requests. One for tokens has an answer
for each token, beside those of others. What fails has an answer that says so, and the stream goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import grpc
import numpy as np

from aotc.serve.engine import Engine
from aotc.serve.faults import LATE, RequestFault, text_of
from aotc.serve.grpc_messages import MESSAGE, STREAM
from aotc.serve.grpc_tensors import is_raw, outputs_of, read_request, read_wish
from aotc.serve.limits import STREAM_REQUESTS
from aotc.serve.model import ServedModel
from aotc.serve.protocol import InferRequest
from aotc.serve.tokens.generation import generate

Fields = dict[str, Any]
_FINAL = "triton_final_response"  # the parameter that clients of streams know the last answer by
_LAST = {_FINAL: {"bool_param": True}}


def trace_texts(engine: Engine, context: Any) -> Mapping[str, str]:
    """Return what a client says of its trace, if anybody looks at it."""
    if not engine.settings.traces:
        return {}
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


async def infer(engine: Engine, message: Any, headers: Mapping[str, str]) -> Fields:
    """Return the fields of the answer to a request for results.

    Raises
    ------
    VmError
        If it cannot be read, does not fit, or is late.
    """
    name = message.model_name
    with engine.admit("grpc") as ticket:
        model, function = engine.find(ticket, name, message.model_version)
        request = read_request(message)
        seconds = engine.time_of(request)
        try:
            async with asyncio.timeout(seconds):
                results = await engine.infer(function, request, headers, name)
        except TimeoutError:
            what = "the request was not done in its time"
            raise RequestFault(LATE, name, what, f"{seconds:g} s", hint="a longer timeout") from None
        return _about(message, model) | outputs_of(request, results, is_raw(message))


def _about(message: Any, model: ServedModel) -> Fields:
    return {"model_name": message.model_name, "model_version": str(model.version), "id": message.id}


class InferStream:
    """One stream of requests, and what they are answered with."""

    def __init__(self, engine: Engine, context: Any) -> None:
        self._engine, self._context = engine, context
        self._headers = trace_texts(engine, context)
        self._room = asyncio.Semaphore(min(STREAM_REQUESTS, engine.settings.queue))
        self._writing = asyncio.Lock()

    async def run(self) -> None:
        """Answer requests until there are no more, or the server ends; those under way are finished."""
        before = asyncio.Event()
        before.set()
        async with asyncio.TaskGroup() as answers:
            while (message := await self._next()) is not None:
                model = self._generating(message)
                if model is not None:
                    answers.create_task(self._ended(self._tokens(message, model), message))
                else:
                    after = asyncio.Event()
                    answers.create_task(self._ended(self._results(message, before), message, before, after))
                    before = after

    async def _next(self) -> Any:
        """Return the next request when there is room for it, None if there is none."""
        await self._room.acquire()
        reading = asyncio.ensure_future(self._context.read())
        closed = asyncio.ensure_future(self._engine.closed.wait())
        try:
            await asyncio.wait((reading, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if not reading.done():
            reading.add_done_callback(_look_away)
            return None
        message = reading.result()
        return None if message is grpc.aio.EOF else message

    def _generating(self, message: Any) -> ServedModel | None:
        """Return the model that a request wants tokens of, None if it wants results."""
        try:
            model, function = self._engine.repository.find(message.model_name, message.model_version)
        except RequestFault:
            return None  # its turn is to fail
        return model if model.is_generation(function) else None

    async def _ended(
        self, answer: Awaitable[None], message: Any, before: asyncio.Event | None = None,
        after: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        """Wait for the answer to a request; ``before`` is set when it is its turn, and this sets ``after``."""
        try:
            await answer
        except Exception as error:
            if before is not None:
                await before.wait()
            await self._write({"id": message.id, "parameters": _LAST}, text_of(error))
        finally:
            if after is not None:
                after.set()
            self._room.release()

    async def _results(self, message: Any, before: asyncio.Event) -> None:
        fields = await infer(self._engine, message, self._headers)
        await before.wait()
        await self._write({**fields, "parameters": _LAST})

    async def _tokens(self, message: Any, model: ServedModel) -> None:
        raw, about = is_raw(message), _about(message, model)

        async def say(index: int, token: int, done: str) -> None:
            results = {"token": np.array([token]), "index": np.array([index])}
            parameters: Fields = {_FINAL: {"bool_param": bool(done)}}
            if done:
                parameters["done"] = {"string_param": done}
            await self._write({**about, **outputs_of(InferRequest(), results, raw), "parameters": parameters})

        with self._engine.admit("grpc") as ticket:
            ticket.model = model.name
            await generate(self._engine, model, message.model_version, read_wish(message), self._headers, say)

    async def _write(self, fields: Fields, error: str = "") -> None:
        async with self._writing:
            await self._context.write(MESSAGE[f"{STREAM}Response"](error_message=error, infer_response=fields))


def _look_away(task: asyncio.Future[Any]) -> None:
    """Take what has become of a task that nobody waits for."""
    if not task.cancelled():
        task.exception()
