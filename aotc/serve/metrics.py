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
# Seconds of requests and errors that the page plots: two minutes show a burst, and two samples fit a pixel of a phone.
HISTORY = 120


class Traffic:
    """Requests of a model: the number of each status, and requests and errors in each recent second that had any."""

    __slots__ = ("seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.seconds: deque[list[int]] = deque(maxlen=HISTORY)

    def add(self, now: float, status: int) -> None:
        """Record a request that ended at ``now`` with a status of HTTP."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        second = int(now)
        if not self.seconds or self.seconds[-1][0] != second:
            self.seconds.append([second, 0, 0])
        row = self.seconds[-1]
        row[1] += 1
        row[2] += status >= 400

    def report(self) -> dict[str, Any]:
        """Return the facts for the status page."""
        return {"statuses": self.statuses, "seconds": list(self.seconds)}


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
        self.sequences = Gauge("aotc_sequences", "Sequences stored between requests.", **new)
        self.memory = Gauge("aotc_request_bytes", "Memory that requests and their answers have.", **new)
        self.ready = Gauge("aotc_model_versions", "Versions that are served.", **new)
        self.latencies: dict[str, deque[tuple[float, float]]] = {}
        self.traffic: dict[str, Traffic] = {}
        self._children: dict[tuple[str, str, int], tuple[Any, Any, deque[tuple[float, float]], Traffic]] = {}

    def ended(self, model: str, protocol: str, status: int, seconds: float) -> None:
        """Record a request."""
        key = model, protocol, status
        found = self._children.get(key)
        if found is None:
            last = self.latencies.setdefault(model, deque(maxlen=LATENCIES))
            traffic = self.traffic.setdefault(model, Traffic())
            labels = tuple(map(str, key))
            found = self._children[key] = self._requests.labels(*labels), self._seconds.labels(model), last, traffic
        counter, histogram, last, traffic = found
        now = time()
        counter.inc()
        histogram.observe(seconds)
        last.append((now, seconds))
        traffic.add(now, status)

    def rows(self, model: str) -> Callable[[int], None]:
        """Return a callback that records the number of rows of each batch of a model."""
        return self._rows.labels(model).observe

    def tokens(self, model: str) -> Callable[[], None]:
        """Return a callback that records each generated token of a model."""
        return partial(self._tokens.labels(model).inc, 1)

    def loaded(self, model: str) -> None:
        """Count the loading of a model's bundle."""
        self._loads.labels(model).inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)

    def page(self) -> dict[str, Any]:
        """Return the time, end time and seconds of each model's recent requests, and all traffic, for the page."""
        return {
            "now": time(), "latencies": {model: list(last) for model, last in self.latencies.items() if model},
            "traffic": {model: traffic.report() for model, traffic in self.traffic.items()},
        }  # fmt: skip
