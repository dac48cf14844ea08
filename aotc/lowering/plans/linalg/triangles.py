"""Plan Cholesky factorisations and triangular solves on a CPU, or one GPU thread: in loops, by LAPACK, or both."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, minimum
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit


@dataclass(frozen=True, slots=True)
class CholeskyPlan(RegionPlan):
    """Plan in which a worker factors a matrix: in loops up to ``loop_rows`` rows (None: always), by LAPACK above."""

    loop_rows: int | None


FACTOR_ROWS = Limit(
    127,
    "rows of a matrix with a Cholesky factorisation in loops; above, LAPACK",
    "Zen 5, one core, f32, us in loops and by LAPACK: 96 rows 19 and 21, 128 rows 42 and 27, 192 rows 102 and 61",
)


def plan_cpu_cholesky(b: RegionBuilder) -> CholeskyPlan:
    """Choose loops, LAPACK or both for a CPU Cholesky factorization, by the matrix size."""
    return CholeskyPlan(_max_size_by_loops(b.outputs[0].shape[-1], FACTOR_ROWS))


def _max_size_by_loops(size: Dim, small: Limit) -> int | None:
    """Return the largest size that loops compute: None for all, 0 for none."""
    if small.holds(size):
        return None
    return 0 if isinstance(size, int) else small.value


@dataclass(frozen=True, slots=True)
class PieceSolvePlan(RegionPlan):
    """Plan in which a grid item solves in loops for some right-hand sides of a matrix.

    Attributes
    ----------
    columns : int
        The number of right-hand sides per item; the last item may have fewer.
    transposed : bool
        Are the right-hand sides rows, which are transposed first?
    """

    columns: int
    transposed: bool = False


@dataclass(frozen=True, slots=True)
class MatrixSolvePlan(RegionPlan):
    """Plan in which a grid item solves for all right-hand sides of a matrix.

    Attributes
    ----------
    loop_rows : int
        Loops are used if unknowns or right-hand sides, whichever are fewer, are at most so many; otherwise BLAS.
    columns : int
        Right-hand sides that the loops solve for at a time.
    """

    loop_rows: int
    columns: int


SOLVE_ROWS = Limit(
    31,
    "unknowns or right-hand sides, the smaller number, of a triangular solve in loops; above, BLAS",
    "Zen 5, one core, f32, time of BLAS relative to loops: 32 x 32 0.8 to 0.95, 64 x 64 0.75, 128 x 200 0.3, 200 x 32 "
    "0.25",
)
FEW_SOLVED_ROWS = Limit(
    3,
    "right-hand sides stored as rows that a triangular solve takes one by one; more are transposed first",
    "Zen 5, 50 solves of 16 unknowns, us one by one and transposed: 4 rows 49 and 12, 8 rows 96 and 32, 16 rows 195 "
    "and 22, 500 rows 5834 and 462",
)


def plan_cpu_solve(b: RegionBuilder) -> PieceSolvePlan | MatrixSolvePlan:
    """Choose loops or BLAS for a CPU triangular solve, by the number of unknowns and right-hand sides."""
    left, n, others = solved_sizes(b)
    transposed = not left and not FEW_SOLVED_ROWS.holds(others) and SOLVE_ROWS.holds(n)
    pieces = plan_right_hand_sides_per_item(left, transposed)
    if any(SOLVE_ROWS.holds(d) for d in (n, others)):
        return pieces
    loop_rows = _max_size_by_loops(minimum(n, others), SOLVE_ROWS)
    assert loop_rows is not None
    return MatrixSolvePlan(loop_rows, pieces.columns)


def solved_sizes(b: RegionBuilder) -> tuple[bool, Dim, Dim]:
    """Return (unknowns are in columns, number of unknowns, number of right-hand sides) of a triangular solve."""
    *_, rows, columns = b.outputs[0].shape
    left = b.region_root_op("triangular_solve").attrs["left_side"]
    return (True, rows, columns) if left else (False, columns, rows)


SOLVE_COLUMNS = BlockSize(64, "right-hand sides per grid item of a triangular solve", "four cache lines of f32")


def plan_right_hand_sides_per_item(left: bool, transposed: bool = False) -> PieceSolvePlan:
    """Choose one or several right-hand sides per grid item of a triangular solve."""
    return PieceSolvePlan(SOLVE_COLUMNS.value if left or transposed else 1, transposed)
