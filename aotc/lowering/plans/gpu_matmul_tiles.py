"""Choose the tiles of a matmul on tensor cores: the tiling with the shortest modelled time.

The model divides the tiles of a launch into waves. In one wave, every multiprocessor runs as many tiles as fit on it.
The wave lasts as long as the slower of two things: the multiplications, at the measured rate of :data:`TILE_RATES`, and
the reads of the operands. The epilogue follows. With two warpgroups that alternate between tiles (``ping_pong``),
the multiplications of one hide the epilogue of the other.

A matmul with too few tiles is split along its terms (split-K), if that pays for the kernel that adds the partial sums.
M. Osama et al., "Stream-K" (2023), describes the loss by incomplete waves (wave quantization).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod

from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import scalars_in, statement_scalars
from aotc.ir.loop.forms.conv import window_operands
from aotc.ir.loop.forms.matmul import LoopProduct, View, is_multiple_dim
from aotc.ir.loop.forms.tiling import ELEMENT_BYTES, FP8_PAIRS, Mma, Template, Tiling, Wgmma, Window
from aotc.ir.loop.ir import Apply, Load, Store
from aotc.ir.opset.elementwise import scalar_work
from aotc.ir.tensor.ir import TensorType
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, UNKNOWN_TILES, dim_or
from aotc.lowering.threshold import Estimate, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class TileRate:
    """Measured rate of one multiprocessor with a tiling.

    Attributes
    ----------
    tiling : Tiling
    rate : float
        Thousands of floating-point operations per nanosecond in bf16.
    resident : int
        Blocks that run on a multiprocessor at a time.
    long : float, optional
        The rate in long products, by default ``rate``. In a long product a GPU reaches its power limit, where tilings
        that need less energy are faster. Products of 8-bit operands always use ``rate``.
    """

    tiling: Tiling
    rate: float
    resident: int = 1
    long: float | None = None


# Rates of the tilings, see TileRate. A product uses the tiling with the least time by this table. Sources, all
# measured by benchmarks/gpu/products.py --tiles on an H200:
# - wgmma tilings that share tiles: 8192 x 768 x 3072 in bf16 takes 63, 49, 50, 52, 61, 61 and 86 us.
# - The other wgmma tilings, and 128 x 128: 18 products with the epilogues of ResNet, BERT, ViT and an MLP. The tilings
#   that the model chooses for them were the fastest or within 3 % of the fastest.
# - mma: 128 x 128 from 4096 x 4096 x 4096, 409 us; the others in proportion.
# - Tilings of two stages, which fit in 48 KiB: chosen below the rates of those with more stages, not measured.
# - Tilings of 16 rows, for weights of few bits: 8 x 4096 x 4096 in bf16 with 8-bit integers takes 14.0 us in 8 parts,
#   14.6 us in 16, and 16.8 us in tiles of 64 x 128.
# - Swapped operands (transposed), with f32 weights in their own layout: 1024 x 3072 x 768 takes 20.6, 34.1, 28.4,
#   32.8, 24.3, 27.2, 28.0, 30.0, 41.6 and 55.1 us in the order of the table.
# - Long products: 4096 x 4096 x 4096 in bf16, each run alone for 0.2 s before it was timed. It takes 214 and 246 us
#   with ping-pong tiles of 128 x 128 and 64 x 128, 209 and 233 us with tiles of 128 x 256 and 128 x 128, and 203 us
#   with cuBLASLt; the others in proportion.
TILE_RATES = (
    TileRate(Tiling(Wgmma(ping_pong=True), 128, 128, 6), 6.25, long=6.0),
    TileRate(Tiling(Wgmma(ping_pong=True), 64, 128, 8), 5.8, long=5.2),
    TileRate(Tiling(Wgmma(ping_pong=True), 128, 64, 8), 5.4, long=5.0),
    TileRate(Tiling(Wgmma(), 128, 256, 4), 6.35, long=6.5),
    TileRate(Tiling(Wgmma(), 128, 192, 5), 6.4, long=5.9),
    TileRate(Tiling(Wgmma(), 128, 128, 6), 6.7, long=5.6),
    TileRate(Tiling(Wgmma(), 128, 64, 8), 4.4),
    TileRate(Tiling(Wgmma(), 64, 256, 5), 6.0, long=5.4),
    TileRate(Tiling(Wgmma(), 64, 128, 8), 5.35),
    TileRate(Tiling(Wgmma(), 64, 128, 4), 5.1, 2),
    TileRate(Tiling(Wgmma(), 64, 64, 6), 3.7, 2),
    TileRate(Tiling(Wgmma(), 64, 64, 2), 2.4, 2),
    TileRate(Tiling(Wgmma(transposed=True), 256, 128, 4), 6.2),
    TileRate(Tiling(Wgmma(transposed=True), 192, 128, 5), 5.2),
    TileRate(Tiling(Wgmma(transposed=True), 128, 128, 6), 4.3),
    TileRate(Tiling(Wgmma(transposed=True), 64, 128, 8), 2.75),
    TileRate(Tiling(Wgmma(transposed=True), 256, 64, 5), 5.1),
    TileRate(Tiling(Wgmma(transposed=True), 128, 64, 8), 3.5),
    TileRate(Tiling(Wgmma(transposed=True), 128, 64, 4), 4.35, 2),
    TileRate(Tiling(Wgmma(transposed=True), 64, 64, 6), 3.05, 2),
    TileRate(Tiling(Wgmma(transposed=True), 64, 64, 2), 2.1, 2),
    TileRate(Tiling(Wgmma(transposed=True), 32, 64, 8), 1.6, 2),
    TileRate(Tiling(Mma(), 128, 128, 3), 3.0),
    TileRate(Tiling(Mma(), 64, 128, 3), 2.8, 2),
    TileRate(Tiling(Mma(), 64, 64, 3), 2.2, 3),
    TileRate(Tiling(Mma(), 64, 64, 2), 1.6, 3),
    TileRate(Tiling(Mma(), 16, 128, 3), 0.6, 2),
    TileRate(Tiling(Mma(), 16, 128, 2), 0.5, 2),
)
_WARPS: frozenset[Template] = frozenset({Mma()})
_SHARES = {"bf16": 1.0, "f16": 1.0, "tf32": 0.5, "f64": 0.17, "i8": 1.9}  # rate of tensor cores relative to bf16
_SHARES |= dict.fromkeys(FP8_PAIRS, 1.9)

TENSOR_FLOPS = Limit(
    1 << 15,
    "multiply-adds of a whole launch, at most, that are not worth tensor cores",
    "one tile of 64 x 64 with 128 terms has 16 times as many",
)
TENSOR_TERMS = Limit(
    7,
    "terms of a sum, at most, that are not worth tensor cores",
    "an instruction adds 8 terms or more",
)
TENSOR_COLUMNS = Limit(
    7,
    "rows and columns of a result: if neither is larger than this, tensor cores are not used",
    "most of a tile would be padding: the smallest ones are 32 x 64 and 16 x 128",
)
TURN_START = Estimate(
    2500,
    "nanoseconds of the launch that transposes the weights of a convolution, in addition to the time for their bytes",
    "on an H200, transposing 2.4 MB takes 2.7 us, 4.7 MB 3.5 us",
)
FEW_TILE_ROWS = Limit(
    32,
    "rows of a product and of its tile, at most, for which the operands are swapped although both orders are possible",
    "a wgmma instruction has 64 rows, but as few as 8 columns",
)
TURNED_READS = Limit(
    511,
    "rows, at most, that are multiplied with an operand of TF32 or i8 without transposing it first",
    "on an H200, transposing 4096 x 4096 takes 36 us and the product then 381 us; with mma tiles and no transpose, "
    "741 us",
)
TURNED_SHORT_READS = Limit(
    63,
    "the same as TURNED_READS, for an operand of at most SHORT_OPERAND bytes",
    "on an H200, a product of 196 rows with 256 x 1024 took 10.8 us with mma tiles, about 7 us with a transpose",
    benchmark="python -m benchmarks gpu products",
)
SHORT_OPERAND = Limit(
    4 << 20,
    "bytes of an operand, at most, that is transposed in about the time that a kernel needs to start",
    "on an H200, 2.4 MB are transposed in 3 us",
    benchmark="python -m benchmarks gpu products",
)
PART_TERMS = Estimate(
    256,
    "terms of a part in a split-K product, at least",
    "four slices of 64 terms, which are copied concurrently",
)
PART_BYTES = Limit(
    16 << 20,
    "bytes of all partial sums of a split-K product, at most",
    "they stay in the 50 MB second-level cache of an H200 until they are added up",
)
ADD_PARTS = Estimate(
    3500,
    "nanoseconds of the kernel that adds up the partial sums of a split-K product",
    "on an H200, 2.8 to 5.2 us for the parts of 16 x 4096 and of 1024 x 768 sums",
    benchmark="python -m benchmarks gpu products",
)
ALONE_PERCENT = Estimate(
    60,
    "percent of its full rate that a multiprocessor reaches with a single tile although several fit",
    "on an H200: 128 x 768 x 1024 in tiles of 64 x 64",
    benchmark="python -m benchmarks gpu products --tiles",
)
MULTIPROCESSORS = Estimate(132, "multiprocessors of a GPU", "an H200")
PRODUCT_START = Estimate(
    2000,
    "nanoseconds of a product in addition to the time of its tiles",
    benchmark="python -m benchmarks gpu products --tiles",
)
TILE_START = Estimate(
    500,
    "nanoseconds of a tile before its first and after its last multiplication, without its epilogue",
    benchmark="python -m benchmarks gpu products --tiles",
)
EPILOGUE_BYTES = Estimate(
    60,
    "bytes per nanosecond that the epilogues of one multiprocessor read and write",
    "residuals of ResNet layers on an H200, in tiles of all sizes",
)
EPILOGUE_WORK = Estimate(
    100,
    "scalar operations per nanosecond in the epilogues of one multiprocessor",
    "gelu of 8192 x 3072 sums on an H200",
)
LONG_FLOPS = Estimate(
    30_000_000_000,
    "floating-point operations of a bf16 product above which it counts as long",
    "40 us of an H200: 2048 x 2048 x 2048 is not long, 8192 x 768 x 3072 is",
)
LONG_EPILOGUE_WORK = Estimate(
    300,
    "the same as EPILOGUE_WORK, for long products",
    "gelu of bf16 on an H200, 4096 x 4096 x 4096 in tiles of 128 x 256: 210 us, 208 us without gelu",
)
PARTLY_HIDDEN = Estimate(
    30,
    "percent of the shorter of two times, of the tiles and of memory, that the longer one does not hide",
    "50176 x 256 x 64 with a residual on an H200: tiles of 128 x 256 take 1.16 times as long as tiles of 64 x 128",
)
OPERAND_BYTES = Estimate(
    116,
    "bytes of operands that one multiprocessor reads per nanosecond",
    "on an H200, with two tiles of 64 x 64 on each multiprocessor",
    benchmark="python -m benchmarks gpu products --tiles",
)
PRODUCT_MEMORY = Estimate(
    4200,
    "bytes of memory that a product reads and writes per nanosecond",
    "on an H200",
    benchmark="python -m benchmarks gpu products",
)


def is_for_tensor_cores(batch: Sequence[Dim], m: Dim, n: Dim, k: Dim) -> bool:
    """Return True if a matmul is large enough for tensor cores; symbolic sizes count as large."""
    if TENSOR_TERMS.holds(k) or (TENSOR_COLUMNS.holds(m) and TENSOR_COLUMNS.holds(n)):
        return False
    return not TENSOR_FLOPS.holds(prod(map(_assumed_extent, (*batch, m, n, k))))


def is_worth_transposing(operand: TensorType, times: Dim) -> bool:
    """Return True if a TF32 or i8 operand is faster with a transposition to k-contiguous order first.

    ``times`` is the number of rows of the other operand: the more there are, the sooner a transpose pays.
    """
    size = prod(map(_assumed_extent, operand.shape)) * size_of(operand.dtype)
    return not (TURNED_SHORT_READS if SHORT_OPERAND.holds(size) else TURNED_READS).holds(times)


def best_tiling(
    product: LoopProduct, target: Target, window: Window | None = None, concurrent: int = 1
) -> Tiling | None:
    """Return the tiling with the least modelled time on ``target``, or None if none fits its shared memory.

    Parameters
    ----------
    product : LoopProduct
    target : Target
    window : Window, optional
        The window of a convolution whose input is copied by windows.
    concurrent : int
        The number of equal products that share the GPU; their total time is minimized.
    """
    if not target.has_ampere:
        return None
    if window is not None and window_operands(product, window) is None:
        window = None
    templates = templates_of(product, target, window)
    rows = (row for row in TILE_RATES if row.tiling.template in templates)
    if Wgmma() in templates:
        few = FEW_TILE_ROWS.holds(product.row[1])
        rows = (row for row in rows if not row.tiling.is_transposed or (few and FEW_TILE_ROWS.holds(row.tiling.rows)))
    rows = (row for row in rows if row.tiling.shared <= target.shared_memory)
    widened = product.is_widened(right=True)
    fitting = [
        _with_resident_limit(row, target)
        for row in _drop_oversized_tilings(rows, product.row[1], product.col[1], widened)
    ]
    best = (
        min(fitting, key=lambda row: matmul_nanoseconds(product, row, window, concurrent)).tiling if fitting else None
    )
    return best if best is None else replace(best, window=window)


def _drop_oversized_tilings(rows: Iterable[TileRate], m: Dim, n: Dim, widened: bool) -> list[TileRate]:
    """Drop tilings that are larger than needed: a smaller tile of their kind also covers the matmul.

    Padding in a tile is copied and stored too: 64 x 64 x 65536 in 64 parts takes 10.1 us on an H200 in tiles of
    64 x 128, and 7.5 us in tiles of 64 x 64. Tiles of 16 rows are only for right operands ``widened`` in them.
    """
    remaining = [row for row in rows if widened or row.tiling.rows >= FEW_TILE_ROWS.value]
    for edge, extent in ((_tile_columns, n), (_tile_rows, m)):
        if isinstance(extent, int):
            least: dict[Template, int] = {}
            for tiling in (row.tiling for row in remaining if edge(row.tiling) >= extent):
                least[_template_group(tiling)] = min(edge(tiling), least.get(_template_group(tiling), edge(tiling)))
            remaining = [
                row for row in remaining if edge(row.tiling) <= least.get(_template_group(row.tiling), edge(row.tiling))
            ]
    return remaining


def _tile_rows(tiling: Tiling) -> int:
    return tiling.rows


def _tile_columns(tiling: Tiling) -> int:
    return tiling.cols


def _template_group(tiling: Tiling) -> Template:
    """Return the template without its tile edges: tilings of one group differ only in these."""
    return replace(tiling.template, ping_pong=False) if isinstance(tiling.template, Wgmma) else tiling.template


def _with_resident_limit(row: TileRate, target: Target) -> TileRate:
    """Return ``row`` with ``resident`` limited to the blocks that the shared memory of a multiprocessor holds."""
    resident = max(min(row.resident, target.multiprocessor.resident_blocks(1, 1, row.tiling.shared)), 1)
    return row if resident == row.resident else replace(row, resident=resident)


def templates_of(product: LoopProduct, target: Target, window: Window | None) -> frozenset[Template]:
    """Return the templates that can multiply these operands: those of Hopper, or that of warps.

    ``Wgmma`` needs operands that the tensor memory accelerator can copy in tiles, and does not support f64. The flags
    ``ways`` are True for an operand stored by rows: contiguous along the result, not along the terms. The instructions
    read such an operand directly if it has 16 bits, and not at all if it has 8. In TF32 only one operand may be stored
    by rows: plain ``Wgmma`` allows the left one, transposed ``Wgmma`` (operands swapped) the right one. In other dtypes
    transposed ``Wgmma`` needs a left operand that is contiguous along the terms.
    """
    if window is not None:
        read = window_operands(product, window)
        assert read is not None
        ways = (False, not read.transposed)
    else:
        views = [
            v for v in (product.view(), product.view(right=True)) if v is not None and _is_operand_copyable(v, product)
        ]
        if target.cpu != "sm_90a" or len(views) != 2 or product.operands == "f64":
            return _WARPS
        ways = (views[0].by_rows, views[1].by_rows)
    match product.operands, ways:
        case ("tf32", (True, True)):
            return _WARPS
        case (kind, (True, _) | (_, True)) if ELEMENT_BYTES[kind] == 1:
            return _WARPS
        case ("tf32", (True, _)):
            return frozenset({Wgmma()})
        case ("tf32", (_, True)):
            return frozenset({Wgmma(transposed=True)})
        case (_, (True, _)):
            return frozenset({Wgmma(), Wgmma(ping_pong=True)})
    return frozenset({Wgmma(), Wgmma(ping_pong=True), Wgmma(transposed=True)})


def _is_operand_copyable(view: View, product: LoopProduct) -> bool:
    """Return True if tiles of an operand can be copied: lines are contiguous and start at multiples of 16 bytes."""
    coordinates, count = view.coordinates(*product.batch), 16 // size_of(view.buffer.dtype)
    if not view.in_lines or coordinates is None:
        return False
    return all(is_multiple_dim(x, count) for x in (coordinates[0], *(stride for _, stride, _ in coordinates[1])))


def split_k_parts(
    shape: Sequence[Dim], k: Dim, operands: str, taps: int = 1, transposed: bool | None = None, by_warps: bool = False
) -> int:
    """Return the number of parts of split-K for a product with a result of ``shape``; 1 if it is not split.

    Parts consist of whole slices of 64 terms. They must save more time than the kernel that adds them up takes.

    Parameters
    ----------
    shape : sequence of Dim
    k : Dim
        The terms of a sum.
    operands : str
        The dtype that is multiplied.
    taps : int
        The taps of a convolution's window, 1 for a matmul.
    transposed : bool, optional
        Are the operands of the tiles swapped? None allows both.
    by_warps : bool
        Does the ``mma`` template multiply, not ``wgmma``?
    """
    if len(shape) != 2 or not isinstance(k, int) or not all(isinstance(d, int) for d in shape):
        return 1
    m, n = map(_assumed_extent, shape)
    by_warps, size = by_warps or operands == "f64", max(ELEMENT_BYTES[operands], 4)
    fit = [row for row in TILE_RATES if row.tiling.is_wgmma is not by_warps]
    either = (row for row in fit if transposed in (None, row.tiling.is_transposed))
    rows = _drop_oversized_tilings(either, m, n, by_warps and operands != "f64")
    most = k // PART_TERMS.value
    possible = [p for p in range(2, most + 1) if k % (p * 64) == 0 and PART_BYTES.holds(size * p * m * n)]

    def nanoseconds_of_parts(parts: int) -> float:
        adding = ADD_PARTS.value + size * (parts + 1) * m * n / PRODUCT_MEMORY.value if parts > 1 else 0
        return adding + min(_products_nanoseconds(m, n, k // parts, parts, operands, row, taps) for row in rows)

    return min((1, *possible), key=nanoseconds_of_parts)


def is_faster_transposed(shape: Sequence[Dim], k: Dim, taps: int) -> bool:
    """Return True if an f32 convolution is faster with its weights, which are stored by rows, transposed first."""
    if not all(isinstance(d, int) for d in (*shape, k)):
        return False
    m, n, terms = map(_assumed_extent, (*shape, k))
    parts = split_k_parts(shape, k, "tf32", taps)
    times = {
        transposed: min(
            _products_nanoseconds(m, n, terms // parts, parts, "tf32", row, taps)
            for row in TILE_RATES
            if row.tiling.is_wgmma and row.tiling.is_transposed is not transposed
        )
        for transposed in (False, True)
    }
    return times[True] + TURN_START.value + 8 * terms * n / PRODUCT_MEMORY.value < times[False]


def matmul_nanoseconds(product: LoopProduct, row: TileRate, window: Window | None = None, concurrent: int = 1) -> float:
    """Return the modelled nanoseconds of ``concurrent`` equal matmuls on a GPU by the tiling of ``row``."""
    m, n, k, count = (_assumed_extent(extent) for _, extent in (product.row, product.col, product.k, product.batch))
    taps = 1 if window is None else prod(window.taps)
    return _products_nanoseconds(m, n, k, count * concurrent, product.operands, row, taps, _epilogue_cost(product))


def _epilogue_cost(product: LoopProduct) -> tuple[int, int]:
    """Return the memory traffic in bytes and the scalar operations of the epilogue, for one element of the result."""
    stored = sum(size_of(s.buffer.dtype) for s in product.epilogue if isinstance(s, Store))
    read = work = 0
    for node in scalars_in(x for s in product.epilogue for x in statement_scalars(s)):
        match node:
            case Apply(fn=fn):
                work += scalar_work(fn)
            case Load(buffer=buffer, index=index) if buffer.space == "global":
                names = {s.name for i in index for s in symbols(i)}
                read += size_of(buffer.dtype) if {product.row[0], product.col[0]} <= names else 0
    return stored + read, work


def _products_nanoseconds(
    m: int, n: int, k: int, count: int, kind: str, row: TileRate, taps: int = 1, epilogue: tuple[int, int] = (4, 0)
) -> float:
    """Return the modelled nanoseconds of ``count`` products ``(m, k) x (k, n)`` of dtype ``kind``, in tiles of ``row``.

    The input of a convolution is read from memory once, not once for each of its ``taps``. ``epilogue`` is the bytes
    and the operations per sum, as :func:`_epilogue_cost` returns them; the default stores a 4-byte partial sum.

    The time is that of the slower of tiles and memory, plus ``PARTLY_HIDDEN`` percent of the faster.
    """
    tiling, size = row.tiling, ELEMENT_BYTES[kind]
    tiles = count * -(-m // tiling.rows) * -(-n // tiling.cols)
    waves = -(-tiles // (MULTIPROCESSORS.value * row.resident))
    together = min(row.resident, -(-tiles // MULTIPROCESSORS.value))
    flops = 2 * tiling.rows * tiling.cols * k * together
    moved = (min(m, tiling.rows) + min(n, tiling.cols)) * k * size * together
    is_long = size > 1 and count * m * n * k * 2 > LONG_FLOPS.value * _SHARES[kind]
    measured = row.long if is_long and row.long is not None else row.rate
    rate = 1000 * measured * _SHARES[kind] * max(together / row.resident, ALONE_PERCENT.value / 100)
    work = (LONG_EPILOGUE_WORK if is_long else EPILOGUE_WORK).value
    own = epilogue[0] / EPILOGUE_BYTES.value + epilogue[1] / work
    own *= min(m, tiling.rows) * min(n, tiling.cols) * together
    wave = max(flops / rate, moved / OPERAND_BYTES.value)
    if tiling.is_ping_pong:
        busy = TILE_START.value + waves * max(wave, (wave + own) / 2) + own
    else:
        busy = waves * (TILE_START.value + wave + own)
    memory = count * ((m * k // taps + k * n) * size + m * n * epilogue[0]) / PRODUCT_MEMORY.value
    return PRODUCT_START.value + max(busy, memory) + PARTLY_HIDDEN.value / 100 * min(busy, memory)


def _assumed_extent(extent: Dim) -> int:
    return dim_or(extent, UNKNOWN_TERMS.value * UNKNOWN_TILES.value)
