"""Lower outlined regions to kernels: the table from the class of a plan to its lowering function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from aotc.diagnostics import CompileError
from aotc.ir.loop.ir import Kernel
from aotc.ir.tensor.ir import Function
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.placement.host_only import host_only
from aotc.lowering.plans.attention.cpu import (
    AttentionByRowsPlan,
    BlockedAttentionPlan,
    DecodeAttentionPlan,
    IntegerAttentionPlan,
)
from aotc.lowering.plans.attention.gpu import TensorCoreAttentionPlan
from aotc.lowering.plans.contract_loops import DepthwisePlan, ElementLoopsPlan
from aotc.lowering.plans.cpu_columns import ColumnPlan
from aotc.lowering.plans.cpu_contract import CopiedPanelPlan, RegisterTilePlan
from aotc.lowering.plans.cpu_loops import LoopPlan
from aotc.lowering.plans.cpu_reductions import RowBlockPlan, RowPlan, TransposedRowPlan
from aotc.lowering.plans.cpu_scan import ChunkScanPlan
from aotc.lowering.plans.cpu_sort import InsertionPlan, MergeSortPlan, RadixSortPlan, SelectionPlan
from aotc.lowering.plans.cpu_transpose import TransposedLoopPlan
from aotc.lowering.plans.gpu_column_scans import ColumnScanPlan
from aotc.lowering.plans.gpu_contract import SharedTilePlan, TensorCorePlan
from aotc.lowering.plans.gpu_loops import GpuTransposePlan, ThreadLoopPlan
from aotc.lowering.plans.gpu_reductions import GpuColumnPlan, GroupRowPlan, ThreadRowPlan
from aotc.lowering.plans.gpu_scans import RowScanPlan
from aotc.lowering.plans.gpu_scatters import BlockScatterPlan, ParallelScatterPlan, RunScatterPlan
from aotc.lowering.plans.gpu_sort import (
    BlockSortPlan,
    CountedRunPlan,
    DigitCountPlan,
    DigitSortPlan,
    MergedPairPlan,
    MergedRunPlan,
)
from aotc.lowering.plans.linalg.dft import BlockDftPlan, CalledDftPlan, ThreadDftPlan
from aotc.lowering.plans.linalg.gpu_factors import (
    ColumnLuPlan,
    EigenPlan,
    HouseholderPlan,
    PanelLuPlan,
    ReflectorProductPlan,
    SingularPlan,
)
from aotc.lowering.plans.linalg.gpu_triangles import BlockCholeskyPlan, BlockSolvePlan
from aotc.lowering.plans.linalg.triangles import CholeskyPlan, MatrixSolvePlan, PieceSolvePlan
from aotc.lowering.plans.plan_region import PLANNERS_OF_OPS, planner_of
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.scatters import SerialScatterPlan, SliceUpdatePlan
from aotc.lowering.plans.single_ops import (
    CollectivePlan,
    CsrRowsPlan,
    CustomCallPlan,
    DeviceCallPlan,
    LapackCallPlan,
    RandomWordsPlan,
    SelectAndScatterPlan,
    TridiagonalPlan,
)
from aotc.lowering.regions.attention.cpu_blocked import (
    lower_attention_by_rows,
    lower_blocked_attention,
    lower_decode_attention,
)
from aotc.lowering.regions.attention.gpu import lower_attention_cuda
from aotc.lowering.regions.common.fuse_rounding import fuse_rounding
from aotc.lowering.regions.custom_call import lower_collective, lower_custom_call, lower_device_call
from aotc.lowering.regions.fft import lower_block_dft, lower_called_dft, lower_thread_dft
from aotc.lowering.regions.linalg.cpu_cholesky_trsm import (
    lower_block_cholesky,
    lower_block_solve,
    lower_cholesky,
    lower_matrix_solve,
    lower_piece_solve,
)
from aotc.lowering.regions.linalg.csr_dot import lower_csr_dot
from aotc.lowering.regions.linalg.gpu_lapack import (
    lower_column_lu,
    lower_eigen,
    lower_householder,
    lower_panel_lu,
    lower_reflector_product,
    lower_singular,
)
from aotc.lowering.regions.linalg.lapack import lower_lapack_call
from aotc.lowering.regions.linalg.tridiagonal import lower_tridiagonal_solve
from aotc.lowering.regions.loop.cpu import lower_loops
from aotc.lowering.regions.loop.cpu_transpose import lower_transposed_loops
from aotc.lowering.regions.loop.gpu import lower_thread_loops
from aotc.lowering.regions.loop.gpu_transpose import lower_gpu_transpose
from aotc.lowering.regions.matmul.cpu_copied_panels import lower_copied_panels
from aotc.lowering.regions.matmul.cpu_tiles import lower_register_tiles
from aotc.lowering.regions.matmul.gpu_shared import lower_shared_tiles
from aotc.lowering.regions.matmul.gpu_tensor_cores import lower_tensor_cores
from aotc.lowering.regions.matmul.loops import lower_depthwise, lower_element_loops
from aotc.lowering.regions.random import lower_random_words
from aotc.lowering.regions.reduce.cpu_columns import lower_columns
from aotc.lowering.regions.reduce.cpu_row_blocks import lower_row_blocks
from aotc.lowering.regions.reduce.cpu_rows import lower_rows
from aotc.lowering.regions.reduce.cpu_scan import lower_chunk_scan
from aotc.lowering.regions.reduce.cpu_transposed_rows import lower_transposed_rows
from aotc.lowering.regions.reduce.gpu import lower_group_rows, lower_thread_rows
from aotc.lowering.regions.reduce.gpu_columns import lower_columns_cuda
from aotc.lowering.regions.reduce.gpu_scan import lower_column_scan, lower_row_scan
from aotc.lowering.regions.scatter.cpu import lower_serial_scatter, lower_slice_update
from aotc.lowering.regions.scatter.gpu import lower_block_scatter, lower_parallel_scatter, lower_run_scatter
from aotc.lowering.regions.scatter.select_and_scatter import lower_select_and_scatter
from aotc.lowering.regions.sort.cpu import lower_merge_sort, lower_radix_sort
from aotc.lowering.regions.sort.gpu_merge import lower_block_sort, lower_merged_pairs, lower_merged_runs
from aotc.lowering.regions.sort.gpu_merge_unknown_length import lower_counted_runs
from aotc.lowering.regions.sort.gpu_radix import lower_digit_counts, lower_digit_sort
from aotc.lowering.regions.sort.top_k import lower_insertion, lower_selection
from aotc.targets import Target

LOWERINGS: dict[type[RegionPlan], Callable[[RegionBuilder, Any], Kernel]] = {
    AttentionByRowsPlan: lower_attention_by_rows,
    BlockCholeskyPlan: lower_block_cholesky,
    BlockDftPlan: lower_block_dft,
    BlockScatterPlan: lower_block_scatter,
    BlockSolvePlan: lower_block_solve,
    BlockSortPlan: lower_block_sort,
    BlockedAttentionPlan: lower_blocked_attention,
    CalledDftPlan: lower_called_dft,
    CholeskyPlan: lower_cholesky,
    ChunkScanPlan: lower_chunk_scan,
    CollectivePlan: lower_collective,
    ColumnLuPlan: lower_column_lu,
    ColumnPlan: lower_columns,
    ColumnScanPlan: lower_column_scan,
    CopiedPanelPlan: lower_copied_panels,
    CountedRunPlan: lower_counted_runs,
    CsrRowsPlan: lower_csr_dot,
    CustomCallPlan: lower_custom_call,
    DeviceCallPlan: lower_device_call,
    DecodeAttentionPlan: lower_decode_attention,
    DepthwisePlan: lower_depthwise,
    DigitCountPlan: lower_digit_counts,
    DigitSortPlan: lower_digit_sort,
    EigenPlan: lower_eigen,
    ElementLoopsPlan: lower_element_loops,
    GpuColumnPlan: lower_columns_cuda,
    GpuTransposePlan: lower_gpu_transpose,
    GroupRowPlan: lower_group_rows,
    HouseholderPlan: lower_householder,
    InsertionPlan: lower_insertion,
    IntegerAttentionPlan: lower_decode_attention,
    LapackCallPlan: lower_lapack_call,
    LoopPlan: lower_loops,
    MatrixSolvePlan: lower_matrix_solve,
    MergeSortPlan: lower_merge_sort,
    MergedPairPlan: lower_merged_pairs,
    MergedRunPlan: lower_merged_runs,
    PanelLuPlan: lower_panel_lu,
    ParallelScatterPlan: lower_parallel_scatter,
    PieceSolvePlan: lower_piece_solve,
    RadixSortPlan: lower_radix_sort,
    RandomWordsPlan: lower_random_words,
    ReflectorProductPlan: lower_reflector_product,
    RegisterTilePlan: lower_register_tiles,
    RowBlockPlan: lower_row_blocks,
    RowPlan: lower_rows,
    RowScanPlan: lower_row_scan,
    RunScatterPlan: lower_run_scatter,
    SelectAndScatterPlan: lower_select_and_scatter,
    SelectionPlan: lower_selection,
    SerialScatterPlan: lower_serial_scatter,
    SharedTilePlan: lower_shared_tiles,
    SingularPlan: lower_singular,
    SliceUpdatePlan: lower_slice_update,
    TensorCoreAttentionPlan: lower_attention_cuda,
    TensorCorePlan: lower_tensor_cores,
    ThreadDftPlan: lower_thread_dft,
    ThreadLoopPlan: lower_thread_loops,
    ThreadRowPlan: lower_thread_rows,
    TransposedLoopPlan: lower_transposed_loops,
    TransposedRowPlan: lower_transposed_rows,
    TridiagonalPlan: lower_tridiagonal_solve,
}


def lower_region(function: Function, target: Target, plan: RegionPlan | None = None) -> Kernel:
    """Lower an outlined region to a kernel, by ``plan``, or by the plan of the region's planner if that is None.

    Raises
    ------
    CompileError
        If the region is an op that has no lowering for ``target``.
    """
    kind, op = function.attrs["kind"], function.body.ops[-1]
    refused = host_only(op) if kind == "single" and target.kind == "cuda" else None
    if refused is not None:
        raise CompileError.at(op.loc, f"{refused.what} is not supported on target {target.name}", hint=refused.hint)
    planner = planner_of(function, target)
    if planner is None:
        names = ", ".join(sorted({name for name, _ in PLANNERS_OF_OPS}))
        raise CompileError.at(
            op.loc,
            f"{op.name} is not supported on target {target.name}",
            hint=f"ops that have their own lowering: {names}",
        )
    b = RegionBuilder(function, target)
    plan = plan or planner(b)
    kernel = replace(LOWERINGS[type(plan)](b, plan), plan=str(plan))
    return kernel if kind == "single" else fuse_rounding(kernel, target)
