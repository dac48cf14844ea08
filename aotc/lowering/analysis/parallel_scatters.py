"""Find scatters that a GPU can compute in parallel, with one thread for each element of the updates or of a run."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, product
from aotc.ir.loop.types import ATOMIC_DTYPES
from aotc.ir.opset import ATOMIC
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.prefix_scans import combiner_op_name


def update_window_count(op: Op) -> Dim:
    """Return the number of windows that a scatter updates."""
    shape = op.operands[op.attrs["inputs"] + 1].type.shape
    return product(d for n, d in enumerate(shape) if n not in op.attrs["update_window_dims"])


def has_disjoint_updates(op: Op) -> bool:
    """Return True if no two updates of a scatter write the same element."""
    return bool(op.attrs["unique_indices"]) or update_window_count(op) == 1


def has_atomic_combiner(op: Op) -> bool:
    """Return True if a GPU has an atomic instruction for the combiner and the order of updates does not matter."""
    return combiner_op_name(op) in ATOMIC and op.results[0].type.dtype in ATOMIC_DTYPES


def has_sorted_row_updates(op: Op) -> bool:
    """Return True if updates are whole rows in sorted order, so that all updates of one row form a run."""
    a, n = op.attrs, op.attrs["inputs"]
    indices, update = op.operands[n].type, op.operands[n + 1].type
    return (
        bool(a["indices_are_sorted"])
        and not a["input_batching_dims"]
        and tuple(a["inserted_window_dims"]) == tuple(a["scatter_dims_to_operand_dims"]) == (0,)
        and tuple(a["update_window_dims"]) == tuple(range(1, update.rank))
        and indices.rank == a["index_vector_dim"] == 1
    )


def is_parallel_scatter(op: Op) -> bool:
    """Return True if a GPU applies the updates of a scatter in parallel."""
    return op.name == "scatter" and (has_disjoint_updates(op) or has_atomic_combiner(op) or has_sorted_row_updates(op))


def is_overwriting_scatter(op: Op) -> bool:
    """Return True if a scatter overwrites elements with the updates, without combining them."""
    region, n = op.regions[0], op.attrs["inputs"]
    return tuple(region.results) == tuple(region.params[n:])
