"""Base of factorisations of a matrix in GPU memory, column by column, by one block: warps process columns.

The matrix is stored by columns, as in LAPACK. Columns are distributed round-robin to warps, rows to their lanes.
Results of one warp that all warps need, such as a pivot or a reflector, are in the matrix itself and in a few words of
shared memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, ceildiv, maximum, mod, sym
from aotc.ir.loop.ir import WARP, Alloc, Apply, Barrier, Buffer, Const, For, If, Load, Scalar, Shuffle, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import constant_scalar, real_and_imaginary
from aotc.vmfb.dtypes import kind_of, real_of

Fill = Callable[[list[Stmt]], None]
Join = Callable[[Sequence[Scalar], Sequence[Scalar]], Sequence[Scalar]]


def binary_call(name: str, x: Scalar, y: Scalar) -> Scalar:
    """Return the scalar expression ``name(x, y)`` for operands of one dtype."""
    return Apply(name, (x, y), x.dtype)


def comparison_call(name: str, x: Scalar, y: Scalar) -> Scalar:
    """Return the comparison ``name(x, y)`` of scalars of one dtype."""
    return Apply(name, (x, y), "i1")


class MatrixColumns:
    """Emit statements over the columns of the matrix ``out[head]``; column ``j`` is ``out[head, j]``."""

    def __init__(self, b: RegionBuilder, out: Buffer, head: Index, warps: int) -> None:
        """Divide the threads of a block into ``warps``; ``head`` is the index of the matrix in the batch."""
        self.b, self.e, self.out, self.head = b, b.elements(), out, head
        self.columns, self.rows = out.shape[len(head) :]
        self.dtype, self.real = out.dtype, real_of(out.dtype)
        self.warps, self.threads = warps, warps * WARP
        self.t = sym("t", 0, self.threads)
        self.lane, self.warp = mod(self.t, WARP), self.t // WARP
        self.made: list[Buffer] = []

    # --- buffers ---

    def allocate_per_thread(self, dtype: str = "") -> Buffer:
        """Allocate a buffer with one scalar per thread."""
        return self._real_buffer_value(Buffer(self.b.fresh("own"), dtype or self.dtype, (self.threads,), "private"))

    def allocate_shared(self, dtype: str = "") -> Buffer:
        """Allocate a buffer with one scalar shared by all threads of the block."""
        return self._real_buffer_value(Buffer(self.b.fresh("held"), dtype or self.dtype, (1,), "shared"))

    def _real_buffer_value(self, buffer: Buffer) -> Buffer:
        self.made.append(buffer)
        return buffer

    def with_allocations(self, body: Sequence[Stmt]) -> list[Stmt]:
        """Return ``body`` preceded by the allocations of its buffers."""
        return [*map(Alloc, self.made), *body]

    def element_index(self, column: Dim, row: Dim) -> Index:
        """Return the buffer index of the matrix element at ``column`` and ``row``."""
        return (*self.head, column, row)

    def load_element(self, column: Dim, row: Dim) -> Scalar:
        """Return the load of the matrix element at ``column`` and ``row``."""
        return Load(self.out, self.element_index(column, row))

    def index_in_buffer(self, of: Buffer, extent: Dim) -> Dim:
        """Return the integer in a shared buffer as an index below ``extent``."""
        return sym(self.e.bind(Load(of, (0,)), "n").name, 0, extent)

    def load_of_thread_scalar(self, buffer: Buffer) -> Scalar:
        """Return the load of the thread's own scalar in ``buffer``."""
        return Load(buffer, (self.t,))

    def store_thread_scalar(self, buffer: Buffer, value: Scalar) -> Stmt:
        """Return the store of the thread's own scalar to ``buffer``."""
        return Store(buffer, (self.t,), value)

    def zero_constant(self, dtype: str = "") -> Scalar:
        """Return the constant 0 of ``dtype``."""
        return constant_scalar(0, dtype or self.dtype)

    # --- loops ---

    def loop_over_threads(self, fill: Fill, count: int = 0) -> Stmt:
        """Return a loop over the first ``count`` threads of the block, or all of them."""
        block = self.e.new_block()
        fill(block)
        return For("t", 0, count or self.threads, tuple(block), "thread")

    def append_on_first_lane(self, block: list[Stmt], body: Sequence[Stmt]) -> None:
        """Append statements that only the first lane of a warp executes."""
        block.append(If(comparison_call("eq", IndexScalar(self.lane), Const(0, "i64")), tuple(body)))

    def append_row_loop(self, block: list[Stmt], first: Dim, each: Callable[[Dim], Sequence[Stmt]]) -> None:
        """Append a loop over the rows from ``first`` on, distributed over the lanes of a warp."""
        name = self.b.fresh("i")
        inner = self.e.new_block()
        inner += each(sym(name, 0, self.rows))
        block.append(For(name, first + self.lane, self.rows, tuple(inner), step=WARP))
        self.e.enter(block)

    def loop_over_columns(self, first: Dim, body: Callable[[Dim, Callable[[Fill], Stmt]], Sequence[Stmt]]) -> Stmt:
        """Return a loop over the columns from ``first`` on, one per warp and iteration.

        ``body(column, by)`` returns the statements of an iteration; ``by(fill)`` restricts statements to threads that
        have a column.
        """
        name = self.b.fresh("c")
        count = maximum(ceildiv(self.columns - first, self.warps), 0)
        column = first + sym(name, 0, count) * self.warps + self.warp

        def restrict_to_columns(fill: Fill) -> Stmt:
            inner = self.e.new_block()
            fill(inner)
            exists = comparison_call("lt", IndexScalar(column), IndexScalar(self.columns))
            return For("t", 0, self.threads, (If(exists, tuple(inner)),), "thread")

        return For(name, 0, count, tuple(body(column, restrict_to_columns)))

    def warp_butterfly_reduce(
        self, buffers: Sequence[Buffer], join: Join, count: int = 0, first: int = 1, last: int = WARP
    ) -> list[Stmt]:
        """Return a butterfly reduction by ``join``: every lane of a warp gets the result over all lanes.

        Only ``last`` neighbouring lanes take part, and of these every ``first``-th, if given.
        """
        others = [self.allocate_per_thread(buffer.dtype) for buffer in buffers]
        stmts: list[Stmt] = []
        for mask in [m for m in (16, 8, 4, 2, 1) if first <= m < last]:
            stmts += [Shuffle(other, buffer, mask) for other, buffer in zip(others, buffers, strict=True)]

            def append_exchange(block: list[Stmt]) -> None:
                own, theirs = ([self.e.bind(self.load_of_thread_scalar(x)) for x in row] for row in (buffers, others))
                values = [self.e.bind(x) for x in join(own, theirs)]
                block += [self.store_thread_scalar(buffer, x) for buffer, x in zip(buffers, values, strict=True)]

            stmts.append(self.loop_over_threads(append_exchange, count))
        return stmts

    def warp_sum(self, buffer: Buffer, count: int = 0) -> list[Stmt]:
        """Return a warp reduction by addition: every lane gets the sum over all lanes."""
        return self.warp_butterfly_reduce([buffer], lambda x, y: [binary_call("add", x[0], y[0])], count)

    def pivot_magnitude(self, x: Scalar) -> Scalar:
        """Return ``|x|``; for a complex number ``|re| + |im|``, by which LAPACK compares pivots."""
        if kind_of(x.dtype) != "c":
            return Apply("abs", (x,), x.dtype)
        parts = [Apply("abs", (part,), self.real) for part in real_and_imaginary(x)]
        return binary_call("add", *parts)


WARP_BARRIER, BLOCK_BARRIER = Barrier(warp=True), Barrier()
