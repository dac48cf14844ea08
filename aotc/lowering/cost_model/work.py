"""What ops count for, and how much work is worth a claim or several threads."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from aotc.ir.dims.algebra import Dim, Expr, product
from aotc.ir.dims.symbols import evaluate, symbols
from aotc.ir.opset import EXPENSIVE
from aotc.ir.tensor.ir import Function, Op, Value
from aotc.lowering.analysis.trip_counts import trip_count
from aotc.lowering.threshold import BlockSize, Estimate, Limit, rows_in
from aotc.vmfb.dtypes import size_of

# fmt: off
SERIAL_NS = Limit(
    "serial_ns", 5_999, "nanoseconds of a graph that one thread runs",
    "chosen, not measured: waking other threads takes about as long",
)
CLAIM_NS = BlockSize(
    "claim_ns", 5_000, "nanoseconds of the grid items claimed at once",
    "chosen, not measured: a claim costs 0.01 to 0.03 microseconds (decision 13), far below a hundredth",
)
MAX_CLAIMS = BlockSize(
    "max_claims", 64, "claims that a grid is cut into, at most",
    "chosen, not measured: some for each of 16 cores",
)
FEW_CLAIMS = Limit(
    "few_claims", 8, "claims of a grid of which there is a power of two",
    "two threads, Zen 4: a product of 8 items in a loop, in 3 claims 1.20 of the time that it takes in 4",
)
SHARING_NS = Estimate(
    "sharing_ns", 3_000, "nanoseconds that a graph takes longer for being shared by threads",
    "chosen, not measured: others see it, claim, and are waited for",
)
UNKNOWN_SIZE = Estimate(
    "unknown_size", 16, "the value of a dim that only a call knows, in prices of commands",
    "chosen, not measured: between a batch of one and large ones",
)
UNKNOWN_TERMS = Estimate(
    "unknown_terms", 512, "terms of a product that only a call knows",
    "chosen, not measured: of the order of a model's hidden sizes",
)
UNKNOWN_TILES = Estimate(
    "unknown_tiles", 8, "tiles of rows, panels or products that only a call knows",
    "chosen, not measured: of the order of a batch of 100 rows",
)
DEAR_WORK = Estimate(
    "dear_work", 12, "scalar operations that a dear one, e.g. a division, counts for in a loop", "chosen, not measured"
)
LOAD_WORK = Estimate("load_work", 2, "what a load counts for in repeated_stage_work", "chosen, not measured")
LOOP_TRIPS = Estimate("loop_trips", 16, "iterations of a loop that is one kernel", "chosen, not measured")
SCAN_WORK = Estimate("scan_work", 2, "times that a scan combines an element", "two by construction: see reduction_scan")
SCATTER_WORK = Estimate("scatter_work", 4, "scalar operations per element of an update", "chosen, not measured")
TOP_K_WORK = Estimate("top_k_work", 4, "scalar operations per element of a row", "chosen, not measured")
DIGIT_WORK = Estimate("digit_work", 4, "scalar operations per element and byte of a radix sort", "chosen, not measured")
MERGE_WORK = Estimate("merge_work", 8, "scalar operations per element and pass of a merge", "chosen, not measured")
SORT_WORK = Estimate(
    "sort_work", 128, "scalar operations per element of a merge of unknown length", "16 passes: rows of 65536"
)
DFT_WORK = Estimate("dft_work", 5, "operations per point and bit of its length", "the count of a radix-2 transform")
RANDOM_WORK = Estimate("random_work", 150, "integer operations per random word", "chosen, not measured")
TRIDIAGONAL_WORK = Estimate("tridiagonal_work", 20, "operations per row and right-hand side", "chosen, not measured")
SPARSE_WORK = Estimate("sparse_work", 4, "scalar operations per element of a sparse product", "chosen, not measured")
CALL_WORK = Estimate("call_work", 16, "operations per element of a custom call's arrays", "chosen, not measured")
# fmt: on
REPEATED_STAGE_WORK = Limit(
    "repeated_stage_work", 7, "scalar operations of a value that each stage of a row computes again",
    "chosen, not measured: a store and a load count about as much",
)

ROWS = rows_in(globals())


def turns_or_guess(turns: int | None) -> int:
    """Return how often a loop turns, a guess where that is not known."""
    return LOOP_TRIPS.value if turns is None else turns


def work_of(op: Op) -> int:
    """Return the scalar operations that one element of ``op`` counts for, measured (``weigh``) or estimated."""
    measured = op.attrs.get("work")
    if measured is not None:
        return measured
    return DEAR_WORK.value if op.name in EXPENSIVE else 1


@lru_cache(maxsize=1024)
def guess_elements(shape: tuple[Dim, ...]) -> int:
    """Return a number for the elements of a shape, which fusion asks of the same ones again and again."""
    return guess(product(shape))


def guess_bytes(v: Value) -> int:
    """Return the bytes of a value; of a symbolic size an estimate."""
    return guess_elements(v.type.shape) * size_of(v.type.dtype)


def guess(value: Dim) -> int:
    """Return a number for a dim, as if what only a call knows were of medium size."""
    if not isinstance(value, Expr):
        return int(value)
    return int(evaluate(value, {s.name: UNKNOWN_SIZE.value for s in symbols(value)}))


def expected_turns(op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]) -> int:
    """Return the number of iterations of a ``while``, or an estimate where :func:`trip_count` has none."""
    return turns_or_guess(trip_count(op, constants, functions))
