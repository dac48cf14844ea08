"""Import of ``chlo.scan``: a loop along one dim of its inputs, with carried state and stacked results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.frontend.mlir_types import attribute_value, integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim
from aotc.ir.opset.spec import SIZES_DIFFER
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import to_numpy


def _row_start_indices(state: ImportState, at: Value, dim: int, rank: int) -> list[Value]:
    zero = state.constant(np.int64(0), TensorType("i64"))
    return [at if d == dim else zero for d in range(rank)]


def _scan_row(state: ImportState, x: Value, at: Value, dim: int) -> Value:
    """Return the slice ``x[..., at, ...]`` along ``dim``, without that dim.

    ``x`` may have a size of 0 along ``dim`` if no iteration reads a slice.
    """
    shape = x.type.shape
    sizes = tuple(1 if d == dim else n for d, n in enumerate(shape))
    (thin,) = state.append("dynamic_slice", [x, *_row_start_indices(state, at, dim, len(shape))], {"sizes": sizes})
    return state.one("reshape", [thin], {}, [TensorType(x.type.dtype, shape[:dim] + shape[dim + 1 :])])


def _put_scan_row(state: ImportState, into: Value, row: Value, at: Value, dim: int) -> Value:
    """Return ``into`` with the slice ``row`` written at ``[..., at, ...]`` along ``dim``."""
    shape = tuple(1 if d == dim else n for d, n in enumerate(into.type.shape))
    thin = state.one("reshape", [row], {}, [TensorType(row.type.dtype, shape)])
    (updated,) = state.append(
        "dynamic_update_slice", [into, thin, *_row_start_indices(state, at, dim, into.type.rank)], {}
    )
    return updated


def _scan_length(state: ImportState, op: Any, inputs: Sequence[Value], dim: int) -> Dim:
    """Return the number of iterations: the size of the scanned dim, which all inputs must share."""
    for v in inputs[1:]:
        state.require("eq", v.type.shape[dim], inputs[0].type.shape[dim], SIZES_DIFFER)
    if inputs:
        return inputs[0].type.shape[dim]
    return state.static_type(op.results[0].type).shape[dim]


def _import_scan(state: ImportState, op: Any) -> None:
    """Import a scan: each iteration reads one slice of each input, in reverse order with ``is_reverse``."""
    count, stacked = (integer_tuple(op.attributes[f"{side}SegmentSizes"])[0] for side in ("operand", "result"))
    values = state.operands(op)
    inputs, inits = values[:count], values[count:]
    dim, index = op.attributes["dimension"].value, TensorType("i64")
    length = _scan_length(state, op, inputs, dim)
    limit = state.one("dim", (), {"expr": length}, [index])
    one, block = state.constant(np.int64(1), index), op.regions[0].blocks[0]
    reverse = bool(attribute_value(op, "is_reverse", False))
    returned = list(block.operations)[-1].operation.operands

    def step(loop_values: list[Value]) -> list[Value]:
        """Emit one iteration: read a slice of each input, run the body, and write the rows of results."""
        at, *rest = loop_values
        outputs, carried = rest[:stacked], rest[stacked:]
        place = state.one("sub", [state.one("sub", [limit, one]), at]) if reverse else at
        state.bind_values(block.arguments, [*(_scan_row(state, x, place, dim) for x in inputs), *carried])
        results = state.session.import_block(state, block)
        rows = [
            _put_scan_row(state, into, row, place, dim) for into, row in zip(outputs, results[:stacked], strict=True)
        ]
        return [state.one("add", [at, one]), *rows, *results[stacked:]]

    start = [state.constant(np.int64(0), index)]
    # Stacked results start as zeros; each iteration writes its row.
    for v in list(returned)[:stacked]:
        row = state.static_type(v.type)
        t = TensorType(row.dtype, (*row.shape[:dim], length, *row.shape[dim:]))
        start.append(state.constant(np.zeros((), to_numpy(row.dtype)), t))
    types = [v.type for v in (*start, *inits)]
    condition = state.region_of_emitter(types, lambda carried: [state.one("lt", [carried[0], limit])])
    outcome = state.emit("while", [*start, *inits], {}, (), [condition, state.region_of_emitter(types, step)])
    state.bind(op, outcome[1:])


CONTROL_SCAN: dict[str, Importer] = {"chlo.scan": _import_scan}
