"""Which tiles attention gets on the tensor cores of a GPU, and which it is not taken for."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from aotc.ir.dims import Dim, bounds, product
from aotc.ir.loop_products import is_multiple
from aotc.ir.opset.attention import ABSENT, axes, operand_dims
from aotc.ir.opset.spec import Attrs, Types
from aotc.ir.products.attention import LoopAttention, attention_shared
from aotc.ir.products.tiling import Tiling
from aotc.lowering.analysis.costs.row import Estimate, Limit
from aotc.lowering.analysis.costs.work import UNKNOWN_TERMS
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

# fmt: off
ATTENTION_DEPTH = Limit(
    "attention_depth", 256, "elements of a key, or of a value; of f32 half as many",
    "the registers of a warpgroup: sums of 256 elements take 128 of each thread's 240",
)
CERTAIN_FILL = Estimate(
    "certain_fill", 30, "powers of ten: a score of minus so much has no weight beside any other",
    "chosen: scores of such products, which would have to be as low, are not far from the end of f32",
)
ATTENTION_SPREAD = Estimate("attention_spread", 132, "tiles of attention at a time", "the multiprocessors of an H200")
SHORT_CAUSAL = Limit(
    "short_causal", 2047, "terms of causal attention that tiles of 192 rows are not for",
    "measured on an H200 with 64 elements: 1024 terms take 79 us with 192 rows, 68 with 128, 4096 take 643 and 697",
)
FEW_QUERIES = Limit(
    "few_queries", 16, "queries of a head, or of heads that share keys, that a warp does alone",
    "a warp's tensor core takes 16 rows at a time, a warpgroup 64",
)
PART_OF_TERMS = Estimate(
    "part_of_terms", 64, "terms of a part, at least, if few queries are spread over parts",
    "measured on an H200 with 12 heads of 1024 x 64 in f32: parts of 64 take 12.1 us, of 128 15.8, of 256 23.6",
)
PART_START = Estimate(
    "part_start", 64, "terms in the time that a part of them takes besides",
    "chosen: parts of 32 terms and of 64 take the same time on an H200",
)
PARTS_TOGETHER = Estimate(
    "parts_together", 128, "terms in the time that it takes to put parts together",
    "chosen: two kernels more; a warp does 16 terms of 64 elements in a microsecond on an H200",
)
STAGE_OF_FEW = Limit(
    "stage_of_few", 16384, "bytes of keys and values that a warp alone has at a time in each stage",
    "measured on an H200: with four warps on a multiprocessor 2.7 TB/s are read, with two of 32 KB 1.7 to 2.4",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class AttentionRate:
    """A row of the table of tiles.

    Attributes
    ----------
    tiling : Tiling
    depth : int
        The most elements of a key or of a value.
    rate : float
        How many rows it does, in the time that the second does one.
    plain : bool
        Is it only for scores that are products with a number, and long rows of them? Others take registers.
    size : int
        The bytes of an element: 4 of f32, which is rounded to TF32.
    """

    tiling: Tiling
    depth: int
    rate: float
    plain: bool = False
    size: int = 2


ATTENTION_RATES = (
    AttentionRate(Tiling("attention_wgmma", 192, 128, 2), 64, 1.2, plain=True),
    AttentionRate(Tiling("attention_wgmma", 128, 128, 2), 128, 1.0),
    AttentionRate(Tiling("attention_wgmma", 64, 128, 2), 128, 0.74),
    AttentionRate(Tiling("attention_wgmma", 128, 64, 2), 256, 0.86),
    AttentionRate(Tiling("attention_mma", 128, 64, 2), 128, 0.36),
    AttentionRate(Tiling("attention_mma", 64, 64, 2), 128, 0.4),
    AttentionRate(Tiling("attention_mma", 32, 64, 2), 256, 0.34),
    AttentionRate(Tiling("attention_mma", 128, 64, 2), 64, 0.2, size=4),
    AttentionRate(Tiling("attention_mma", 64, 32, 2), 64, 0.174, size=4),
    AttentionRate(Tiling("attention_mma", 32, 64, 2), 64, 0.125, size=4),
    AttentionRate(Tiling("attention_mma", 128, 32, 2), 128, 0.2, size=4),
    AttentionRate(Tiling("attention_mma", 32, 32, 2), 128, 0.132, size=4),
)
"""unit: see AttentionRate
why: attention's tiles are those that take the least time by it
from: measured on an H200: 128 heads of 4096 x 4096 x 64 in bf16 take 1118 us with 192 rows, 1265 with 128; 96 of 1024 x
1024 x 64 take 71 with 128 rows, 96 with 64, 83 with 64 terms at a time, by single warps 113, 102 and 118: these are
rated lower, since a tile that is alone takes as long with few rows. f32: 243, 278 and 387; of 128 elements 441 and 669
"""


@dataclass(frozen=True, slots=True)
class AttentionSizes:
    """The axes of attention as a template takes them.

    Attributes
    ----------
    batch : tuple of Dim
    rows, terms : Dim
    depth, width : int
    offset : Dim, optional
        A row has terms up to its own number and so many more; None if all, or if those behind may have weight.
    plain : bool
        Are scores products with a number, where they have weight?
    grouped : int
        The axis of the batch that rows are of, where there is one query of each head: heads that share keys.
    size : int
        The bytes of an element of an operand.
    """

    batch: tuple[Dim, ...]
    rows: Dim
    terms: Dim
    depth: int
    width: int
    offset: Dim | None = None
    plain: bool = True
    grouped: int = ABSENT
    size: int = 2

    def shared(self, tiling: Tiling) -> int:
        """Return the bytes of shared memory of a block."""
        return attention_shared(tiling, self.depth, self.width, self.size)

    def places(self, dims: tuple[int, ...], rows: bool = True) -> tuple[int, ...]:
        """Return the dims of an operand in the order batch, row, last; of one without ``rows``, batch, term, last."""
        if self.grouped == ABSENT:
            return dims
        *batch, line, last = dims
        row = batch.pop(self.grouped)
        return (*batch, row if rows else line, last)


def sizes_of(types: Types, attrs: Attrs) -> AttentionSizes | None:
    """Return the axes, or None if templates do not take such operands."""
    batch, rows, terms, depth, width = axes(types, attrs)
    if not isinstance(depth, int) or not isinstance(width, int) or terms == 0:
        return None
    dtypes = {t.dtype for t in types[:3]}
    if dtypes not in ({"bf16"}, {"f16"}, {"f32"}) or attrs.get("precision", "DEFAULT") != "DEFAULT":
        return None
    size = size_of(types[0].dtype)
    pieces = all(n % 8 == 0 and ATTENTION_DEPTH.holds(n * size // 2) and n for n in (depth, width))
    lying = all(dims[-1] == t.rank - 1 for t, dims in zip(types[:3], operand_dims(attrs)))
    if not pieces or not lying or len(batch) > 3 or any(not isinstance(d, int) for d in batch[1:]):
        return None
    offset = _offset(attrs)
    plain = len(types) == 3 and attrs["scale"] > 0 and (offset is not None or not attrs["causal"])
    found = AttentionSizes(batch, rows, terms, depth, width, offset, plain, size=size)
    shared = [n for n in range(len(batch)) if attrs["k_dims"][n] == attrs["v_dims"][n] == ABSENT]
    if rows != 1 or not shared:
        return found
    rest = tuple(size for n, size in enumerate(batch) if n != shared[-1])
    return replace(found, batch=rest, rows=batch[shared[-1]], grouped=shared[-1])


def _offset(attrs: Attrs) -> Dim | None:
    """Return up to which term a row goes, if no term behind it can have weight."""
    if not attrs["causal"]:
        return None
    (offset,) = attrs["causal"]
    low = bounds(offset)[0]
    certain = attrs["fill"] <= -(10.0**CERTAIN_FILL.value) and low is not None and low >= 0 and not attrs["mask_dims"]
    return offset if attrs["fill"] == -math.inf or certain else None


def attention_tiling(sizes: AttentionSizes, target: Target) -> Tiling | None:
    """Return the tiling of the least time that ``target`` has, or None if none fits its memory."""
    if FEW_QUERIES.holds(sizes.rows):
        return _of_few(sizes, target)
    fitting = list(_fitting(sizes, target))
    return min(fitting, key=lambda row: _time(sizes, row)).tiling if fitting else None


def _of_few(sizes: AttentionSizes, target: Target) -> Tiling | None:
    """Return the tiling of one warp: more terms at a time the fewer bytes they are, and as many stages as fit."""
    line = (sizes.depth + sizes.width) * sizes.size
    terms = next((n for n in (64, 32) if STAGE_OF_FEW.holds(n * line)), 16)
    tilings = (Tiling("attention_mma", 16, terms, stages) for stages in (3, 2))
    room = target.shared_memory
    return next((t for t in tilings if sizes.shared(t) <= room), None)


def terms_of_parts(sizes: AttentionSizes, target: Target) -> int:
    """Return how many terms a part has, if few queries are spread over parts of them; else 0.

    Parts are whole stages. They take turns at the GPU: one block more than it holds doubles the time.
    """
    tiling = attention_tiling(sizes, target)
    heads = product(sizes.batch)
    if not FEW_QUERIES.holds(sizes.rows) or tiling is None:
        return 0
    if not isinstance(heads, int) or not isinstance(sizes.terms, int) or not heads:
        return 0
    held = target.multiprocessor
    at_once = held.shared // (sizes.shared(tiling) + held.reserved)
    room, terms = ATTENTION_SPREAD.value * at_once, sizes.terms

    def time_of(part: int) -> int:
        return -(-heads * -(-terms // part) // room) * (part + PART_START.value)

    most = min(terms // PART_OF_TERMS.value, -(-2 * room // heads))
    found = {-(-terms // (parts * tiling.cols)) * tiling.cols for parts in range(2, most + 1)}
    best = min(sorted(found, reverse=True), key=time_of, default=terms)
    return best if time_of(best) + PARTS_TOGETHER.value < time_of(terms) else 0


def _fitting(sizes: AttentionSizes, target: Target) -> Iterator[AttentionRate]:
    for row in ATTENTION_RATES:
        takes = target.cpu == "sm_90a" if row.tiling.template == "attention_wgmma" else True
        small = max(sizes.depth, sizes.width) <= row.depth and sizes.size == row.size
        there = sizes.shared(row.tiling) <= target.shared_memory
        wide = sizes.plain and (sizes.offset is None or not SHORT_CAUSAL.holds(sizes.terms))
        if takes and small and there and (wide or not row.plain):
            yield row


def _time(sizes: AttentionSizes, row: AttentionRate) -> float:
    rows, heads = (n if isinstance(n, int) else UNKNOWN_TERMS.value for n in (sizes.rows, product(sizes.batch)))
    tiles = heads * -(-rows // row.tiling.rows)
    return -(-tiles // ATTENTION_SPREAD.value) * row.tiling.rows / row.rate


def takes_attention_cuda(types: Types, attrs: Attrs, target: Target) -> bool:
    """Is there a template on ``target`` for attention of such operands?"""
    sizes = sizes_of(types, attrs)
    return sizes is not None and attention_tiling(sizes, target) is not None


def lies_in_lines(found: LoopAttention, tiling: Tiling) -> bool:
    """Do the operands of a kernel lie in memory as the template of ``tiling`` copies them?"""
    views = found.views()
    if tiling.template == "attention_mma":
        return all(view is not None and view.in_lines for view in views[1:])
    for view in views:
        if view is None or not view.in_lines or (lying := view.coordinates(*found.batch)) is None:
            return False
        if not all(is_multiple(x, 8) for x in (lying[0], *(stride for _, stride, _ in lying[1]))):
            return False
    return True
