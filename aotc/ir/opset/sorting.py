"""Sort by any comparator or by digits of keys, and top-k."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aotc.ir.dims.algebra import ceildiv, minimum, static
from aotc.ir.opset.dim_attributes import dim_of
from aotc.ir.opset.elementwise_scalars import total_order_key
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    Constraint,
    OpSpec,
    RegionCall,
    Types,
    equal_operand_shapes,
    op_spec_table,
    require_rule,
    same_shape,
    size_within_extent,
)
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import from_numpy, kind_of

RADIX = 256
"""The number of values of a digit, which is a byte of a key."""


def _infer_sort(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(0 <= attrs["dim"] < max(types[0].rank, 1), f"sort: dim {attrs['dim']} of {types[0]}")
    for t in types:
        require_rule(same_shape(t.shape, types[0].shape), f"sort: operand shapes differ: {t} and {types[0]}")
    return types


def _reference_sort(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    if arrays[0].size == 0 or arrays[0].ndim == 0:
        return list(arrays)
    rows = [np.moveaxis(a, attrs["dim"], -1) for a in arrays]
    flat = [np.ascontiguousarray(r).reshape(-1, r.shape[-1]) for r in rows]
    order = _merge_order(flat, regions[0])
    sorted_rows = [np.take_along_axis(f, order, axis=1).reshape(r.shape) for f, r in zip(flat, rows)]
    return [np.moveaxis(r, -1, attrs["dim"]) for r in sorted_rows]


def _merge_order(rows: list[np.ndarray], comparator: RegionCall) -> np.ndarray:
    """Return the indices that sort each row stably: a bottom-up merge sort that finds ranks by binary search."""
    count, length = rows[0].shape
    order = np.broadcast_to(np.arange(length), (count, length)).copy()
    line = np.arange(count)[:, None]
    place = np.arange(length)

    def less(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        operands = [x for r in rows for x in (r[line, a], r[line, b])]
        return np.asarray(comparator(*operands)[0])

    width = 1
    while width < length:
        own = place // width
        start = np.minimum((own ^ 1) * width, length)
        stop = np.minimum(start + width, length)
        low = np.broadcast_to(start, (count, length)).copy()
        high = np.broadcast_to(stop, (count, length)).copy()
        first = own % 2 == 0
        for _ in range(width.bit_length()):
            open_ = low < high
            middle = np.minimum((low + high) // 2, length - 1)
            other = np.take_along_axis(order, middle, axis=1)
            # left counts strictly smaller elements of right, right also counts equal ones of left: stable
            before = np.where(first, less(other, order), ~less(order, other))
            low = np.where(open_ & before, middle + 1, low)
            high = np.where(open_ & ~before, middle, high)
        rank = (place - own * width) + (low - start) + (own // 2) * 2 * width
        merged = np.empty_like(order)
        np.put_along_axis(merged, rank, order, axis=1)
        order, width = merged, width * 2
    return order


def _infer_sort_runs(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(types[0].rank > 0, "sort_runs: is not defined on scalars")
    for t in types:
        require_rule(same_shape(t.shape, types[0].shape), f"sort_runs: operand shapes differ: {t} and {types[0]}")
    *lead, n = types[0].shape
    width, keep = attrs["width"], attrs["keep"]
    require_rule(1 <= keep <= width, f"sort_runs: keeps {keep} of {width}")
    left = n if keep == width else n // width * keep + minimum(n % width, keep)
    kept = [TensorType(t.dtype, (*lead, left)) for t in types]
    return (*kept, TensorType("i32", (*lead, left))) if attrs["numbered"] else tuple(kept)


def _reference_sort_runs(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    n, width = arrays[0].shape[-1], attrs["width"]
    if attrs["numbered"]:
        arrays = [*arrays, np.broadcast_to(np.arange(n, dtype=np.int32), arrays[0].shape)]
    pieces = [[a[..., begin : begin + width] for a in arrays] for begin in range(0, n, width)]
    done = [_reference_sort(piece, {"dim": arrays[0].ndim - 1}, regions, types) for piece in pieces]
    if not done:
        return list(arrays)
    return [np.concatenate([a[..., : attrs["keep"]] for a in column], axis=-1) for column in zip(*done)]


def _infer_digit_counts(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    _require_rows("digit_counts", types, attrs)
    *lead, n = types[0].shape
    return (TensorType("i32", (*lead, RADIX, ceildiv(n, attrs["part"]))),)


def _infer_digit_sort(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    *arrays, ends = types
    _require_rows("digit_sort", tuple(arrays), attrs)
    *lead, n = arrays[0].shape
    counted = TensorType("i32", (*lead, RADIX, ceildiv(n, attrs["part"])))
    require_rule(ends == counted, f"digit_sort: counts of parts are {counted}, not {ends}")
    return tuple(arrays)


def _require_rows(name: str, types: Types, attrs: Attrs) -> None:
    require_rule(bool(types) and types[0].rank > 0, f"{name}: is not defined on scalars")
    for t in types:
        require_rule(same_shape(t.shape, types[0].shape), f"{name}: operand shapes differ: {t} and {types[0]}")
    require_rule(
        attrs["part"] > 0 and attrs["shift"] % 8 == 0, f"{name}: parts of {attrs['part']}, shift {attrs['shift']}"
    )


def _radix_digits(arrays: Arrays, attrs: Attrs, key: RegionCall) -> np.ndarray:
    """Return the radix-sort digit of each element: one byte of an unsigned integer that orders like its key."""
    (x,) = map(np.asarray, key(*arrays))
    kind = kind_of(from_numpy(x.dtype))
    if kind == "f":
        x, kind = total_order_key(x), "i"
    wide = f"u{max(x.dtype.itemsize, 1)}"
    word = x.astype(f"i{x.dtype.itemsize}").view(wide) if kind == "i" else x.astype(wide)
    if kind == "i":
        word = word ^ word.dtype.type(1 << (8 * word.dtype.itemsize - 1))
    word = word if attrs["ascending"] else ~word
    return (word >> word.dtype.type(attrs["shift"])) & word.dtype.type(RADIX - 1)


def _reference_digit_counts(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    found = _radix_digits(arrays, attrs, regions[0])
    begins = range(0, found.shape[-1], attrs["part"])
    parts = [found[..., begin : begin + attrs["part"]] for begin in begins]
    counts = [np.stack([(p == d).sum(-1) for p in parts], -1) for d in range(RADIX)] if parts else []
    shape = (*found.shape[:-1], RADIX, len(parts))
    return [np.stack(counts, -2).astype(np.int32) if counts else np.zeros(shape, np.int32)]


def _reference_digit_sort(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    rows = arrays[:-1]
    order = np.argsort(_radix_digits(rows, attrs, regions[0]), axis=-1, kind="stable")
    return [np.take_along_axis(x, order, axis=-1) for x in rows]


def _infer_top_k(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,), k = types, dim_of(attrs, "k")
    require_rule(x.rank > 0 and kind_of(x.dtype) in "iufb", f"top_k: is not defined on {x}")
    require_rule(
        not isinstance(x.shape[-1], int) or not isinstance(k, int) or 0 <= k <= x.shape[-1], f"top_k: k = {k} of {x}"
    )
    shape = (*x.shape[:-1], k)
    return (TensorType(x.dtype, shape), TensorType("i32", shape))


def _top_k_sizes_constraints(types: Types, attrs: Attrs, given: Types) -> Iterator[Constraint]:
    for extent in types[0].shape[-1:]:
        yield from size_within_extent(dim_of(attrs, "k"), extent, "the largest {0} of {1} elements")


def _reference_top_k(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    (x,) = arrays
    key = total_order_key(x) if kind_of(types[0].dtype) == "f" else x.astype(np.int8) if x.dtype == bool else x
    order = np.argsort(np.invert(key), axis=-1, kind="stable")[..., : static(dim_of(attrs, "k"))]
    return [np.take_along_axis(x, order, axis=-1), order.astype(np.int32)]


SORTING = op_spec_table(
    OpSpec(
        "sort",
        _infer_sort,
        _reference_sort,
        ("dim", "stable"),
        regions=1,
        tolerance=0,
        constraints=equal_operand_shapes,
        variadic=True,
        partial=True,
    ),
    OpSpec(
        "sort_runs",
        _infer_sort_runs,
        _reference_sort_runs,
        ("width", "done", "keep", "numbered"),
        regions=1,
        tolerance=0,
        constraints=equal_operand_shapes,
        partial=True,
        added_by="parallelize_gpu",
    ),
    OpSpec(
        "digit_counts",
        _infer_digit_counts,
        _reference_digit_counts,
        ("part", "shift", "ascending"),
        regions=1,
        tolerance=0,
        constraints=equal_operand_shapes,
        added_by="parallelize_gpu",
    ),
    OpSpec(
        "digit_sort",
        _infer_digit_sort,
        _reference_digit_sort,
        ("part", "shift", "ascending"),
        regions=1,
        tolerance=0,
        partial=True,
        added_by="parallelize_gpu",
    ),
    OpSpec(
        "top_k", _infer_top_k, _reference_top_k, ("k",), tolerance=0, constraints=_top_k_sizes_constraints, partial=True
    ),
)
