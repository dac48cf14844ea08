"""Choose the blocks of fused attention on a CPU: rows and terms at a time, and a worker's scratch memory.

The scores of a block of queries and keys stay in cache. A running maximum and sum per row rescale earlier results, so
the whole score matrix never exists (flash attention). *Terms* are keys, *columns* are the elements of a value. A kernel
for a few rows of queries (decoding) has :class:`DecodeBlocks`, one for more rows :class:`ScoreBlocks`.
"""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, ceildiv, product, static
from aotc.ir.loop.forms.tile_forms import TileForm, form_of_operands
from aotc.ir.opset.attention import ABSENT, attention_axis_sizes
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.opset.spec import Attrs, Types
from aotc.ir.tensor.ir import Op, TensorType
from aotc.lowering.plans.attention.gpu_tiles import takes_attention_cuda
from aotc.lowering.plans.cpu_tiles import best_tile
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.resources import memory_limits
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of

ATTENTION_TERMS = BlockSize(
    256,
    "terms (keys), about, between two updates of the running maximum",
    "a block of scores stays in a second-level cache together with its keys and values",
)
DECODED_ROWS = Limit(
    8,
    "rows of queries, at most, whose scores are computed as dot products",
    "one core of a Zen 5, 8 rows of 65536 terms of 64 elements: 0.46 (f32) and 0.55 (bf16) of the time with vectors "
    "of queries",
)


@dataclass(frozen=True, slots=True)
class DecodeBlocks(RegionPlan):
    """Blocks of attention with few rows of queries (decoding) on a CPU.

    Attributes
    ----------
    wide : str
        The dtype of scores and sums.
    rows : int
        The rows of queries of a block.
    terms : int
        The keys of a block.
    whole_axes : tuple of int
        The batch axes that one grid item processes whole: first those whose keys and values are stored within one term,
        the outermost first, then those that share their keys and values.
    heads : int
        The product of the sizes of these axes.
    pairs : bool
        Do both matmuls use instructions for pairs of bf16?
    digits : int
        The bytes of the integers to which queries and weights are quantized if keys and values are multiplied as
        integers; else 0.
    """

    wide: str
    rows: int
    terms: int
    whole_axes: tuple[int, ...] = ()
    heads: int = 1
    pairs: bool = False
    digits: int = 0

    def scratch_bytes(self, depth: int, columns: int) -> int:
        """Return the bytes of scratch memory per worker for decode attention."""
        rounded = size_of("bf16") * self.terms + size_of(self.wide) * columns if self.pairs else 0
        numbers = size_of(self.wide) * (depth + columns + self.terms + 2) + rounded
        numbers += self.digits * (depth + self.terms + size_of("i32") * columns)
        return self.heads * (self.rows * numbers + 2 * size_of(self.wide) * self.terms)


@dataclass(frozen=True, slots=True)
class ScoreBlocks(RegionPlan):
    """Blocks of attention with more rows of queries on a CPU.

    Attributes
    ----------
    wide : str
        The dtype of scores and sums.
    rows, terms : int
        The size of a block of scores: queries and keys.
    tile_terms, tile_rows : int
        The size of a register tile of scores; its vectors are along the rows.
    columns, tile_columns : int
        The columns of the sums, padded to whole tiles, and of one register tile of sums.
    tile_height : int
        The most rows of a register tile of sums.
    pairs : bool
        Do both matmuls use instructions for pairs of bf16? Weights are rounded to bf16 then.
    """

    wide: str
    rows: int
    terms: int
    tile_terms: int
    tile_rows: int
    columns: int
    tile_columns: int
    tile_height: int
    pairs: bool = False

    @property
    def group(self) -> int:
        """Return the number of adjacent terms along k that a register tile multiplies at once."""
        return 2 if self.pairs else 1

    @property
    def dtype(self) -> str:
        """Return the dtype in which register tiles multiply keys and values."""
        return "bf16" if self.pairs else self.wide

    @property
    def form(self) -> TileForm:
        """Return the form of the register tiles."""
        return form_of_operands(self.dtype, self.dtype)

    def scratch_bytes(self, depth: int) -> int:
        """Return the bytes of scratch memory per worker, including copies of a block of keys and values."""
        scores = self.rows * (self.terms + 2 * self.tile_terms)
        copies = (self.terms + 2 * self.tile_terms) * depth + (self.terms + 1) * self.columns + self.rows * depth
        copies += self.rows * (self.terms + 1) if self.pairs else 0
        return size_of(self.wide) * (2 * self.rows * self.columns + scores) + size_of(self.dtype) * copies


FEW_SCORES = Limit(
    127,
    "scores of one head, at most, that are too few for attention as one kernel",
    "Zen 5 (EPYC), two threads: 16 rows and 16 terms take 0.91 of the time of three kernels, 8 rows and 8 terms 1.01",
)


def takes_attention(op: Op, target: Target) -> bool:
    """Return True if ``target`` can compute the attention ``op`` as one kernel, faster than as three kernels."""
    types = tuple(v.type for v in op.operands)
    if target.kind == "cuda":
        return not _are_integer_operands(types) and takes_attention_cuda(types, op.attrs, target)
    if not attention_blocks(types, op.attrs, final_attention_dtype(op), target):
        return False
    _, rows, terms, _, _ = attention_axis_sizes(types, op.attrs)
    return not FEW_SCORES.holds(rows * terms)


def _are_integer_operands(types: Types) -> bool:
    return any(kind_of(t.dtype) == "i" for t in types[1:3])


IDLE_ITEMS = Limit(
    3,
    "grid items of attention, at most, that leave workers idle",
    "a few heads of one row on 4 to 16 cores",
)
TERM_PARTS = BlockSize(
    8,
    "parts, at most, into which the terms of attention are split (split-KV)",
    "8 cores are common",
)
PART_TERMS = BlockSize(
    1024,
    "terms of such a part, at least",
    "20 microseconds of a core for a row of depth 64, several times what combining the parts takes",
)


def split_kv_parts(op: Op, target: Target) -> int:
    """Return the number of parts into which the terms of ``op`` are split (split-KV) to occupy all workers; often 1."""
    types = tuple(v.type for v in op.operands)
    candidates = attention_blocks(types, op.attrs, final_attention_dtype(op), target) if target.kind == "cpu" else ()
    batch, rows, terms, _, _ = attention_axis_sizes(types, op.attrs)
    if not candidates or dims_of(op.attrs, "causal") or isinstance(terms, Expr):
        return 1
    blocks = candidates[-1]
    heads = blocks.heads if isinstance(blocks, DecodeBlocks) else 1
    items = product(batch) // heads * ceildiv(rows, blocks.rows)
    most = TERM_PARTS.value
    if not IDLE_ITEMS.holds(items):
        most = -(-most // items) if heads > 1 and isinstance(items, int) else 1
    return max(min(most, terms * heads // PART_TERMS.value), 1)


def takes_pairs(types: Types, attrs: Attrs, depth: int, result: str, target: Target) -> bool:
    """Return True if both attention matmuls use instructions that multiply pairs of bf16.

    All operands and the result must be bf16, so the weights may be rounded to bf16 as well. A matrix unit does not
    count, as its tiles cannot read weights in the layout that attention produces.
    """
    has = "bf16" in target.units - target.matrices and attrs.get("precision") in (None, "DEFAULT")
    return has and depth % 2 == 0 and {*(t.dtype for t in types[:3]), result} == {"bf16"}


def gains_by_pairs(op: Op, target: Target) -> bool:
    """Return True if the f32 attention ``op`` is faster on ``target`` with operands and result converted to bf16."""
    types = tuple(v.type for v in op.operands)
    if {t.dtype for t in (*types[:3], *(v.type for v in op.results))} != {"f32"} or len(op.results) > 1:
        return False
    _, rows, _, depth, _ = attention_axis_sizes(types, op.attrs)
    if not isinstance(depth, int) or DECODED_ROWS.holds(rows) or target.kind != "cpu":
        return False
    short = tuple(TensorType("bf16", t.shape) for t in types[:3])
    return takes_pairs(short, op.attrs, depth, "bf16", target)


def quantized_bytes_per_element(types: Types, attrs: Attrs, result: str, target: Target) -> int:
    """Return the bytes per element of queries and weights quantized for integer products on x86; 0: not used.

    Three bytes have as many bits as the significand of f32; two have more than that of a 16-bit result.
    """
    quads, (k, v) = "i8" in target.units and target.triple.startswith("x86_64"), types[1:3]
    lie_in_rows = attrs["k_dims"][-1] == k.rank - 1 and attrs["v_dims"][-1] == v.rank - 1
    if not quads or (k.dtype, v.dtype) != ("i8", "i8") or types[0].dtype == "f64" or not lie_in_rows:
        return 0
    if static(k.shape[-1]) % 16 or static(v.shape[-1]) % target.vector_bytes:
        return 0
    short = {size_of(x) for x in (types[0].dtype, result)} == {2} and attrs.get("precision") in (None, "DEFAULT")
    return 2 if short else 3


def final_attention_dtype(op: Op) -> str:
    """Return the dtype to which the result of ``op`` is finally rounded, for split-KV after parts are combined."""
    return op.results[0].type.dtype if len(op.results) == 1 else op.operands[0].type.dtype


ATTENTION_ROWS = BlockSize(
    64,
    "rows of queries, about, in a grid item of attention",
    "keys and values are read from the second-level cache once for all these rows",
)


def attention_blocks(types: Types, attrs: Attrs, result: str, target: Target) -> tuple[ScoreBlocks | DecodeBlocks, ...]:
    """Return the blocks of attention on a CPU; empty if none fit the scratch memory, or depth or columns are symbolic.

    If the number of rows is symbolic, there are two: the first for few rows. ``result`` is the dtype to which the
    result is rounded. Blocks that do not fit are reduced to up to 8 times fewer terms and 4 times fewer rows.
    """
    _, rows, terms, depth, columns = attention_axis_sizes(types, attrs)
    if not isinstance(depth, int) or not isinstance(columns, int) or not depth or not columns or terms == 0:
        return ()
    room = memory_limits(target)["scratch"][1]
    wide = "f64" if types[0].dtype == "f64" else "f32"
    pairs = takes_pairs(types, attrs, depth, result, target)
    few = _decode_block_sizes(types, attrs, (wide, pairs), result, target)
    if DECODED_ROWS.holds(rows):
        return (few,) if few.scratch_bytes(depth, columns) <= room else ()
    if _are_integer_operands(types):
        return ()
    for share in (1, 2, 4, 8):
        some = _equal_part_size(terms, ATTENTION_TERMS.value // share)
        many = _many_query_block_sizes(
            _equal_part_size(rows, ATTENTION_ROWS.value // min(share, 4)), some, depth, columns, (wide, pairs), target
        )
        both = (few.scratch_bytes(depth, columns) if isinstance(rows, Expr) else 0) + many.scratch_bytes(depth)
        if both <= room and 5 * many.rows * size_of(wide) <= target.stack:
            return (few, many) if isinstance(rows, Expr) else (many,)
    return ()


UNKNOWN_ROWS = BlockSize(
    4,
    "rows of the kernel for few rows if only a call knows how many there are",
    "each key is multiplied with this many rows even if there are fewer",
)
ROW_TERMS = BlockSize(
    64,
    "terms of a block of few rows and many heads, at least",
    "sums are rescaled once per block, a sixty-fourth of the additions to them",
)
ROW_SUMS = BlockSize(
    65536,
    "bytes of the queries, or of the sums, of all heads, at most, that an item of few rows processes together",
    "they are read again for each term, at worst from a second-level cache",
)
BYTE_BLOCK = BlockSize(
    32,
    "terms of which a block has a multiple where 8-bit integers are multiplied as integers",
    "the values of at most this many terms form a tile; terms that do not fill one are multiplied one by one",
)
DIGIT_TERMS = BlockSize(
    1024,
    "terms of a block times its heads, about, where 8-bit integers are multiplied as integers",
    "the sums of a block are converted once, and its scales are copied",
)
LEAST_DIGIT_TERMS = BlockSize(128, "terms of such a block, at least", "see DIGIT_TERMS")


def _decode_block_sizes(
    types: Types, attrs: Attrs, kind: tuple[str, bool], result: str, target: Target
) -> DecodeBlocks:
    """Return the block sizes of attention with few query rows (decoding).

    A grid item processes several heads together (``whole_axes``), unless the number of rows is symbolic.
    """
    (batch, rows, terms, depth, columns), (wide, pairs) = attention_axis_sizes(types, attrs), kind
    most = rows if isinstance(rows, int) else UNKNOWN_ROWS.value
    whole_axes = _batch_axes_of_item(types, attrs) if isinstance(rows, int) else []
    length = max(static(depth), static(columns)) * size_of(wide) * max(most, 1)
    while whole_axes and static(product(batch[a] for a in whole_axes)) * length > ROW_SUMS.value:
        del whole_axes[0]
    heads = static(product(batch[a] for a in whole_axes))
    some = _equal_part_size(terms, max(ATTENTION_TERMS.value // heads, ROW_TERMS.value))
    queries = max(most, 1) * static(product(batch[a] for a in whole_axes if attrs["k_dims"][a] == ABSENT))
    digits = quantized_bytes_per_element(types, attrs, result, target) if queries > 1 else 0
    side_by_side = static(product(batch[a] for a in whole_axes if attrs["k_dims"][a] != ABSENT))
    digits = digits if digits == 2 or side_by_side == 1 else 0
    if digits:
        some = _equal_part_size(terms, max(DIGIT_TERMS.value // heads, LEAST_DIGIT_TERMS.value))
        some = -(-some // BYTE_BLOCK.value) * BYTE_BLOCK.value
    return DecodeBlocks(wide, max(most, 1), some, tuple(whole_axes), heads, pairs and queries > 1, digits)


KEY_QUERIES = Limit(
    8,
    "queries of one grid item, at most, that share a key",
    "8 vectors of sums and 2 vectors of keys fit into registers",
)


def _batch_axes_of_item(types: Types, attrs: Attrs) -> list[int]:
    """Return the batch axes that an item of few rows processes whole, see :attr:`DecodeBlocks.whole_axes`."""
    (batch, rows, *_), (k, v) = attention_axis_sizes(types, attrs), (attrs["k_dims"], attrs["v_dims"])
    static_axes = [a for a, n in enumerate(batch) if isinstance(n, int) and n]
    inside = sorted((a for a in static_axes if k[a] > k[-2] and v[a] > v[-2]), key=lambda a: k[a])
    shared, queries = [], static(rows)
    for a in static_axes:
        if k[a] == v[a] == ABSENT and KEY_QUERIES.holds(queries * static(batch[a])):
            shared.append(a)
            queries *= static(batch[a])
    return [*inside, *shared]


def _many_query_block_sizes(
    rows: int, terms: int, depth: int, columns: int, kind: tuple[str, bool], target: Target
) -> ScoreBlocks:
    """Return the block sizes of attention with many query rows, from the best register tiles of both matmuls."""
    wide, pairs = kind
    dtype, lanes = "bf16" if pairs else wide, target.vector_bytes // size_of(wide)
    block = -(-rows // lanes) * lanes
    form = form_of_operands(dtype, dtype)
    tile_terms, tile_rows = best_tile(terms, block, depth, form, target)
    block = -(-block // tile_rows) * tile_rows
    height, width = best_tile(block, columns, terms, form, target)
    return ScoreBlocks(wide, block, terms, tile_terms, tile_rows, -(-columns // width) * width, width, height, pairs)


def _equal_part_size(extent: Dim, most: int) -> int:
    """Return the size of about equal parts of ``extent``, at most ``most``; ``most`` if the extent is symbolic."""
    if not isinstance(extent, int):
        return most
    return -(-extent // max(-(-extent // most), 1)) or 1
