"""Import of ops on quantized tensors.

In the tensor IR a quantized tensor is the tensor of its integers; arguments and results of a function too. An op
on it means, by the specification of StableHLO: dequantize the operands, do the op on floats, quantize the result.
Ops that only move elements move the integers, if these mean the same before and after.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from aotc.frontend.import_state import Importer, Leaves, State, leaf_types
from aotc.frontend.quantization import Quantization, quantization_of
from aotc.frontend.tensor_ir import TensorType, Value
from aotc.vmfb.dtypes import DTYPES, to_numpy

_MOVES = frozenset(
    f"stablehlo.{name}"
    for name in (
        "all_gather", "all_to_all", "broadcast", "broadcast_in_dim", "collective_broadcast", "collective_permute",
        "concatenate", "dynamic_broadcast_in_dim", "dynamic_gather", "dynamic_pad", "dynamic_reshape", "dynamic_slice",
        "dynamic_update_slice", "gather", "pad", "real_dynamic_slice", "reshape", "reverse", "select", "slice",
        "transpose",
    )
)  # fmt: skip
_CARRIES = frozenset({
    "func.call", "stablehlo.bitcast_convert", "stablehlo.case", "stablehlo.composite", "stablehlo.constant",
    "stablehlo.get_dimension_size", "stablehlo.get_tuple_element", "stablehlo.if", "stablehlo.optimization_barrier",
    "stablehlo.tuple", "stablehlo.uniform_dequantize", "stablehlo.uniform_quantize", "stablehlo.while",
})  # fmt: skip
_OPAQUE = frozenset({"stablehlo.custom_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send"})


def is_quantized(op: Any) -> bool:
    """Has ``op`` a quantized operand or result?"""
    return any(quantization_of(leaf) for v in (*op.operands, *op.results) for leaf in leaf_types(v.type))


def import_quantized(importer: Importer, state: State, op: Any) -> None:
    """Import ``op`` with ``importer``, which knows nothing of quantization."""
    match op.name:
        case name if name in _OPAQUE:
            state.fail(
                f"{name} of quantized tensors: nothing says whether it takes integers or what they stand for",
                hint="put stablehlo.uniform_dequantize or stablehlo.bitcast_convert before it",
            )
        case name if name in _CARRIES or (name in _MOVES and _moves_integers(op)):
            importer(state, op)
        case _ if len(op.regions):
            _check_regions(state, op)
            importer(state, op)
        case _:
            _on_floats(importer, state, op)


def _change_form(state: State, op: Any) -> None:
    state.session.quantized = True
    (x,) = state.operands(op)
    source, target = quantization_of(op.operands[0].type), quantization_of(op.results[0].type)
    if source is not None:
        x = dequantize(state, x, source)
    state.bind(op, [x if target is None else quantize(state, x, target)])


def _moves_integers(op: Any) -> bool:
    found = [q for v in (*op.operands, *op.results) if (q := quantization_of(v.type))]
    return all(q.same_numbers(found[0]) for q in found)


def _check_regions(state: State, op: Any) -> None:
    """The integers go into the region as they are: its parameters must mean the same by them."""
    found = [q for v in (*op.operands, *op.results) if (q := quantization_of(v.type))]
    inner = [a for r in op.regions for block in r.blocks for a in block.arguments]
    found += [q for a in inner if (q := quantization_of(a.type))]
    plain = any(quantization_of(a.type) is None and "f" in str(a.type) for a in inner)
    if plain or any(not q.same_numbers(found[0]) for q in found):
        state.fail(
            f"{op.name}: its operands, results and computation are quantized differently",
            hint="bring all to one type with stablehlo.uniform_quantize first",
        )


def _on_floats(importer: Importer, state: State, op: Any) -> None:
    """Dequantize the operands, import the op as one on floats, quantize its results."""
    given: dict[Any, Leaves | None] = {}
    for v in op.operands:
        q = quantization_of(v.type)
        if q is not None and v not in given:
            given[v] = state.values[v]
            state.values[v] = (dequantize(state, state.value(v), q),)
    try:
        with _expressed(state):
            importer(state, op)
    finally:
        state.values.update(given)
    results = [(q, r) for r in op.results if (q := quantization_of(r.type))]
    for q, r in results:
        state.bind_values([r], [quantize(state, state.value(r), q)])


@contextmanager
def _expressed(state: State) -> Iterator[None]:
    """Let the types of quantized values be those of the numbers that they stand for."""
    session = state.session
    session.types, session.expressed = {}, True
    try:
        yield
    finally:
        session.types, session.expressed = {}, False


def dequantize(state: State, v: Value, q: Quantization) -> Value:
    """Return the numbers ``(v - zero) * scale`` that integers ``v`` stand for."""
    x = v
    if any(q.zeros):
        work = _working_type(q)
        x = state.one("sub", [_convert(state, x, work), _spread(state, q.zeros, work, v, q)])
    x = _convert(state, x, q.expressed)
    return state.one("mul", [x, _spread(state, q.scales, q.expressed, v, q)])


def quantize(state: State, x: Value, q: Quantization) -> Value:
    """Return the integers ``clamp(round(x / scale) + zero)``, to nearest even; NaN becomes 0, as in StableHLO's own.

    Zero points and bounds are applied to floats that hold every integer of the storage type, so no sum overflows.
    """
    x = _convert(state, x, q.expressed)
    scaled = state.one("div", [x, _spread(state, q.scales, q.expressed, x, q)])
    work = "f32" if DTYPES[q.storage].bits <= 16 else "f64"
    whole = _convert(state, state.one("round_even", [scaled]), work)
    if any(q.zeros):
        whole = state.one("add", [whole, _spread(state, q.zeros, work, x, q)])
    for fn, bound in (("max", q.low), ("min", q.high)):
        whole = state.one(fn, [whole, _spread(state, (bound,), work, x, q)])
    return _convert(state, whole, q.storage)


def _working_type(q: Quantization) -> str:
    return "i32" if DTYPES[q.storage].bits <= 16 else "i64"


def _convert(state: State, v: Value, dtype: str) -> Value:
    return v if v.type.dtype == dtype else state.one("convert", [v], {}, [TensorType(dtype, v.type.shape)])


def _spread(state: State, values: tuple, dtype: str, like: Value, q: Quantization) -> Value:
    """Return ``values``, one or one for each index along the axis, in the shape of ``like``."""
    t = TensorType(dtype, like.type.shape)
    if q.axis is None or len(set(values)) == 1:
        return state.constant(np.array(values[0]).astype(to_numpy(dtype)), t)
    row = state.constant(np.array(values).astype(to_numpy(dtype)), TensorType(dtype, (len(values),)))
    return state.one("broadcast", [row], {"dims": (q.axis,)}, [t])


QUANTIZED: dict[str, Importer] = {
    f"stablehlo.{name}": _change_form for name in ("uniform_dequantize", "uniform_quantize")
}
