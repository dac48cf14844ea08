"""Work of ops in scalar operations, estimates for symbolic sizes, and the work that is worth several threads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from types import MappingProxyType

from aotc.ir.dims.algebra import Dim, Expr, product
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.opset import EXPENSIVE
from aotc.ir.tensor.ir import Function, Op, Value
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.threshold import Estimate, Limit
from aotc.vmfb.assumed_sizes import ASSUMED_SIZE
from aotc.vmfb.dtypes import size_of

SERIAL_NS = Limit(
    5_999,
    "nanoseconds of a graph, at most, that a single thread executes",
    "waking other threads takes about as long",
)
SHARING_NS = Estimate(
    3_000,
    "nanoseconds that a graph takes longer because several threads share it",
    "the others notice it, claim items and are waited for",
)
UNKNOWN_SIZE = Estimate(
    ASSUMED_SIZE,
    "size assumed for a dim that only a call knows, in costs of commands",
    "between a batch of one and large batches",
)
UNKNOWN_TERMS = Estimate(
    512,
    "terms assumed for a product if only a call knows them",
    "of the order of the hidden sizes of models",
)
UNKNOWN_TILES = Estimate(
    8,
    "tiles of rows, panels or products assumed if only a call knows their number",
    "of the order of a batch of 100 rows",
)
DEAR_WORK = Estimate(12, "scalar operations that an expensive one, e.g. a division, counts as in a loop")
LOOP_TRIPS = Estimate(16, "iterations assumed for a loop whose trip count is unknown")
SCATTER_WORK = Estimate(4, "scalar operations per element of a scatter update")
DIGIT_WORK = Estimate(4, "scalar operations per element and byte of a radix sort")
MERGE_WORK = Estimate(8, "scalar operations per element and pass of a merge sort")
DFT_WORK = Estimate(
    5,
    "operations of a Fourier transform per point and bit of its length",
    "the count of a radix-2 transform",
)


def iterations_or_estimate(iterations: int | None) -> int:
    """Return the trip count of a loop, or the estimate ``LOOP_TRIPS`` if it is unknown."""
    return LOOP_TRIPS.value if iterations is None else iterations


def scalar_work_of_op(op: Op) -> int:
    """Return the scalar operations of one element of ``op``, measured (attribute ``work``) or estimated."""
    measured = op.attrs.get("work")
    if measured is not None:
        return measured
    return DEAR_WORK.value if op.name in EXPENSIVE else 1


_TYPICAL: ContextVar[Mapping[str, int]] = ContextVar("typical", default=MappingProxyType({}))


@contextmanager
def typical_sizes(sizes: Mapping[str, int]) -> Iterator[None]:
    """Use ``sizes`` as the estimates of these symbolic dims inside the block (``Options.typical``)."""
    token = _TYPICAL.set(sizes)
    try:
        yield
    finally:
        _TYPICAL.reset(token)


def estimated_symbol(name: str) -> int:
    """Return the estimated size of the symbol ``name``: its typical size, or else ``UNKNOWN_SIZE``."""
    return _TYPICAL.get().get(name, UNKNOWN_SIZE.value)


def estimated_elements(shape: tuple[Dim, ...]) -> int:
    """Return the elements of a shape, with estimates for symbolic dims; cached, as fusion asks for the same shapes."""
    return _estimated_elements(shape, tuple(_TYPICAL.get().items()))


@lru_cache(maxsize=1024)
def _estimated_elements(shape: tuple[Dim, ...], typical: tuple[tuple[str, int], ...]) -> int:
    """Return the estimated number of elements of a shape.

    ``typical`` are the sizes that :func:`estimated_dim` assumes for symbols: a part of the cache's key.
    """
    return estimated_dim(product(shape))


def estimated_bytes(v: Value) -> int:
    """Return the bytes of a value, with estimates for symbolic dims."""
    return estimated_elements(v.type.shape) * size_of(v.type.dtype)


def estimated_dim(value: Dim) -> int:
    """Return the number that a dim has if every symbol has its estimated size."""
    if not isinstance(value, Expr):
        return int(value)
    return int(evaluate(value, {s.name: estimated_symbol(s.name) for s in symbols(value)}))


def dim_or(value: Dim, default: int) -> int:
    """Return the number of a dim: exact, or by the typical sizes if all its symbols have one, or else ``default``."""
    if not isinstance(value, Expr):
        return int(value)
    return estimated_dim(value) if {s.name for s in symbols(value)} <= _TYPICAL.get().keys() else default


def expected_iterations(op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]) -> int:
    """Return the number of iterations of a ``while``, or an estimate if :func:`trip_count` cannot determine it."""
    return iterations_or_estimate(trip_count(op, constants, functions))
