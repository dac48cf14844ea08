"""LAPACK's routines on a GPU, by a block of threads per matrix: the routines and sizes that ``host_only`` permits."""

from __future__ import annotations

from collections.abc import Callable

from aotc.diagnostics import CompileError
from aotc.ir.loop.ir import Kernel, Stmt
from aotc.ir.loop.scratch import shared_bytes
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.linalg.gpu_factors import (
    ColumnLuPlan,
    EigenPlan,
    HouseholderPlan,
    PanelLuPlan,
    ReflectorProductPlan,
    SingularPlan,
)
from aotc.lowering.regions.linalg.gpu_eig_svd import eigen_statements, svd_statements
from aotc.lowering.regions.linalg.gpu_lu import lu_with_pivots
from aotc.lowering.regions.linalg.gpu_lu_blocked import LuPanels
from aotc.lowering.regions.linalg.gpu_qr import product_of_reflectors, qr_by_reflectors
from aotc.lowering.regions.linalg.lapack import kernel_per_matrix


def lower_column_lu(b: RegionBuilder, plan: ColumnLuPlan) -> Kernel:
    """Lower ``getrf`` (LU factorization) column by column."""
    return _block_per_matrix(b, lambda head: lu_with_pivots(b, head, plan))


def lower_panel_lu(b: RegionBuilder, plan: PanelLuPlan) -> Kernel:
    """Lower ``getrf`` (LU factorization) panel by panel."""
    return _block_per_matrix(b, lambda head: LuPanels(b, head, plan).factor_statements())


def lower_householder(b: RegionBuilder, plan: HouseholderPlan) -> Kernel:
    """Lower ``geqrf`` (QR factorization by Householder reflectors)."""
    return _block_per_matrix(b, lambda head: qr_by_reflectors(b, head, plan))


def lower_reflector_product(b: RegionBuilder, plan: ReflectorProductPlan) -> Kernel:
    """Lower ``orgqr`` (the matrix Q from Householder reflectors)."""
    return _block_per_matrix(b, lambda head: product_of_reflectors(b, head, plan))


def lower_eigen(b: RegionBuilder, plan: EigenPlan) -> Kernel:
    """Lower ``syevd`` (eigenvalues and eigenvectors of Hermitian matrices)."""
    return _block_per_matrix(b, lambda head: eigen_statements(b, head, plan))


def lower_singular(b: RegionBuilder, plan: SingularPlan) -> Kernel:
    """Lower ``gesdd`` and ``gesvd`` (singular value decomposition)."""
    return _block_per_matrix(b, lambda head: svd_statements(b, head, plan))


def _block_per_matrix(b: RegionBuilder, routine: Callable[[Index], list[Stmt]]) -> Kernel:
    """Return the kernel with a block per matrix.

    Raises
    ------
    CompileError
        If a block has too little shared memory for a matrix.
    """
    kernel = kernel_per_matrix(b, routine)
    needed, room = shared_bytes(kernel.body), b.target.shared_memory
    if needed > room:
        op = b.region_root_op("lapack")
        message = f"LAPACK's {op.attrs['routine']} needs {needed:,} bytes of shared memory, and a block has {room:,}"
        raise CompileError.at(op.loc, message, hint="raise --shared-memory-limit, or use a CPU target or device")
    return kernel
