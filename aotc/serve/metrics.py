"""Prometheus metrics, and recent latencies for the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from time import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2, 5))
_ROWS = tuple(float(1 << n) for n in range(11))


# Most recent requests of a model whose latencies the page plots and the quantiles are computed from.
LATENCIES = 512


class Metrics:
    """Metrics of one server.

    Only names of existing models are labels: requests for other names are counted under "".
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new: Mapping[str, Any] = {"registry": self.registry}
        names = ("model", "protocol", "status")
        self._requests = Counter("aotc_requests", "Requests that ended, by status of HTTP.", names, **new)
        self._seconds = Histogram(
            "aotc_request_seconds", "From a request's head to its answer.", ("model",), buckets=_SECONDS, **new
        )
        self._rows = Histogram("aotc_batch_rows", "Rows of a batch.", ("model",), buckets=_ROWS, **new)
        self._tokens = Counter("aotc_tokens", "Tokens that were generated.", ("model",), **new)
        self._loads = Counter("aotc_loads", "Bundles that were loaded.", ("model",), **new)
        self.in_flight = Gauge("aotc_in_flight", "Requests that wait or run.", **new)
        self.sequences = Gauge("aotc_sequences", "Texts that are kept between requests.", **new)
        self.memory = Gauge("aotc_request_bytes", "Memory that requests and their answers have.", **new)
        self.ready = Gauge("aotc_model_versions", "Versions that are served.", **new)
        self.latencies: dict[str, deque[tuple[float, float]]] = {}
        self._children: dict[tuple[str, str, int], tuple[Any, Any, deque[tuple[float, float]]]] = {}

    def ended(self, model: str, protocol: str, status: int, seconds: float) -> None:
        """Record a request."""
        key = model, protocol, status
        found = self._children.get(key)
        if found is None:
            last = self.latencies.setdefault(model, deque(maxlen=LATENCIES))
            found = self._children[key] = self._requests.labels(*map(str, key)), self._seconds.labels(model), last
        counter, histogram, last = found
        counter.inc()
        histogram.observe(seconds)
        last.append((time(), seconds))

    def rows(self, model: str) -> Callable[[int], None]:
        """Return a callback for the rows of each batch of a model."""
        return self._rows.labels(model).observe

    def tokens(self, model: str) -> Callable[[], None]:
        """Return a callback for each generated token of a model."""
        return partial(self._tokens.labels(model).inc, 1)

    def loaded(self, model: str) -> None:
        """Count a loaded bundle."""
        self._loads.labels(model).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def page(self) -> dict[str, list[tuple[float, float]]]:
        """Return end time and seconds of each model's recent requests."""
        return {model: list(last) for model, last in self.latencies.items() if model}
