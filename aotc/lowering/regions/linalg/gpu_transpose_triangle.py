"""Copy one triangle of a matrix to the other on a GPU: warps transpose tiles in shared memory, along rows in memory."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, ceildiv, mod, sym
from aotc.ir.loop.ir import WARP, Alloc, Apply, Barrier, Buffer, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import conjunction_of_tests, constant_scalar, test_index
from aotc.lowering.plans.linalg.gpu_triangles import BlockCholeskyPlan
from aotc.vmfb.dtypes import kind_of


class TriangleTranspose:
    """Emit copies of one triangle of a square matrix to the other, conjugated, by all threads of a block."""

    def __init__(self, b: RegionBuilder, out: Buffer, head: Index, plan: BlockCholeskyPlan) -> None:
        """Divide the matrix into tiles, and name a tile in shared memory for each warp."""
        self.b, self.out, self.head, self.n = b, out, head, out.shape[-1]
        self.threads, self.side = plan.block.threads, plan.mirror
        self.held = Buffer(b.fresh("held"), out.dtype, plan.transposing_tile_shape, "shared")
        self.t = sym("t", 0, self.threads)
        self.tiles = ceildiv(self.n, self.side)

    def allocate_tiles(self) -> Stmt:
        """Return the allocation of the transposition tiles in shared memory."""
        return Alloc(self.held)

    def copy_lower_to_upper(self) -> list[Stmt]:
        """Return the copy of the lower triangle to the upper one, without the diagonal."""
        return self._transpose_tiles(up=True)

    def move_upper_to_lower(self) -> list[Stmt]:
        """Return the copy of the upper triangle to the lower one; it clears the upper one."""
        return self._transpose_tiles(up=False)

    def clear_lower_triangle(self) -> list[Stmt]:
        """Return the clearing of the lower triangle."""
        k = self.b.fresh("k")
        i = sym(self.b.fresh("i"), 0, self.n)
        zero = Store(self.out, self._matrix_index(i, sym(k, 0, self.n)), constant_scalar(0, self.out.dtype))
        across = For(k, mod(self.t, WARP), i, (zero,), step=WARP)
        down = For(str(i), self.t // WARP, self.n, (across,), step=self.threads // WARP)
        return [For("t", 0, self.threads, (down,), "thread")]

    def _matrix_index(self, i: Dim, k: Dim) -> Index:
        return (*self.head, i, k)

    def _transpose_tiles(self, up: bool) -> list[Stmt]:
        """Return rounds of tile transposes, one tile per warp, for tiles on one side of the diagonal."""
        rounds = ceildiv(self.tiles * self.tiles, self.threads // WARP)
        number = sym("r", 0, rounds) * (self.threads // WARP) + self.t // WARP
        row, column = number // self.tiles, mod(number, self.tiles)
        tests = [
            *test_index(number, self.tiles * self.tiles, "lt"),
            Apply("le", (IndexScalar(row), IndexScalar(column)), "i1"),
        ]
        source, target = ((column, row), (row, column)) if up else ((row, column), (column, row))
        u = sym("u", 0, self.side * self.side // WARP)
        a, c = (u * WARP + mod(self.t, WARP)) // self.side, mod(u * WARP + mod(self.t, WARP), self.side)
        warp = self.t // WARP

        def loop_over_tile(stmts: list[Stmt]) -> For:
            unrolled = For("u", 0, self.side * self.side // WARP, tuple(stmts), "unroll")
            return For("t", 0, self.threads, (If(conjunction_of_tests(tests), (unrolled,)),), "thread")

        i, k = source[0] * self.side + a, source[1] * self.side + c
        read = self._guarded_in_matrix(
            i, k, [], Store(self.held, (warp, a, c), Load(self.out, self._matrix_index(i, k)))
        )
        i, k = target[0] * self.side + a, target[1] * self.side + c
        # The tile is read by columns here, so that both accesses to global memory are along rows.
        value: Scalar = Load(self.held, (warp, c, a))
        if kind_of(self.out.dtype) == "c":
            value = Apply("conj", (value,), value.dtype)
        first, last = (i, k) if up else (k, i)
        writes = [
            self._guarded_in_matrix(
                i, k, [_index_less_than(first, last)], Store(self.out, self._matrix_index(i, k), value)
            )
        ]
        if not up:
            i, k = source[0] * self.side + a, source[1] * self.side + c
            zero = Store(self.out, self._matrix_index(i, k), constant_scalar(0, self.out.dtype))
            writes.append(self._guarded_in_matrix(i, k, [_index_less_than(i, k)], zero))
        steps = (loop_over_tile([read]), Barrier(warp=True), loop_over_tile(writes), Barrier(warp=True))
        return [For("r", 0, rounds, steps)]

    def _guarded_in_matrix(self, i: Dim, k: Dim, tests: list[Scalar], stmt: Stmt) -> Stmt:
        """Return a statement guarded by ``tests``, and by a test that ``(i, k)`` is in the matrix."""
        if mod(self.n, self.side) != 0:
            tests = [*tests, *(_index_less_than(x, self.n) for x in (i, k))]
        return If(conjunction_of_tests(tests), (stmt,)) if tests else stmt


def _index_less_than(a: Dim, b: Dim) -> Scalar:
    return Apply("lt", (IndexScalar(a), IndexScalar(b)), "i1")
