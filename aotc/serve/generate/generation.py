"""Token generation for one request, independent of the protocol."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np

from aotc.serve.engine import Engine
from aotc.serve.errors import LATE, RequestFault
from aotc.serve.gang_module import GangModule
from aotc.serve.generate.capabilities import check_functions
from aotc.serve.generate.gang_decoder import check_gang_functions
from aotc.serve.generate.request import GenerationRequest, parse_request
from aotc.serve.generate.sampling import next_token
from aotc.serve.generate.sequences import Sequence
from aotc.serve.model import ServedModel

LENGTH, STOP = "length", "stop"
SendToken = Callable[[int, int, str], Awaitable[None]]


async def generate(
    engine: Engine, model: ServedModel, version: str, document: Mapping[str, Any], headers: Mapping[str, str],
    send_token: SendToken,
) -> None:
    """Generate the tokens of a request.

    Parameters
    ----------
    engine, model
        The server's state, and the model.
    version : str
        The version in the request, or "".
    document
        The request's parameters.
    headers
        Headers of the trace context.
    send_token : callable
        Called for each token with its index, the token, and the finish reason ("" except for the last token).

    Raises
    ------
    RequestFault
        If a token is not generated and read in time, or the request is invalid. The sequence has then ended;
        cancellation of this coroutine ends it too.
    """
    if isinstance(model.module, GangModule):
        check_gang_functions(model.module, model.name)
    else:
        check_functions(model.module, model.name)
    parameters = parse_request(document, model.name)
    try:
        async with asyncio.timeout(parameters.timeout):
            await _generate_tokens(engine, model, version, parameters, headers, send_token)
    except TimeoutError:
        what, hint = "the tokens were not made, and taken, in their time", "a longer timeout"
        raise RequestFault(LATE, model.name, what, f"{parameters.timeout} s", hint=hint) from None


async def _generate_tokens(
    engine: Engine,
    model: ServedModel,
    version: str,
    parameters: GenerationRequest,
    headers: Mapping[str, str],
    send_token: SendToken,
) -> None:
    """Generate and send tokens until a stop token, the maximum number, or the timeout of a token."""
    count, seconds = engine.metrics.tokens(model.name), engine.settings.timeout
    about = {"model": model.name, "function": "generate"}
    made, token, done = -1, -1, ""
    try:
        with (
            engine.sequences.sequence_of(model, version, parameters) as sequence,
            engine.span("generate", headers, about),
        ):
            async with asyncio.timeout(seconds) as limit, aclosing(_token_stream(sequence, parameters)) as tokens:
                async for token in tokens:
                    made += 1
                    count()
                    done = STOP if (parameters.stop == token).any() else LENGTH if made + 1 == parameters.most else ""
                    if done:
                        sequence.whole = True
                        break
                    await send_token(made, token, "")
                    limit.reschedule(asyncio.get_running_loop().time() + seconds)
        async with asyncio.timeout(seconds):
            await send_token(made, token, done)  # the receiver can continue the sequence
    except TimeoutError:
        what = "the next token was not made, or not taken, in its time"
        raise RequestFault(LATE, model.name, what, f"{seconds:g} s") from None


async def _token_stream(sequence: Sequence, parameters: GenerationRequest) -> AsyncGenerator[int, None]:
    """Yield the tokens of a sequence without end, and return its state to the decoder afterwards."""
    decoder = sequence.model.decoder
    assert decoder is not None
    try:
        if sequence.text is None:
            first, sequence.text = await decoder.begin(parameters.tokens)
        else:
            first = await decoder.decode_tokens(sequence.text, np.concatenate([sequence.pending, parameters.tokens]))
        while True:
            token = next_token(first, parameters.sampling)
            sequence.pending = np.array([token])
            yield token
            first = await decoder.decode_tokens(sequence.text, sequence.pending)
    finally:
        if sequence.text is not None:
            decoder.leave(sequence.text, sequence.whole)
