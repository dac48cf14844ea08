"""Outlined regions to kernels: which lowering each kind of region gets."""

from __future__ import annotations

from collections.abc import Callable

from aotc.diagnostics import CompileError
from aotc.ir.loop_ir import Kernel
from aotc.ir.tensor_ir import Function
from aotc.lowering.analysis.host.host_only import host_only
from aotc.lowering.regions.contract import lower_contract
from aotc.lowering.regions.contract_cuda import lower_contract_cuda
from aotc.lowering.regions.cuda import lower_reduction_cuda
from aotc.lowering.regions.loop import lower_loop
from aotc.lowering.regions.ops.attention_on_cpus.attention import lower_attention
from aotc.lowering.regions.ops.control_custom_call import lower_custom_call
from aotc.lowering.regions.ops.indexing import lower_dynamic_update_slice, lower_scatter, lower_update_cuda
from aotc.lowering.regions.ops.linalg import lower_cholesky, lower_triangular_solve
from aotc.lowering.regions.ops.linalg_fft import lower_dft
from aotc.lowering.regions.ops.linalg_lapack import lower_lapack
from aotc.lowering.regions.ops.linalg_sparse import lower_csr_dot
from aotc.lowering.regions.ops.linalg_tridiagonal import lower_tridiagonal_solve_perturbed
from aotc.lowering.regions.ops.random import lower_rng_bit_generator
from aotc.lowering.regions.ops.reduction_scan import lower_scan
from aotc.lowering.regions.ops.reduction_window import lower_select_and_scatter
from aotc.lowering.regions.ops.sorts.sorting import lower_sort
from aotc.lowering.regions.ops.sorts.sorting_digits import lower_digit_counts, lower_digit_sort
from aotc.lowering.regions.ops.sorts.sorting_runs import lower_sort_runs
from aotc.lowering.regions.ops.sorts.sorting_selection import lower_top_k
from aotc.lowering.regions.round_once import round_once
from aotc.lowering.regions.row_blocks import lower_reduction
from aotc.targets import Target

Lowering = Callable[[Function, Target], Kernel]

# By kind of region and kind of target.
KINDS: dict[tuple[str, str], Lowering] = {
    ("loop", "cpu"): lower_loop,
    ("loop", "cuda"): lower_loop,
    ("window", "cpu"): lower_loop,
    ("window", "cuda"): lower_loop,
    ("row", "cpu"): lower_reduction,
    ("row", "cuda"): lower_reduction_cuda,
    ("reduce", "cpu"): lower_reduction,
    ("reduce", "cuda"): lower_reduction_cuda,
    ("contract", "cpu"): lower_contract,
    ("contract", "cuda"): lower_contract_cuda,
    ("update", "cpu"): lower_dynamic_update_slice,
    ("update", "cuda"): lower_update_cuda,
}

SINGLES: dict[str, Lowering] = {
    "attention": lower_attention,
    "csr_dot": lower_csr_dot,
    "custom_call": lower_custom_call,
    "cholesky": lower_cholesky,
    "dft": lower_dft,
    "digit_counts": lower_digit_counts,
    "digit_sort": lower_digit_sort,
    "dynamic_update_slice": lower_dynamic_update_slice,
    "lapack": lower_lapack,
    "reduce_window": lower_scan,
    "rng_bit_generator": lower_rng_bit_generator,
    "scatter": lower_scatter,
    "select_and_scatter": lower_select_and_scatter,
    "sort": lower_sort,
    "sort_runs": lower_sort_runs,
    "top_k": lower_top_k,
    "triangular_solve": lower_triangular_solve,
    "tridiagonal_solve_perturbed": lower_tridiagonal_solve_perturbed,
}


def lower_region(function: Function, target: Target) -> Kernel:
    """Return the kernel of an outlined region.

    Raises
    ------
    CompileError
        If the region is an op that has no lowering for ``target``.
    """
    kind = function.attrs["kind"]
    if kind != "single":
        return round_once(KINDS[kind, target.kind](function, target), target)
    op = function.body.ops[-1]
    refused = host_only(op) if target.kind == "cuda" else None
    if refused is not None:
        raise CompileError.at(op.loc, f"{refused.what} is not supported on target {target.name}", hint=refused.hint)
    lowering = SINGLES.get(op.name)
    if lowering is None:
        known = ", ".join(sorted(SINGLES))
        raise CompileError.at(
            op.loc,
            f"{op.name} is not supported on target {target.name}",
            hint=f"ops with a lowering of their own are: {known}",
        )
    return lowering(function, target)
