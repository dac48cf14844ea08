"""Plans of fused attention on a CPU: how a block's keys and values are multiplied, copied and prefetched."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, product, static, sym
from aotc.ir.loop.forms.matmul import View, matrix_view_of_load
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, TileForm, find_form
from aotc.ir.loop.ir import Load
from aotc.ir.opset.attention import ABSENT, attention_axis_sizes
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.analysis.attention_int_cache import INTEGERS
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.plans.attention.cpu_blocks import DecodeBlocks, ScoreBlocks, attention_blocks, final_attention_dtype
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class DecodeAttentionPlan(RegionPlan):
    """Plan of attention with few query rows: keys and values are read once, in memory order.

    Attributes
    ----------
    blocks : DecodeBlocks
    key_form : TileForm or None
        The form of the tile for dot products of queries and keys; None if scores are summed in vectors of terms.
    key_terms : int
        The number of keys in such a tile.
    value_terms, value_columns : int
        The terms per step of the weighted sum of values, and the columns of its tile for pairs of bf16; 0: no tile.
    keys_ahead, values_ahead : int
        Prefetch distances, in terms: how far ahead of the current key or value.
    """

    blocks: DecodeBlocks
    key_form: TileForm | None
    key_terms: int
    value_terms: int
    value_columns: int
    keys_ahead: int
    values_ahead: int


@dataclass(frozen=True, slots=True)
class IntegerAttentionPlan(DecodeAttentionPlan):
    """Plan of attention with few query rows whose keys and values are multiplied as integers.

    Attributes
    ----------
    digit_terms : int
        The terms of a tile of integer weights and values; 0 for no tile, if values are not in memory.
    """

    digit_terms: int


@dataclass(frozen=True, slots=True)
class BlockedAttentionPlan(RegionPlan):
    """Plan of attention with more query rows: the scores of a block of queries and keys stay in cache.

    Attributes
    ----------
    blocks : ScoreBlocks
    is_single : bool
        Are all terms in one block, so that nothing is rescaled?
    copies_keys, copies_values : bool
        Are the keys, or the values, of a block copied before they are multiplied?
    """

    blocks: ScoreBlocks
    is_single: bool
    copies_keys: bool
    copies_values: bool


@dataclass(frozen=True, slots=True)
class AttentionByRowsPlan(RegionPlan):
    """Plan of attention whose number of query rows is not known at compile time.

    The kernel has a variant for few rows and one for many, and chooses in each call.
    """

    few: DecodeAttentionPlan
    many: BlockedAttentionPlan


CpuAttentionPlan = DecodeAttentionPlan | BlockedAttentionPlan | AttentionByRowsPlan


def plan_cpu_attention(b: RegionBuilder) -> CpuAttentionPlan:
    """Choose the algorithm, block sizes and split-KV parts of an attention region on a CPU.

    Raises
    ------
    CompileError
        If no blocks fit the scratch memory.
    """
    op = b.region_root_op("attention")
    match attention_blocks(tuple(v.type for v in op.operands), op.attrs, final_attention_dtype(op), b.target):
        case (DecodeBlocks() as few,):
            return _plan_decode_attention(b, op, few)
        case (ScoreBlocks() as many,):
            return _plan_attention_of_many_queries(b, op, many)
        case (DecodeBlocks() as few, ScoreBlocks() as many):
            return AttentionByRowsPlan(_plan_decode_attention(b, op, few), _plan_attention_of_many_queries(b, op, many))
    raise b.unsupported_error(op, "attention of these sizes", "fuse_attention creates it only where it is supported")


def attention_operand_index(value: Value, dims: Sequence[int], at: Sequence[Dim]) -> Index:
    """Return the index of an operand's element; ``at`` has the batch axes and the last two, ``dims`` their dims."""
    index: list[Dim] = [0] * value.type.rank
    for d, i in zip(dims, at, strict=True):
        if d != ABSENT:
            index[d] = i
    return tuple(index)


def attention_operand_layout(e: Elements, op: Op, number: int, at: Index) -> View | None:
    """Return the layout of a head's keys (operand 1) or values (2) as (term, column); None if not in memory."""
    value, dims = op.operands[number], op.attrs[("", "k_dims", "v_dims")[number]]
    _, _, terms, *sizes = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)
    t, c = e.names("t"), e.names("c")
    trial = e.new_block()
    x = e.at(value, attention_operand_index(value, dims, (*at, sym(t, 0, terms), sym(c, 0, sizes[number - 1]))))
    return matrix_view_of_load(x, t, c, set(), set()) if isinstance(x, Load) and not trial else None


def _trial_views(b: RegionBuilder, op: Op, whole_axes: Sequence[int] = ()) -> list[View | None]:
    """Return the layouts of keys and values in memory (None if not stored) for the first head along ``whole_axes``."""
    batch, e = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)[0], b.trial_elements()
    at = tuple(0 if a in whole_axes or n == 1 else sym(e.names("n"), 0, n) for a, n in enumerate(batch))
    e.precompute_slice_starts(op.operands)
    return [attention_operand_layout(e, op, number, at) for number in (1, 2)]


# --- more rows ---

WIDENED = ("bf16", "f16")  # dtypes of values that f32 tiles read without a copy


def _plan_attention_of_many_queries(b: RegionBuilder, op: Op, blocks: ScoreBlocks) -> BlockedAttentionPlan:
    """Return the plan of attention by blocks; keys and values are copied where tiles cannot read them in place."""
    _, _, terms, _, columns = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)
    single = isinstance(terms, int) and terms <= blocks.terms and op.attrs.get("split", 1) == 1
    keys, values = _trial_views(b, op)
    copies_keys = keys is None or not _tiles_read_keys_in_place(blocks, keys)
    copies_values = values is None or not _tiles_read_values_in_place(b.target, blocks, values, static(columns))
    return BlockedAttentionPlan(blocks, single, copies_keys, copies_values)


def _tiles_read_keys_in_place(blocks: ScoreBlocks, view: View) -> bool:
    """Return True if tiles read keys without a copy. Pairs of a key's depths are adjacent in memory."""
    return view.buffer.dtype == blocks.dtype and (view.depth == 1 or not blocks.pairs)


def _tiles_read_values_in_place(target: Target, blocks: ScoreBlocks, view: View, columns: int) -> bool:
    """Return True if tiles read values without a copy. Pairs of terms are never adjacent in memory."""
    dtype, in_rows = view.buffer.dtype, view.depth == 1 and columns % blocks.tile_columns == 0
    short = dtype in WIDENED and not (dtype == "f16" and "f16" in target.lacks) and blocks.wide == "f32"
    return in_rows and not blocks.pairs and (dtype == blocks.wide or short)


# --- few rows ---

FETCHED_KEYS = BlockSize(
    16384,
    "prefetch distance in bytes of keys or values",
    "Zen 5, one core, 16 heads of 128 bf16 keys in memory order, throughput relative to a plain read: distance 0 "
    "0.75, 4096 0.8, 8192 0.88, 16384 0.93 to 1.08",
)
DOT_TERMS = BlockSize(
    4,
    "terms per tile of dot products with the queries, at most",
    "Zen 5, one core, throughput relative to a plain read: 4 bf16 queries with 1 term 0.54, 2 terms 0.74, 4 terms "
    "0.75; one i8 query with 1 term 0.62, 4 terms 0.7. One bf16 query with 1 term 1.03, 4 terms 0.87, and f32 of "
    "several heads with 1 term 0.72, 4 terms 0.56: these use one term, in memory order",
)
TURNED_WORDS = BlockSize(
    4,
    "divisor of the number of 32-bit words of a key whose words are transposed in registers",
    "4 words are the part of a register within which its shuffles stay",
)
TURNED_QUERIES = BlockSize(
    4,
    "queries per vector of a key, at least, for its words to be transposed in registers",
    "Zen 5, one core, bf16, time relative to keys in memory order: 8 queries of 64 elements 0.84 (keys from memory "
    "0.97 to 1.06), 4 queries of 64 up to 1.2",
)
PAIR_TERMS = BlockSize(
    8,
    "terms per step of the weighted sum of values by instructions for bf16 pairs",
    "Zen 5, one core, 4 queries of 8 heads of 128, throughput relative to a plain read: 4 terms 0.57, 8 terms 0.75, "
    "32 terms 0.52; in f32 0.68",
)
VALUE_TERMS = BlockSize(
    4,
    "terms per step of the weighted sum of values that are integers or that several queries share",
    "Zen 5, one core, bf16 values of 128 in the L2 cache, GB/s with 1, 2, 4, 8 terms: 4 queries 24, 38, 51, 56; 1 "
    "query 93, 136, 135, 129. From memory 1 term is fastest, because it reads in order",
)
BYTE_TERMS = BlockSize(
    8,
    "terms per tile of integer weights and values, where several heads are adjacent in memory",
    "Zen 5, one core, a prototype, 16 adjacent heads of 128, throughput relative to a plain read: 8 terms 0.89, 16 "
    "terms 0.66, 32 terms 0.52",
)
BYTE_VALUES = BlockSize(
    256,
    "columns per tile of integer weights and values of one head, in units of BYTE_TERMS terms",
    "Zen 5, one core, 8 queries that share a key of 64 elements, time relative to f32: 32 terms 0.65, 8 terms 0.92",
)


def _plan_decode_attention(b: RegionBuilder, op: Op, blocks: DecodeBlocks) -> DecodeAttentionPlan:
    """Return the plan of attention with few queries: tile sizes and prefetch distances for its keys and values."""
    batch, _, _, depth, columns = attention_axis_sizes(tuple(v.type for v in op.operands), op.attrs)
    k_dims = op.attrs["k_dims"]
    heads = static(product(batch[a] for a in blocks.whole_axes if k_dims[a] != ABSENT))
    several = any(k_dims[a] != ABSENT for a in blocks.whole_axes)
    queries = blocks.rows * static(product(batch[a] for a in blocks.whole_axes if k_dims[a] == ABSENT))
    keys, values = _trial_views(b, op, blocks.whole_axes)
    form = _key_form(b.target, blocks, keys.buffer.dtype) if keys is not None and keys.depth == 1 else None
    plain = [_is_bound_by_reading_keys(v, queries, several) for v in op.operands[1:3]]
    lengths = (heads * static(n) * size_of(v.type.dtype) for v, n in zip(op.operands[1:3], (depth, columns)))
    keys_ahead, values_ahead = (-(-FETCHED_KEYS.value // n) for n in lengths)
    in_rows = values is not None and values.depth == 1
    width = _pair_columns(b.target, blocks, static(columns), queries) if in_rows else 0
    value_terms = PAIR_TERMS.value if width else 1 if plain[1] else VALUE_TERMS.value
    digit_terms = BYTE_TERMS.value if values is not None else 0
    if heads == 1:  # adjacent heads are read in order, in small tiles
        digit_terms *= max(BYTE_VALUES.value // static(columns), 1)
    key_terms = _key_terms(b.target, blocks, form, static(depth), queries, plain[0])
    sizes = form, key_terms, value_terms, width, keys_ahead, values_ahead
    return IntegerAttentionPlan(blocks, *sizes, digit_terms) if blocks.digits else DecodeAttentionPlan(blocks, *sizes)


def _is_bound_by_reading_keys(operand: Value, queries: int, side_by_side: bool) -> bool:
    """Return True if reading the keys (or values) takes most of the matmul's time, so that memory order matters."""
    dtype = operand.type.dtype
    return dtype not in INTEGERS and (queries == 1 or (side_by_side and size_of(dtype) >= 4))


def _key_form(target: Target, blocks: DecodeBlocks, dtype: str) -> TileForm | None:
    """Return the form of the tile that multiplies queries with keys of a dtype, or None if there is none."""
    if dtype in target.lacks:
        return None
    return find_form("bf16" if blocks.pairs else blocks.wide, dtype)


def _key_terms(
    target: Target, blocks: DecodeBlocks, form: TileForm | None, depth: int, queries: int, plain: bool
) -> int:
    """Return the keys of a tile of dot products.

    If words of keys are transposed in registers, each vector lane has one key. It saves the horizontal sums of dot
    products.
    """
    words = depth // form.group if form else 0
    whole = form == BF16_PAIRS and target.triple.startswith("x86_64") and words % TURNED_WORDS.value == 0
    vectors = -(-words * size_of(blocks.wide) // target.vector_bytes)
    if whole and queries >= TURNED_QUERIES.value * vectors:
        return target.vector_bytes // size_of(blocks.wide)
    return 1 if plain else min(DOT_TERMS.value, max(target.registers // 2 // queries, 1))


def _pair_columns(target: Target, blocks: DecodeBlocks, columns: int, queries: int) -> int:
    """Return the columns of a tile of bf16 pairs: an even number of vectors that fits the registers; 0 for no tile."""
    lanes = target.vector_bytes // size_of(blocks.wide)
    most = max(target.registers // 4 // queries, 1) if blocks.pairs else 0
    return max((2 * lanes * n for n in range(1, most + 1) if columns % (2 * lanes * n) == 0), default=0)
