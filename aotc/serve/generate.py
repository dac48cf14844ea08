"""Tokens of a language model, one after the other, as server-sent events.

A bundle generates if it has two functions: ``prefill(tokens) -> (logits, *state)`` and
``decode(token, *state) -> (logits, *state)``. The first result may be the next token itself, an integer. The state
stays where the functions have made it; ``decode`` may take its memory (``donate_argnums``).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf, isfinite
from typing import Any

import numpy as np

from aotc.serve.engine import Engine, Ticket
from aotc.serve.faults import BAD, LATE, RequestFault, text_of
from aotc.serve.http_io import ClientLeft, ClientWatch, Receive, Scope, Send, read_body, send_fault
from aotc.serve.limits import LAST_WORD_SECONDS, MOST_TOKENS, USUAL_TOKENS
from aotc.serve.model import ServedModel
from aotc.serve.protocol import parse_object
from aotc.vmfb.dtypes import kind_of, limits, to_numpy
from aotc.vmfb.results import DEVICE

PREFILL, DECODE = "prefill", "decode"


@dataclass(slots=True)
class Wish:
    """What a client asks for.

    Attributes
    ----------
    tokens : list of int
    most : int
        Tokens to make.
    stop : frozenset of int
        Tokens that end it.
    temperature : float
        0 takes the likeliest token.
    top_k : int
        So many of the likeliest are drawn from; 0 for all.
    random : numpy.random.Generator
    """

    tokens: list[int]
    most: int = USUAL_TOKENS
    stop: frozenset[int] = frozenset()
    temperature: float = 0.0
    top_k: int = 0
    random: np.random.Generator = field(default_factory=np.random.default_rng)


def parse_wish(body: bytes, where: str) -> Wish:
    """Read the body of a request.

    Raises
    ------
    RequestFault
        Says what of it cannot be read.
    """
    document = parse_object(body, where)
    unknown = document.keys() - {"tokens", "max_tokens", "stop", "temperature", "top_k", "seed"}
    if unknown:
        expected = "tokens, max_tokens, stop, temperature, top_k, seed"
        raise RequestFault(BAD, where, f"there is no {sorted(unknown)[0][:40]!r} here", expected=expected)
    tokens = _integers(document.get("tokens"), "tokens", where)
    if not tokens:
        raise RequestFault(BAD, where, "tokens is empty", expected='"tokens": [1, 2, 3]')
    most = _number(document, "max_tokens", USUAL_TOKENS, 1, MOST_TOKENS, where)
    stop = _integers(document.get("stop", []), "stop", where)
    temperature = document.get("temperature", 0)
    good = isinstance(temperature, int | float) and not isinstance(temperature, bool)
    if not good or not 0 <= temperature < inf:
        raise RequestFault(BAD, where, "temperature is no number", repr(temperature)[:40], "0 or more")
    top_k = _number(document, "top_k", 0, 0, 1 << 31, where)
    seed = _number(document, "seed", -1, 0, 1 << 63, where) if "seed" in document else None
    return Wish(tokens, most, frozenset(stop), float(temperature), top_k, np.random.default_rng(seed))


def _integers(found: Any, key: str, where: str) -> list[int]:
    if not isinstance(found, list) or not all(type(n) is int for n in found):
        raise RequestFault(BAD, where, f"{key} is no list of integers", repr(found)[:80], f'"{key}": [1, 2, 3]')
    return found


def _number(document: Mapping[str, Any], key: str, usual: int, least: int, most: int, where: str) -> int:
    found = document.get(key, usual)
    if type(found) is not int or not least <= found <= most:
        raise RequestFault(BAD, where, f"{key} is no number that it can be", repr(found)[:40], f"{least} to {most}")
    return found


class Generation:
    """One text: the state that belongs to it, and what comes next."""

    def __init__(self, model: ServedModel, wish: Wish) -> None:
        self._model, self._wish = model, wish
        self._results = DEVICE if model.module.gpus else ""
        check_functions(model)

    async def tokens(self) -> AsyncIterator[int]:
        """Yield token after token; whoever cancels this cancels the call under way."""
        module, wish = self._model.module, self._wish
        values: Sequence[Any] = [self._argument(PREFILL, wish.tokens)]
        for name in (PREFILL, *[DECODE] * (wish.most - 1)):
            first, *state = await module.submit(name, *values, donate=name == DECODE, results=self._results)
            token = choose(np.asarray(first), wish)
            yield token
            if token in wish.stop:
                return
            values = [self._argument(DECODE, [token]), *state]

    def _argument(self, name: str, tokens: Sequence[int]) -> np.ndarray:
        """Return tokens as a function takes them: in its last dim, all others are 1.

        Raises
        ------
        RequestFault
            If it takes another number of them, or its type cannot hold one.
        """
        function = self._model.functions[name]
        row, where = function.arguments[0], f"{self._model.name}.{name}"
        shape = [1] * (len(row["dims"]) - 1) + [len(tokens)] if row["dims"] else []
        fits = all(isinstance(d, str) or d == n for d, n in zip(row["dims"], shape)) and (shape or len(tokens) == 1)
        if not fits:
            raise RequestFault(BAD, where, "it takes another number of tokens", len(tokens), row["dims"])
        low, high = limits(row["dtype"])
        if not all(low <= n <= high for n in tokens):
            raise RequestFault(BAD, where, "a token is out of range", max(tokens, key=abs), f"{low} to {high}")
        return np.array(tokens, to_numpy(row["dtype"])).reshape(shape)


def check_functions(model: ServedModel) -> None:
    """Refuse a model that does not generate.

    Raises
    ------
    RequestFault
        If it lacks one of the functions, or they do not fit each other.
    """
    if not model.generates:
        found = ", ".join(model.functions)
        raise RequestFault(BAD, model.name, "the model does not generate", found, f"functions {PREFILL} and {DECODE}")
    prefill, decode = model.functions[PREFILL], model.functions[DECODE]
    for function in (prefill, decode):
        first = function.arguments[0] if function.arguments else None
        if first is None or kind_of(first["dtype"]) not in "iu":
            taken = None if first is None else first["dtype"]
            raise RequestFault(BAD, f"{model.name}.{function.name}", "it takes no tokens first", taken, "integers")
    state = [_type(row) for row in decode.arguments[1:]]
    for function in (prefill, decode):
        made = [_type(row) for row in function.results[1:]]
        same = len(made) == len(state) and all(_may_be(x, y) for x, y in zip(made, state))
        if not same or not function.results or len(prefill.arguments) != 1:
            where, what = f"{model.name}.{function.name}", "what it gives is not the state that decode takes"
            raise RequestFault(BAD, where, what, f"{len(made)} arrays: {made}"[:400], f"{len(state)}: {state}"[:400])


def _type(row: Mapping[str, Any]) -> tuple[str, list[int | str]]:
    return row["dtype"], row["dims"]


def _may_be(x: tuple[str, list[int | str]], y: tuple[str, list[int | str]]) -> bool:
    """May a result of one type be an argument of the other? Sizes that only a call knows may be any."""
    sizes = all(isinstance(a, str) or isinstance(b, str) or a == b for a, b in zip(x[1], y[1]))
    return x[0] == y[0] and len(x[1]) == len(y[1]) and sizes


def choose(first: np.ndarray, wish: Wish) -> int:
    """Return the next token, of the last position: itself, or drawn by its logits.

    Raises
    ------
    RequestFault
        If no logit is a number.
    """
    if first.dtype.kind in "iu":
        return int(first.reshape(-1)[-1])
    logits = np.asarray(first[(-1,) * (first.ndim - 1)], np.float64)
    if not logits.size or np.isnan(logits).all():
        raise RequestFault(BAD, "", "the model gives no logits", f"{first.dtype} {list(first.shape)}")
    logits = np.where(np.isnan(logits), -inf, logits)
    best = int(logits.argmax())
    if not wish.temperature or not isfinite(logits[best]):
        return best
    if 0 < wish.top_k < logits.size:
        logits = np.where(logits >= np.partition(logits, -wish.top_k)[-wish.top_k], logits, -inf)
    weights = np.exp((logits - logits[best]) / wish.temperature)
    return int(wish.random.choice(logits.size, p=weights / weights.sum()))


# ---------------------------------------------------------------- over HTTP


class Generate:
    """Answers requests for tokens, each as soon as it is made; stops when the client leaves."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one."""
        stream = _Events(send)
        try:
            with self._engine.admit("generate") as ticket:
                await self._answer(scope, receive, stream, ticket)
        except ClientLeft:
            return
        except Exception as error:
            await stream.fail(error)

    async def _answer(self, scope: Scope, receive: Receive, stream: _Events, ticket: Ticket) -> None:
        engine, names = self._engine, scope["path_params"]
        seconds = engine.settings.timeout
        try:
            with ClientWatch(engine, receive) as watch:
                async with asyncio.timeout(seconds) as limit:
                    model, _ = engine.repository.find(names["model"], names.get("version", ""))
                    ticket.model = model.name
                    body = await read_body(dict(scope["headers"]), receive, engine.settings.max_body)
                    stream.read = True
                    watch.begin()
                    wish = parse_wish(body, names["model"])
                    made, token, count = 0, -1, engine.metrics.tokens(model.name)
                    async for token in Generation(model, wish).tokens():
                        await stream.say({"index": made, "token": token})
                        made += 1
                        count()
                        limit.reschedule(asyncio.get_running_loop().time() + seconds)
                    await stream.end({"done": "stop" if token in wish.stop else "length", "tokens": made})
        except TimeoutError:
            what = "the next token was not made, or not taken, in its time"
            raise RequestFault(LATE, names["model"], what, f"{seconds:g} s") from None


class _Events:
    """An answer that is a stream of events."""

    def __init__(self, send: Send) -> None:
        self.read = False
        self._send, self._begun = send, False

    async def say(self, document: Mapping[str, Any], more: bool = True) -> None:
        """Send an event."""
        if not self._begun:
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-store")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
            self._begun = True
        data = b"data: " + json.dumps(document).encode() + b"\n\n"
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def end(self, document: Mapping[str, Any]) -> None:
        """Send the last event."""
        await self.say(document, more=False)

    async def fail(self, error: BaseException) -> None:
        """End with an error: as an event, if some have been sent and the client takes them."""
        if self._begun:
            with suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORD_SECONDS):
                    await self.end({"error": text_of(error)})
        else:
            await send_fault(self._send, error, close=not self.read)
