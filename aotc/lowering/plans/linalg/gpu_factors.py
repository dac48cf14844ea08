"""Plan matrix factorisations by a GPU block: column by column, by panels, or by Jacobi's method."""

from __future__ import annotations

from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, static
from aotc.ir.loop.ir import WARP, Buffer
from aotc.ir.loop.scratch import shared_bytes_of_buffers
from aotc.ir.opset.linalg_lapack import JACOBI_ROUTINES, SVDS
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.linalg.gpu_jacobi import RotatedColumns, jacobi_layout
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.threshold import BlockSize, Limit
from aotc.vmfb.dtypes import real_of, size_of


@dataclass(frozen=True, slots=True)
class ColumnFactorPlan(RegionPlan):
    """Plan in which a block of ``warps`` warps processes a matrix column by column."""

    warps: int


@dataclass(frozen=True, slots=True)
class ColumnLuPlan(ColumnFactorPlan):
    """Plan of an LU factorisation column by column."""


@dataclass(frozen=True, slots=True)
class HouseholderPlan(ColumnFactorPlan):
    """Plan of a QR factorisation."""


@dataclass(frozen=True, slots=True)
class ReflectorProductPlan(ColumnFactorPlan):
    """Plan of the product of the reflectors of a QR factorisation."""


@dataclass(frozen=True, slots=True)
class PanelLuPlan(RegionPlan):
    """Plan of an LU factorisation by panels; each thread has a row of the panel in registers.

    Attributes
    ----------
    tall : int
        Threads that have a row: whole warps.
    panel : int
        Columns of a panel.
    rest : int
        The largest number of columns outside a panel.
    some : int
        Columns outside the panel that a thread updates at a time.
    groups : int
        Groups of ``tall`` threads, which update different columns.
    """

    tall: int
    panel: int
    rest: int
    some: int
    groups: int

    def shared_buffers(self, dtype: str) -> dict[str, Buffer]:
        """Return the buffers in shared memory by their role, without the number of the first zero pivot."""
        arrays = {"upper": (dtype, (self.panel,)), "factors": (dtype, (self.panel, self.tall))}
        if self.tall > WARP:
            warps = self.tall // WARP
            arrays |= {"bests": (real_of(dtype), (warps,)), "places": ("i32", (warps,))}
        if self.rest:
            arrays |= {"numbers": ("i32", (self.tall,)), "triangle": (dtype, (self.panel, self.panel))}
            arrays |= {"top": (dtype, (self.groups, self.some, self.panel))}
        return {role: Buffer("held", kind, shape, "shared") for role, (kind, shape) in arrays.items()}


@dataclass(frozen=True, slots=True)
class JacobiPlan(RegionPlan):
    """Plan in which a block rotates the columns of a matrix in shared memory.

    Attributes
    ----------
    columns : RotatedColumns
    sweeps : int
        The largest number of sweeps over all pairs of columns.
    """

    columns: RotatedColumns
    sweeps: int


@dataclass(frozen=True, slots=True)
class EigenPlan(JacobiPlan):
    """Plan of eigenvalues and eigenvectors."""


@dataclass(frozen=True, slots=True)
class SingularPlan(JacobiPlan):
    """Plan of singular values and singular vectors."""


FactorPlan = ColumnLuPlan | PanelLuPlan | HouseholderPlan | ReflectorProductPlan | EigenPlan | SingularPlan

JACOBI_SWEEPS = BlockSize(
    30,
    "sweeps over all pairs of columns until they are orthogonal, at most",
    "the limit of LAPACK's gesvj; random matrices of 64 rows converge in 7 to 10",
)


def plan_gpu_lapack(b: RegionBuilder) -> FactorPlan:
    """Return the plan of a LAPACK routine by one block; :mod:`~aotc.lowering.placement.host_only` permits it."""
    routine, out = b.region_root_op("lapack").attrs["routine"], b.outputs[0]
    *_, columns, rows = out.shape
    if routine in JACOBI_ROUTINES:
        more, kind = (static(columns), SingularPlan) if routine in SVDS else (0, EigenPlan)
        return kind(jacobi_layout(static(columns), static(rows), size_of(out.dtype), more), JACOBI_SWEEPS.value)
    match routine:
        case "getrf":
            return _plan_lu_by_panels(b, columns, rows) or ColumnLuPlan(_warps_for_columns(columns))
        case "geqrf":
            return HouseholderPlan(_warps_for_columns(columns))
    return ReflectorProductPlan(_warps_for_columns(columns))


FACTOR_WARPS = BlockSize(
    16,
    "warps of a GPU block that factors a matrix column by column, at most",
    "the same as TRIANGLE_THREADS",
)
COLUMNS_OF_WARP = BlockSize(
    4,
    "matrix columns per warp of such a block, at least",
    "all warps wait for the one that finds the pivot or reflector",
)


def _warps_for_columns(columns: Dim) -> int:
    """Return the number of warps for which the columns of a matrix are enough work."""
    many = columns if isinstance(columns, int) else FACTOR_WARPS.value * COLUMNS_OF_WARP.value
    return min(max(-(-many // COLUMNS_OF_WARP.value), 1), FACTOR_WARPS.value)


PANEL_ROWS = Limit(
    512,
    "rows of a matrix whose LU factorisation works by panels, with one thread per row",
    "at 64 bytes a row, 32 KiB of shared memory",
)
PIVOT_PANEL_BYTES = BlockSize(
    128,
    "bytes of a row of an LU panel, which one thread keeps in registers",
    "NVIDIA H200, 2026-11-23, batches of 64 f32 matrices: 128 x 128 130 us, 256 x 256 483 us (64 bytes: 143 and 611 "
    "us)",
)
PANEL_GROUP_BYTES = BlockSize(
    32,
    "bytes of the columns that a thread updates with an LU panel at a time",
    "NVIDIA H200, 2026-11-23, batches of 64 matrices of 256 x 256: 565 us (16 bytes: 575 us), with 512 threads 597 us "
    "(611 us)",
)
PANEL_THREADS = BlockSize(
    512,
    "threads of a GPU block that computes an LU factorisation by panels, at most",
    "NVIDIA H200, 2026-11-23, batches of 64, panels of 64 bytes: 128 x 128 143 us (1024 threads: 161 us), 256 x 256 "
    "611 us (565 us)",
)


def _plan_lu_by_panels(b: RegionBuilder, columns: Dim, rows: Dim) -> PanelLuPlan | None:
    """Return the plan by panels, or None if a block cannot have a thread per row, or has too little memory."""
    if not isinstance(columns, int) or not isinstance(rows, int) or not PANEL_ROWS.holds(rows):
        return None
    dtype = b.outputs[0].dtype
    size, tall = size_of(dtype), -(-rows // WARP) * WARP
    is_one = columns * size <= PIVOT_PANEL_BYTES.value
    panel = columns if is_one else PIVOT_PANEL_BYTES.value // size
    last = (min(rows, columns) - 1) // panel * panel
    rest = max(columns - panel, last)  # the last panel may be narrow
    some = max(PANEL_GROUP_BYTES.value // size, 1)
    groups = max(min(PANEL_THREADS.value // tall, -(-rest // some)), 1)
    plan = PanelLuPlan(tall, panel, rest, some, groups)
    failed = Buffer("failed", "i32", (1,), "shared")
    return plan if shared_bytes_of_buffers([failed, *plan.shared_buffers(dtype).values()]) <= b.target.shared else None
