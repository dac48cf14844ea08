"""Which scatters a GPU can do with a thread for each element of the updates."""

from __future__ import annotations

from aotc.ir.dims import Dim, product
from aotc.ir.loop_types import ATOMIC_DTYPES
from aotc.ir.opset import ATOMIC
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.scan_windows import combiner


def updates_of(op: Op) -> Dim:
    """Return how many windows a scatter updates."""
    shape = op.operands[op.attrs["inputs"] + 1].type.shape
    return product(d for n, d in enumerate(shape) if n not in op.attrs["update_window_dims"])


def is_apart(op: Op) -> bool:
    """Do no two updates of a scatter go to the same element?"""
    return bool(op.attrs["unique_indices"]) or updates_of(op) == 1


def is_atomic(op: Op) -> bool:
    """Does a scatter combine integers by what GPUs do in one step, so that the result is the same in any order?"""
    return combiner(op) in ATOMIC and op.results[0].type.dtype in ATOMIC_DTYPES


def is_side_by_side(op: Op) -> bool:
    """Does a GPU apply the updates of a scatter at the same time, a thread for each element of them?"""
    return op.name == "scatter" and (is_apart(op) or is_atomic(op))


def overwrites(op: Op) -> bool:
    """Does a scatter put updates in the place of what was there?"""
    region, n = op.regions[0], op.attrs["inputs"]
    return tuple(region.results) == tuple(region.params[n:])
