"""Core of the server, shared by REST and gRPC: admission, model lookup, execution and statistics of requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from logging import Logger
from math import ceil
from time import perf_counter
from typing import Any

import numpy as np

from aotc.serve.conversion import Conversion
from aotc.serve.errors import BUSY, CANCELLED, CLOSED, FAILED, FORBIDDEN, GOOD, RequestFault, http_status_of
from aotc.serve.generate.sequences import Sequences
from aotc.serve.memory import MemoryBudget
from aotc.serve.metrics import Metrics
from aotc.serve.model import ServedFunction, ServedModel
from aotc.serve.protocol import InferRequest
from aotc.serve.repository import Repository
from aotc.serve.settings import Settings
from aotc.serve.statistics import INFER, INPUT, QUEUE, Statistics
from aotc.serve.telemetry import open_traces


class Ticket:
    """An admitted request, with the data for metrics and logs at its end."""

    __slots__ = ("_lap", "began", "error", "load", "model", "phases", "protocol", "rows", "statistics", "status")

    def __init__(self, protocol: str, load: int) -> None:
        self.protocol, self.load, self.model, self.status, self.began = protocol, load, "", GOOD, perf_counter()
        self.error: BaseException | None = None
        self.statistics: Statistics | None = None
        self.phases: dict[str, float] = {}
        self.rows, self._lap = 1, self.began

    def end_phase(self, phase: str = "") -> float:
        """Record the duration of the current phase under the name ``phase``, and return it in seconds.

        Without a name the phase ends and is not recorded.
        """
        now = perf_counter()
        seconds, self._lap = now - self._lap, now
        if phase:
            self.phases[phase] = seconds
        return seconds


class Engine:
    """The state of a server that all protocols share.

    Attributes
    ----------
    settings : Settings
        The settings of the server.
    repository : Repository
        The served models.
    metrics : Metrics
        Prometheus metrics.
    memory : MemoryBudget
        Memory limit of all requests.
    conversion : Conversion
        Parser of requests and writer of responses.
    sequences : Sequences
        Sequences that continue over several requests.
    closed : asyncio.Event
        Set when the server admits no further requests.
    stop : callable
        Stops the server, from any thread.
    """

    def __init__(self, settings: Settings, log: Logger) -> None:
        self.settings, self.log, self.metrics = settings, log, Metrics()
        self.span = open_traces(settings.traces)
        self.repository = Repository(settings, log, self._loaded)
        self.memory, self.conversion = MemoryBudget(settings.memory), Conversion(settings.max_json)
        self.sequences = Sequences(settings.sequences, settings.sequence_timeout)
        self.closed = asyncio.Event()
        self.stop: Callable[[], object] = lambda: None
        self._in_flight = 0
        self._usual = 0.0  # moving average of the seconds of a request
        self.metrics.in_flight.set_function(lambda: self._in_flight)
        self.metrics.sequences.set_function(lambda: len(self.sequences))
        self.metrics.memory.set_function(lambda: self.memory.used)
        self.metrics.ready.set_function(lambda: sum(map(len, self.repository.models.values())))

    @property
    def closing(self) -> bool:
        """Return True if the server admits no further requests."""
        return self.closed.is_set()

    @property
    def ready(self) -> bool:
        """Return True if the server can accept requests."""
        models = [model for versions in self.repository.models.values() for model in versions.values()]
        return not self.closing and bool(models) and all(model.is_ready for model in models)

    @property
    def in_flight(self) -> int:
        """Return the number of requests that wait or run."""
        return self._in_flight

    def _loaded(self, model: ServedModel) -> None:
        """Count a loaded model, and connect its batcher and decoder to the metrics."""
        self.metrics.loaded(model.name)
        for function in model.functions.values():
            if function.batcher is not None:
                function.batcher.observe = _count_batch_twice(self.metrics.rows(model.name), function.statistics.called)
        if model.decoder is not None:
            model.decoder.observe = self.metrics.rows(model.name)

    @contextmanager
    def admit(self, protocol: str) -> Iterator[Ticket]:
        """Admit a request before its body is read, and record the request when it ends.

        Raises
        ------
        RequestFault
            If the server is shutting down, or the queue is full.
        """
        ticket = Ticket(protocol, self._in_flight + 1)
        try:
            self._check_capacity()
        except RequestFault as error:
            self.metrics.ended("", protocol, error.status, perf_counter() - ticket.began)
            raise
        self._in_flight += 1
        try:
            yield ticket
        except BaseException as error:
            ticket.error = error
            ticket.status = CANCELLED if isinstance(error, asyncio.CancelledError) else http_status_of(error)
            raise
        finally:
            self._in_flight -= 1
            self._record_request(ticket)
            ticket.error = None  # its traceback references the ticket and all memory of the request

    def _check_capacity(self) -> None:
        """Refuse a request if the server is shutting down or the queue is full."""
        if self.closing:
            raise RequestFault(CLOSED, "", "the server is ending", hint="another server", retry=1)
        if self._in_flight >= self.settings.queue:
            seconds = min(max(ceil(self._usual * self.settings.queue), 1), 60)
            what, found = "the server is busy", f"{self._in_flight} requests wait or run"
            raise RequestFault(BUSY, "", what, found, f"fewer than {self.settings.queue}", "later", retry=seconds)

    def _record_request(self, ticket: Ticket) -> None:
        """Record a finished request in metrics, statistics and logs."""
        seconds = perf_counter() - ticket.began
        self._usual += (seconds - self._usual) / 16
        self.metrics.ended(ticket.model, ticket.protocol, ticket.status, seconds, ticket.load)
        if not ticket.model:
            self.metrics.named(ticket.error)
        if ticket.statistics is not None:
            ticket.statistics.ended(seconds, ticket.phases, ticket.status == GOOD, ticket.rows)
        if ticket.status == FAILED:
            about = {"model": ticket.model, "protocol": ticket.protocol}
            self.log.error("request failed", extra={"fields": about}, exc_info=ticket.error)
        if self.settings.access_log:
            fields = {"model": ticket.model, "protocol": ticket.protocol, "status": ticket.status}
            self.log.info("request", extra={"fields": {**fields, "ms": round(seconds * 1e3, 3)}})

    def find(self, ticket: Ticket, name: str, version: str) -> tuple[ServedModel, ServedFunction]:
        """Return the model and function of a request, and record them in its ticket."""
        model, function = self.repository.find(name, version)
        found = model.function(function)
        ticket.model, ticket.statistics = model.name, found.statistics
        return model, found

    def check_control(self, name: str) -> None:
        """Refuse a request to load or unload a model, unless the settings allow model control.

        Raises
        ------
        RequestFault
            If model control is not enabled.
        """
        if not self.settings.model_control:
            what = "models are not loaded and unloaded on request here"
            raise RequestFault(FORBIDDEN, name, what, hint="--model-control")

    def time_limit_of(self, request: InferRequest) -> float:
        """Return the maximum duration of a request in seconds: the request's own timeout, at most the server's."""
        return min(request.timeout or self.settings.timeout, self.settings.timeout)

    async def infer(
        self, ticket: Ticket, function: ServedFunction, request: InferRequest, headers: Mapping[str, str], where: str
    ) -> dict[str, np.ndarray]:
        """Run a request; cancellation, for instance at its deadline, cancels the call.

        Raises
        ------
        CallError
            If the request does not match the function, or the function raises an error.
        """
        arrays = function.arguments_of_request(request, where)
        ticket.end_phase(INPUT)
        with self.span("infer", headers, {"model": where, "function": function.name}):
            batcher = function.batcher
            if batcher is not None and batcher.can_batch(arrays):
                ticket.rows = arrays[0].shape[0]
                results = await batcher.call(arrays, partial(ticket.end_phase, QUEUE))
                ticket.end_phase(INFER)
            else:
                results = await function.module.submit(function.name, *arrays, results=function.wanted)
                function.statistics.called(1, ticket.end_phase(INFER))
        return dict(zip(function.outputs, results))

    def state(self) -> dict[str, Any]:
        """Return the state for the status page."""
        models = [m.report() for versions in self.repository.models.values() for m in versions.values()]
        return {
            "in_flight": self._in_flight, "queue": self.settings.queue, "ready": self.ready, "models": models,
            "index": self.repository.index(),
            "trouble": self.repository.trouble, **self.metrics.page(),
        }  # fmt: skip


def _count_batch_twice(
    count: Callable[[int], object], called: Callable[[int, float], object]
) -> Callable[[int, float], object]:
    """Return a callback that records a batch twice: for Prometheus, and for Triton's statistics."""

    def observe(rows: int, seconds: float) -> None:
        count(rows)
        called(rows, seconds)

    return observe
