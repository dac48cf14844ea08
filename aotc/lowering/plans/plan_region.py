"""Table of planners: for each kind of region and of target, or for the op of a region and a kind of target."""

from __future__ import annotations

from collections.abc import Callable

from aotc.ir.tensor.ir import Function
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.plans.attention.cpu import plan_cpu_attention
from aotc.lowering.plans.attention.gpu import plan_gpu_attention
from aotc.lowering.plans.cpu_contract import plan_cpu_contract
from aotc.lowering.plans.cpu_reductions import plan_cpu_reduction
from aotc.lowering.plans.cpu_scan import plan_cpu_scan
from aotc.lowering.plans.cpu_sort import plan_cpu_sort, plan_cpu_top_k, plan_gpu_top_k
from aotc.lowering.plans.gpu_contract import plan_gpu_contract
from aotc.lowering.plans.gpu_reductions import plan_gpu_reduction
from aotc.lowering.plans.gpu_scans import plan_gpu_scan
from aotc.lowering.plans.gpu_scatters import plan_gpu_scatter, plan_gpu_slice, plan_gpu_update
from aotc.lowering.plans.gpu_sort import plan_digit_counts, plan_digit_sort, plan_gpu_sort, plan_sort_runs
from aotc.lowering.plans.linalg.dft import plan_cpu_dft, plan_gpu_dft
from aotc.lowering.plans.linalg.gpu_factors import plan_gpu_lapack
from aotc.lowering.plans.linalg.gpu_triangles import plan_gpu_cholesky, plan_gpu_solve
from aotc.lowering.plans.linalg.triangles import plan_cpu_cholesky, plan_cpu_solve
from aotc.lowering.plans.loops import plan_element_loops
from aotc.lowering.plans.region_plan import RegionPlan
from aotc.lowering.plans.scatters import plan_cpu_scatter, plan_cpu_slice
from aotc.lowering.plans.single_ops import (
    CsrRowsPlan,
    CustomCallPlan,
    LapackCallPlan,
    RandomWordsPlan,
    SelectAndScatterPlan,
    TridiagonalPlan,
    constant_planner,
    plan_gpu_call,
)
from aotc.targets import Target

Planner = Callable[[RegionBuilder], RegionPlan]

PLANNERS: dict[tuple[str, str], Planner] = {
    ("contract", "cpu"): plan_cpu_contract,
    ("contract", "cuda"): plan_gpu_contract,
    ("loop", "cpu"): plan_element_loops,
    ("loop", "cuda"): plan_element_loops,
    ("window", "cpu"): plan_element_loops,
    ("window", "cuda"): plan_element_loops,
    ("row", "cpu"): plan_cpu_reduction,
    ("row", "cuda"): plan_gpu_reduction,
    ("reduce", "cpu"): plan_cpu_reduction,
    ("reduce", "cuda"): plan_gpu_reduction,
    ("update", "cpu"): plan_cpu_slice,
    ("update", "cuda"): plan_gpu_update,
}

# Planners of regions of kind ``single``, by the op that the region was made for and the kind of target.
PLANNERS_OF_OPS: dict[tuple[str, str], Planner] = {
    ("attention", "cpu"): plan_cpu_attention,
    ("attention", "cuda"): plan_gpu_attention,
    ("cholesky", "cpu"): plan_cpu_cholesky,
    ("cholesky", "cuda"): plan_gpu_cholesky,
    ("csr_dot", "cpu"): constant_planner(CsrRowsPlan()),
    ("csr_dot", "cuda"): constant_planner(CsrRowsPlan()),
    ("custom_call", "cpu"): constant_planner(CustomCallPlan()),
    ("custom_call", "cuda"): plan_gpu_call,
    ("dft", "cpu"): plan_cpu_dft,
    ("dft", "cuda"): plan_gpu_dft,
    ("digit_counts", "cuda"): plan_digit_counts,
    ("digit_sort", "cuda"): plan_digit_sort,
    ("dynamic_update_slice", "cpu"): plan_cpu_slice,
    ("dynamic_update_slice", "cuda"): plan_gpu_slice,
    ("lapack", "cpu"): constant_planner(LapackCallPlan()),
    ("lapack", "cuda"): plan_gpu_lapack,
    ("reduce_window", "cpu"): plan_cpu_scan,
    ("reduce_window", "cuda"): plan_gpu_scan,
    ("rng_bit_generator", "cpu"): constant_planner(RandomWordsPlan()),
    ("rng_bit_generator", "cuda"): constant_planner(RandomWordsPlan()),
    ("scatter", "cpu"): plan_cpu_scatter,
    ("scatter", "cuda"): plan_gpu_scatter,
    ("select_and_scatter", "cpu"): constant_planner(SelectAndScatterPlan()),
    ("select_and_scatter", "cuda"): constant_planner(SelectAndScatterPlan()),
    ("sort", "cpu"): plan_cpu_sort,
    ("sort", "cuda"): plan_gpu_sort,
    ("sort_runs", "cuda"): plan_sort_runs,
    ("top_k", "cpu"): plan_cpu_top_k,
    ("top_k", "cuda"): plan_gpu_top_k,
    ("triangular_solve", "cpu"): plan_cpu_solve,
    ("triangular_solve", "cuda"): plan_gpu_solve,
    ("tridiagonal_solve_perturbed", "cpu"): constant_planner(TridiagonalPlan()),
    ("tridiagonal_solve_perturbed", "cuda"): constant_planner(TridiagonalPlan()),
}


def planner_of(function: Function, target: Target) -> Planner | None:
    """Return the planner of a region for ``target``, or None if there is none."""
    kind = function.attrs["kind"]
    if kind == "single":
        return PLANNERS_OF_OPS.get((function.body.ops[-1].name, target.kind))
    return PLANNERS.get((kind, target.kind))
