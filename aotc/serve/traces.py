"""Spans of requests for OpenTelemetry, if its API is installed; whoever wants to see them sets up its SDK."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from importlib import import_module
from typing import Any

from aotc.vmfb.errors import VmError

Span = Callable[[str, Mapping[str, str], Mapping[str, Any]], AbstractContextManager[Any]]


def no_span(name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> AbstractContextManager[Any]:
    """Return nothing to enter."""
    return nullcontext()


def open_traces(wanted: bool) -> Span:
    """Return what begins the span of a request, as part of the trace that the client's headers name.

    Raises
    ------
    VmError
        If they are wanted and the API is not there.
    """
    if not wanted:
        return no_span
    try:
        trace, propagate = import_module("opentelemetry.trace"), import_module("opentelemetry.propagate")
    except ImportError:
        hint = "pip install opentelemetry-api opentelemetry-sdk"
        raise VmError("", "traces need OpenTelemetry", hint=hint) from None
    tracer = trace.get_tracer("aotc.serve")

    def span(name: str, headers: Mapping[str, str], attributes: Mapping[str, Any]) -> AbstractContextManager[Any]:
        parent = propagate.extract(headers)
        kind = trace.SpanKind.SERVER
        return tracer.start_as_current_span(name, parent, kind=kind, attributes=dict(attributes))

    return span
