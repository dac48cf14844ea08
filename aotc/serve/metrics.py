"""Prometheus metrics, and recent latencies for the status page."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping
from functools import partial
from time import time
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from aotc.serve.errors import NOT_FOUND, RequestFault, http_status_of

CONTENT_TYPE = CONTENT_TYPE_LATEST
_SECONDS = tuple(base * 10.0**power for power in range(-4, 2) for base in (1, 2, 5))
_ROWS = tuple(float(1 << n) for n in range(11))


# Most recent successful requests of a model from which the page computes quantiles.
LATENCIES = 512
# Seconds of requests and errors that the page plots: two minutes show a burst, and two samples fit a pixel of a phone.
HISTORY = 120
# Latencies from which the quantiles of one second, or of one number of requests in flight, are computed: a p99 of
# fewer is their maximum.
SAMPLES = 128
# Names of unknown models that the page lists; clients choose them, so that others are counted without a name.
UNKNOWN_NAMES = 16
_ERRORS = 400  # the first status of HTTP that is an error


def quantile(values: Collection[float], q: float) -> float:
    """Return the quantile ``q`` of ``values``, one of them; ``values`` must not be empty."""
    return sorted(values)[min(int(q * len(values)), len(values) - 1)]


def median_and_p99(values: Collection[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile."""
    return quantile(values, 0.5), quantile(values, 0.99)


class Second:
    """Requests and errors that ended within a second, and latencies of the successful ones."""

    __slots__ = ("errors", "latencies", "number", "requests")

    def __init__(self, number: int) -> None:
        self.number, self.requests, self.errors = number, 0, 0
        self.latencies: deque[float] = deque(maxlen=SAMPLES)

    def report(self) -> list[float | None]:
        """Return the second, its requests and errors, and the median and p99 of its latencies if it has any."""
        quantiles = median_and_p99(self.latencies) if self.latencies else (None, None)
        return [self.number, self.requests, self.errors, *quantiles]


class ModelTraffic:
    """Requests of a model: the number of each status, each recent second with requests, latencies by load.

    A load is the number of requests in flight when a request began, rounded up to a power of two.
    """

    __slots__ = ("by_load", "seconds", "statuses")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.seconds: deque[Second] = deque(maxlen=HISTORY)
        self.by_load: dict[int, deque[float]] = {}

    def add(self, now: float, status: int, latency: float = 0.0, load: int = 1) -> None:
        """Record a request that ended at ``now`` with an HTTP status, after ``latency`` seconds."""
        self.statuses[status] = self.statuses.get(status, 0) + 1
        if not self.seconds or self.seconds[-1].number != int(now):
            self.seconds.append(Second(int(now)))
        second = self.seconds[-1]
        second.requests += 1
        if status >= _ERRORS:
            second.errors += 1
            return
        second.latencies.append(latency)
        bucket = 1 << max(load - 1, 0).bit_length()
        self.by_load.setdefault(bucket, deque(maxlen=SAMPLES)).append(latency)

    def report(self) -> dict[str, Any]:
        """Return the facts for the status page; ``loads`` has rows of a load, its latencies' median and p99."""
        return {
            "statuses": self.statuses, "seconds": [second.report() for second in self.seconds],
            "loads": [[load, *median_and_p99(found)] for load, found in sorted(self.by_load.items())],
        }  # fmt: skip


class Metrics:
    """Prometheus metrics of one server.

    Only names of existing models are labels: requests for other names are counted under "".
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        new: Mapping[str, Any] = {"registry": self.registry}
        names = ("model", "protocol", "status")
        self._requests = Counter("aotc_requests", "Requests that ended, by status of HTTP.", names, **new)
        self._seconds = Histogram(
            "aotc_request_seconds", "Seconds from the head of a request to the end of its response.", ("model",),
            buckets=_SECONDS, **new,
        )  # fmt: skip
        self._rows = Histogram("aotc_batch_rows", "Rows of a batch.", ("model",), buckets=_ROWS, **new)
        self._tokens = Counter("aotc_tokens", "Tokens that were generated.", ("model",), **new)
        self._loads = Counter("aotc_loads", "Bundles that were loaded.", ("model",), **new)
        self.in_flight = Gauge("aotc_in_flight", "Requests that wait or run.", **new)
        self.sequences = Gauge("aotc_sequences", "Sequences stored between requests.", **new)
        self.memory = Gauge("aotc_request_bytes", "Memory that requests and their answers have.", **new)
        self.ready = Gauge("aotc_model_versions", "Versions that are served.", **new)
        self.latencies: dict[str, deque[tuple[float, float]]] = {}
        self.traffic: dict[str, ModelTraffic] = {}
        self.unknown: dict[str, int] = {}
        self._children: dict[tuple[str, str, int], tuple[Any, Any, deque[tuple[float, float]], ModelTraffic]] = {}

    def ended(self, model: str, protocol: str, status: int, seconds: float, load: int = 1) -> None:
        """Record a request; ``load`` is the number of requests in flight when it began, with this one."""
        key = model, protocol, status
        found = self._children.get(key)
        if found is None:
            last = self.latencies.setdefault(model, deque(maxlen=LATENCIES))
            traffic = self.traffic.setdefault(model, ModelTraffic())
            labels = tuple(map(str, key))
            found = self._children[key] = self._requests.labels(*labels), self._seconds.labels(model), last, traffic
        counter, histogram, last, traffic = found
        now = time()
        counter.inc()
        histogram.observe(seconds)
        if status < _ERRORS:
            last.append((now, seconds))
        traffic.add(now, status, seconds, load)

    def refused(self, protocol: str, error: BaseException) -> None:
        """Record a request that ended with an error before it was admitted, such as one for an unknown model."""
        status = http_status_of(error)
        self._requests.labels("", protocol, str(status)).inc()
        self.traffic.setdefault("", ModelTraffic()).add(time(), status)
        self.named(error)

    def named(self, error: BaseException | None) -> None:
        """Record the name of the unknown model that a request's error is about, if it is about one."""
        if not isinstance(error, RequestFault) or error.status != NOT_FOUND or not error.where:
            return
        if error.where in self.unknown or len(self.unknown) < UNKNOWN_NAMES:
            self.unknown[error.where] = self.unknown.get(error.where, 0) + 1

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
        """Return what the page shows of requests.

        These are the time, the end and the seconds of each model's recent successful requests, all traffic, and the
        names of unknown models with their requests. ModelTraffic under "" is of no model.
        """
        return {
            "now": time(), "latencies": {model: list(last) for model, last in self.latencies.items() if model},
            "traffic": {model: traffic.report() for model, traffic in self.traffic.items()},
            "unknown": self.unknown,
        }  # fmt: skip
