"""Constant values: stored constants, splats, iotas, and values that depend on weights alone."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr, is_static, static
from aotc.ir.opset import CHECKS, EFFECTS, SOURCES
from aotc.ir.tensor.ir import Function, Op, Region, TensorType, Value, values_captured_by_op, walk
from aotc.lowering.analysis.index_maps import value_before_movement
from aotc.lowering.analysis.thresholds import SPLAT_ELEMENTS
from aotc.vmfb.dtypes import DTYPES, kind_of


def constants_in(*regions: Region) -> dict[Value, Op]:
    """Return the constants of regions and of their nested regions, by their results."""
    return {op.result: op for region in regions for op in walk(region) if op.name == "constant"}


def constant_of(v: Value, definitions: Mapping[Value, Op]) -> np.ndarray | None:
    """Return the stored array of a constant (of shape ``()`` if a single number fills it), or None."""
    op = definitions.get(v)
    return op.attrs["value"] if op is not None and op.name == "constant" else None


def weights_of(function: Function) -> tuple[Value, ...]:
    """Return the arguments of a function that are known before a call, as ``bind_weights`` marked them."""
    return tuple(function.body.params[n] for n in function.attrs.get("weights", ()))


def is_computable_from_weights(op: Op, weights: Collection[Value], definitions: Mapping[Value, Op]) -> bool:
    """Return True if ``op`` can be computed as soon as ``weights`` are known.

    It must read at least one of ``weights``, otherwise only constants, have no effect and not depend on symbolic sizes.
    """
    reads = (*op.operands, *values_captured_by_op(op))
    if not any(v in weights for v in reads) or not all(
        v in weights or _is_same_in_each_call(v, definitions) for v in reads
    ):
        return False
    inner = [op, *(o for r in op.regions for o in walk(r))]
    return not any(_has_effect_or_can_fail(o) or _depends_on_symbolic_sizes(o) for o in inner)


def _is_same_in_each_call(v: Value, definitions: Mapping[Value, Op]) -> bool:
    """Return True if a value is the same in each call: the result of an op without operands or symbolic sizes."""
    op = definitions.get(v)
    return op is not None and op.name in SOURCES and not _depends_on_symbolic_sizes(op)


def _has_effect_or_can_fail(op: Op) -> bool:
    """Return True if an op has an effect, can fail, or calls a function of the user."""
    return op.name in EFFECTS or op.name in CHECKS or op.name == "custom_call"


def _depends_on_symbolic_sizes(op: Op) -> bool:
    """Return True if an op depends on symbolic sizes, which only a call knows."""
    return not all(is_static(v.type.shape) for v in op.results) or _contains_symbolic_dims(list(op.attrs.values()))


def _contains_symbolic_dims(data: Any) -> bool:
    """Return True if an attribute value contains a symbolic dim, at any depth."""
    match data:
        case tuple() | list():
            return any(map(_contains_symbolic_dims, data))
        case Mapping():
            return any(map(_contains_symbolic_dims, data.values()))
    return isinstance(data, Expr)


def splat_of(v: Value, definitions: Mapping[Value, Op]) -> np.ndarray | None:
    """Return the scalar (shape ``()``) that fills ``v``, looking through movement ops, or None.

    Constants of more than ``SPLAT_ELEMENTS`` elements are not compared.
    """
    op = definitions.get(value_before_movement(v, definitions))
    if op is None or op.name != "constant":
        return None
    value = op.attrs["value"]
    if value.ndim == 0:
        return value
    if value.size and SPLAT_ELEMENTS.holds(value.size):
        raw = np.ascontiguousarray(value).reshape(value.size, 1).view(np.uint8)
        if (raw == raw[0]).all():
            return value.reshape(-1)[0].reshape(())
    return None


def integer_of(v: Value, definitions: Mapping[Value, Op]) -> int | None:
    """Return the integer value of the constant scalar ``v``, or None."""
    value = splat_of(v, definitions)
    return int(value) if value is not None and v.type.rank == 0 else None


def iota_dim(v: Value, definitions: Mapping[Value, Op]) -> int | None:
    """Return the dim ``d`` along which ``v`` is an iota: each element is its index along ``d``. None if there is none.

    Dims of size 1 never qualify, since their only index is 0.
    """
    op = definitions.get(v)
    if op is None or kind_of(v.type.dtype) not in "iu":
        return None
    match op.name:
        case "iota":
            return _iota_dim_of_constant(op.attrs["dim"], v.type)
        case "constant":
            return _iota_dim_of_array(op.attrs["value"], v.type)
        case "convert":
            dim = iota_dim(op.operands[0], definitions)
            return None if dim is None else _iota_dim_of_constant(dim, v.type)
        case "broadcast":
            dim = iota_dim(op.operands[0], definitions)
            if dim is None or op.operands[0].type.shape[dim] != v.type.shape[op.attrs["dims"][dim]]:
                return None
            return int(op.attrs["dims"][dim])
        case "reshape":
            return _iota_dim_of_reshape(op, iota_dim(op.operands[0], definitions))
    return None


def dtype_represents_indices(dtype: str, size: Dim) -> bool:
    """Return True if an integer dtype can represent every index of a dim. A symbolic dim may have any size."""
    info = DTYPES[dtype]
    largest = 2 ** (info.bits - (info.kind == "i")) - 1
    return static(size) - 1 <= largest if is_static((size,)) else info.bits == 64


def _iota_dim_of_constant(dim: int, type_: TensorType) -> int | None:
    size = type_.shape[dim]
    return dim if size != 1 and dtype_represents_indices(type_.dtype, size) else None


def _iota_dim_of_array(value: np.ndarray, type_: TensorType) -> int | None:
    """Return the dim along which ``value`` counts from 0, or None if it is not an iota."""
    if value.ndim != type_.rank or not value.size:
        return None
    for dim, size in enumerate(value.shape):
        line = np.arange(size).reshape([size if d == dim else 1 for d in range(value.ndim)])
        if size > 1 and np.array_equal(value, np.broadcast_to(line, value.shape)):
            return dim
    return None


def _iota_dim_of_reshape(op: Op, dim: int | None) -> int | None:
    """Follow a dim through a reshape that adds and removes dims of size 1."""
    if dim is None:
        return None
    before, after = _is_large_shape(op.operands[0].type.shape), _is_large_shape(op.result.type.shape)
    if [d for _, d in before] != [d for _, d in after]:
        return None
    return after[[n for n, _ in before].index(dim)][0]


def _is_large_shape(shape: tuple[Dim, ...]) -> list[tuple[int, Dim]]:
    return [(n, d) for n, d in enumerate(shape) if d != 1]
