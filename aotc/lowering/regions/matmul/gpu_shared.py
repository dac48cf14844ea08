"""Matmuls on a GPU without tensor cores: operands pass through shared memory, sums accumulate in registers.

A block of threads computes ``rows x cols`` elements of the result. Each thread accumulates a small part of them in
registers while slices of both operands pass through shared memory::

    for q in range(K / depth):
        for t in thread(0, 256): left[kk, r] = a[row + r, q*depth + kk]; right[kk, c] = b[q*depth + kk, column + c]
        barrier()
        for t in thread(0, 256): acc[t, i, j] += left[kk, ...] * right[kk, ...]
        barrier()

The sums then go to shared memory, so that the fused epilogue runs over neighbouring columns. A convolution is the
matmul of its patches, which are never stored, and its kernel.
"""

from __future__ import annotations

from collections.abc import Callable

from aotc.ir.dims.algebra import Dim, minimum, product, sym
from aotc.ir.loop.ir import Alloc, Apply, Barrier, Buffer, For, If, Kernel, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.tensor.ir import Value
from aotc.lowering.analysis.contractions import contraction_of, sum_dtype
from aotc.lowering.analysis.index_maps import Index, delinearize
from aotc.lowering.elements.builder import RegionBuilder, grid_item, store_results
from aotc.lowering.elements.contract_elements import conv_element
from aotc.lowering.elements.elements import constant_scalar, provide_scalar
from aotc.lowering.plans.gpu_contract import SLICE_PAD, SharedTilePlan
from aotc.vmfb.dtypes import to_numpy


def lower_shared_tiles(b: RegionBuilder, plan: SharedTilePlan) -> Kernel:
    """Lower a matmul or convolution to GPU tiles in shared memory, without tensor cores."""
    return _SharedTileMatmul(b, plan).shared_tile_kernel()


class _SharedTileMatmul:
    """Emit the grid, the copies to shared memory, the sums and the epilogue of a matmul."""

    def __init__(self, b: RegionBuilder, shape: SharedTilePlan) -> None:
        """Name the shared slices of both operands, the accumulators of threads and the shared result tile."""
        self.b, self.op, self.p, self.shape = b, b.root, contraction_of(b.root), shape
        self.e = b.elements()
        self.dtype = sum_dtype(b.root)
        self.left = Buffer("left", self.dtype, (shape.depth, shape.rows + SLICE_PAD), "shared")
        self.right = Buffer("right", self.dtype, (shape.depth, shape.cols + SLICE_PAD), "shared")
        self.acc = Buffer("acc", self.dtype, (shape.threads, shape.thread_rows, shape.thread_cols), "private")
        self.sums = Buffer("sums", self.dtype, (shape.rows, shape.cols), "shared")

    def shared_tile_kernel(self) -> Kernel:
        """Return the matmul kernel with shared-memory tiles."""
        p, s = self.p, self.shape
        extents = (*p.batch, (p.m + (s.rows - 1)) // s.rows, (p.n + (s.cols - 1)) // s.cols)
        grid = product(extents)
        *batch, row, column = delinearize(grid_item(grid), extents)
        at, first, start = tuple(batch), row * s.rows, column * s.cols
        zero = constant_scalar(to_numpy(self.dtype).type(0), self.dtype)
        clear: tuple[Stmt, ...] = (Store(self.acc, self._accumulator_index(), zero),)
        steps = (p.k + (s.depth - 1)) // s.depth
        q = sym("q", 0, steps) if steps != 1 else 0
        slice_ = (
            *self._copy_k_slice_to_shared(at, first, start, q * s.depth),
            Barrier(),
            self._multiply_add_slice(),
            Barrier(),
        )
        block: list[Stmt] = [Alloc(x) for x in (self.left, self.right, self.acc, self.sums)]
        block.append(self._thread_loop(self._unrolled_part_loops(clear)))
        block += [For("q", 0, steps, slice_)] if steps != 1 else slice_
        block += [self._store_sums_to_shared(), Barrier(), self._shared_tile_epilogue(at, first, start)]
        return self.b.grid(grid, block, product((*p.batch, p.m, p.n, p.k)) * 2)

    def _thread_loop(self, body: tuple[Stmt, ...]) -> For:
        return For("t", 0, self.shape.threads, body, "thread")

    def _thread_index(self) -> Dim:
        return sym("t", 0, self.shape.threads)

    def _accumulator_index(self) -> Index:
        """Return the index of element (i, j) of a thread's part in the accumulators."""
        return (self._thread_index(), sym("i", 0, self.shape.thread_rows), sym("j", 0, self.shape.thread_cols))

    def _thread_row_and_column(self) -> tuple[Dim, Dim]:
        """Return the row and column of element (i, j) of a thread's part in the block."""
        s = self.shape
        across = s.cols // s.thread_cols
        t, i, j = self._accumulator_index()
        return (t // across) * s.thread_rows + i, (t % across) * s.thread_cols + j

    def _unrolled_part_loops(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        inner = For("j", 0, self.shape.thread_cols, body, "unroll")
        return (For("i", 0, self.shape.thread_rows, (inner,), "unroll"),)

    def _copy_k_slice_to_shared(self, at: Index, first: Dim, start: Dim, k0: Dim) -> tuple[Stmt, ...]:
        """Emit the copy of a k-slice of both operands to shared memory; 0 beyond the end of k."""
        p, s = self.p, self.shape
        lhs, rhs = self.op.operands

        def left_index(r: Dim, k: Dim) -> Index:
            return p.lhs(at, minimum(first + r, p.m - 1), k)

        def right_index(c: Dim, k: Dim) -> Index:
            return p.rhs(at, k, minimum(start + c, p.n - 1))

        body = (
            self._thread_copy_loop(lhs, self.left, s.rows, p.lhs_by_terms, k0, left_index),
            self._thread_copy_loop(rhs, self.right, s.cols, p.rhs_by_terms, k0, right_index),
        )
        return (self._thread_loop(body),)

    def _thread_copy_loop(
        self, source: Value, to: Buffer, width: int, by_k: bool, k0: Dim, index: Callable[[Dim, Dim], Index]
    ) -> For:
        """Return the loop of one thread's copies; neighbouring threads copy neighbours in memory."""
        depth = self.shape.depth
        each = width * depth // self.shape.threads
        u = self.b.fresh("u")
        flat = sym(u, 0, each) * self.shape.threads + self._thread_index()
        other, kk = (flat // depth, flat % depth) if by_k else (flat % width, flat // width)
        k = k0 + kk
        inside: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inside)
        place, padded = index(other, minimum(k, self.p.k - 1)), self.op.name == "conv" and source is self.op.operands[0]
        value = conv_element(self.e, self.op, place) if padded else self.e.at(source, place)
        if value.dtype != self.dtype:
            value = Apply("convert", (value,), self.dtype)
        if not isinstance(self.p.k, int) or self.p.k % depth:
            exists = Apply("lt", (IndexScalar(k), IndexScalar(self.p.k)), "i1")
            zero = constant_scalar(to_numpy(self.dtype).type(0), self.dtype)
            value = Apply("select", (exists, value, zero), self.dtype)
        inside.append(Store(to, (kk, other), value))
        return For(u, 0, each, tuple(inside), "unroll")

    def _multiply_add_slice(self) -> For:
        """Return the multiply-adds of one k-slice, unrolled so that LLVM merges neighbouring loads."""
        kk = sym("kk", 0, self.shape.depth)
        row, column = self._thread_row_and_column()
        term = Apply("mul", (Load(self.left, (kk, row)), Load(self.right, (kk, column))), self.dtype)
        add = self._unrolled_part_loops((Store(self.acc, self._accumulator_index(), term, "add"),))
        return self._thread_loop((For("kk", 0, self.shape.depth, add, "unroll"),))

    def _store_sums_to_shared(self) -> For:
        """Return the stores of all threads' sums to shared memory."""
        return self._thread_loop(
            self._unrolled_part_loops(
                (Store(self.sums, self._thread_row_and_column(), Load(self.acc, self._accumulator_index())),)
            )
        )

    def _shared_tile_epilogue(self, at: Index, first: Dim, start: Dim) -> For:
        """Return the epilogue: results from the sums in shared memory, neighbouring columns in neighbouring threads."""
        p, s = self.p, self.shape
        size = s.rows * s.cols
        f = sym("f", 0, size)
        r, c = f // s.cols, f % s.cols
        inside: list[Stmt] = []
        self.e.anchored.clear()
        self.e.enter(inside)
        total: Scalar = Load(self.sums, (r, c))
        dtype = self.op.result.type.dtype
        self.e.anchor(
            self.op.result, provide_scalar(total if dtype == self.dtype else Apply("convert", (total,), dtype))
        )
        store_results(self.b, self.e, p.result(at, first + r, start + c))
        for offset, extent, width in ((first + r, p.m, s.rows), (start + c, p.n, s.cols)):
            if not isinstance(extent, int) or extent % width:
                inside = [If(Apply("lt", (IndexScalar(offset), IndexScalar(extent)), "i1"), tuple(inside))]
        return self._thread_loop((For("f", self._thread_index(), size, tuple(inside), step=s.threads),))
