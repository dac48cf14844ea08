"""Plan a matmul or convolution on a CPU: by register tiles if ``pack_contractions`` chose them, else by loops."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, minimum, product, static, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.ir import Buffer, Load, Store
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.analysis.tiled_product import TiledProduct, tiled_product
from aotc.lowering.cost_model.machines import MATRIX_WORK
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, UNKNOWN_TILES, dim_or
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.elements import provide_scalar
from aotc.lowering.plans.contract_loops import DepthwisePlan, ElementLoopsPlan, plan_contract_loops
from aotc.lowering.plans.cpu_tiles import SET_PERIOD, SET_ROWS, best_tile, split_rows
from aotc.lowering.plans.matmul import IN_PLACE_ELEMENTS, copies_panels
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


@dataclass(frozen=True, slots=True)
class RowTiles:
    """Partition of a matmul's rows into ``tiles`` tiles; the first ``tall`` are one row higher than ``height``.

    ``ragged`` is the symbolic number of rows if it is not known. Then every tile has ``height`` rows except the last,
    which has the remainder.
    """

    tiles: Dim
    height: int
    tall: int
    ragged: Dim | None = None

    @property
    def max_rows(self) -> int:
        """Return the largest number of rows of a tile."""
        return self.height + (self.tall != 0)

    def first_row(self, tile: Dim) -> Dim:
        """Return the first row of a tile."""
        return tile * self.height + (minimum(tile, self.tall) if self.tall != 0 else 0)


def row_tiles(m: Dim, height: int, tall: int) -> RowTiles:
    """Return the tiles of ``m`` rows, of which the first ``tall`` have ``height`` + 1 rows."""
    tiles = (m - tall + (height - 1)) // height
    return RowTiles(tiles, height, tall, None if isinstance(m, int) else m)


@dataclass(frozen=True, slots=True)
class RegisterTilePlan(RegionPlan):
    """Plan of register tiles: some rows by the columns of a panel, which ``pack_contractions`` chose.

    Attributes
    ----------
    height, tall : int
        Rows of a tile, and the number of tiles at the top that have one more.
    row_block, panel_block : int
        Row tiles and panels of a grid item.
    is_direct : bool
        Are tiles stored to the result, without a private buffer and an epilogue?
    own_epilogues : bool
        Does each tile have its own copy of the epilogue, instead of sharing one between tiles of different heights?
    rows_outer : bool
        Does the loop over row tiles enclose that over panels?
    copied_pitch : int
        Elements from row to row of the private copy of a tile's rows; 0: rows are read in place.
    by_columns : bool
        Does an epilogue store a tile column by column, because its columns are contiguous in memory?
    """

    height: int
    tall: int
    row_block: int
    panel_block: int
    is_direct: bool
    own_epilogues: bool = False
    rows_outer: bool = False
    copied_pitch: int = 0
    by_columns: bool = False


@dataclass(frozen=True, slots=True)
class CopiedPanelPlan(RegisterTilePlan):
    """Plan of register tiles over an unpacked right operand, of which only a call knows the sizes.

    A grid item copies each of its panels to scratch memory, where the rows of the panel are contiguous. The last panel
    ends with the last column of the matrix, and drops its first columns. A matrix with fewer columns than a panel is
    always copied.

    Attributes
    ----------
    in_place_tiles : int
        Row tiles of a grid item up to which its panels are read in place.
    in_place_elements : int
        Elements of the right operand up to which its panels are read in place.
    shared_sets : int
        Elements between rows of the left operand, at multiples of which the rows share cache sets; 0: a static number.
    shared_rows : int
        Rows of a tile, at most, whose rows share cache sets; a larger tile is computed in two halves.
    direct_panels : bool
        Are the tiles of panels that do not exceed the result stored to it, without a private buffer?
    """

    in_place_tiles: int = 0
    in_place_elements: int = 0
    shared_sets: int = 0
    shared_rows: int = 0
    direct_panels: bool = False


def plan_cpu_contract(b: RegionBuilder) -> RegisterTilePlan | DepthwisePlan | ElementLoopsPlan:
    """Choose register tiles or loops for a CPU region with a matmul or a convolution."""
    p = tiled_product(b.root)
    return plan_contract_loops(b) if p is None else _plan_tiles(b, b.root, p)


def _plan_tiles(b: RegionBuilder, op: Op, p: TiledProduct) -> RegisterTilePlan:
    """Return the tiles, and the blocks of tiles that are grid items.

    A matrix unit waits for loads. So its rows are reused at once, by tiles with their own epilogues, and its panels are
    in the cache.
    """
    rows_max, _ = best_tile(p.m, p.n, p.k, p.form, b.target, p.a_row * size_of(p.a.type.dtype))
    runs = split_rows(p.m, rows_max) if isinstance(p.m, int) and p.m else ((rows_max, 0),)
    rows = row_tiles(p.m, runs[-1][0], runs[0][1] if len(runs) > 1 else 0)
    results = b.function.body.results
    only = len(results) == 1 and results[0] is op.result and not (p.pixels and p.m != 1)
    matrix = p.form.dot_product_dtype in b.target.matrices
    row_block, panel_block = _tiles_per_item(b.target, p, rows)
    pitch = 0
    if matrix and op.name == "packed_matmul" and not op.attrs["lhs_transposed"]:
        pitch = _copied_pitch(b.target, p, rows.max_rows, panel_block)
    direct = only and p.is_whole
    by_columns = not direct and rows.max_rows > 1 and _stores_columns(b, p, rows)
    if op.name == "matmul" and copies_panels(p.m, p.n, p.k):
        return CopiedPanelPlan(
            rows.height, rows.tall, COPY_READERS.value * row_block, panel_block, direct, by_columns=by_columns,
            in_place_tiles=IN_PLACE_TILES.value, in_place_elements=IN_PLACE_ELEMENTS.value,
            shared_sets=0 if isinstance(p.a_row, int) else SET_PERIOD.value // size_of(p.a.type.dtype),
            shared_rows=SET_ROWS.value, direct_panels=only and not p.is_whole,
        )  # fmt: skip
    return RegisterTilePlan(rows.height, rows.tall, row_block, panel_block, direct, matrix, matrix, pitch, by_columns)


IN_PLACE_TILES = BlockSize(
    2,
    "row tiles of a grid item, at most, for which a panel of unknown size is read in place",
    "a copy takes about as long as two rows of a tile",
)
COPY_READERS = BlockSize(
    2,
    "row tiles of a grid item that copies its panels, in multiples of those of an item that does not",
    "f32, Zen 4, one core, time relative to static sizes with 1, 2 and 4: 512^3 1.08, 1.02, 1.02; 1200^3 1.10, 1.07, "
    "1.04; with 4, 256^3 has too few items for several threads",
    benchmark="python -m benchmarks ops symbolic_products",
)


def _stores_columns(b: RegionBuilder, p: TiledProduct, rows: RowTiles) -> bool:
    """Return True if every store of an epilogue is contiguous along the rows of a tile, and not along its columns.

    Then the result is stored transposed. Stored row by row, each element would be in another cache line. Lines that are
    2 or 4 kB apart share few cache sets, so all of them would be evicted before the next row. ::

        for c in range(0, 32):            # in place of for r: for c:
            for r in range(0, 14):
                o0[c + 32*q, r + 14*t] = tile0[r, c]
    """
    e = b.trial_elements()
    r, c = sym("r", 0, rows.max_rows), sym("c", 0, p.cols)
    tile = sym("t", 0, rows.tiles) if rows.tiles != 1 else 0
    panel = sym("q", 0, p.panels) if p.panels != 1 else 0
    outer = tuple(delinearize(grid_item(product(p.outer)), p.outer))
    block = e.new_block()
    tile_of_sums = Buffer("tile", p.form.out, (rows.max_rows, p.cols), "private")
    e.anchor(b.root.result, provide_scalar(Load(tile_of_sums, (r, c))))
    store_results(b, e, p.place(outer, rows.first_row(tile) + r, panel * p.cols + c))
    stores = [s for s in block if isinstance(s, Store)]
    return bool(stores) and all(_is_store_along_rows(s) for s in stores)


def _is_store_along_rows(store: Store) -> bool:
    large = [i for i, size in zip(store.index, store.buffer.shape) if size != 1]
    used = {s.name for s in symbols(large[-1])} if large else set()
    return "r" in used and "c" not in used


ITEM_FLOPS = BlockSize(
    3 << 20,
    "floating-point operations per grid item of a large matmul, at least",
    "30 microseconds of a core of 100 GFLOP/s",
)
MATRIX_ITEM_FLOPS = BlockSize(
    144 << 20,
    "operations per grid item of a large matmul on a matrix unit, at least",
    "Intel Xeon with AMX at 3 TFLOP/s: 50 microseconds; with a quarter of it 1024^3 took 1.3 times as long, in i8 1.4 "
    "times",
)
LARGE_ITEMS = BlockSize(
    32,
    "operations per grid item, at most, in multiples of ITEM_FLOPS or MATRIX_ITEM_FLOPS",
    "f32, one core of a busy Zen 5, throughput relative to a factor of 8: 2048^3 with 16 1.07, 32 1.14; 1024^3 with "
    "16 1.03, 32 1.03; AVX2 1 to 1.02",
)
MIN_ITEMS = BlockSize(8, "grid items of a matmul, at least", "8 cores are common")
MANY_ITEMS = BlockSize(48, "grid items of a matmul, above which items become larger", "several for each of 16 cores")
WHOLE_FLOPS = Limit(
    1 << 19,
    "floating-point operations of a matmul that is one grid item",
    "5 microseconds of a core of 100 GFLOP/s, in one claim",
)


def _tiles_per_item(target: Target, p: TiledProduct, rows: RowTiles) -> tuple[int, int]:
    """Return the row tiles and panels of a grid item: enough work for a claim, few enough for all threads."""
    k = dim_or(p.k, UNKNOWN_TERMS.value)
    tile_flops = 2 * k * (rows.height + 1) * p.cols
    extents = (rows.tiles, p.panels, product(p.outer))
    tiles, panels, outer = (dim_or(n, UNKNOWN_TILES.value) for n in extents)
    total = tile_flops * tiles * panels * outer
    matrix = p.form.dot_product_dtype in target.matrices
    least = (MATRIX_ITEM_FLOPS if matrix else ITEM_FLOPS).value
    want = max(total // MANY_ITEMS.value, least)
    want = min(want, LARGE_ITEMS.value * least, max(total // MIN_ITEMS.value, 1))
    if WHOLE_FLOPS.holds(total * MATRIX_WORK.value // 100 if matrix else total):
        want = total + 1
    some = want // max(tile_flops, 1)
    if matrix:
        panel_block = max(min(panels, _tiles_in_l2_cache(target, k * size_of(p.b.type.dtype) * p.cols), some), 1)
        return max(min(tiles, some // panel_block), 1), panel_block
    row_block = max(min(tiles, _tiles_in_l2_cache(target, k * size_of(p.a.type.dtype) * (rows.height + 1)), some), 1)
    panel_block = max(min(panels, want // max(tile_flops * row_block, 1)), 1)
    return row_block, panel_block


def _tiles_in_l2_cache(target: Target, size: Dim) -> int:
    """Return the number of row tiles or panels, of ``size`` bytes each, that fit half of the L2 cache."""
    return max(target.l2 // 2 // max(static(size), 1), 1)


COPIED_PANELS = Limit(
    7,
    "panels per grid item of a matrix unit, up to which the rows they share are not copied",
    "Intel Xeon with AMX, bf16, time with a copy relative to without: rows that begin within a cache line 1024^3 "
    "0.60, 512^3 0.69; aligned rows 1 to 1.1",
)
COPIED_ROWS = Limit(
    16,
    "rows of a tile of a matrix unit, up to which they are not copied",
    "one tile register; such matmuls wait for the right operand",
)


def _copied_pitch(target: Target, p: TiledProduct, rows: int, panel_block: int) -> int:
    """Return the pitch of the copy of a tile's ``rows`` for a matrix unit, or 0 if too few panels read them.

    Rows of an argument may begin within a cache line; loading a tile register then takes twice the lines. Rows of an
    even number of lines share cache sets.
    """
    if not isinstance(p.k, int) or COPIED_ROWS.holds(rows) or COPIED_PANELS.holds(panel_block):
        return 0
    line = target.vector_bytes // size_of(p.a.type.dtype)
    return (-(-p.k // line) | 1) * line
