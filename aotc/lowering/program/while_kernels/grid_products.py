"""Emit a matmul by all blocks of a loop's kernel, for few rows or columns, as in each iteration of a recurrent cell.

A block computes a tile of the result. It loads the operands into shared memory, all at once if they fit, so that it
waits for memory once. Its threads compute small parts of the tile for slices of the sum (split-K), which are added in
shared memory. The fused epilogue reads the sums from there::

    for b in blocks(0, 128):
        barrier()
        for t in thread(0, 256): stage[...] = a[...]; stage[4160 + ...] = w[...]
        barrier()
        for t in thread(0, 256): acc[t, i, j] += stage[a's row 4*(t % 16 // 4) + i, term] * stage[w's term, column ...]
        barrier()
        for t in thread(0, 256): stage[t // 16, ...] = acc[t, ...]
        barrier()
        for t in thread(0, 256): out[...] = stage[0, ...] + stage[1, ...] + ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce

from aotc.ir.dims.algebra import Dim, minimum, static, sym
from aotc.ir.loop.forms.matmul import LoopProduct
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, Const, For, If, Index, Load, Scalar, Stmt, Store
from aotc.lowering.analysis.index_maps import delinearize
from aotc.lowering.program.while_kernels.inline_kernels import substitute_loop_values
from aotc.lowering.threshold import BlockSize

LOOP_PRODUCT_TERMS = BlockSize(
    4,
    "terms of a matmul in such a loop that a thread reads at a time",
    "16 bytes of f32, the widest access",
)


@dataclass(frozen=True, slots=True)
class LoopTile:
    """Tiling of a matmul by one block.

    Attributes
    ----------
    rows, cols : int
        The tile of a block.
    thread_rows, thread_cols : int
        The part of the tile that a thread computes.
    terms, slices : int
        Terms of the sum that a thread reads at a time, and number of slices of the sum (split-K).
    chunk : int
        Terms that are in shared memory at a time.
    """

    rows: int
    cols: int
    thread_rows: int
    thread_cols: int
    terms: int
    slices: int = 1
    chunk: int = 1

    @property
    def threads_across(self) -> int:
        """Return the number of threads along a row of the tile."""
        return self.cols // self.thread_cols

    @property
    def threads_per_slice(self) -> int:
        """Return the number of threads that cover the tile once."""
        return self.rows // self.thread_rows * self.threads_across

    @property
    def left_pitch(self) -> int:
        """Return the stride of rows of A in shared memory, padded so that rows are in different banks."""
        return self.chunk + self.terms

    @property
    def right_pitch(self) -> int:
        """Return the stride of terms of B in shared memory, padded likewise."""
        return self.cols + self.thread_cols

    @property
    def staged_elements(self) -> int:
        """Return the number of elements in shared memory."""
        return max(self.rows * self.left_pitch + self.chunk * self.right_pitch, self.slices * self.rows * self.cols)


LOOP_PRODUCT_ROWS = BlockSize(
    16,
    "rows of a matmul in such a loop per block, at most",
    "a block then reads each element of B from the L2 cache once for 16 rows",
)
LOOP_PRODUCT_COLS = BlockSize(
    64,
    "columns of such a matmul per block, at most",
    "a tile and its slices are 16 KiB of shared memory",
)
LOOP_PRODUCT_PART = BlockSize(
    4,
    "rows of such a matmul per thread, at most; the columns per thread follow from it",
    "eight sums in registers, next to 24 elements in flight",
)


def tiling_for_grid_matmul(p: LoopProduct, blocks: int, threads: int, room: int) -> LoopTile:
    """Return a tiling with work for about ``blocks`` blocks, within ``room`` elements of shared memory."""
    batch, m, n, k = (static(extent) for _, extent in (p.batch, p.row, p.col, p.k))
    rows, cols = (
        min(_next_power_of_two(m), LOOP_PRODUCT_ROWS.value),
        min(_next_power_of_two(n), LOOP_PRODUCT_COLS.value // 8),
    )
    while cols < LOOP_PRODUCT_COLS.value and batch * -(-m // rows) * -(-n // cols) > blocks:
        cols *= 2
    while rows > 1 and cols < LOOP_PRODUCT_COLS.value // 8 and batch * -(-m // rows) * -(-n // cols) < blocks // 2:
        rows //= 2
    part, terms = LOOP_PRODUCT_PART.value, LOOP_PRODUCT_TERMS.value
    tall = min(rows, part)
    wide = min(cols, max(part // tall, part // 2))
    while rows // tall * (cols // wide) > threads:
        rows //= 2
        tall = min(rows, part)
    return _tile_with_slices(LoopTile(rows, cols, tall, wide, terms if k % terms == 0 else 1), k, threads, room)


def _tile_with_slices(tile: LoopTile, k: int, threads: int, room: int) -> LoopTile:
    """Return the tile with as many slices as there are threads for, and chunks that fit ``room``."""
    slices = _next_power_of_two(threads // tile.threads_per_slice + 1) // 2
    while slices > 1 and (k // tile.terms) % slices:
        slices //= 2
    each = tile.terms * slices
    for chunks in range(1, k // each + 1):
        if k // each % chunks == 0:
            trial = LoopTile(tile.rows, tile.cols, tile.thread_rows, tile.thread_cols, tile.terms, slices, k // chunks)
            if trial.staged_elements <= room:
                return trial
    return _tile_with_slices(tile, k, threads // 2, room)


def _next_power_of_two(size: int) -> int:
    """Return the least power of two that is at least ``size``."""
    return 1 << max(size - 1, 0).bit_length()


LOOP_STAGE_READS = BlockSize(
    8,
    "reads of 16 bytes that a thread has in flight while it copies operands to shared memory, at most",
    "32 registers",
)


class GridMatmul:
    """Emit a matmul by all blocks of a loop's kernel; operands pass through the shared buffer ``stage``."""

    def __init__(self, p: LoopProduct, tile: LoopTile, threads: int, stage: Buffer, name: str) -> None:
        """Divide the result of ``p`` into tiles, and name the accumulators of ``threads`` threads."""
        self.p, self.tile, self.threads, self.stage, self.name = p, tile, threads, stage, name
        self.dtype = p.total.dtype
        self.m, self.n, self.k = (static(extent) for _, extent in (p.row, p.col, p.k))
        self.extents = (static(p.batch[1]), -(-self.m // tile.rows), -(-self.n // tile.cols))
        self.acc = Buffer(
            self._loop_variable("acc"), self.dtype, (threads, tile.thread_rows, tile.thread_cols), "private"
        )

    def matmul_statements(self) -> list[Stmt]:
        """Return the loop over all tiles of a matmul inside a grid loop."""
        t, (batch, down, right) = self.tile, self.extents
        z, row, col = delinearize(sym(self._loop_variable("b"), 0, batch * down * right), self.extents)
        first, start = row * t.rows, col * t.cols
        chunks = self.k // t.chunk
        q = sym(self._loop_variable("q"), 0, chunks) if chunks > 1 else 0
        stages = self._copy_operands_to_shared(z, first, start, q * t.chunk)
        steps = (Barrier(), stages, Barrier(), self._multiply_add_chunk())
        zero = Const(0.0 if self.dtype.startswith("f") else 0, self.dtype)
        clear = self._thread_loop(
            self._statements_per_thread_element(
                self.threads, lambda i, j, thread: Store(self.acc, (thread, i, j), zero)
            )
        )
        sums = (For(self._loop_variable("q"), 0, chunks, steps),) if chunks > 1 else steps
        body = (
            Alloc(self.acc),
            clear,
            *sums,
            Barrier(),
            self._store_partial_sums(),
            Barrier(),
            self._sum_slices_and_epilogue(z, first, start),
        )
        return [For(self._loop_variable("b"), 0, batch * down * right, body, "blocks")]

    def _loop_variable(self, name: str) -> str:
        return f"{name}{self.name}"

    def _thread_loop(self, body: Sequence[Stmt], count: int = 0) -> For:
        return For(self._loop_variable("t"), 0, count or self.threads, tuple(body), "thread")

    def _unrolled_loop(self, var: str, count: int, body: Sequence[Stmt]) -> For:
        return For(self._loop_variable(var), 0, count, tuple(body), "unroll")

    # --- operands to shared memory ---

    def _copy_operands_to_shared(self, z: Dim, first: Dim, start: Dim, k: Dim) -> For:
        """Return the copies of a chunk of both operands by all threads, each with several reads in flight."""
        t = self.tile
        a, b = self.p.view(), self.p.view(right=True)
        left = self._operand_copies("l", t.rows, a is None or not a.by_rows, self.p.left, (z, first, self.m, k), 0)
        base = t.rows * t.left_pitch
        right = self._operand_copies(
            "r", t.cols, b is not None and not b.by_rows, self.p.right, (z, start, self.n, k), base
        )
        return self._thread_loop([*left, *right])

    def _operand_copies(
        self, name: str, outer: int, by_k: bool, value: Scalar, at: tuple[Dim, Dim, int, Dim], base: int
    ) -> list[Stmt]:  # fmt: skip
        """Return the copies of an operand of ``outer`` rows or columns, contiguous along terms if ``by_k``."""
        t, (z, first, extent, k0) = self.tile, at
        inner = t.chunk if by_k else outer
        width = min(LOOP_PRODUCT_TERMS.value, inner) if inner % LOOP_PRODUCT_TERMS.value == 0 or inner < 4 else 1
        pieces = outer * t.chunk // width
        reads = max(n for n in (1, 2, 4, 8) if n <= LOOP_STAGE_READS.value and (n == 1 or pieces >= n * self.threads))
        own = Buffer(self._loop_variable(f"h{name}"), self.dtype, (reads, width), "private")
        v, u = (sym(self._loop_variable(f"{x}{name}"), 0, count) for x, count in (("v", reads), ("u", width)))
        iteration = sym(self._loop_variable(f"c{name}"), 0, -(-pieces // (reads * self.threads)))
        thread = sym(self._loop_variable("t"), 0, self.threads)

        def tile_position(piece: Dim, lane: Dim) -> tuple[Dim, Dim]:
            """Return the row or column within the tile, and the term within the chunk."""
            flat = piece * width + lane
            return (flat // inner, flat % inner) if by_k else (flat % inner, flat // inner)

        stmts: list[Stmt] = [Alloc(own)]
        piece = (iteration * reads + v) * self.threads + thread
        whole = pieces % (reads * self.threads) == 0
        other, term = tile_position(piece if whole else minimum(piece, pieces - 1), u)
        clamped = first + other if extent % outer == 0 else minimum(first + other, extent - 1)
        places = (z, clamped, 0, k0 + term) if name == "l" else (z, 0, clamped, k0 + term)
        other, term = tile_position(piece, u)
        to = other * t.left_pitch + term if name == "l" else base + term * t.right_pitch + other
        keep: Stmt = self._unrolled_loop(f"u{name}", width, [Store(self.stage, (to,), Load(own, (v, u)))])
        if not whole:
            keep = If(Apply("lt", (Index(piece), Index(pieces)), "i1"), (keep,))
        lanes = For(self._loop_variable(f"u{name}"), 0, width, self._guarded_read(own, (v, u), value, places), "lanes")
        body = (
            self._unrolled_loop(f"v{name}", reads, [lanes]),
            self._unrolled_loop(f"v{name}", reads, [keep]),
        )  # fmt: skip
        stmts.append(For(self._loop_variable(f"c{name}"), 0, -(-pieces // (reads * self.threads)), body))
        return stmts

    def _guarded_read(self, to: Buffer, index: tuple[Dim, ...], value: Scalar, at: Sequence[Dim]) -> tuple[Stmt, ...]:
        """Return the statements that copy the operand's element at (batch, row, column, term) to ``to``."""
        p = self.p
        if value.dtype != self.dtype:
            value = Apply("convert", (value,), self.dtype)
        values = dict(zip((p.batch[0], p.row[0], p.col[0], p.k[0]), at, strict=True))
        *before, last = substitute_loop_values(
            (*p.lets, Store(Buffer("", self.dtype, ()), (), value)), values, f"{self.name}r"
        )
        assert isinstance(last, Store)
        return (*before, Store(to, index, last.value))

    # --- sums ---

    def _corner_of_thread(self, thread: Dim) -> tuple[Dim, Dim, Dim]:
        """Return the slice, and the first row and column, of a thread's part of the tile."""
        t = self.tile
        at = thread % t.threads_per_slice
        return (
            thread // t.threads_per_slice,
            at // t.threads_across * t.thread_rows,
            at % t.threads_across * t.thread_cols,
        )

    def _statements_per_thread_element(self, count: int, make: Callable[[Dim, Dim, Dim], Stmt]) -> list[Stmt]:
        """Return a statement for each element of the part of each of ``count`` threads."""
        t = self.tile
        i, j = sym(self._loop_variable("i"), 0, t.thread_rows), sym(self._loop_variable("j"), 0, t.thread_cols)
        stmt = make(i, j, sym(self._loop_variable("t"), 0, count))
        return [self._unrolled_loop("i", t.thread_rows, [self._unrolled_loop("j", t.thread_cols, [stmt])])]

    def _multiply_add_chunk(self) -> For:
        """Return the multiply-adds of each thread's rows and columns of the chunk."""
        t = self.tile
        count = t.slices * t.threads_per_slice
        slice_, down, right = self._corner_of_thread(sym(self._loop_variable("t"), 0, count))
        iterations = t.chunk // (t.terms * t.slices)
        s, u = (
            sym(self._loop_variable("s"), 0, iterations) if iterations > 1 else 0,
            sym(self._loop_variable("u"), 0, t.terms),
        )
        term = (s * t.slices + slice_) * t.terms + u

        def multiply_add(i: Dim, j: Dim, thread: Dim) -> Store:
            a = Load(self.stage, ((down + i) * t.left_pitch + term,))
            b = Load(self.stage, (t.rows * t.left_pitch + term * t.right_pitch + right + j,))
            return Store(self.acc, (thread, i, j), Apply("mul", (a, b), self.dtype), "add")

        step = self._unrolled_loop("u", t.terms, self._statements_per_thread_element(count, multiply_add))
        return self._thread_loop(
            [For(self._loop_variable("s"), 0, iterations, (step,))] if iterations > 1 else [step], count
        )

    def _store_partial_sums(self) -> For:
        """Return the stores of each thread's sums to its slice in shared memory."""
        t = self.tile
        count = t.slices * t.threads_per_slice
        slice_, down, right = self._corner_of_thread(sym(self._loop_variable("t"), 0, count))

        def store_sum(i: Dim, j: Dim, thread: Dim) -> Store:
            to = (slice_ * t.rows + down + i) * t.cols + right + j
            return Store(self.stage, (to,), Load(self.acc, (thread, i, j)))

        return self._thread_loop(self._statements_per_thread_element(count, store_sum), count)

    def _sum_slices_and_epilogue(self, z: Dim, first: Dim, start: Dim) -> For:
        """Return the sum of the slices, followed by the epilogue."""
        t, p = self.tile, self.p
        size = t.rows * t.cols
        f = sym(self._loop_variable("f"), 0, size)
        row, col = first + f // t.cols, start + f % t.cols
        parts: list[Scalar] = [Load(self.stage, (n * size + f,)) for n in range(t.slices)]
        total = Buffer(p.total.name, self.dtype, (), "private")
        values = dict(zip((p.batch[0], p.row[0], p.col[0]), (z, row, col), strict=True))
        total_of = reduce(lambda a, b: Apply("add", (a, b), self.dtype), parts)
        body: tuple[Stmt, ...] = (
            Alloc(total), Store(total, (), total_of), *substitute_loop_values(p.epilogue, values, f"{self.name}e")
        )  # fmt: skip
        for at, extent, width in ((row, self.m, t.rows), (col, self.n, t.cols)):
            if extent % width:
                body = (If(Apply("lt", (Index(at), Index(extent)), "i1"), body),)
        thread = sym(self._loop_variable("t"), 0, self.threads)
        return self._thread_loop([For(self._loop_variable("f"), thread, size, body, "serial", self.threads)])
