"""How a product is computed: its decisions by size, which passes and regions ask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from aotc.ir.dims.algebra import Dim, is_static, product
from aotc.ir.loop.forms.tile_forms import FORMS
from aotc.ir.tensor.ir import Op
from aotc.lowering.threshold import BlockSize, Limit, rows_in
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of

# fmt: off
STREAM_ROWS = Limit(
    "stream_rows", 4, "rows of a product whose right operand passes by once",
    "chosen, not measured: all sums of a wide tile fit into registers; memory bandwidth bounds the product",
)
THIN_ROWS = Limit(
    "thin_rows", 8, "rows of a product with a large matrix that is read once, by rows, and no constant",
    "8 rows x 4096 x 4096 on one core of a Zen 5: packed first 22.8 ms, tiles in place 6.0, by rows 3.9",
)
MANY_THIN_ROWS = Limit(
    "many_thin_rows", 31, "rows of a product with so few columns that is computed as it is",
    "chosen, not measured: four times as many rows as columns, at least",
)
HALF_PANEL_COLUMNS = Limit(
    "half_panel_columns", 7, "columns of a product of many rows, or a constant, that its transpose times rows computes",
    "a busy Zen 5, f32, 16384 terms, us of a constant: 8 x 4 packed 75, so 18; 24 x 6 504, 107; 7 x 8 40, 52",
)
PADDED_PANEL_BYTES = Limit(
    "padded_panel_bytes", 1 << 16, "bytes of the panels of a constant that are padding for half or more",
    "as half_panel_columns, 8 x 8: 64 KiB packed 6.8, as sums 7.1; 1 MiB 45, 34; larger ones are not folded either",
)
SHORT_THIN_TERMS = Limit(
    "short_thin_terms", 127, "terms of such a product that is computed as it is, if its rows are contiguous",
    "chosen, not measured: what is left of a vector's sums is added lane by lane in the end",
)
WIDE_STREAM_ROWS = Limit(
    "wide_stream_rows", 2, "rows of a streaming product with the widest tile",
    "chosen, not measured: 2 rows of 8 vectors fill as many of 32 registers as 4 rows of 4",
)
STREAM_VECTORS = BlockSize(
    "stream_vectors", 8, "vectors in a row of the tile of a product of up to wide_stream_rows rows",
    "chosen, not measured: see wide_stream_rows; in proportion where there are fewer than 32 registers",
)
NARROW_STREAM_VECTORS = BlockSize(
    "narrow_stream_vectors", 4, "vectors in a row of the tile of a streaming product of more rows",
    "chosen, not measured: see wide_stream_rows",
)
TINY_FLOPS = Limit(
    "tiny_flops", 1 << 13, "floating-point operations of a product done in plain loops",
    "chosen, not measured: packing, a tile and its epilogue's buffer do not pay off before",
)
PACKED_PERCENT = Limit(
    "packed_percent", 25, "percent of a limit on memory that a packed copy of an operand takes",
    "chosen, not measured: what is read in place costs time, a limit that is missed the whole model",
)
IN_PLACE_ELEMENTS = Limit(
    "in_place_elements", 1 << 16, "elements of a right operand, no constant, that is read where it lies",
    "chosen, not measured: 256 KiB of f32 stay in a second-level cache, where rows are as good as panels",
)
SMALL_ROWS = Limit(
    "small_rows", 8, "rows of a product that one tile of three vectors a row has",
    "chosen, not measured: 24 sums and 3 loads fit into 32 registers",
)
TILE_ROWS = BlockSize(
    "tile_rows", 14, "rows of a tile of two vectors or more, at most",
    "chosen, not measured: 28 sums, 2 loads and a broadcast of 32 registers; spilling halves the rate (decision 14)",
)
FEW_TILE_ROWS = Limit(
    "few_tile_rows", 12, "rows of a product that are one tile although they share cache sets",
    "12 ways (Ice Lake, Zen 5); several tiles read the right operand several times; 14 x 4096 x 4096 as two 0.62",
)
SET_PERIOD = BlockSize(
    "set_period", 4096, "bytes after which first-level cache sets repeat",
    "64 sets of 64 bytes; rows of half as many bytes are 7 in each set, as of set_rows",
)
SET_ROWS = BlockSize(
    "set_rows", 7, "rows of a tile of two vectors or more that share cache sets",
    "8 ways, one for b; f32, a Zen 5 (12 ways), % of FMAs alone: 1024^3 of 14 89, 12 93, 7 95; 2048^3 of 12 92, 7 95",
)
AARCH64_TILE_ROWS = BlockSize(
    "aarch64_tile_rows", 11, "rows of a tile of two vectors or more on AArch64, at most",
    "LLVM's code: no sum leaves the registers in the inner loop, of 14 rows a quarter does; not measured",
)
SQUARE_SUMS = BlockSize(
    "square_sums", 24, "registers of sums of a tile of two rows by two columns on AArch64, at most",
    "LLVM's code: no sum leaves the registers in the inner loop; not measured",
)
SVE_SUMS = BlockSize(
    "sve_sums", 24, "registers of sums of a tile of two vectors or more of SVE, at most",
    "LLVM's code: no sum leaves the registers in the inner loop, of 27 one does; not measured",
)
SVE_SQUARE_SUMS = BlockSize(
    "sve_square_sums", 20, "registers of sums of a tile of two rows by two columns of SVE, at most",
    "LLVM's code: no sum leaves the registers in the inner loop, of 24 one does; not measured",
)
COLUMN_TILE_ROWS = BlockSize(
    "column_tile_rows", 24, "rows of a tile of one vector, at most",
    "chosen, not measured: more sums do not hide more latency, and code grows",
)
GROUPED_TILE_ROWS = BlockSize(
    "grouped_tile_rows", 12, "rows of a tile that takes several terms a step, with 32 registers",
    "chosen, not measured: converted operands take registers beside the sums",
)
GROUPED_TILE_ROWS_16 = BlockSize(
    "grouped_tile_rows_16", 4, "rows of a tile that takes several terms a step, with 16 registers",
    "chosen, not measured: converted operands take registers beside the sums",
)
SIGNED_ROWS = Limit(
    "signed_rows", 127, "rows of a product of bytes with a sign and an argument, whose tiles take away what 128 adds",
    "by VNNI of 1024 x 1024 on a core of a Zen 5, of tiles' time: 16 rows 1.15, 64 1.02; 192 of 768 x 3072 0.96",
)
SIGNED_TERMS = Limit(
    "signed_terms", 128, "terms of a product of bytes with a sign, whose tiles take away what 128 adds",
    "as signed_rows, constants: 512 x 512 of 64 terms 1.07, 128 1.01; 3136 x 256 of 128 1.04; 64 x 256 of 256 0.96",
)
SIGNED_FLOPS = Limit(
    "signed_flops", 1 << 21, "operations of a product of bytes with a sign, whose tiles take away what 128 adds",
    "as signed_rows, constants: 1 x 512 x 512 1.06, 1 x 1024 x 1024 1.02, 8 x 512 x 512 0.91, 4 x 768 x 768 0.87",
)
ITEM_FLOPS = BlockSize(
    "item_flops", 3 << 20, "floating-point operations of a grid item of a large product, at least",
    "chosen, not measured: 30 microseconds of a core of 100 GFLOP/s",
)
MATRIX_ITEM_FLOPS = BlockSize(
    "matrix_item_flops", 144 << 20, "operations of a grid item of a large product on a matrix unit, at least",
    "an Intel Xeon with AMX at 3 TFLOP/s, 50 microseconds: with a quarter 1024^3 took 1.3 times as long, i8 1.4 times",
)
COPIED_PANELS = Limit(
    "copied_panels", 7, "panels that a grid item reads rows with on a matrix unit, for which these are not copied",
    "bf16 on a Xeon with AMX, rows that begin within a line: 1024^3 0.60 of the time, 512^3 0.69; aligned 1 to 1.1",
)
COPIED_ROWS = Limit(
    "copied_rows", 16, "rows of a tile of a matrix unit that are not copied",
    "chosen, not measured: one register's rows, of products that wait for the right operand",
)
LARGE_ITEMS = BlockSize(
    "large_items", 32, "times item_flops that a grid item has at most",
    "f32 on a core of a busy Zen 5, of the rate of 8: 2048^3 by 16 1.07, 32 1.14; 1024^3 1.03, 1.03; AVX2 1 to 1.02",
)
MIN_ITEMS = BlockSize(
    "min_items", 8, "grid items of a product, at least",
    "chosen, not measured: 8 cores are common",
)
MANY_ITEMS = BlockSize(
    "many_items", 48, "grid items of a product, beyond which they grow",
    "chosen, not measured: some for each of 16 cores",
)
WHOLE_FLOPS = Limit(
    "whole_flops", 1 << 19, "floating-point operations of a product done as one grid item",
    "chosen, not measured: 5 microseconds of a core of 100 GFLOP/s, one claim",
)
UNROLLED_TERMS = Limit(
    "unrolled_terms", 49, "terms of a sum that is unrolled",
    "chosen, not measured: the taps of a 7 x 7 window",
)
NARROW_GAIN = Limit(
    "narrow_gain", 130, "percent of the work with pixels as columns that a convolution of few channels may take",
    "chosen, not measured: what is fused behind the convolution becomes a kernel of its own",
)
CHANNELS_FIRST = BlockSize(
    "channels_first", 32, "multiplications that take as long as moving an element of the input to its channel",
    "chosen, not measured: a third of a nanosecond, and a hundred multiplications in a nanosecond",
)
PIXEL_SUMS = BlockSize(
    "pixel_sums", 6, "vectors of sums in a tile of pixels that keep its unit busy",
    "chosen, not measured: a multiplication takes four cycles, and one or two begin in a cycle",
)
QUAD_RATE = BlockSize(
    "quad_rate", 4, "multiplications of small integers or bf16 in the time of one that takes a term by itself",
    "chosen, not measured: four terms of i8 in a step",
)
HELD_WEIGHTS = BlockSize(
    "held_weights", 25, "weights of a channel that stay in registers along a row, of 32 registers",
    "8 pixels side by side, AVX-512, of the time of one: 9 and 25 weights 0.86 to 1.05, 31 0.61, 49 0.5 to 0.58",
)
BESIDE_PIXELS = BlockSize(
    "beside_pixels", 8, "pixels of a row of a depthwise convolution of many weights that are computed side by side",
    "as held_weights, 49 weights: 2 pixels 0.75 to 0.83, 4 0.65 to 0.78, 7 0.52 to 0.58, 8 0.5 to 0.58",
)
QUANTIZED_BYTES = Limit(
    "quantized_bytes", 1 << 16, "bytes of a constant matrix that stays as it is though weights are to be quantised",
    "chosen, not measured: so much stays in a cache, where it is read as fast as it is widened",
)
QUANTIZED_PERCENT = Limit(
    "quantized_percent", 75, "percent of a matrix's bytes that it takes with few bits, padding and scales included",
    "chosen, not measured: one that hardly shrinks would lose digits for nothing",
)
UNPAIRED_ROWS = Limit(
    "unpaired_rows", 1, "rows of bf16 whose product with weights of few bits is one of f32, not of pairs",
    "3 x 4096 x 4096 of int4:64 on one core of a Zen 5, ms by f32, by pairs: 1 row 0.96, 1.07; 2 rows 2.15, 1.14",
)
WIDENED_ROWS = Limit(
    "widened_rows", 384, "rows of a product of bf16 by pairs whose weights of few bits tiles widen",
    "4096 x 4096 of i8, one core of a Zen 5, ms in tiles, widened first: 256 rows 20.8, 23.3; 512 41, 42; 1024 88, 85",
    True,
)
GPU_EXTENT = Limit(
    "gpu_extent", 23, "rows, columns or terms too few for a GPU's block",
    "chosen, not measured: most of a block's threads would have nothing to do",
)
GPU_TERMS = Limit(
    "gpu_terms", 127, "terms of a product of few rows with one thread per element",
    "chosen, not measured: a skinny block takes slices of 128 terms",
)
GPU_IDLE_BLOCKS = Limit(
    "gpu_idle_blocks", 127, "blocks that leave multiprocessors of a GPU idle",
    "an H200 has 132 multiprocessors; not measured",
)
# fmt: on

ROWS = rows_in(globals())

Strategy = Literal["loops", "dots", "sums", "in_place", "packed"]


def streams(m: Dim) -> bool:
    """Does a product of ``m`` rows read its right operand only once, all rows in one tile? (Unknown counts as many.)"""
    return STREAM_ROWS.holds(m)


def is_tiny(shape: Sequence[Dim], k: Dim) -> bool:
    """Is a product of ``shape`` that sums ``k`` terms per element too small for tiles?"""
    return TINY_FLOPS.holds(product((*shape, k)) * 2)


def _converts_integers(op: Op, form: str) -> bool:
    """Would tiles of ``form`` have operands or sums converted that are shorter integers? Loops convert as they go."""
    narrow = [op.result] if form == "i8" else [op.result, *op.operands]
    return form in ("i8", "i32", "i64") and any(size_of(v.type.dtype) < size_of("i32") for v in narrow)


def is_turned(op: Op, form: str, target: Target, constant: bool = False) -> bool:
    """Is a ``matmul`` of a few columns computed as one of a few rows? (Tiles would be padding for the most part.)

    ``constant`` says that the right operand is known before a call, and the left one is not; so is its transpose.
    """
    m, n = op.result.type.shape[-2:]
    k = op.operands[0].type.shape[-2 if op.attrs["lhs_transposed"] else -1]
    if form in ("", "i8") or m == 1 or _converts_integers(op, form):
        return False
    if is_tiny(op.result.type.shape, k):
        return n == 1 and not UNROLLED_TERMS.holds(k) and kind_of(FORMS[form].out) == "f"
    long = op.attrs["lhs_transposed"] or not SHORT_THIN_TERMS.holds(k)
    few = THIN_ROWS.holds(n) and not MANY_THIN_ROWS.holds(m)
    half = isinstance(n, int) and THIN_ROWS.holds(n) and 2 * n <= _lanes(form, target)
    if half and not op.attrs["lhs_transposed"]:
        few |= sum((HALF_PANEL_COLUMNS.holds(n), not THIN_ROWS.holds(m), constant)) >= 2
    return n == 1 or (few and long and form not in target.matrices)


def _lanes(form: str, target: Target) -> int:
    """Return the sums that a vector holds."""
    return target.vector_bytes // size_of(FORMS[form].out)


def matmul_strategy(op: Op, form: str, constant: bool, target: Target, memory_limit: int = 0) -> Strategy:
    """Return how a CPU computes a ``matmul``.

    Parameters
    ----------
    op : Op
        The product.
    form : str
        The form of tile that fits its dtypes, or the empty string.
    constant : bool
        Is the right operand a constant, which is packed once and for all?
    target : Target
        The CPU.
    memory_limit : int
        Bytes that a call may take, 0 for any number: little of it goes to packed copies.

    Returns
    -------
    str
        ``packed``: tiles over panels of the right operand; ``in_place``: tiles over the right operand as it lies;
        ``dots``: one dot product per element of the result; ``sums``: rows of the right operand, times a number each,
        summed up; ``loops``: no tiles.
    """
    lhs, rhs = (v.type for v in op.operands)
    result = op.result.type
    m, n = result.shape[-2:]
    k = lhs.shape[-2 if op.attrs["lhs_transposed"] else -1]
    if not form or k == 0 or (_converts_integers(op, form) and (n == 1 or is_tiny((m, n), k))):
        return "loops"
    few = THIN_ROWS.holds(m) and (streams(m) or form not in target.matrices)
    thin = few and form != "i8" and product(result.shape) != 0
    if op.attrs["rhs_transposed"] and form != "i8" and streams(m) and not (form == "bf16" and constant):
        return "dots"
    sums = not op.attrs["rhs_transposed"] and thin
    if is_tiny(result.shape, k):
        rows = not op.attrs["rhs_transposed"] and n != 1 and product(result.shape) != 0
        return "sums" if rows and kind_of(FORMS[form].out) == "f" and not UNROLLED_TERMS.holds(k) else "loops"
    if op.attrs["rhs_transposed"] and thin and not constant and not SHORT_THIN_TERMS.holds(k):
        return "dots"
    lanes = _lanes(form, target)
    by_rows = not op.attrs["rhs_transposed"] and form != "i8" and isinstance(n, int) and n % lanes == 0
    quick = k % FORMS[form].group == 0 or form in target.matrices
    pairs = form == "bf16" and quick  # to pack, for what is gained
    near = IN_PLACE_ELEMENTS.holds(k * n)
    if by_rows and not constant and near and (streams(m) or not pairs):
        return "in_place"
    if sums and (not constant or is_mostly_padding(op, form, target)):
        return "sums"
    in_form = by_rows and {lhs.dtype, rhs.dtype, result.dtype} == {form} and form != "bf16"
    if in_form and memory_limit and not constant:
        copied = product(rhs.shape) * size_of(form)
        if not PACKED_PERCENT.holds(copied * 100 // memory_limit):
            return "in_place"
    if isinstance(n, int) and isinstance(k, int):
        return "packed"
    if in_form:
        return "in_place"
    return "packed" if kind_of(FORMS[form].out) == "f" else "loops"


def is_mostly_padding(op: Op, form: str, target: Target) -> bool:
    """Return True if panels of a constant with few columns cost more than they save.

    A panel has whole vectors of columns, so each row reads ``lanes`` columns where the constant has ``n``. The products
    that a row does not need are spread over the rows, so more rows pay for wider panels. Large panels that are padding
    for the most part are not folded, so each call would pack them; half of it is read in vain.
    """
    rhs, (m, n) = op.operands[1].type, op.result.type.shape[-2:]
    if not isinstance(n, int) or not isinstance(m, int):
        return False
    lanes, k = _lanes(form, target), rhs.shape[-1 if op.attrs["rhs_transposed"] else -2]
    is_large = not PADDED_PANEL_BYTES.holds(k * lanes * size_of(rhs.dtype))
    most = lanes // 2 if FORMS[form].group == 1 else lanes // 2 - 1
    return 2 * m * n <= lanes or (n <= most and is_large)


def conv_strategy(op: Op, form: str) -> Strategy:
    """Return how a CPU computes a ``conv``: ``packed``, by tiles over panels of the kernel, or ``loops``."""
    *window, n = op.operands[1].type.shape
    groups, terms = op.attrs["feature_groups"], product(window)
    unknown = not isinstance(terms * n, int)
    if form == "" or terms == 0 or n == 0:
        return "loops"
    if unknown and (groups > 1 or not is_static(window[:-1]) or kind_of(FORMS[form].out) != "f"):
        return "loops"
    if form == "i8" and window[-1] == 1 and UNROLLED_TERMS.holds(terms):
        return "loops"  # three of four terms would be padding
    if groups > 1 and is_tiny(op.result.type.shape, terms):
        return "loops"
    if not unknown and n == groups and UNROLLED_TERMS.holds(terms):
        return "loops"  # all columns of a tile but one would be padding: pixels of a row are a vector's lanes
    return "packed"
