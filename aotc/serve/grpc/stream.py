"""Inference over gRPC: single requests, and streams.

An inference request in a stream has one response, in the order of the requests. A generation request has a response for
each token, interleaved with others. A failed request has an error response, and the stream continues.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Mapping
from typing import Any

import grpc
import numpy as np

from aotc.serve.engine import Engine, Ticket
from aotc.serve.errors import LATE, RequestFault, client_error_text
from aotc.serve.generate.generation import generate
from aotc.serve.grpc.messages import MESSAGE
from aotc.serve.grpc.reads import MessageReads
from aotc.serve.grpc.tensors import read_parameters, read_request, write_answer
from aotc.serve.grpc.wire import STREAM_RESPONSE, ReceivedRequest, receive
from aotc.serve.limits import COPIES
from aotc.serve.memory import Lease
from aotc.serve.model import ServedModel
from aotc.serve.protocol import InferRequest
from aotc.serve.statistics import OUTPUT

Fields = dict[str, Any]
_FINAL = "triton_final_response"  # the parameter by which streaming clients recognise the last response
_LAST = {_FINAL: {"bool_param": True}}


def trace_context(engine: Engine, context: Any) -> Mapping[str, str]:
    """Return the client's trace context, if tracing is enabled."""
    if not engine.settings.traces:
        return {}
    return {k: v for k, v in context.invocation_metadata() or () if isinstance(v, str)}


# Minimum rate in bytes per second at which a client must read a response; a slower one is disconnected. gRPC does not
# report how much has been read. 8 Mbit/s.
SLOWEST_GRPC_READER = 1 << 20


async def write(context: Any, answer: bytes, idle: float) -> None:
    """Write a gRPC response, and wait until the client has read it, except for gRPC's own buffer.

    Raises
    ------
    asyncio.CancelledError
        If the client has disconnected, or does not read it within ``idle`` seconds plus the time of a slow client: gRPC
        itself never ends a call whose client reads nothing.
    """
    try:
        async with asyncio.timeout(idle + len(answer) / SLOWEST_GRPC_READER):
            await context.write(answer)
    except Exception:
        raise asyncio.CancelledError from None


async def infer(
    engine: Engine, received: ReceivedRequest, ticket: Ticket, headers: Mapping[str, str], more: Fields | None = None
) -> bytes:
    """Run an inference request and return the encoded response; ``more`` are additional fields in a stream.

    Raises
    ------
    CallError
        If the request is malformed, does not match the model, or times out.
    """
    message = received.message
    name = message.model_name
    model, function = engine.find(ticket, name, message.model_version)
    ticket.end_phase()
    request = read_request(received, function.most_tensors)
    seconds = engine.time_limit_of(request)
    try:
        async with asyncio.timeout(seconds):
            results = await engine.infer(ticket, function, request, headers, name)
            about = {**_stream_response_fields(message, model), **(more or {})}
            stream = more is not None
            answer = await write_answer(engine.conversion, about, request, results, received.numbers, stream)
            ticket.end_phase(OUTPUT)
            return answer
    except TimeoutError:
        what = "the request was not done in its time"
        raise RequestFault(LATE, name, what, f"{seconds:g} s", hint="a longer timeout") from None


def _stream_response_fields(message: Any, model: ServedModel) -> Fields:
    return {"model_name": message.model_name, "model_version": str(model.version), "id": message.id}


# Requests of one stream that run at the same time; the next is read when one ends. More than a client usually has open,
# far fewer than the queue.
STREAM_REQUESTS = 32


class InferStream:
    """A gRPC stream of inference and generation requests and their responses."""

    def __init__(self, engine: Engine, context: Any, reads: MessageReads) -> None:
        self._engine, self._context, self._reads = engine, context, reads
        self._headers = trace_context(engine, context)
        self._room = asyncio.Semaphore(min(STREAM_REQUESTS, engine.settings.queue))
        self._writing = asyncio.Lock()
        self._task: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Handle requests until the client sends no more or the server shuts down; then finish the running ones."""
        self._task = asyncio.current_task()
        before = asyncio.Event()
        before.set()
        async with asyncio.TaskGroup() as answers:
            while (data := await self._next_request()) is not None:
                lease = self._engine.memory.lease()
                try:
                    lease.grow(len(data))
                    async with asyncio.timeout(self._engine.settings.timeout):
                        received = await receive(self._engine.conversion, data)
                except Exception as error:
                    lease.release()
                    after = asyncio.Event()
                    answers.create_task(self._write_error_on_failure(_raise_error(error), "", lease, before, after))
                    before = after
                    continue
                finally:
                    data = None
                model, name = self._model_of_generation_request(received.message), received.message.id
                if model is not None:
                    tokens = self._write_generated_tokens(received, model)
                    answers.create_task(self._write_error_on_failure(tokens, name, lease))
                else:
                    after = asyncio.Event()
                    response = self._write_inference_response(received, before, lease)
                    answers.create_task(self._write_error_on_failure(response, name, lease, before, after))
                    before = after

    async def _next_request(self) -> bytes | None:
        """Wait until another request may run, and read it; return None at the end of the stream or at shutdown."""
        await self._room.acquire()
        reading = asyncio.ensure_future(self._reads.read(self._context))
        closed = asyncio.ensure_future(self._engine.closed.wait())
        try:
            await asyncio.wait((reading, closed), return_when=asyncio.FIRST_COMPLETED)
        finally:
            closed.cancel()
        if not reading.done():
            reading.add_done_callback(_ignore_result)
            return None
        data = reading.result()
        return None if data is grpc.aio.EOF else data

    def _model_of_generation_request(self, message: Any) -> ServedModel | None:
        """Return the model of a generation request, or None for an inference request."""
        try:
            model, function = self._engine.repository.find(message.model_name, message.model_version)
        except RequestFault:
            return None  # it fails when its response is due
        return model if model.is_generation(function) else None

    async def _write_error_on_failure(
        self, answer: Awaitable[None], name: str, lease: Lease, before: asyncio.Event | None = None,
        after: asyncio.Event | None = None,
    ) -> None:  # fmt: skip
        """Await the coroutine ``answer``, which writes a response, and write an error response if it fails.

        The error is written when ``before`` is set; ``after`` is set at the end.
        """
        try:
            await answer
        except Exception as error:
            if before is not None:
                await before.wait()
            fields: Fields = {"id": name, "parameters": _LAST}
            message = MESSAGE[STREAM_RESPONSE](error_message=client_error_text(error), infer_response=fields)
            await self._write(message.SerializeToString())
        finally:
            lease.release()
            if after is not None:
                after.set()
            self._room.release()

    async def _write_inference_response(self, received: ReceivedRequest, before: asyncio.Event, lease: Lease) -> None:
        """Run an inference request, and write its response when ``before`` is set."""
        with self._engine.admit("grpc") as ticket:
            answer = await infer(self._engine, received, ticket, self._headers, {"parameters": _LAST})
            lease.grow(COPIES * len(answer))
        await before.wait()
        await self._write(answer)

    async def _write_generated_tokens(self, received: ReceivedRequest, model: ServedModel) -> None:
        """Handle a generation request: write a response for each token."""
        about, conversion = _stream_response_fields(received.message, model), self._engine.conversion

        async def send_token(index: int, token: int, done: str) -> None:
            results = {"token": np.array([token]), "index": np.array([index])}
            parameters: Fields = {_FINAL: {"bool_param": bool(done)}}
            if done:
                parameters["done"] = {"string_param": done}
            fields = {**about, "parameters": parameters}
            await self._write(await write_answer(conversion, fields, InferRequest(), results, received.numbers, True))

        with self._engine.admit("grpc") as ticket:
            ticket.model, ticket.statistics = model.name, model.statistics
            version = received.message.model_version
            await generate(self._engine, model, version, read_parameters(received), self._headers, send_token)

    async def _write(self, answer: bytes) -> None:
        async with self._writing:
            try:
                await write(self._context, answer, self._engine.settings.idle_timeout)
            except asyncio.CancelledError:
                if self._task is not None:
                    self._task.cancel()  # the whole stream: nobody reads it
                raise


async def _raise_error(error: Exception) -> None:
    """Raise ``error``: a coroutine that replaces the response to an unreadable request."""
    raise error


def _ignore_result(task: asyncio.Future[Any]) -> None:
    """Retrieve the result of a task that nobody awaits, so that asyncio does not log its exception."""
    if not task.cancelled():
        task.exception()
