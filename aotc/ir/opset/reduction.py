"""Reductions: over dims, over windows, and select-and-scatter."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import product as all_pairs

import numpy as np

from aotc.ir.dims.algebra import Dim, floordiv, maximum, minimum
from aotc.ir.opset.dim_attributes import dims_of, number_pairs_of, numbers_of, pairs_of
from aotc.ir.opset.shape import pad_array
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    Constraint,
    OpSpec,
    RegionCall,
    Types,
    equal_shapes,
    op_spec_table,
    positive_values,
    require_rule,
    same_shape,
    static_sizes,
)
from aotc.ir.tensor.ir import TensorType


def _inputs_and_inits(name: str, types: Types) -> tuple[Types, Types]:
    require_rule(
        len(types) % 2 == 0 and len(types) > 0, f"{name}: as many initial values as inputs, found {len(types)} operands"
    )
    half = len(types) // 2
    for t in types[half:]:
        require_rule(t.rank == 0, f"{name}: an initial value is {t}, expected a scalar")
    for t in types[:half]:
        require_rule(same_shape(t.shape, types[0].shape), f"{name}: input shapes differ: {t} and {types[0]}")
    return types[:half], types[half:]


def _infer_reduce(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    inputs, inits = _inputs_and_inits("reduce", types)
    dims = attrs["dims"]
    require_rule(all(0 <= d < inputs[0].rank for d in dims), f"reduce: dims {dims} of {inputs[0]}")
    shape = tuple(s for i, s in enumerate(inputs[0].shape) if i not in dims)
    return tuple(TensorType(t.dtype, shape) for t in inits)


def _input_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield from equal_shapes(types[: len(types) // 2])


def _reference_reduce(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    half, dims = len(arrays) // 2, attrs["dims"]
    kept = [i for i in range(arrays[0].ndim) if i not in dims]
    shape = [arrays[0].shape[i] for i in kept]
    count = int(np.prod([arrays[0].shape[d] for d in dims], dtype=np.int64))
    inits = [np.broadcast_to(a, shape) for a in arrays[half:]]
    if count == 0 or 0 in shape:
        return inits
    parts = [a.transpose([*sorted(dims), *kept]).reshape([count, *shape]) for a in arrays[:half]]
    return regions[0](*inits, *(p[0] for p in _fold_by_tree(regions[0], parts)))


def _fold_by_tree(combine: RegionCall, parts: list[np.ndarray]) -> list[np.ndarray]:
    """Reduce arrays along axis 0 by combining neighbours pairwise, as a binary tree; the result has size 1 there."""
    while parts[0].shape[0] > 1:
        even = parts[0].shape[0] // 2 * 2
        left, right = [p[0:even:2] for p in parts], [p[1:even:2] for p in parts]
        folded = combine(*left, *right)
        parts = [np.concatenate([f, p[even:]]) for f, p in zip(folded, parts)]
    return parts


def window_extent(size: Dim, low: Dim, high: Dim, base: Dim, window: Dim, dilation: Dim, stride: Dim) -> Dim:
    """Return the number of windows that fit along one dim, at least 0.

    Parameters
    ----------
    size : Dim
        The size of the dim.
    low, high : Dim
        Padding before and after the elements.
    base : Dim
        Dilation of the elements: their distance in the padded array.
    window : Dim
        The number of elements of a window.
    dilation : Dim
        Distance of the elements of a window.
    stride : Dim
        Distance of the first elements of successive windows.
    """
    dilated = size if base == 1 else maximum((size - 1) * base + 1, 0)
    padded, reach = low + dilated + high, (window - 1) * dilation + 1
    if isinstance(padded, int) and padded <= 0:
        return 0
    count = floordiv(padded - reach, stride) + 1
    return size if count == size else maximum(count, 0)


def _infer_reduce_window(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    inputs, inits = _inputs_and_inits("reduce_window", types)
    x = inputs[0]
    for key in ("window", "strides", "base_dilations", "window_dilations", "padding"):
        require_rule(len(attrs[key]) == x.rank, f"reduce_window: {key} does not match the rank of {x}")
    shape = tuple(
        window_extent(d, lo, hi, base, w, wd, s)
        for d, (lo, hi), base, w, wd, s in zip(
            x.shape,
            pairs_of(attrs),
            attrs["base_dilations"],
            dims_of(attrs, "window"),
            attrs["window_dilations"],
            attrs["strides"],
        )
    )
    return tuple(TensorType(t.dtype, shape) for t in inits)


def _window_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    yield from _input_sizes_constraints(types, attrs, given)
    for n, extent in zip(dims_of(attrs, "window"), types[0].shape):  # a window as long as an empty array is empty, too
        yield Constraint("le", minimum(1, extent), n, "a window of {1}, expected at least {0}")
    for name in ("strides", "base_dilations", "window_dilations"):
        yield from positive_values(attrs[name], name.replace("_", " "))


def _window_views(
    x: np.ndarray, shape: Sequence[int], window: Sequence[int], dilations: Sequence[int], strides: Sequence[int]
) -> Iterator[np.ndarray]:
    """Yield one view of ``x`` for each position inside a window; it has the element at this position of all windows."""
    for offset in all_pairs(*(range(w) for w in window)):
        starts = [o * d for o, d in zip(offset, dilations)]
        yield x[tuple(slice(b, b + (n - 1) * s + 1, s) for b, n, s in zip(starts, shape, strides))]


def _reference_reduce_window(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    half, shape = len(arrays) // 2, static_sizes(types[0])
    low, high = zip(*number_pairs_of(attrs)) if number_pairs_of(attrs) else ((), ())
    interior = tuple(b - 1 for b in attrs["base_dilations"])
    padded = [pad_array(x, init, low, high, interior) for x, init in zip(arrays[:half], arrays[half:])]
    results = [np.broadcast_to(a, shape) for a in arrays[half:]]
    if 0 in shape:
        return results
    window, dilations = numbers_of(attrs, "window"), attrs["window_dilations"]
    views = [_window_views(p, shape, window, dilations, attrs["strides"]) for p in padded]
    for elements in zip(*views):
        results = regions[0](*results, *elements)
    return results


def _infer_select_and_scatter(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, source, init = types
    require_rule(init.rank == 0, f"select_and_scatter: the initial value is {init}, expected a scalar")
    for key in ("window", "strides", "padding"):
        require_rule(len(attrs[key]) == x.rank, f"select_and_scatter: {key} does not match the rank of {x}")
    require_rule(source.rank == x.rank, f"select_and_scatter: source {source} does not fit {x}")
    return (TensorType(init.dtype, x.shape),)


def _source_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    x, source = types[:2]
    windows = zip(x.shape, source.shape, pairs_of(attrs), dims_of(attrs, "window"), attrs["strides"])
    for d, (extent, size, (low, high), window, stride) in enumerate(windows):
        count = window_extent(extent, low, high, 1, window, 1, stride)
        yield Constraint("eq", size, count, "{0} values for {1} windows", (1, d), count)


def _reference_select_and_scatter(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    x, source, init = arrays
    window, strides, padding = numbers_of(attrs, "window"), attrs["strides"], number_pairs_of(attrs)
    low, high = [p[0] for p in padding], [p[1] for p in padding]
    places = pad_array(np.arange(x.size).reshape(x.shape), np.array(-1), low, high, (0,) * x.ndim)
    values = pad_array(x, init, low, high, (0,) * x.ndim)
    ones = (1,) * x.ndim
    best = chosen = None
    for value, place in zip(*(_window_views(a, source.shape, window, ones, strides) for a in (values, places))):
        if best is None or chosen is None:
            best, chosen = value, place
            continue
        keep = np.asarray(regions[0](best, value)[0])
        better = (place >= 0) & ((chosen < 0) | ~keep)
        best, chosen = np.where(better, value, best), np.where(better, place, chosen)
    result = np.full(x.size, init, init.dtype)
    if chosen is None:
        return [result.reshape(x.shape)]
    targets, parts = chosen.reshape(-1), source.reshape(-1)
    targets, parts = targets[targets >= 0], parts[targets >= 0]
    while targets.size:
        unique, first = np.unique(targets, return_index=True)
        result[unique] = regions[1](result[unique], parts[first])[0]
        rest = np.ones(targets.size, bool)
        rest[first] = False
        targets, parts = targets[rest], parts[rest]
    return [result.reshape(x.shape)]


_WINDOW = ("window", "strides", "base_dilations", "window_dilations", "padding")


def _reduced_terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return math.prod(shapes[0][d] for d in attrs["dims"])


def _window_terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return math.prod(numbers_of(attrs, "window"))


REDUCTION = op_spec_table(
    OpSpec(
        "reduce",
        _infer_reduce,
        _reference_reduce,
        ("dims",),
        regions=1,
        folds=True,
        names_kernel=True,
        tolerance=16,
        normwise=True,
        terms=_reduced_terms,
        constraints=_input_sizes_constraints,
        variadic=True,
        folds_state=True,
    ),
    OpSpec(
        "reduce_window",
        _infer_reduce_window,
        _reference_reduce_window,
        _WINDOW,
        regions=1,
        names_kernel=True,
        tolerance=64,
        normwise=True,
        terms=_window_terms,
        constraints=_window_sizes_constraints,
        variadic=True,
    ),
    OpSpec(
        "select_and_scatter",
        _infer_select_and_scatter,
        _reference_select_and_scatter,
        ("window", "strides", "padding"),
        regions=2,
        tolerance=16,
        normwise=True,
        constraints=_source_sizes_constraints,
    ),
)
