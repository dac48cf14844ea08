"""Sort on GPUs in several kernels: first runs that fit a block of threads, then merges of sorted runs.

Before::

    %y = sort %x {dim = 0} : f32[1000000]
After::

    %runs = sort_runs %x {width = 4096, done = 1}
    %more = sort_runs %runs {width = 8192, done = 4096}         // merges pairs of runs
    ...
    %y = sort_runs %most {width = 1048576, done = 524288}

If the length is unknown, there are as many steps as for the longest possible array; steps that find a single run copy
it. Long rows whose comparator orders by keys are radix-sorted instead (:mod:`.radix_sort`).

The largest elements of a row are among the largest elements of its runs. So ``top_k`` of a long row keeps the first
``k`` elements of each run, and sorts these again. Rows that one thread can sort are not changed.
"""

from __future__ import annotations

from collections.abc import Sequence

from aotc.ir.dims.algebra import product
from aotc.ir.opset.dim_attributes import dim_of
from aotc.ir.tensor.copies import copy_region
from aotc.ir.tensor.ir import Op, Region, TensorType, Value
from aotc.lowering.analysis.sort_keys import key_bytes
from aotc.lowering.passes.parallelize_gpu.radix_sort import radix_sort_arrays, radix_sort_keys
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.resources import sorted_width
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of

THREAD_SORT = Limit(
    32,
    "elements of a row that one GPU thread sorts",
    "the number of threads of a warp; they fit the private memory of a thread",
)


def parallelize_sort(op: Op, target: Target, b: Builder) -> Sequence[Value] | None:
    """Rewrite a GPU ``sort`` or ``top_k`` as parallel sorts of runs that are merged; None keeps the op."""
    if op.name == "sort" and op.results[0].type.rank:
        n = op.results[0].type.shape[op.attrs["dim"]]
        return None if THREAD_SORT.holds(n) or 0 in op.results[0].type.shape else _parallel_sort(op, target, b)
    if op.name == "top_k":
        shape = op.operands[0].type.shape
        few = THREAD_SORT.holds(shape[-1]) or 0 in (*shape, dim_of(op.attrs, "k"))
        return None if few else _parallel_top_k(op, target, b)
    return None


def _parallel_sort(op: Op, target: Target, b: Builder) -> Sequence[Value]:
    """Return the results of a sort, with the sorted dim moved last and each row sorted by runs."""
    dim, shape = op.attrs["dim"], op.results[0].type.shape
    last = len(shape) - 1
    moved = product(shape[dim + 1 :]) != 1
    perm = [d for d in range(len(shape)) if d != dim] + [dim]
    arrays = [b.transpose(v, perm) if moved else b.reshape(v, [shape[d] for d in perm]) for v in op.operands]
    sorted_rows = _sorted_rows_by_runs(arrays, op.regions[0], target, b)
    back = [perm.index(d) for d in range(last + 1)]
    return [b.transpose(v, back) if moved else b.reshape(v, shape) for v in sorted_rows]


MERGED_SORT = Limit(
    0,
    "merge passes per byte of the keys, rounded down, up to which GPUs sort by merging; above, radix sort",
    "NVIDIA H200, 2026-11-22: a merge pass over a million f32 takes 16 us, as long as a radix pass over a digit",
)


def _sorted_rows_by_runs(arrays: Sequence[Value], region: Region, target: Target, b: Builder) -> Sequence[Value]:
    """Return ``arrays`` sorted along their last dim, as parallel sorts of runs that are merged."""
    n = arrays[0].type.shape[-1]
    width = sorted_width([v.type.dtype for v in arrays], target)
    keys = radix_sort_keys(region, target)
    if keys:
        merges = max(-(-n // width) - 1, 0).bit_length() if isinstance(n, int) else n
        bytes_ = sum(key_bytes(k.value.type.dtype) for k in keys)
        if not isinstance(merges, int) or (merges and not MERGED_SORT.holds(merges // bytes_)):
            return radix_sort_arrays(arrays, region, keys, target, b)
    return _merge_sorted_runs(arrays, region, width, b)


# Elements. A row of unknown length is sorted in as many merge passes as a row of this length. Positions in a row are
# i32.
LONGEST_ROW = 1 << 31
MERGE_WAYS_UNKNOWN = BlockSize(
    16,
    "runs that a GPU merges in one pass over an array of unknown length",
    "few passes merely copy when the array is short",
)


def _merge_sorted_runs(arrays: Sequence[Value], region: Region, width: int, b: Builder) -> Sequence[Value]:
    """Return ``arrays`` sorted along their last dim by merging runs, starting with runs of ``width``."""
    n = arrays[0].type.shape[-1]
    most, fan_in = (n, 2) if isinstance(n, int) else (LONGEST_ROW, MERGE_WAYS_UNKNOWN.value)
    runs = _append_sort_runs(arrays, region, b, width, 1)
    while width < most:
        runs, width = _append_sort_runs(runs, region, b, width * fan_in, width), width * fan_in
    return runs


def _append_sort_runs(
    arrays: Sequence[Value], region: Region, b: Builder, width: int, done: int, keep: int = 0, numbered: bool = False
) -> Sequence[Value]:
    """Append a ``sort_runs`` to runs of ``width`` elements, from sorted runs of ``done`` elements."""
    attrs = {"width": width, "done": done, "keep": keep or width, "numbered": numbered}
    regions = (copy_region(region, b.names),)
    return b.append(b.op("sort_runs", tuple(arrays), attrs, hint="sorted", regions=regions))


KEPT_OF_RUN = Limit(
    25,
    "percent of a block's sorted run that top_k keeps; with more, the whole row is sorted",
    "each pass leaves at most a quarter",
)


def _parallel_top_k(op: Op, target: Target, b: Builder) -> Sequence[Value]:
    """Return the ``k`` largest elements of each row and their indices, by parallel sorts of runs."""
    (x,), k = op.operands, dim_of(op.attrs, "k")
    n = x.type.shape[-1]
    region = _descending_comparator(x.type.dtype, b)
    width = sorted_width([x.type.dtype, "i32"], target)
    if isinstance(n, int) and isinstance(k, int) and (n <= width or KEPT_OF_RUN.holds(100 * k // width)):
        sorted_rows = _append_sort_runs((x,), region, b, width, 1, k, numbered=True)
        while n > width:
            n = n // width * k + min(n % width, k)
            sorted_rows = _append_sort_runs(sorted_rows, region, b, width, 1, k)
        return sorted_rows
    places = b.make("iota", (), {"dim": x.type.rank - 1}, TensorType("i32", x.type.shape))
    sorted_rows = _sorted_rows_by_runs((x, places), region, target, b)
    return [b.slice_dim(v, x.type.rank - 1, 0, k) for v in sorted_rows]


def _descending_comparator(dtype: str, b: Builder) -> Region:
    """Return the comparator that orders larger values first and NaN before all; equal elements keep their order."""
    types = [TensorType(dtype), TensorType(dtype), TensorType("i32"), TensorType("i32")]
    params = tuple(Value(b.names.fresh(hint), t) for hint, t in zip("xymn", types, strict=True))
    result = Value(b.names.fresh("before"), TensorType("i1"))
    name = "gt_total" if kind_of(dtype) == "f" else "gt"
    return Region(params, (Op(name, params[:2], (result,), loc=b.loc),), (result,))
