"""Import of ops on quantized tensors.

In the tensor IR a quantized tensor is the tensor of its integers, for arguments and results of a function, too. By the
specification of StableHLO, an op on it dequantizes the operands, computes in floats, and quantizes the result. Ops that
only move elements move the integers if their quantization does not change. Matmuls of 8 bits or less are computed on
the integers and scaled afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aotc.frontend.mlir_types import leaf_types
from aotc.frontend.quantized.math import dequantize, quantize
from aotc.frontend.quantized.products import bind_integer_matmul, is_int8_matmul, uint8_operand_as_int8
from aotc.frontend.quantized.types import quantization_of
from aotc.frontend.session import Importer, ImportState, Leaves

_MOVES = frozenset({
    "stablehlo.all_gather", "stablehlo.all_to_all", "stablehlo.broadcast", "stablehlo.broadcast_in_dim",
    "stablehlo.collective_broadcast", "stablehlo.collective_permute", "stablehlo.concatenate",
    "stablehlo.dynamic_broadcast_in_dim", "stablehlo.dynamic_gather", "stablehlo.dynamic_pad",
    "stablehlo.dynamic_reshape", "stablehlo.dynamic_slice", "stablehlo.dynamic_update_slice", "stablehlo.gather",
    "stablehlo.pad", "stablehlo.real_dynamic_slice", "stablehlo.reshape", "stablehlo.reverse", "stablehlo.select",
    "stablehlo.slice", "stablehlo.transpose",
})  # fmt: skip
_CARRIES = frozenset({
    "func.call", "stablehlo.bitcast_convert", "stablehlo.case", "stablehlo.composite", "stablehlo.constant",
    "stablehlo.get_dimension_size", "stablehlo.get_tuple_element", "stablehlo.if", "stablehlo.optimization_barrier",
    "stablehlo.tuple", "stablehlo.uniform_dequantize", "stablehlo.uniform_quantize", "stablehlo.while",
})  # fmt: skip
_OPAQUE = frozenset({"stablehlo.custom_call", "stablehlo.infeed", "stablehlo.outfeed", "stablehlo.send"})


def is_quantized(op: Any) -> bool:
    """Return True if ``op`` has a quantized operand or result."""
    return any(quantization_of(leaf) for v in (*op.operands, *op.results) for leaf in leaf_types(v.type))


def import_quantized(importer: Importer, state: ImportState, op: Any) -> None:
    """Import ``op`` on quantized tensors by ``importer``, which does not support quantization."""
    match op.name:
        case name if name in _OPAQUE:
            state.fail(
                f"{name} of quantized tensors: nothing says whether it takes integers or what they stand for",
                hint="put stablehlo.uniform_dequantize or stablehlo.bitcast_convert before it",
            )
        case name if name in _CARRIES or (name in _MOVES and _moves_integers(op)):
            importer(state, op)
        case _ if is_int8_matmul(op) and _import_integer_matmul(importer, state, op):
            pass
        case _ if len(op.regions):
            _check_regions(state, op)
            importer(state, op)
        case _:
            _import_on_floats(importer, state, op)


def _import_integer_matmul(importer: Importer, state: ImportState, op: Any) -> bool:
    """Import a quantized matmul on integers; return False, with nothing bound, if that is impossible."""
    saved = {v: state.values[v] for v in list(op.operands)[:2]}
    narrow = {v: (uint8_operand_as_int8(state, state.value(v), q),) for v in saved if (q := quantization_of(v.type))}
    state.values.update(narrow)
    try:
        with quantized_as(state, "i32"):
            importer(state, op)
    finally:
        state.values.update(saved)
    return bind_integer_matmul(state, op)


def _import_quantize_or_convert(state: ImportState, op: Any) -> None:
    """Import a conversion between quantized types or floats, by way of floats."""
    state.session.quantized = True
    (x,) = state.operands(op)
    source, target = quantization_of(op.operands[0].type), quantization_of(op.results[0].type)
    if source is not None:
        x = dequantize(state, x, source)
    state.bind(op, [x if target is None else quantize(state, x, target)])


def _moves_integers(op: Any) -> bool:
    quantizations = [q for v in (*op.operands, *op.results) if (q := quantization_of(v.type))]
    return all(q.same_numbers(quantizations[0]) for q in quantizations)


def _check_regions(state: ImportState, op: Any) -> None:
    """Reject regions whose parameters have another quantization than the operands: these are not converted."""
    quantizations = [q for v in (*op.operands, *op.results) if (q := quantization_of(v.type))]
    inner = [a for r in op.regions for block in r.blocks for a in block.arguments]
    quantizations += [q for a in inner if (q := quantization_of(a.type))]
    plain = any(quantization_of(a.type) is None and "f" in str(a.type) for a in inner)
    if plain or any(not q.same_numbers(quantizations[0]) for q in quantizations):
        state.fail(
            f"{op.name}: its operands, results and computation are quantized differently",
            hint="bring all to one type with stablehlo.uniform_quantize first",
        )


def _import_on_floats(importer: Importer, state: ImportState, op: Any) -> None:
    """Dequantize the operands, import the op on floats, and quantize its results."""
    saved: dict[Any, Leaves | None] = {}
    for v in op.operands:
        q = quantization_of(v.type)
        if q is not None and v not in saved:
            saved[v] = state.values[v]
            state.values[v] = (dequantize(state, state.value(v), q),)
    try:
        with quantized_as(state, "expressed"):
            importer(state, op)
    finally:
        state.values.update(saved)
    results = [(q, r) for r in op.results if (q := quantization_of(r.type))]
    for q, r in results:
        state.bind_values([r], [quantize(state, state.value(r), q)])


@contextmanager
def quantized_as(state: ImportState, what: str) -> Iterator[None]:
    """Read quantized types as ``what`` within the ``with`` block.

    ``what`` is ``"storage"`` (their integers), ``"expressed"`` (their float type), or a dtype.
    """
    session = state.session
    session.types, session.quantized_as = {}, what
    try:
        yield
    finally:
        session.types, session.quantized_as = {}, "storage"


QUANTIZED: dict[str, Importer] = {
    f"stablehlo.{name}": _import_quantize_or_convert for name in ("uniform_dequantize", "uniform_quantize")
}
