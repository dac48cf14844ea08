"""Ops that create or move elements, independent of their values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np

from aotc.ir.dims.algebra import is_static, maximum, product, static
from aotc.ir.dims.compare import is_possible_relation
from aotc.ir.opset.dim_attributes import dim_of, dims_of, numbers_of
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    Constraint,
    OpSpec,
    RuleError,
    Types,
    declared_type,
    dims_may_be_equal,
    equal_shapes,
    op_spec_table,
    positive_values,
    require_rule,
    same_shape,
    static_sizes,
)
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import from_numpy, kind_of, to_numpy


def _infer_constant(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    value = attrs["value"]
    if not given:
        return (TensorType(from_numpy(value.dtype), value.shape),)
    (result,) = given
    if from_numpy(value.dtype) != result.dtype:
        raise RuleError(f"constant: {value.dtype} elements in a {result}")
    if value.shape not in ((), result.shape):
        raise RuleError(f"constant: shape {value.shape} in a {result}")
    return given


def _reference_constant(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.broadcast_to(attrs["value"], static_sizes(types[0]))]


def _infer_iota(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    result = declared_type(given, "iota")
    require_rule(0 <= attrs["dim"] < result.rank, f"iota: dim {attrs['dim']} of {result}")
    require_rule(kind_of(result.dtype) != "b", "iota: is not defined on i1")
    return given


def _reference_iota(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    (result,), dim, shape = types, attrs["dim"], static_sizes(types[0])
    line = np.arange(shape[dim]).astype(to_numpy(result.dtype))
    return [np.broadcast_to(line.reshape([-1 if d == dim else 1 for d in range(result.rank)]), shape)]


def _infer_dim(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    result = declared_type(given, "dim")
    require_rule(
        result.rank == 0 and kind_of(result.dtype) in "iu", f"dim: the result must be an integer scalar, not {result}"
    )
    return given


def _reference_dim(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.array(static(dim_of(attrs, "expr"))).astype(to_numpy(types[0].dtype))]


def _infer_broadcast(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,), dims, result = types, attrs["dims"], declared_type(given, "broadcast")
    require_rule(len(dims) == x.rank, f"broadcast: {x.rank} operand dims but {len(dims)} in dims")
    require_rule(len(set(dims)) == len(dims) and all(0 <= d < result.rank for d in dims), f"broadcast: bad dims {dims}")
    for i, d in enumerate(dims):
        if x.shape[i] != 1 and not dims_may_be_equal(x.shape[i], result.shape[d]):
            raise RuleError(f"broadcast: operand dim {i} of {x} does not fit dim {d} of {result}")
    require_rule(x.dtype == result.dtype, f"broadcast: {x.dtype} to {result.dtype}")
    return given


def _broadcast_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for size, d in zip(types[0].shape, attrs["dims"]):
        if size not in (1, given[0].shape[d]):
            yield Constraint("eq", size, given[0].shape[d], "broadcast of size {0} to size {1}")


def _reference_broadcast(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    (x,), shape = arrays, static_sizes(types[0])
    spread = [1] * len(shape)
    for i, d in enumerate(attrs["dims"]):
        spread[d] = x.shape[i]
    order = sorted(range(x.ndim), key=lambda i: attrs["dims"][i])
    return [np.broadcast_to(x.transpose(order).reshape(spread), shape)]


def _infer_reshape(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,), result = types, declared_type(given, "reshape")
    require_rule(x.dtype == result.dtype, f"reshape: {x.dtype} to {result.dtype}")
    if not dims_may_be_equal(product(x.shape), product(result.shape)):
        raise RuleError(f"reshape: {x} and {result} differ in element count")
    return given


def _reshape_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield Constraint("eq", product(types[0].shape), product(given[0].shape), "reshape of {0} elements to {1}")


def _reference_reshape(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [arrays[0].reshape(static_sizes(types[0]))]


def _infer_transpose(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,), perm = types, attrs["perm"]
    require_rule(sorted(perm) == list(range(x.rank)), f"transpose: {perm} is not a permutation of {x.rank} dims")
    return (TensorType(x.dtype, tuple(x.shape[p] for p in perm)),)


def _reference_transpose(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [arrays[0].transpose(attrs["perm"])]


def _infer_reverse(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,) = types
    require_rule(all(0 <= d < x.rank for d in attrs["dims"]), f"reverse: bad dims {attrs['dims']} for {x}")
    return (x,)


def _reference_reverse(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.flip(arrays[0], attrs["dims"]) if attrs["dims"] else arrays[0]]


def _infer_slice(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,) = types
    start, limit, stride = dims_of(attrs, "start"), dims_of(attrs, "limit"), dims_of(attrs, "stride")
    require_rule(len(start) == len(limit) == len(stride) == x.rank, f"slice: bounds do not match the rank of {x}")
    for i in range(x.rank):
        require_rule(stride[i] != 0, "slice: stride 0")
        ends = (0, start[i], limit[i], x.shape[i])
        fits = all(is_possible_relation("le", low, high) for low, high in pairwise(ends))
        require_rule(not is_static(ends) or fits, f"slice: dim {i}: {start[i]}:{limit[i]} of {x}")
    return (TensorType(x.dtype, tuple((hi - lo + s - 1) // s for lo, hi, s in zip(start, limit, stride))),)


def _slice_bounds_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for start, limit, extent in zip(dims_of(attrs, "start"), dims_of(attrs, "limit"), types[0].shape):
        yield Constraint("le", limit, extent, "a slice up to {0} of {1} elements")
        yield Constraint("le", start, limit, "a slice from {0} up to {1}")
        yield Constraint("le", 0, start, "a slice from {1}")
    yield from positive_values(dims_of(attrs, "stride"), "a slice with a stride")


def _reference_slice(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    bounds = zip(numbers_of(attrs, "start"), numbers_of(attrs, "limit"), numbers_of(attrs, "stride"))
    return [arrays[0][tuple(slice(lo, hi, s) for lo, hi, s in bounds)]]


def _infer_pad(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, value = types
    require_rule(value.rank == 0 and value.dtype == x.dtype, f"pad: the padding value is {value}, expected {x.dtype}[]")
    low, high, interior = dims_of(attrs, "low"), dims_of(attrs, "high"), dims_of(attrs, "interior")
    require_rule(len(low) == len(high) == len(interior) == x.rank, f"pad: widths do not match the rank of {x}")
    shape = []
    for d, lo, hi, inner in zip(x.shape, low, high, interior):
        grown = d if inner == 0 else d + maximum(d - 1, 0) * inner
        shape.append(lo + grown + hi)
        require_rule(not isinstance(shape[-1], int) or shape[-1] >= 0, f"pad: {x} becomes smaller than nothing")
    return (TensorType(x.dtype, tuple(shape)),)


def _pad_widths_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for inner in dims_of(attrs, "interior"):
        yield Constraint("le", 0, inner, "interior padding of {1}")


def pad_array(
    x: np.ndarray, value: np.ndarray, low: Sequence[int], high: Sequence[int], interior: Sequence[int]
) -> np.ndarray:
    """Pad ``x`` with ``value``; negative widths remove elements, and ``interior`` counts padding between elements."""
    grown = [d + max(d - 1, 0) * i for d, i in zip(x.shape, interior)]
    full = np.full([max(lo, 0) + g + max(hi, 0) for lo, g, hi in zip(low, grown, high)], value, x.dtype)
    inside = tuple(slice(max(lo, 0), max(lo, 0) + g, i + 1) for lo, g, i in zip(low, grown, interior))
    full[inside] = x
    crop = tuple(slice(max(-lo, 0), n - max(-hi, 0)) for lo, hi, n in zip(low, high, full.shape))
    return full[crop]


def _reference_pad(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    low, high, interior = (numbers_of(attrs, name) for name in ("low", "high", "interior"))
    return [pad_array(arrays[0], arrays[1], low, high, interior)]


def _infer_concatenate(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    dim, first = attrs["dim"], types[0]
    require_rule(0 <= dim < first.rank, f"concatenate: dim {dim} of {first}")
    total = first.shape[dim]
    for t in types[1:]:
        rest = [s for i, s in enumerate(t.shape) if i != dim]
        require_rule(t.dtype == first.dtype and same_shape(rest, [s for i, s in enumerate(first.shape) if i != dim]),
             f"concatenate: {t} does not join {first} along dim {dim}")  # fmt: skip
        total = total + t.shape[dim]
    return (TensorType(first.dtype, tuple(total if i == dim else s for i, s in enumerate(first.shape))),)


def _concatenate_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield from equal_shapes(types, but=attrs["dim"])


def _reference_concatenate(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [np.concatenate(list(arrays), axis=attrs["dim"])]


SHAPE = op_spec_table(
    OpSpec("constant", _infer_constant, _reference_constant, ("value",), inline=True, work=0, tolerance=0),
    OpSpec("iota", _infer_iota, _reference_iota, ("dim",), inline=True, work=0, tolerance=0),
    OpSpec("dim", _infer_dim, _reference_dim, ("expr",), inline=True, work=0, tolerance=0),
    OpSpec(
        "broadcast",
        _infer_broadcast,
        _reference_broadcast,
        ("dims",),
        moves=True,
        inline=True,
        folds=True,
        work=0,
        tolerance=0,
        constraints=_broadcast_sizes_constraints,
    ),
    OpSpec(
        "reshape",
        _infer_reshape,
        _reference_reshape,
        moves=True,
        permutes=True,
        inline=True,
        folds=True,
        work=0,
        tolerance=0,
        constraints=_reshape_sizes_constraints,
    ),
    OpSpec(
        "transpose",
        _infer_transpose,
        _reference_transpose,
        ("perm",),
        moves=True,
        permutes=True,
        inline=True,
        folds=True,
        work=0,
        tolerance=0,
    ),
    OpSpec(
        "reverse",
        _infer_reverse,
        _reference_reverse,
        ("dims",),
        moves=True,
        permutes=True,
        inline=True,
        folds=True,
        work=0,
        tolerance=0,
    ),
    OpSpec(
        "slice",
        _infer_slice,
        _reference_slice,
        ("start", "limit", "stride"),
        moves=True,
        inline=True,
        folds=True,
        work=0,
        tolerance=0,
        constraints=_slice_bounds_constraints,
    ),
    OpSpec(
        "pad",
        _infer_pad,
        _reference_pad,
        ("low", "high", "interior"),
        inline=True,
        folds=True,
        tolerance=0,
        constraints=_pad_widths_constraints,
        writes_part=True,
    ),
    OpSpec(
        "concatenate",
        _infer_concatenate,
        _reference_concatenate,
        ("dim",),
        inline=True,
        folds=True,
        tolerance=0,
        constraints=_concatenate_sizes_constraints,
    ),
)
