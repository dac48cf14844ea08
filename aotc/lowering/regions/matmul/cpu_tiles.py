"""Matmuls and convolutions with their epilogues on a CPU: register tiles over packed or in-place operands.

A grid item computes a block of row tiles against a group of column panels. Each tile is accumulated entirely in
registers. If an epilogue is fused, or the tile exceeds the result, it goes to a small private buffer first, and the
epilogue runs over it while it is in the L1 cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Expr, maximum, minimum, product, static, sym
from aotc.ir.loop.forms.tile_forms import FORMS, form_of_operands
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, If, Kernel, Let, Load, Stmt, Store, Tile, Var
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import TILED_BY_COLUMNS
from aotc.ir.opset.contract import panel_cols
from aotc.ir.tensor.ir import Function, Op
from aotc.lowering.analysis.index_maps import Index, delinearize, linearize
from aotc.lowering.cost_model.machines import MATRIX_WORK
from aotc.lowering.cost_model.work import UNKNOWN_TERMS, UNKNOWN_TILES
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.elements import provide
from aotc.lowering.plans.cpu_tiles import best_tile, split_rows
from aotc.lowering.regions.matmul.loops import lower_contract_loops
from aotc.lowering.regions.matmul.tile_stores import loops_of_tile
from aotc.lowering.threshold import BlockSize, Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

Levels = tuple[tuple[Dim, Dim, Dim], ...]


@dataclass(frozen=True, slots=True)
class RowTiles:
    """The partition of the rows of one matmul: ``tiles`` tiles, the first ``tall`` one row higher than ``height``.

    ``ragged`` is the symbolic number of rows if it is not known. Then every tile has ``height`` rows except the last,
    which has the remainder.
    """

    tiles: Dim
    height: int
    tall: Dim
    ragged: Dim | None = None

    @property
    def most(self) -> int:
        """Number of rows of the highest tile."""
        return self.height + (self.tall != 0)

    def start(self, tile: Dim) -> Dim:
        """Return the first row of a tile."""
        return tile * self.height + (minimum(tile, self.tall) if self.tall != 0 else 0)


def cut_rows(m: Dim, rows_max: int) -> RowTiles:
    """Return the balanced partition of ``m`` rows into tiles of at most ``rows_max``."""
    if not isinstance(m, int):
        return RowTiles((m + (rows_max - 1)) // rows_max, rows_max, 0, m)
    if m == 0:
        return RowTiles(0, rows_max, 0)
    runs = split_rows(m, rows_max)
    if len(runs) == 1:
        return RowTiles(runs[0][1], runs[0][0], 0)
    return RowTiles(runs[0][1] + runs[1][1], runs[1][0], runs[0][1])


@dataclass(frozen=True, slots=True)
class TiledProduct:
    """One matmul as its tiles see it.

    ``outer`` are the extents of the grid dims before rows and columns (batch, or image and output row). ``a_at(outer,
    row)`` and ``b_at(outer, panel)`` return flat offsets; ``place(outer, row, column)`` returns the index in the op's
    result. If ``pixels``, the columns are the pixels of a row: a last tile that would exceed it begins earlier, and its
    first columns are dropped.
    """

    form: str
    a: Buffer
    b: Buffer
    outer: tuple[Dim, ...]
    m: Dim
    n: Dim
    cols: int
    k: Dim
    a_row: Dim
    a_inner: Dim
    levels: Levels
    a_at: Callable[[Index, Dim], Dim]
    b_at: Callable[[Index, Dim], Dim]
    place: Callable[[Index, Dim, Dim], Index]
    pixels: bool = False


def lower_contract(function: Function, target: Target) -> Kernel:
    """Lower a matmul or convolution for a CPU: by tiles if ``pack_contractions`` chose them, else as loops."""
    b = RegionBuilder(function, target)
    describe = _DESCRIBE.get(b.root.name)
    if describe is None or (b.root.name in TILED_BY_COLUMNS and "cols" not in b.root.attrs):
        return lower_contract_loops(b)
    return _Tiles(b, b.root, describe(b, b.root), target).lower()


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


class _Tiles:
    """Emitter of the grid, the panels, the tiles and the epilogue."""

    def __init__(self, b: RegionBuilder, op: Op, p: TiledProduct, target: Target) -> None:
        self.b, self.op, self.p, self.target = b, op, p, target
        rows_max, _ = best_tile(p.m, p.n, p.k, p.form, target, p.a_row * size_of(p.a.dtype))
        self.rows = cut_rows(p.m, rows_max)
        self.panels = (p.n + (p.cols - 1)) // p.cols
        self.apart = p.form in target.matrices  # each tile of a matrix unit has an epilogue of its own
        self.row_block, self.panel_block = self._blocks()
        self.copy = self._copy_of_rows()
        self.e = b.elements()
        self.results = list(zip(b.outputs, b.function.body.results, strict=True))

    def lower(self) -> Kernel:
        p = self.p
        row_blocks = (self.rows.tiles + (self.row_block - 1)) // self.row_block
        panel_blocks = (self.panels + (self.panel_block - 1)) // self.panel_block
        extents = (*p.outer, panel_blocks, row_blocks)
        grid = product(extents)
        *outer, panel_at, row_at = delinearize(grid_item(grid), extents)
        block: list[Stmt] = []
        self._panels(block, tuple(outer), panel_at * self.panel_block, row_at * self.row_block)
        return self.b.grid(grid, block, product((*p.outer, p.m, p.n, p.k)) * 2)

    def _blocks(self) -> tuple[int, int]:
        """Return (row tiles, panels) per item: enough work to be worth a claim, few enough for all threads."""
        p = self.p
        k = p.k if isinstance(p.k, int) else UNKNOWN_TERMS.value
        tile_flops = 2 * k * (self.rows.height + 1) * p.cols
        extents = (self.rows.tiles, self.panels, product(p.outer))
        tiles, panels, outer = (n if isinstance(n, int) else UNKNOWN_TILES.value for n in extents)
        total = tile_flops * tiles * panels * outer
        matrix = p.form in self.target.matrices
        least = (MATRIX_ITEM_FLOPS if matrix else ITEM_FLOPS).value
        want = max(total // MANY_ITEMS.value, least)
        want = min(want, LARGE_ITEMS.value * least, max(total // MIN_ITEMS.value, 1))
        if WHOLE_FLOPS.holds(total * MATRIX_WORK.value // 100 if matrix else total):
            want = total + 1
        some = want // max(tile_flops, 1)
        if matrix:
            panel_block = max(min(panels, self._fitting(k * size_of(p.b.dtype) * p.cols), some), 1)
            return max(min(tiles, some // panel_block), 1), panel_block
        row_block = max(min(tiles, self._fitting(k * size_of(p.a.dtype) * (self.rows.height + 1)), some), 1)
        panel_block = max(min(panels, want // max(tile_flops * row_block, 1)), 1)
        return row_block, panel_block

    def _fitting(self, size: Dim) -> int:
        """Return how many row tiles or panels of ``size`` bytes fit half of the L2 cache."""
        return max(self.target.l2 // 2 // max(static(size), 1), 1)

    def _panels(self, block: list[Stmt], outer: Index, begin: Dim, first: Dim) -> None:
        panel = sym("q", 0, self.panels) if self.panels != 1 else 0
        tile = sym("t", 0, self.rows.tiles) if self.rows.tiles != 1 else 0
        end, last = minimum(begin + self.panel_block, self.panels), minimum(first + self.row_block, self.rows.tiles)
        body: list[Stmt] = []
        self._tile(body, outer, panel, tile)
        if self.apart:  # a matrix unit waits for loads: rows are reused at once, panels are in the cache
            block += _loop("t", tile, first, last, self._copied(outer, tile) + _loop("q", panel, begin, end, body))
        else:
            block += _loop("q", panel, begin, end, _loop("t", tile, first, last, body))

    def _copy_of_rows(self) -> Buffer | None:
        """Return the buffer to which the rows of a matrix unit's tile are copied, or None if too few panels read them.

        Rows of an argument may begin within a cache line; loading a tile register then takes twice the lines. Rows of
        an even number of lines share cache sets.
        """
        p, line = self.p, self.target.vector_bytes // size_of(self.p.a.dtype)
        if not self.apart or self.op.name != "packed_matmul" or self.op.attrs["lhs_transposed"]:
            return None
        if not isinstance(p.k, int) or COPIED_ROWS.holds(self.rows.most) or COPIED_PANELS.holds(self.panel_block):
            return None
        pitch = (-(-p.k // line) | 1) * line
        return Buffer(self.b.fresh("rows"), p.a.dtype, (self.rows.most, pitch), "private")

    def _copied(self, outer: Index, tile: Dim) -> list[Stmt]:
        """Return the copy of a tile's rows."""
        if self.copy is None:
            return []
        start, most = self.rows.start(tile), self.rows.most
        r, j = sym("i", 0, most), sym("j", 0, self.p.k)
        store = Store(self.copy, (r, j), Load(self.p.a, (*outer, start + r, j)))
        return [Alloc(self.copy), For("i", 0, minimum(most, self.p.m - start), (For("j", 0, self.p.k, (store,)),))]

    def _tile(self, block: list[Stmt], outer: Index, panel: Dim, tile: Dim) -> None:
        """Write a tile of rows and its epilogue, whose code tiles of different heights share."""
        rows, start = self.rows, self.rows.start(tile)
        if rows.ragged is not None:
            self._ragged(block, outer, panel, start, rows.ragged)
        elif rows.tall == 0:
            self._whole(block, outer, panel, start, rows.height)
        else:
            tall: list[Stmt] = []
            low: list[Stmt] = []
            test = Apply("lt", (IndexScalar(tile), Const(static(rows.tall), "i64")), "i1")
            if self.apart:
                self._whole(tall, outer, panel, start, rows.height + 1)
                self._whole(low, outer, panel, start, rows.height)
                block.append(If(test, tuple(tall), tuple(low)))
                return
            out = self._out(block, rows.height + 1)
            self._one(tall, out, outer, panel, start, rows.height + 1)
            self._one(low, out, outer, panel, start, rows.height)
            block.append(If(test, tuple(tall), tuple(low)))
            count = rows.height + minimum(1, maximum(0, rows.tall - tile))
            self._epilogue(block, out, outer, start, panel, count, rows.height + 1)

    def _whole(self, block: list[Stmt], outer: Index, panel: Dim, start: Dim, height: int, done: Dim = 0) -> None:
        """Write a tile of ``height`` rows with an epilogue of its own."""
        out = self._out(block, height)
        self._one(block, out, outer, panel, start, height, done)
        self._epilogue(block, out, outer, start + done, panel, height, height)

    def _ragged(self, block: list[Stmt], outer: Index, panel: Dim, start: Dim, m: Dim) -> None:
        """Write a full tile, or the remaining rows in tiles of powers of two, the largest first."""
        full: list[Stmt] = []
        out = None if self.apart else self._out(block, self.rows.height)
        if self.apart:
            self._whole(full, outer, panel, start, self.rows.height)
        else:
            self._one(full, out, outer, panel, start, self.rows.height)
        rest: list[Stmt] = []
        left = self.e.names("left")
        rest.append(Let(Var(left, "i64"), IndexScalar(m - start)))
        remaining = sym(left, 0, self.rows.height)
        height = 1 << (self.rows.height - 1).bit_length() - 1 if self.rows.height > 1 else 1
        while height:
            part: list[Stmt] = []
            done = (remaining // (2 * height)) * (2 * height)
            if self.apart:
                self._whole(part, outer, panel, start, height, done)
            else:
                self._one(part, out, outer, panel, start, height, done)
            rest.append(If(Apply("eq", (IndexScalar((remaining // height) % 2), Const(1, "i64")), "i1"), tuple(part)))
            height //= 2
        test = Apply("ge", (IndexScalar(m - start), Const(self.rows.height, "i64")), "i1")
        block.append(If(test, tuple(full), tuple(rest)))
        self._epilogue(block, out, outer, start, panel, minimum(self.rows.height, m - start), self.rows.height)

    def _out(self, block: list[Stmt], height: int) -> Buffer | None:
        """Return the buffer of tiles of at most ``height`` rows before the epilogue; None if tiles go to the result."""
        if self._direct():
            return None
        out = Buffer(self.b.fresh("tile"), FORMS[self.p.form].out, (height, self.p.cols), "private")
        block.append(Alloc(out))
        return out

    def _one(
        self, block: list[Stmt], out: Buffer | None, outer: Index, panel: Dim, start: Dim, height: int, done: Dim = 0
    ) -> None:
        """Write one tile of ``height`` rows, beginning ``done`` rows after row ``start``."""
        p, shape = self.p, self.op.result.type.shape
        row = start + done
        own = self.copy
        rows = (p.a, p.a_at(outer, row), p.a_row)
        rows = rows if own is None else (own, done * own.shape[1], own.shape[1])
        if out is None:
            index = p.place(outer, row, panel * p.cols)
            place = self.b.outputs[0], linearize(index, shape), shape[-1]
        else:
            place = out, 0 if self.apart else done * p.cols, p.cols
        block.append(
            Tile(
                height, p.cols, *place, *rows, p.b, p.b_at(outer, panel), p.levels, p.form,
                a_inner=p.a_inner if FORMS[p.form].group > 1 else 1,
            )
        )  # fmt: skip

    def _direct(self) -> bool:
        p = self.p
        only = len(self.results) == 1 and self.results[0][1] is self.op.result and not (p.pixels and p.m != 1)
        return only and isinstance(p.n, int) and p.n % p.cols == 0

    def _epilogue(
        self, block: list[Stmt], tile: Buffer | None, outer: Index, start: Dim, panel: Dim, count: Dim, most: int
    ) -> None:
        """Write the epilogue of ``count`` rows (at most ``most``), unless the tile went to the result directly."""
        if tile is None:
            return
        p = self.p
        column = panel * p.cols
        r = sym("r", 0, most) if most > 1 else 0
        whole = isinstance(p.n, int) and p.n % p.cols == 0
        width: Dim = p.cols if whole else minimum(p.cols, p.n - column)
        c = sym("c", 0, p.cols)
        dropped = maximum(0, column + p.cols - p.n) if p.pixels and not whole else 0
        inner: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inner)
        self.e.anchor(self.op.result, provide(Load(tile, (r, c + dropped))))
        store_results(self.b, self.e, p.place(outer, start + r, column + c))
        block.append(loops_of_tile(inner, count, width, most))


def _loop(name: str, at: Dim, start: Dim, stop: Dim, body: list[Stmt]) -> list[Stmt]:
    """Return a loop for ``at``, or its body if ``at`` is a constant."""
    return [For(name, start, stop, tuple(body))] if isinstance(at, Expr) else body


# --- descriptions ------------------------------------------------------------


def _packed_matmul(b: RegionBuilder, op: Op) -> TiledProduct:
    lhs, panels = op.operands
    a, packed = b.buffers[lhs], b.buffers[panels]
    group, bits = op.attrs["group"], op.attrs.get("bits", 0)
    *batch, m, n = op.result.type.shape
    steps, wide = panels.type.shape[-2:]
    k = steps * group
    turned = op.attrs["lhs_transposed"]
    a_row, a_step = (1, m) if turned else (k, 1)
    count, cols = panels.type.shape[-3], panel_cols(panels.type, op.attrs)
    levels: Levels = ((steps, a_step * group, wide),)
    form = f"{lhs.type.dtype}_i{bits}" if bits else form_of_operands(lhs.type.dtype, panels.type.dtype)
    if bits:
        terms = FORMS[form].group
        levels = (*levels, (group // terms, a_step * terms, cols * bits * terms // 8))
    return TiledProduct(
        form, a, packed, tuple(batch), m, n, cols, k, a_row, a_step, levels,
        lambda outer, row: (outer[0] * m * k if outer else 0) + row * a_row,
        lambda outer, panel: ((outer[0] * count if outer else 0) + panel) * steps * wide,
        lambda outer, row, column: (*outer, row, column),
    )  # fmt: skip


def _matmul(b: RegionBuilder, op: Op) -> TiledProduct:
    """Describe a matmul that reads its right operand in place: rows of ``n`` contiguous elements."""
    lhs, rhs = op.operands
    *batch, m, n = op.result.type.shape
    k, cols = rhs.type.shape[-2], op.attrs["cols"]
    a_row, a_step = (1, m) if op.attrs["lhs_transposed"] else (k, 1)
    form = form_of_operands(lhs.type.dtype, rhs.type.dtype)
    return TiledProduct(
        form, b.buffers[lhs], b.buffers[rhs], tuple(batch), m, n, cols, k, a_row, a_step,
        ((k, a_step, n),),
        lambda outer, row: (outer[0] * m * k if outer else 0) + row * a_row,
        lambda outer, panel: (outer[0] * k * n if outer else 0) + panel * cols,
        lambda outer, row, column: (*outer, row, column),
    )  # fmt: skip


def _packed_conv(b: RegionBuilder, op: Op) -> TiledProduct:
    """Describe a packed convolution: the rows of a tile are neighbouring pixels of one output row.

    No patch is ever copied. Groups are the first dim of the grid: the panels of one group stay in a cache while it
    reads its channels of all pixels.
    """
    lhs, panels = op.operands
    a, packed = b.buffers[lhs], b.buffers[panels]
    shape, strides = lhs.type.shape, op.attrs["strides"]
    kernel, dilation = op.attrs["kernel"], op.attrs["rhs_dilation"]
    channels, group, groups = shape[-1], op.attrs.get("group", 1), op.attrs.get("feature_groups", 1)
    c, count = channels // groups, panels.type.shape[0] // groups
    cols = static(panels.type.shape[-1]) // group
    steps: list[Dim] = [channels]
    for extent in reversed(shape[2:-1]):
        steps.insert(0, steps[0] * extent)
    levels: list[tuple[Dim, Dim, Dim]] = [(c, 1, cols)]  # in single terms
    size: Dim = c
    for extent, step, gap in reversed(list(zip(kernel, steps, dilation, strict=True))):
        if len(levels) == 1 and step * gap == c and size == levels[0][0] and extent * c:
            levels[0] = (extent * c, 1, cols)
        elif extent != 1:
            levels.insert(0, (extent, step * gap, size * cols))
        size = size * extent
    terms, a_step, b_step = levels[-1]
    levels[-1] = (terms // group, a_step * group, b_step * group)
    n_images, *spatial, outputs = op.result.type.shape
    n = outputs // groups
    image = product(shape[1:])
    k = product(kernel) * c
    form = form_of_operands(lhs.type.dtype, panels.type.dtype)
    return TiledProduct(
        form, a, packed, (groups, n_images, *spatial[:-1]), spatial[-1], n, cols, k, strides[-1] * channels, 1,
        tuple(levels),
        lambda at, row: at[0] * c + at[1] * image
        + sum((i * s * step for i, s, step in zip(at[2:], strides[:-1], steps[:-1], strict=True)), 0)
        + row * strides[-1] * channels,
        lambda at, panel: (at[0] * count + panel) * k * cols,
        lambda at, row, column: (*at[1:], row, at[0] * n + column),
    )  # fmt: skip


def _pixel_conv(b: RegionBuilder, op: Op) -> TiledProduct:
    """Describe a convolution of one input channel with pixels as columns.

    The columns of a tile are neighbouring pixels of one output row, its rows are output channels.
    """
    lhs, rhs = op.operands
    shape, strides, cols = lhs.type.shape, op.attrs["strides"], op.attrs["cols"]
    *kernel, _, n = rhs.type.shape
    steps = [product(shape[d + 1 : -1]) for d in range(1, len(shape) - 1)]
    levels: list[tuple[Dim, Dim, Dim]] = []
    size: Dim = n
    for extent, step, gap in reversed(list(zip(kernel, steps, op.attrs["rhs_dilation"], strict=True))):
        if extent != 1:
            levels.insert(0, (extent, size, step * gap))
        size = size * extent
    images, *spatial, _ = op.result.type.shape
    image, pixels = product(shape[1:]), spatial[-1]
    return TiledProduct(
        form_of_operands(rhs.type.dtype, lhs.type.dtype), b.buffers[rhs], b.buffers[lhs], (images, *spatial[:-1]),
        n, pixels, cols, product(kernel), 1, 1, tuple(levels) or ((1, n, 1),),
        lambda at, row: row,
        lambda at, panel: at[0] * image
        + sum((i * s * step for i, s, step in zip(at[1:], strides[:-1], steps[:-1], strict=True)), 0)
        + minimum(panel * cols, pixels - cols),
        lambda at, row, column: (*at, column, row), pixels=True,
    )  # fmt: skip


_DESCRIBE: dict[str, Callable[[RegionBuilder, Op], TiledProduct]] = {
    "packed_matmul": _packed_matmul,
    "packed_conv": _packed_conv,
    "conv": _pixel_conv,
    "matmul": _matmul,
}
