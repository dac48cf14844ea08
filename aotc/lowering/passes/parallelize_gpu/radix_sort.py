"""Radix sort on GPUs, from the least significant digit on, for comparators that order by keys.

Before::

    %y = sort %x {dim = 0} : f32[1000000]
After, once for each byte of the key::

    %counts = digit_counts %x {part = 4096, shift = 0} : i32[256, 245]   // of each digit in each part
    %ends = reduce_window %counts (add) : i32[256, 245]                  // in all parts up to each one
    %some = digit_sort %x, %ends {part = 4096, shift = 0} : f32[1000000]

Each pass is stable, so after the last one the elements are sorted by the whole key. If elements are large, only keys
and indices are sorted, and the elements are gathered at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from aotc.ir.loop.ir import WARP
from aotc.ir.opset.sorting import RADIX
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Region, TensorType, Value
from aotc.lowering.analysis.sort_keys import SortKey, key_bytes, sort_keys, values_behind
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.thresholds import DIGIT_THREADS, LANE_DIGITS
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

DIGIT_SORT_MOVED = Limit(
    16,
    "bytes of an element that each radix pass moves whole; of larger ones it moves keys and the position",
    "gathering the other operands at the end reads and writes them once",
)


DIGIT_SORT_KEYS = Limit(
    8,
    "bytes of the keys of an element that a GPU radix-sorts",
    "longer keys take more passes than merging a million elements",
)


def radix_sort_keys(region: Region, target: Target) -> tuple[SortKey, ...]:
    """Return the keys of a comparator, the most significant first; empty if a radix sort is not possible.

    That is so if the comparator does not order by keys, if keys are too long, or if a block does not have enough shared
    memory for the counts of 32 elements.
    """
    keys = sort_keys(region) or ()
    fits = _elements_per_sort_block(DIGIT_SORT_MOVED.value, target) >= WARP
    return keys if fits and DIGIT_SORT_KEYS.holds(sum(key_bytes(k.value.type.dtype) for k in keys)) else ()


def radix_sort_arrays(
    arrays: Sequence[Value], region: Region, keys: Sequence[SortKey], target: Target, b: Builder
) -> Sequence[Value]:
    """Return ``arrays`` sorted along their last dim by ``keys`` of the comparator ``region``."""
    makers = {v: op for op in region.ops for v in op.results}
    needed = set().union(*(values_behind(k.value, makers) for k in keys))
    read = {n for n in range(len(arrays)) if not needed.isdisjoint(region.params[2 * n : 2 * n + 2])}
    whole = DIGIT_SORT_MOVED.holds(sum(size_of(v.type.dtype) for v in arrays))
    moved = [n for n in range(len(arrays)) if whole or n in read]
    carried = [arrays[n] for n in moved]
    shape = arrays[0].type.shape
    if not whole:
        carried.append(b.make("iota", (), {"dim": len(shape) - 1}, TensorType("i32", shape)))
    part = max(_elements_per_sort_block(sum(size_of(v.type.dtype) for v in carried), target), WARP)
    for key in reversed(keys):
        for byte in range(key_bytes(key.value.type.dtype)):
            attrs = {"part": part, "shift": 8 * byte, "ascending": key.ascending}
            one = _sort_key_region(region, key, moved, carried, b)
            (counts,) = b.append(b.op("digit_counts", tuple(carried), attrs, hint="counts", regions=(one,)))
            again = (copy_region(one, b.names),)
            operands = (*carried, _prefix_sums(counts, b))
            carried = [*b.append(b.op("digit_sort", operands, attrs, hint="sorted", regions=again))]
    if whole:
        return carried
    result_of = dict(zip(moved, carried))
    return [result_of[n] if n in result_of else _gather_along_rows(v, carried[-1], b) for n, v in enumerate(arrays)]


def _sort_key_region(region: Region, key: SortKey, moved: Sequence[int], arrays: Sequence[Value], b: Builder) -> Region:
    """Return the region that computes the key of an element from the arrays that the sort moves."""
    needed = values_behind(key.value, {v: op for op in region.ops for v in op.results})
    params = [region.params[2 * n] for n in moved]
    params += [Value(b.names.fresh("place"), TensorType(v.type.dtype)) for v in arrays[len(params) :]]
    ops = tuple(op for op in region.ops if not needed.isdisjoint(op.results))
    return copy_region(replace(region, params=tuple(params), ops=ops, results=(key.value,)), b.names)


DIGIT_SORT_BYTES = BlockSize(
    32 << 10,
    "bytes of the elements that a GPU block orders by one digit",
    "4096 f32 with their positions, within the 48 KiB of shared memory that every GPU has",
)


def _elements_per_sort_block(bytes_: int, target: Target) -> int:
    """Return the number of elements, of ``bytes_`` bytes each, that a block sorts: a power of two."""
    part = DIGIT_THREADS.value * LANE_DIGITS.value
    while part and not (
        part * bytes_ <= DIGIT_SORT_BYTES.value and part * bytes_ + _digit_table_bytes(part) <= target.shared
    ):
        part //= 2
    return part


def _digit_table_bytes(part: int) -> int:
    """Return the bytes of shared memory for a block's digit counts, their prefix sums and offsets."""
    warps = max(part // LANE_DIGITS.value // WARP, 1)
    return 4 * RADIX * (warps + 5)


def _prefix_sums(counts: Value, b: Builder) -> Value:
    """Return the inclusive prefix sums of ``counts`` along the last dim."""
    *lead, parts = counts.type.shape
    ones, none = (1,) * (len(lead) + 1), ((0, 0),) * len(lead)
    plain = dict.fromkeys(("strides", "base_dilations", "window_dilations"), ones)
    attrs = {**plain, "window": (*ones[1:], parts), "padding": (*none, (parts - 1, 0))}
    zero = b.constant(0, TensorType(counts.type.dtype))
    return b.make("reduce_window", (counts, zero), attrs, hint="ends", regions=(b.combiner("add", "i32"),))


def _gather_along_rows(x: Value, places: Value, b: Builder) -> Value:
    """Return the elements of each row of ``x`` at ``places``."""
    rank = x.type.rank
    lead = tuple(range(rank - 1))
    attrs = {
        "offset_dims": (), "collapsed_slice_dims": (rank - 1,), "operand_batching_dims": lead,
        "start_indices_batching_dims": lead, "start_index_map": (rank - 1,), "index_vector_dim": rank,
        "slice_sizes": (1,) * rank,
    }  # fmt: skip
    return b.make("gather", (x, places), attrs)
