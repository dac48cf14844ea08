"""Ops that read or write at computed indices: dynamic slices, gather, scatter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import Dim, minimum, product
from aotc.ir.opset.dim_attributes import dims_of, numbers_of
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    Constraint,
    OpSpec,
    RegionCall,
    Types,
    equal_shapes,
    equal_sizes,
    first_in_place,
    op_spec_table,
    require_rule,
    same_shape,
    size_within_extent,
    static_sizes,
)
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import kind_of


def _check_starts(name: str, x: TensorType, starts: Types) -> None:
    require_rule(len(starts) == x.rank, f"{name}: {x} needs {x.rank} start indices, found {len(starts)}")
    for t in starts:
        require_rule(
            t.rank == 0 and kind_of(t.dtype) in "iu", f"{name}: a start index is {t}, expected an integer scalar"
        )


def _infer_dynamic_slice(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, sizes = types[0], dims_of(attrs, "sizes")
    _check_starts("dynamic_slice", x, types[1:])
    require_rule(len(sizes) == x.rank, f"dynamic_slice: {len(sizes)} sizes for {x}")
    for size, d in zip(sizes, x.shape):
        require_rule(
            not isinstance(size, int) or not isinstance(d, int) or 0 <= size <= d, f"dynamic_slice: size {size} of {x}"
        )
    return (TensorType(x.dtype, tuple(sizes)),)


def _clamped_window(x: np.ndarray, starts: Sequence[np.ndarray], sizes: Sequence[int]) -> tuple[slice, ...]:
    clamped = [min(max(int(s), 0), d - n) for s, d, n in zip(starts, x.shape, sizes)]
    return tuple(slice(s, s + n) for s, n in zip(clamped, sizes))


def _slice_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for size, extent in zip(dims_of(attrs, "sizes"), types[0].shape):
        yield from size_within_extent(size, extent, "a slice of {0} elements from {1}")


def _reference_dynamic_slice(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [arrays[0][_clamped_window(arrays[0], arrays[1:], numbers_of(attrs, "sizes"))]]


def _infer_dynamic_update_slice(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, update = types[:2]
    _check_starts("dynamic_update_slice", x, types[2:])
    require_rule(update.dtype == x.dtype and update.rank == x.rank, f"dynamic_update_slice: {update} into {x}")
    for n, d in zip(update.shape, x.shape):
        require_rule(
            not isinstance(n, int) or not isinstance(d, int) or n <= d, f"dynamic_update_slice: {update} into {x}"
        )
    return (x,)


def _update_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for size, extent in zip(types[1].shape, types[0].shape):
        yield Constraint("le", size, extent, "an update of {0} elements in {1}")


def _reference_dynamic_update_slice(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    result = np.array(arrays[0])
    result[_clamped_window(result, arrays[2:], arrays[1].shape)] = arrays[1]
    return [result]


_BEYOND = 2**62  # an index that no array has; sums with it do not wrap


def _batch_shape(indices: Sequence[Dim], vector_dim: int) -> tuple[Any, ...]:
    return tuple(d for i, d in enumerate(indices) if i != vector_dim)


def _infer_gather(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, indices = types
    sizes = dims_of(attrs, "slice_sizes")
    require_rule(kind_of(indices.dtype) in "iu", f"gather: indices are {indices.dtype}, expected integers")
    require_rule(len(sizes) == x.rank, f"gather: {len(sizes)} slice sizes for {x}")
    hidden = {*attrs["collapsed_slice_dims"], *attrs["operand_batching_dims"]}
    offsets = [s for i, s in enumerate(sizes) if i not in hidden]
    batch = list(_batch_shape(indices.shape, attrs["index_vector_dim"]))
    require_rule(
        len(offsets) == len(attrs["offset_dims"]), f"gather: {len(offsets)} offset dims, found {attrs['offset_dims']}"
    )
    shape = [offsets.pop(0) if i in attrs["offset_dims"] else batch.pop(0) for i in range(len(offsets) + len(batch))]
    return (TensorType(x.dtype, tuple(shape)),)


def _index_sizes(types: Types, indices: int, vector_dim: int, count: int) -> Iterator[Constraint]:
    """Yield the constraint that index vectors, along ``vector_dim`` of operand ``indices``, have ``count`` elements."""
    if vector_dim < types[indices].rank:
        size, what = types[indices].shape[vector_dim], "vectors of {0} indices for {1} dims"
        yield Constraint("eq", size, count, what, (indices, vector_dim), count)
    elif count != 1:
        yield Constraint("eq", 1, count, "vectors of {0} indices for {1} dims")


def _gather_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    x, indices = types
    vector_dim = attrs["index_vector_dim"]
    for size, extent in zip(dims_of(attrs, "slice_sizes"), x.shape):
        yield from size_within_extent(size, extent, "a slice of {0} elements from {1}")
    sizes = dims_of(attrs, "slice_sizes")
    for d in (*attrs["collapsed_slice_dims"], *attrs["operand_batching_dims"]):
        yield Constraint("le", sizes[d], 1, "a slice of {0} elements along a dim that is dropped")
    yield from _index_sizes(types, 1, vector_dim, len(attrs["start_index_map"]))
    for d, b in zip(attrs["operand_batching_dims"], attrs["start_indices_batching_dims"]):
        yield from equal_sizes(types, (0, d), (1, b), "batches of {0} and {1}")
    batch = product(_batch_shape(indices.shape, vector_dim))
    yield Constraint("le", minimum(batch, 1), product(x.shape), "{0} of {1} elements")


def _index_columns(indices: np.ndarray, vector_dim: int) -> list[np.ndarray]:
    """Split index vectors into one array for each component, of the shape of ``indices`` without ``vector_dim``."""
    if indices.dtype == np.uint64:
        indices = np.minimum(indices, np.uint64(_BEYOND))
    wide = indices.astype(np.int64)
    return [wide] if vector_dim == indices.ndim else list(np.moveaxis(wide, vector_dim, 0))


def _reference_gather(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    x, indices = arrays
    widths, rank = numbers_of(attrs, "slice_sizes"), types[0].rank
    offset_dims = list(attrs["offset_dims"])
    batch_dims = [i for i in range(rank) if i not in offset_dims]
    columns = _index_columns(indices, attrs["index_vector_dim"])
    starts = dict(zip(attrs["start_index_map"], columns))
    batch_shape = _batch_shape(indices.shape, attrs["index_vector_dim"])
    for d, b in zip(attrs["operand_batching_dims"], attrs["start_indices_batching_dims"]):
        axis = b - (b > attrs["index_vector_dim"])
        starts[d] = np.arange(batch_shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(batch_shape))])
    hidden = {*attrs["collapsed_slice_dims"], *attrs["operand_batching_dims"]}
    windows = iter(offset_dims)
    places = []
    for d in range(x.ndim):
        place = np.zeros([1] * rank, np.int64)
        if d in starts:
            start = np.clip(np.broadcast_to(starts[d], batch_shape), 0, x.shape[d] - widths[d])
            spread = [batch_shape[batch_dims.index(i)] if i in batch_dims else 1 for i in range(rank)]
            place = place + start.reshape(spread)
        if d not in hidden:
            axis = next(windows)
            place = place + np.arange(widths[d]).reshape([-1 if i == axis else 1 for i in range(rank)])
        places.append(place)
    return [np.broadcast_to(x[tuple(places)] if places else x, static_sizes(types[0]))]


def _infer_scatter(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    n = attrs["inputs"]
    require_rule(len(types) == 2 * n + 1, f"scatter: {n} inputs need {2 * n + 1} operands, found {len(types)}")
    inputs, indices, updates = types[:n], types[n], types[n + 1 :]
    require_rule(kind_of(indices.dtype) in "iu", f"scatter: indices are {indices.dtype}, expected integers")
    for t in inputs:
        require_rule(same_shape(t.shape, inputs[0].shape), f"scatter: input shapes differ: {t} and {inputs[0]}")
    for t in updates:
        require_rule(t.shape == updates[0].shape, f"scatter: update shapes differ: {t} and {updates[0]}")
    batch = updates[0].rank - len(attrs["update_window_dims"])
    vector = indices.rank - (attrs["index_vector_dim"] < indices.rank)
    require_rule(batch == vector, f"scatter: updates {updates[0]} do not fit indices {indices}")
    return inputs


def _scatter_places(x: np.ndarray, indices: np.ndarray, update: np.ndarray, attrs: Attrs) -> tuple[list, np.ndarray]:
    """Compute the target of each update element of a scatter.

    Return one index array for each dim of ``x``, and the mask of updates whose whole window is inside ``x``.
    """
    window_dims = list(attrs["update_window_dims"])
    batch_dims = [i for i in range(update.ndim) if i not in window_dims]
    batch_shape = [update.shape[i] for i in batch_dims]
    columns = _index_columns(indices, attrs["index_vector_dim"])
    starts = dict(zip(attrs["scatter_dims_to_operand_dims"], columns))
    for d, b in zip(attrs["input_batching_dims"], attrs["scatter_indices_batching_dims"]):
        axis = b - (b > attrs["index_vector_dim"])
        starts[d] = np.arange(batch_shape[axis]).reshape([-1 if i == axis else 1 for i in range(len(batch_shape))])
    hidden = {*attrs["inserted_window_dims"], *attrs["input_batching_dims"]}
    windows = iter(window_dims)
    places, inside = [], np.ones(update.shape, bool)
    for d in range(x.ndim):
        place, size = np.zeros(update.shape, np.int64), 1
        if d not in hidden:
            axis = next(windows)
            size = update.shape[axis]
            place = place + np.arange(size).reshape([-1 if i == axis else 1 for i in range(update.ndim)])
        if d in starts:
            spread = [update.shape[i] if i in batch_dims else 1 for i in range(update.ndim)]
            start = np.broadcast_to(starts[d], batch_shape).reshape(spread)
            inside &= (start >= 0) & (start + size <= x.shape[d])
            place = place + start
        places.append(place)
    return places, inside


def _scatter_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    n = attrs["inputs"]
    x, indices, update = types[0], types[n], types[n + 1]
    yield from equal_shapes(types, operands=range(n))
    yield from equal_shapes(types, operands=range(n + 1, 2 * n + 1))
    vector_dim = attrs["index_vector_dim"]
    yield from _index_sizes(types, n, vector_dim, len(attrs["scatter_dims_to_operand_dims"]))
    hidden = {*attrs["inserted_window_dims"], *attrs["input_batching_dims"]}
    whole = [d for d in range(x.rank) if d not in hidden]
    for d, w in zip(whole, attrs["update_window_dims"]):
        yield Constraint("le", update.shape[w], x.shape[d], "an update of {0} elements in {1}")
    batch = [d for d in range(update.rank) if d not in attrs["update_window_dims"]]
    for d, b in zip(batch, [b for b in range(indices.rank) if b != vector_dim]):
        for k in range(n + 1, 2 * n + 1):
            yield from equal_sizes(types, (n, b), (k, d), "{1} places for {0} updates")
    for d, b in zip(attrs["input_batching_dims"], attrs["scatter_indices_batching_dims"]):
        for k in range(n):
            yield from equal_sizes(types, (n, b), (k, d), "batches of {0} and {1}")


def _reference_scatter(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    """Combine updates into copies of the inputs at the given indices; drop windows that are partly outside.

    Each pass applies the first pending update of every element, so updates of one element combine in row-major order.
    """
    n = attrs["inputs"]
    results = [np.array(a) for a in arrays[:n]]
    updates = arrays[n + 1 :]
    if updates[0].size == 0:
        return results
    places, inside = _scatter_places(results[0], arrays[n], updates[0], attrs)
    flat = np.zeros(updates[0].shape, np.int64)
    for place, d in zip(places, results[0].shape):
        flat = flat * d + place
    keep = inside.reshape(-1)
    targets = flat.reshape(-1)[keep]
    values = [u.reshape(-1)[keep] for u in updates]
    lines = [np.ascontiguousarray(r).reshape(-1) for r in results]
    while targets.size:
        unique, first = np.unique(targets, return_index=True)
        combined = regions[0](*[line[unique] for line in lines], *[v[first] for v in values])
        for line, new in zip(lines, combined):
            line[unique] = new
        rest = np.ones(targets.size, bool)
        rest[first] = False
        targets, values = targets[rest], [v[rest] for v in values]
    return [line.reshape(r.shape) for line, r in zip(lines, results)]


_SCATTER_ATTRS = (
    "inputs", "update_window_dims", "inserted_window_dims", "input_batching_dims", "scatter_indices_batching_dims",
    "scatter_dims_to_operand_dims", "index_vector_dim", "unique_indices", "indices_are_sorted",
)  # fmt: skip
_GATHER_ATTRS = (
    "offset_dims", "collapsed_slice_dims", "operand_batching_dims", "start_indices_batching_dims", "start_index_map",
    "index_vector_dim", "slice_sizes",
)  # fmt: skip

INDEXING = op_spec_table(
    OpSpec(
        "dynamic_slice",
        _infer_dynamic_slice,
        _reference_dynamic_slice,
        ("sizes",),
        inline=True,
        folds=True,
        tolerance=0,
        constraints=_slice_sizes_constraints,
    ),
    OpSpec(
        "dynamic_update_slice",
        _infer_dynamic_update_slice,
        _reference_dynamic_update_slice,
        folds=True,
        tolerance=0,
        constraints=_update_sizes_constraints,
        selects=True,
        writes_part=True,
        in_place=first_in_place,
    ),
    OpSpec(
        "gather",
        _infer_gather,
        _reference_gather,
        _GATHER_ATTRS,
        inline=True,
        folds=True,
        tolerance=0,
        names_kernel=True,
        constraints=_gather_sizes_constraints,
    ),
    OpSpec(
        "scatter",
        _infer_scatter,
        _reference_scatter,
        _SCATTER_ATTRS,
        regions=1,
        tolerance=16,
        normwise=True,
        constraints=_scatter_sizes_constraints,
        writes_part=True,
        in_place=lambda attrs: tuple(range(attrs["inputs"])),
        variadic=True,
    ),
)
