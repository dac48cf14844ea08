"""Work of ops in scalar operations, estimates for symbolic sizes, and the work that is worth several threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from aotc.ir.dims.algebra import Dim, Expr, product
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.opset import EXPENSIVE
from aotc.ir.tensor.ir import Function, Op, Value
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.threshold import Estimate, Limit
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.profile.cost_record import ASSUMED_SIZE

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


@lru_cache(maxsize=1024)
def estimated_elements(shape: tuple[Dim, ...]) -> int:
    """Return the elements of a shape, with estimates for symbolic dims; cached, as fusion asks for the same shapes."""
    return estimated_dim(product(shape))


def estimated_bytes(v: Value) -> int:
    """Return the bytes of a value, with estimates for symbolic dims."""
    return estimated_elements(v.type.shape) * size_of(v.type.dtype)


def estimated_dim(value: Dim) -> int:
    """Return the number that a dim has if every symbolic size is the medium size ``UNKNOWN_SIZE``."""
    if not isinstance(value, Expr):
        return int(value)
    return int(evaluate(value, {s.name: UNKNOWN_SIZE.value for s in symbols(value)}))


def expected_iterations(op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]) -> int:
    """Return the number of iterations of a ``while``, or an estimate if :func:`trip_count` cannot determine it."""
    return iterations_or_estimate(trip_count(op, constants, functions))
