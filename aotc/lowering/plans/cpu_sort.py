"""Plan sorts and ``top_k`` in which one worker processes a row."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, ceildiv, minimum, product, sym
from aotc.ir.limits import PRIVATE_BYTES
from aotc.ir.loop.ir import Load
from aotc.ir.opset.dim_attributes import dim_of
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.sort_keys import SortKey, key_bytes, sort_keys
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.row_axis import rows_along_dim
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import DTYPES, kind_of, size_of
from aotc.vmfb.float_formats import SMALL_FLOATS


@dataclass(frozen=True, slots=True)
class RadixSortPlan(RegionPlan):
    """Plan that sorts rows by the bytes of their keys (radix sort).

    Attributes
    ----------
    in_place : bool
        Are rows contiguous, so that they are sorted in the memory of the results?
    copied : tuple of int
        Numbers of the operands whose rows are copied before they are sorted.
    """

    in_place: bool
    copied: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class MergeSortPlan(RegionPlan):
    """Plan of a merge sort, which merges sorted runs, each time twice as long.

    Attributes
    ----------
    private : bool
        Is the second copy of a row on the stack, or in the memory of a GPU thread? Else it is in scratch memory.
    """

    private: bool


MERGED_ROW = Limit(
    9,
    "twice the bit length of the row length, less the bytes of the keys, of a merge sort; above, radix sort",
    "a merge sort takes a pass per bit; a million f32 took 300 ms by merge sort, 20 ms by radix sort (decision 29)",
)


def plan_cpu_sort(b: RegionBuilder) -> RadixSortPlan | MergeSortPlan:
    """Choose radix sort or merge sort for a CPU: radix if the comparator has keys and rows are not short."""
    op = b.region_root_op("sort")
    keys = sort_keys(op.regions[0]) if op.results[0].type.rank else None
    if keys is not None:
        n = op.results[0].type.shape[op.attrs["dim"]]
        if not isinstance(n, int) or not MERGED_ROW.holds(2 * n.bit_length() - _sort_key_bytes(keys)):
            return _plan_radix(b, op)
    bytes_, _ = sorted_row_bytes(op)
    return MergeSortPlan(isinstance(bytes_, int) and bytes_ <= PRIVATE_BYTES)


def _sort_key_bytes(keys: tuple[SortKey, ...]) -> int:
    return sum(key_bytes(key.value.type.dtype) for key in keys)


def sorted_row_bytes(op: Op) -> tuple[Dim, Dim]:
    """Return the bytes of a row of all arrays that ``op`` sorts, and its length."""
    n = (op.results[0].type.shape or (1,))[op.attrs["dim"]]
    return n * sum(size_of(v.type.dtype) for v in op.results), n


def _plan_radix(b: RegionBuilder, op: Op) -> RadixSortPlan:
    """Return the radix sort plan: rows that are not contiguous, or of computed operands, are copied first."""
    dim, shape = op.attrs["dim"], op.results[0].type.shape
    _, place = rows_along_dim(shape, dim)
    in_place = product(shape[dim + 1 :]) == 1
    e = b.trial_elements()
    e.new_block()
    rows = [e.at(v, place(0)) for v in op.operands]
    loaded = [in_place and isinstance(x, Load) and x.index == place(0) for x in rows]
    return RadixSortPlan(in_place, tuple(n for n, is_loaded in enumerate(loaded) if not is_loaded))


# --- top_k -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class InsertionPlan(RegionPlan):
    """Plan of ``top_k`` by insertion into an ordered list of the k largest elements so far.

    Attributes
    ----------
    block : int
        Elements that are compared with the k-th one at once.
    vectorized : bool
        Is the comparison written with vector lanes?
    """

    block: int
    vectorized: bool


@dataclass(frozen=True, slots=True)
class SelectionPlan(RegionPlan):
    """Plan of ``top_k`` by a buffer of elements above the k-th largest so far; a full buffer is sorted and cut.

    Attributes
    ----------
    block, vectorized
        As in :class:`InsertionPlan`.
    spare : int
        The least number of elements beyond k that the buffer has room for.
    """

    block: int
    vectorized: bool
    spare: int


INSERTED = Limit(
    24,
    "k of a top_k by insertion; a larger k is by selection",
    "64 rows of 1000, k = 24, us by insertion and by selection: random elements 250 and 554, ascending ones 963 and "
    "793",
)
INSERTED_ROW = Limit(
    64,
    "elements of a row whose top_k is by insertion, whatever k is",
    "a radix sort counts 256 digits for each byte of the key",
)
INSERTED_BLOCK = BlockSize(32, "elements of a row that are compared with the limit at once", "two vectors of f32")
SELECTION_SPARE = BlockSize(
    256,
    "elements that a selection buffer accepts beyond k, at least, before it is sorted and cut",
    "Zen 5, the 40 largest of 8 rows of 8000, us for random and ascending elements: 64 73 and 592, 256 73 and 419, "
    "768 89 and 358",
)


def plan_cpu_top_k(b: RegionBuilder) -> InsertionPlan | SelectionPlan:
    """Choose the CPU algorithm of ``top_k``: insertion for a small k, selection for a larger one."""
    op = b.region_root_op("top_k")
    top, n, size = dim_of(op.attrs, "k"), op.operands[0].type.shape[-1], INSERTED_BLOCK.value
    if INSERTED.holds(top) or INSERTED_ROW.holds(n):
        return InsertionPlan(size, _is_vectorized(b, op, ceildiv(n, size)))
    spare = min(SELECTION_SPARE.value, n // 4) if isinstance(n, int) else SELECTION_SPARE.value
    return SelectionPlan(size, _is_vectorized(b, op, ceildiv(n, size) + 1), spare)


def plan_gpu_top_k(b: RegionBuilder) -> InsertionPlan:
    """Return the GPU plan of ``top_k``: insertion by one thread per row."""
    return InsertionPlan(INSERTED_BLOCK.value, vectorized=False)


def _is_vectorized(b: RegionBuilder, op: Op, blocks: Dim) -> bool:
    """Return True if a CPU can compare the elements of a top-k block as integer vectors."""
    (x,) = op.operands
    n, size = x.type.shape[-1], INSERTED_BLOCK.value
    if not _orders_like_its_bits(x.type.dtype):
        return False
    _, place = rows_along_dim(x.type.shape, x.type.rank - 1)
    first = first_tested_element(n, sym("j", 0, blocks) * size, size)
    e = b.trial_elements()
    e.new_block()
    return isinstance(e.at(x, place(first + sym("l", 0, size))), Load)


def first_tested_element(n: Dim, begin: Dim, size: int) -> Dim:
    """Return the first element that the vectorized test of a block of ``top_k`` compares.

    The test of the last block begins before it, so that all tests have the same size.
    """
    return minimum(begin, n - size) if isinstance(n, int) and n >= size else begin


def _orders_like_its_bits(dtype: str) -> bool:
    """Return True if elements have whole bytes and, signs aside, order like their bits."""
    return dtype not in SMALL_FLOATS and kind_of(dtype) in "iuf" and DTYPES[dtype].bits >= 8
