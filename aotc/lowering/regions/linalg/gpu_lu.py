"""``getrf`` on a GPU, column by column (:mod:`.gpu_factor_common`): LU factorisation with partial pivoting.

A block of threads factors a matrix::

    for k in range(min(m, n)):
        p = the row from k on whose element of column k is largest    # a warp
        swap rows k and p of column k, divide the rows below by a[k, k]
        barrier
        for j in the columns but k:                                   # a warp for each
            swap rows k and p of column j
            if j > k: a[k+1:, j] -= a[k+1:, k] * a[k, j]
        barrier
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from aotc.ir.dims.algebra import Dim, minimum, sym
from aotc.ir.loop.ir import WARP, Apply, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.linalg.gpu_factors import ColumnLuPlan
from aotc.lowering.regions.linalg.gpu_factor_common import (
    BLOCK_BARRIER,
    WARP_BARRIER,
    Fill,
    MatrixColumns,
    binary_call,
    comparison_call,
)
from aotc.lowering.regions.linalg.gpu_lu_blocked import larger_pivot


def lu_with_pivots(b: RegionBuilder, head: Index, plan: ColumnLuPlan) -> list[Stmt]:
    """Return the statements that factor the matrix ``head`` of the first output in place.

    The other outputs are the pivots, counted from 1, and the number of the first zero pivot (0: none).
    """
    return _ColumnLu(b, head, plan).factor_statements()


class _ColumnLu:
    """Emit the column-by-column LU factorisation of a matrix by a block of threads."""

    def __init__(self, b: RegionBuilder, head: Index, plan: ColumnLuPlan) -> None:
        """Allocate the scalars of each thread and the shared pivot; ``head`` is the index of the matrix."""
        matrix, self.pivots, self.status = b.outputs
        self.c = c = MatrixColumns(b, matrix, head, plan.warps)
        self.e, self.head, self.name = c.e, head, b.fresh("k")
        self.count = minimum(c.rows, c.columns)
        self.best, self.row = c.allocate_per_thread(c.real), c.allocate_per_thread("i64")
        self.upper, self.lower = c.allocate_per_thread(), c.allocate_per_thread()
        self.pivot, self.failed = c.allocate_shared("i64"), c.allocate_shared("i32")

    def factor_statements(self) -> list[Stmt]:
        """Return all statements of a column-wise LU factorization, with their allocations."""
        c, k = self.c, sym(self.name, 0, self.count)
        start = c.loop_over_threads(lambda block: block.append(Store(self.failed, (0,), Const(0, "i32"))), 1)
        steps = [
            *self._search_pivot(k),
            *self._swap_and_divide_column(k),
            BLOCK_BARRIER,
            self._update_other_columns(k),
            BLOCK_BARRIER,
        ]
        end = c.loop_over_threads(lambda block: block.append(Store(self.status, self.head, Load(self.failed, (0,)))), 1)
        return c.with_allocations([start, For(self.name, 0, self.count, tuple(steps)), end])

    def _search_pivot(self, k: Dim) -> list[Stmt]:
        """Return the search for the largest element of column ``k``; of equal ones the first."""
        c = self.c

        def clear_candidate(block: list[Stmt]) -> None:
            block += [
                c.store_thread_scalar(self.best, Const(-1.0, c.real)),
                c.store_thread_scalar(self.row, IndexScalar(k)),
            ]

        def search_column(block: list[Stmt]) -> None:
            """Append the search of each lane's rows for the element of largest magnitude."""
            def compare_row(i: Dim) -> list[Stmt]:
                size = self.e.bind(c.pivot_magnitude(self.e.bind(c.load_element(k, i))))
                better = (c.store_thread_scalar(self.best, size), c.store_thread_scalar(self.row, IndexScalar(i)))
                self.e.block.append(If(comparison_call("gt", size, c.load_of_thread_scalar(self.best)), better))
                return []

            c.append_row_loop(block, k, compare_row)

        return [
            c.loop_over_threads(clear_candidate),
            c.loop_over_threads(search_column, WARP),
            *c.warp_butterfly_reduce([self.best, self.row], larger_pivot, WARP),
        ]

    def _swap_and_divide_column(self, k: Dim) -> list[Stmt]:
        """Return the swap that moves the pivot of column ``k`` to the diagonal, and the division by it."""
        c = self.c

        def swap_rows(block: list[Stmt]) -> None:
            """Swap elements ``k`` and ``p`` of the column; record the pivot, and the first zero pivot in ``failed``."""
            inner = self.e.new_block()
            p = sym(self.e.bind(c.load_of_thread_scalar(self.row), "n").name, 0, c.rows)
            x, y = self.e.bind(c.load_element(k, k)), self.e.bind(c.load_element(k, p))
            is_first = binary_call(
                "and",
                comparison_call("eq", y, c.zero_constant()),
                comparison_call("eq", Load(self.failed, (0,)), Const(0, "i32")),
            )
            number = Apply("convert", (IndexScalar(k + 1),), "i32")
            inner += [
                Store(c.out, c.element_index(k, k), y), Store(c.out, c.element_index(k, p), x),
                Store(self.pivot, (0,), IndexScalar(p)),
                Store(self.pivots, (*self.head, k), Apply("convert", (IndexScalar(p + 1),), "i32")),
                If(is_first, (Store(self.failed, (0,), number),)),
            ]  # fmt: skip
            c.append_on_first_lane(block, inner)

        def divide_column(block: list[Stmt]) -> None:
            """Append the division of the rows below ``k`` by the pivot, unless that is 0."""
            pivot = self.e.bind(c.load_element(k, k))
            inner = self.e.new_block()
            c.append_row_loop(
                inner,
                k + 1,
                lambda i: [Store(c.out, c.element_index(k, i), binary_call("div", c.load_element(k, i), pivot))],
            )
            block.append(If(comparison_call("ne", pivot, c.zero_constant()), tuple(inner)))

        return [
            WARP_BARRIER,
            c.loop_over_threads(swap_rows, WARP),
            WARP_BARRIER,
            c.loop_over_threads(divide_column, WARP),
        ]

    def _update_other_columns(self, k: Dim) -> Stmt:
        """Return the row swap in the other columns, and the trailing update by column ``k``."""
        c = self.c

        def update_column(column: Dim, by: Callable[[Fill], Stmt]) -> Sequence[Stmt]:
            """Return the two passes of a warp over ``column``: read both elements of the swap, then swap and update."""
            def read_swapped_elements(block: list[Stmt]) -> None:
                p = c.index_in_buffer(self.pivot, c.rows)
                block += [
                    c.store_thread_scalar(self.upper, c.load_element(column, p)),
                    c.store_thread_scalar(self.lower, c.load_element(column, k)),
                ]

            def write_swapped_column(block: list[Stmt]) -> None:
                """Append the swap; right of column ``k``, also subtract the pivot row from the rows below."""
                p = c.index_in_buffer(self.pivot, c.rows)
                u, low = (
                    self.e.bind(c.load_of_thread_scalar(self.upper)),
                    self.e.bind(c.load_of_thread_scalar(self.lower)),
                )
                is_other = comparison_call("ne", IndexScalar(column), IndexScalar(k))
                swapped = [Store(c.out, c.element_index(column, p), low), Store(c.out, c.element_index(column, k), u)]
                before: list[Stmt] = []
                c.append_on_first_lane(before, swapped)
                behind = self.e.new_block()
                c.append_on_first_lane(behind, swapped[1:])
                c.append_row_loop(behind, k + 1, lambda i: [self._subtract_pivot_row(k, column, i, p, u, low)])
                later = If(comparison_call("gt", IndexScalar(column), IndexScalar(k)), tuple(behind), tuple(before))
                block.append(If(is_other, (later,)))

            return [by(read_swapped_elements), WARP_BARRIER, by(write_swapped_column)]

        return c.loop_over_columns(0, update_column)

    def _subtract_pivot_row(self, k: Dim, column: Dim, i: Dim, p: Dim, u: Scalar, low: Scalar) -> Stmt:
        """Return the update of one element; row ``p`` reads the element ``low`` that the swap moves there."""
        c = self.c
        old = Apply(
            "select", (comparison_call("eq", IndexScalar(i), IndexScalar(p)), low, c.load_element(column, i)), c.dtype
        )
        return Store(
            c.out, c.element_index(column, i), binary_call("sub", old, binary_call("mul", c.load_element(k, i), u))
        )
