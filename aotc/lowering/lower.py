"""Outlined regions to kernels: which lowering each kind of region gets."""

from __future__ import annotations

from collections.abc import Callable

from aotc.diagnostics import CompileError
from aotc.frontend.tensor_ir import Function
from aotc.lowering.loop_ir import Kernel
from aotc.lowering.lower_contract import lower_contract
from aotc.lowering.lower_cuda import lower_reduction_cuda
from aotc.lowering.lower_loop import lower_loop
from aotc.lowering.lower_reduction import lower_reduction
from aotc.lowering.rules.custom_call import lower_custom_call
from aotc.lowering.rules.fft import lower_dft
from aotc.lowering.rules.indexing import lower_dynamic_update_slice, lower_scatter
from aotc.lowering.rules.lapack import lower_lapack
from aotc.lowering.rules.linalg import lower_cholesky, lower_triangular_solve
from aotc.lowering.rules.random import lower_rng_bit_generator
from aotc.lowering.rules.scans import lower_scan
from aotc.lowering.rules.selection import lower_top_k
from aotc.lowering.rules.sorting import lower_sort
from aotc.lowering.rules.sparse import lower_csr_dot
from aotc.lowering.rules.tridiagonal import lower_tridiagonal_solve_perturbed
from aotc.lowering.rules.windows import lower_select_and_scatter
from aotc.targets import Target

Lowering = Callable[[Function, Target], Kernel]

KINDS: dict[str, Lowering] = {
    "loop": lower_loop,
    "window": lower_loop,
    "row": lower_reduction,
    "reduce": lower_reduction,
    "contract": lower_contract,
    "update": lower_dynamic_update_slice,
}

CUDA_KINDS: dict[str, Lowering] = {
    "row": lower_reduction_cuda,
    "reduce": lower_reduction_cuda,
}

SINGLES: dict[str, Lowering] = {
    "csr_dot": lower_csr_dot,
    "custom_call": lower_custom_call,
    "cholesky": lower_cholesky,
    "dft": lower_dft,
    "dynamic_update_slice": lower_dynamic_update_slice,
    "lapack": lower_lapack,
    "reduce_window": lower_scan,
    "rng_bit_generator": lower_rng_bit_generator,
    "scatter": lower_scatter,
    "select_and_scatter": lower_select_and_scatter,
    "sort": lower_sort,
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
    if target.kind == "cuda" and kind in CUDA_KINDS:
        return CUDA_KINDS[kind](function, target)
    if kind != "single":
        return KINDS[kind](function, target)
    op = function.body.ops[-1]
    lowering = SINGLES.get(op.name)
    if lowering is None:
        known = ", ".join(sorted(SINGLES))
        raise CompileError.at(
            op.loc,
            f"{op.name} is not supported on target {target.name}",
            hint=f"ops with a lowering of their own are: {known}",
        )
    return lowering(function, target)
