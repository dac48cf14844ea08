"""Decide which long rows use the online form of softmax and variance, which reads a row once, and the size of parts.

The algorithm, and how the partial results of parts are combined, is in :mod:`aotc.lowering.analysis.long_rows`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from aotc.ir.dims.algebra import Expr, product
from aotc.ir.opset import SCALARS
from aotc.ir.tensor.ir import Region, Value
from aotc.lowering.analysis.long_rows import LongRow, dependent_reduction_pairs
from aotc.lowering.cost_model.machines import machine_of
from aotc.lowering.cost_model.work import estimated_dim
from aotc.lowering.plans.resources import cheap_row_memory
from aotc.lowering.plans.thresholds import FEW_ROWS, GPU_IDLE_ROWS, LONG_ROW_THREADS, REDUCED_ELEMENTS, ROW_REGISTERS
from aotc.lowering.threshold import BlockSize
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class RowForm:
    """Decision to split one long row, or not.

    Attributes
    ----------
    row : LongRow
    part : int
        The elements of a part; 0 if the row is not computed in parts.
    reason : str
        The comparison of sizes or times that led to the decision.
    """

    row: LongRow
    part: int
    reason: str


def long_row_splits(region: Region, target: Target) -> Iterator[RowForm]:
    """Yield the decision to split or not for each long row reduced in ``region``, without nested regions.

    A row is long if its two reductions do not fit the fast memory of a worker, or if there are too few rows for all
    workers.
    """
    for row in dependent_reduction_pairs(region):
        if form := _long_row_split(row, target):
            yield form


ROW_PART = BlockSize(
    1 << 15,
    "elements, at most, of a part of a long row that a CPU core reads once for both reductions",
    "128 KiB of f32 stay in a second-level cache; parts of 4096 elements take 5 to 20 % longer",
    benchmark="python -m benchmarks ops long_rows",
)
GPU_ROW_PART = BlockSize(
    1 << 12,
    "elements, at most, of a part of a long row that a GPU block reads once for both reductions",
    benchmark="python -m benchmarks ops long_rows",
)
FEWEST_ROW_PARTS = BlockSize(16, "parts of a long row on a CPU, at least", "two for each of 8 cores")
LEAST_PART = BlockSize(
    512,
    "elements of a part of a long row, at least",
    "with smaller parts, combining their partial results is a large share of the work",
)


def _long_row_split(row: LongRow, target: Target) -> RowForm | None:
    """Return the decision to split a long row; None if the row fits the cache and rows occupy all workers.

    Parts pay if they save a read of the row from memory or occupy idle workers. They cost a second ``exp`` of each
    element if its result is also read by another op: the exponential was taken with the maximum of the part.
    """
    size, rows, bytes_ = row.elements, product(row.kept_dims), row.row_bytes
    if isinstance(size, Expr) or isinstance(bytes_, Expr):
        return None
    where, room = cheap_row_memory(target)
    fits = bytes_ <= room
    idle = (FEW_ROWS if target.kind == "cpu" else GPU_IDLE_ROWS).holds(rows)
    if fits and (not idle or size <= _max_unsplit_row(target)):
        return None
    reasons = [] if fits else [f"{bytes_:,} bytes of a row > {room:,} bytes of {where}"]
    reasons += [f"{rows} rows of {size:,} elements leave workers idle"] if idle else []
    needed = ", and ".join(reasons)
    if not idle and not row.is_softmax:
        return RowForm(row, 0, f"{needed}, but its blocks' rows are read again from a cache")
    most = GPU_ROW_PART.value
    if target.kind == "cpu":  # enough parts for all workers
        most = min(ROW_PART.value, max(size // FEWEST_ROW_PARTS.value, LEAST_PART.value))
    part = max((n for n in range(LEAST_PART.value, most + 1) if size % n == 0), default=size)
    if part == size:
        return RowForm(row, 0, f"{needed}, but no part of {LEAST_PART.value} to {most} elements divides them")
    if not row.is_softmax or not row.read_again:
        return RowForm(row, part, f"{needed}: read in parts of {part:,}")
    again_ns, stored_ns = _exp_recompute_nanoseconds(row, target), _exp_store_nanoseconds(row, target)
    costs = f"exp again takes {again_ns:.3f} ns, to write and read it {stored_ns:.3f}"
    if again_ns > stored_ns:
        return RowForm(row, 0, f"{needed}, but {costs}")
    return RowForm(row, part, f"{needed}: read in parts of {part:,}; {costs}")


def _max_unsplit_row(target: Target) -> int:
    """Return the elements of the longest row that is never split into parts, however few rows there are."""
    register_elements = LONG_ROW_THREADS.value * ROW_REGISTERS.value  # in the registers of the largest GPU block
    return REDUCED_ELEMENTS.value if target.kind == "cpu" else register_elements


def _exp_recompute_nanoseconds(row: LongRow, target: Target) -> float:
    """Return the nanoseconds per element of recomputing the exponential that the second reduction sums."""
    machine = machine_of(target)
    lanes = max(machine.vector_bytes // size_of(_summed_exponential(row).type.dtype), 1)
    return SCALARS["exp"].vector_work / machine.vector / lanes


def _exp_store_nanoseconds(row: LongRow, target: Target) -> float:
    """Return the nanoseconds per element of writing the exponential to memory and reading it again."""
    size = size_of(_summed_exponential(row).type.dtype)
    whole = size * estimated_dim(product(_summed_exponential(row).type.shape))
    return 2 * size / machine_of(target).level_of(2 * whole).rate


def _summed_exponential(row: LongRow) -> Value:
    return row.steps[0].result
