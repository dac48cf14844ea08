"""Import of reductions, windows and map."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from aotc.frontend.mlir_types import integer_attribute_tuple, integer_tuple
from aotc.frontend.requirements import require_types
from aotc.frontend.session import Importer, ImportState
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.vmfb.dtypes import DTYPES, to_numpy


def _combiner_types(state: ImportState, op: Any) -> list[str]:
    return [state.dtype(a.type) for a in op.regions[0].blocks[0].arguments]


def _import_reduce(state: ImportState, op: Any) -> None:
    """Import ``reduce``; simple combiners of floats of 16 bits or less accumulate in f32."""
    operands = state.promoted(state.operands(op), _combiner_types(state, op))
    dims = tuple(sorted(integer_tuple(op.attributes["dimensions"])))
    region = state.scalar_region(op.regions[0].blocks[0])
    if _accumulates_short(region):
        dtype = region.params[0].type.dtype
        wide = state.emit(
            "reduce", state.promoted(operands, ["f32"] * 2), {"dims": dims}, (), [_combiner_in_f32(state, region)]
        )
        state.bind(op, state.promoted(wide, [dtype]))
        return
    state.bind(op, state.emit("reduce", operands, {"dims": dims}, (), [region]))


def _accumulates_short(region: Region) -> bool:
    """Return True if a combiner accumulates floats of 16 bits or less as a sum, product, maximum or minimum.

    Rounding after every step would stop a sum at the first power of two whose unit in the last place exceeds the terms
    (bf16: at 256, for ones). So such reductions run in f32 and round once, as in XLA. A maximum is the same either way,
    but f32 registers across steps allow vectors.
    """
    if len(region.params) != 2 or len(region.ops) != 1:
        return False
    (op,), row = region.ops, DTYPES[region.params[0].type.dtype]
    plain = op.name in ACCUMULATED and set(op.operands) == set(region.params)
    return plain and row.kind == "f" and row.bits <= 16


def _combiner_in_f32(state: ImportState, region: Region) -> Region:
    (op,) = region.ops
    a, b, c = (state.new_value(TensorType("f32")) for _ in range(3))
    return Region((a, b), (replace(op, operands=(a, b), results=(c,)),), (c,))


def sum_over(state: ImportState, v: Value, dims: tuple[int, ...]) -> Value:
    """Return the sum of ``v`` over ``dims``; for booleans the logical or."""
    scalar = TensorType(v.type.dtype)
    zero = state.constant(np.zeros((), to_numpy(v.type.dtype)), scalar)
    a, b, c = (state.new_value(scalar) for _ in range(3))
    combine = Op("or" if v.type.dtype == "i1" else "add", (a, b), (c,), {}, (), state.loc)
    return state.emit("reduce", [v, zero], {"dims": dims}, (), [Region((a, b), (combine,), (c,))])[0]


def padding_pairs(attribute: Any, rank: int) -> tuple[tuple[int, int], ...]:
    """Return a ``rank x 2`` padding attribute as pairs (low, high)."""
    values = integer_tuple(attribute)
    if isinstance(attribute, ir.DenseElementsAttr) and attribute.is_splat:
        values = tuple(int(x) for x in np.broadcast_to(np.array(attribute), (rank, 2)).reshape(-1))
    return tuple(zip(values[::2], values[1::2]))


def _import_reduce_window(state: ImportState, op: Any) -> None:
    """Import ``reduce_window``; missing strides and dilations are 1, missing padding is 0."""
    operands = state.promoted(state.operands(op), _combiner_types(state, op))
    rank = operands[0].type.rank
    ones = (1,) * rank
    attrs = {
        "window": integer_tuple(op.attributes["window_dimensions"]),
        "strides": integer_attribute_tuple(op, "window_strides", ones),
        "base_dilations": integer_attribute_tuple(op, "base_dilations", ones),
        "window_dilations": integer_attribute_tuple(op, "window_dilations", ones),
        "padding": padding_pairs(op.attributes["padding"], rank) if "padding" in op.attributes else ((0, 0),) * rank,
    }
    region = state.scalar_region(op.regions[0].blocks[0])
    state.bind(op, state.emit("reduce_window", operands, attrs, (), [region]))


def _import_select_and_scatter(state: ImportState, op: Any) -> None:
    """Import ``select_and_scatter``: the gradient of a pooling, with a selection and a combiner region."""
    dtype = state.dtype(op.results[0].type)
    operands = state.promoted(state.operands(op), [dtype] * 3)
    rank = operands[0].type.rank
    ones = (1,) * rank
    attrs = {
        "window": integer_attribute_tuple(op, "window_dimensions", ones),
        "strides": integer_attribute_tuple(op, "window_strides", ones),
        "padding": padding_pairs(op.attributes["padding"], rank) if "padding" in op.attributes else ((0, 0),) * rank,
    }
    for argument in (a for r in op.regions for a in r.blocks[0].arguments):
        if state.dtype(argument.type) != dtype:
            state.fail(f"select_and_scatter of {dtype} works on {argument.type}", hint="convert the operands first")
    regions = [state.scalar_region(r.blocks[0]) for r in op.regions]
    state.bind(op, state.emit("select_and_scatter", operands, attrs, (), regions))


def _import_map(state: ImportState, op: Any) -> None:
    """Import a ``map`` by emission of its scalar ops on whole tensors."""
    values = state.operands(op)
    operands = require_types(state, values, [values[0].type] * len(values))
    shape = values[0].type.shape
    block = op.regions[0].blocks[0]
    state.bind_values(block.arguments, operands)
    state.by_element += 1
    try:
        results: list[Value] = state.session.import_block(state, block)
    finally:
        state.by_element -= 1
    state.bind(op, [state.broadcast_scalar(v, shape) for v in results])


REDUCTION: dict[str, Importer] = {
    "stablehlo.reduce": _import_reduce,
    "stablehlo.reduce_window": _import_reduce_window,
    "stablehlo.select_and_scatter": _import_select_and_scatter,
    "stablehlo.map": _import_map,
}
