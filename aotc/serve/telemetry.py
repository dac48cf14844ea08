"""OpenTelemetry spans of requests, if its API is installed; the application configures its SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from logging import getLogger
from typing import Any

from aotc.serve.logs import LOGGER
from aotc.vmfb.errors import CallError

Span = Callable[[str, Mapping[str, str], Mapping[str, Any]], AbstractContextManager[Any]]


def no_span(name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return a null context manager, which replaces a span if traces are disabled."""
    return nullcontext()


def open_traces(wanted: bool) -> Span:
    """Return a function that starts the span of a request as a child of the client's span.

    Raises
    ------
    CallError
        If traces are enabled and the API is not installed.
    """
    if not wanted:
        return no_span
    try:
        import opentelemetry.propagate as propagate  # optional
        import opentelemetry.trace as trace
    except ImportError:
        hint = "pip install opentelemetry-api opentelemetry-sdk"
        raise CallError("", "traces need OpenTelemetry", hint=hint) from None
    tracer = trace.get_tracer("aotc.serve")
    said: set[str] = set()

    def log_error(error: Exception) -> None:
        kind = type(error).__name__
        if kind not in said:
            said.add(kind)
            getLogger(LOGGER).error("a trace is lost", extra={"fields": {"error": f"{kind}: {error}"}})

    def span(name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> AbstractContextManager[Any]:
        def begin() -> AbstractContextManager[Any]:
            parent, kind = propagate.extract(headers), trace.SpanKind.SERVER
            return tracer.start_as_current_span(name, parent, kind=kind, attributes=dict(attributes))

        return QuietSpan(begin, log_error)

    return span


class QuietSpan:
    """A span that never fails a request: errors of tracing, such as a full disk, are logged."""

    def __init__(
        self, begin: Callable[[], AbstractContextManager[Any]], log_error: Callable[[Exception], None]
    ) -> None:
        self._begin, self._log_error = begin, log_error
        self._span: AbstractContextManager[Any] | None = None

    def __enter__(self) -> None:
        try:
            span = self._begin()
            span.__enter__()
            self._span = span
        except Exception as error:
            self._log_error(error)

    def __exit__(self, *raised: Any) -> None:
        try:
            if self._span is not None:
                self._span.__exit__(*raised)
        except Exception as error:
            if error is not raised[1]:
                self._log_error(error)
