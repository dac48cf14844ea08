"""JAX's GPU calls for linear algebra, imported as the equivalent ops.

A model that JAX lowered for CUDA or ROCm therefore also compiles for a CPU. Results may differ by the phase of a
singular vector or an eigenvector.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from aotc.frontend.calls.lapack import (
    bind_results_in_model_order,
    lapack_call_options,
    operands_in_memory_order,
    results_with_zero_factors,
    unpack_eigenvectors,
)
from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim
from aotc.ir.tensor.ir import TensorType, Value


def _emit_lapack_call(state: ImportState, routine: str, operands: list[Value], options: dict[str, Any]) -> list[Value]:
    return list(state.emit("lapack", operands, {"routine": routine, "options": options}))


def _import_as_lapack(routine: str, state: ImportState, op: Any) -> None:
    """Import a call with the same operands, results and options as the LAPACK routine."""
    bind_results_in_model_order(
        state, op, _emit_lapack_call(state, routine, operands_in_memory_order(state, op), dict(lapack_call_options(op)))
    )


def _import_potrf(state: ImportState, op: Any) -> None:
    x = state.data_operands(op)[0]
    factor = state.one("cholesky", [x], {"lower": bool(lapack_call_options(op)["lower"])})
    state.bind(op, [factor, state.constant(np.zeros((), np.int32), TensorType("i32", x.type.shape[:-2]))])


def _triangle_option(op: Any) -> str:
    return "L" if lapack_call_options(op)["lower"] else "U"


def _import_syevd(state: ImportState, op: Any) -> None:
    options = {"mode": "V", "uplo": _triangle_option(op)}
    bind_results_in_model_order(
        state, op, _emit_lapack_call(state, "syevd", operands_in_memory_order(state, op), options)
    )


def _import_sytrd(state: ImportState, op: Any) -> None:
    bind_results_in_model_order(
        state,
        op,
        _emit_lapack_call(state, "sytrd", operands_in_memory_order(state, op), {"uplo": _triangle_option(op)}),
    )


def _import_svd(routine: str, state: ImportState, op: Any) -> None:
    """Import an SVD; for matrices stored by rows the two factors are swapped."""
    options = lapack_call_options(op)
    mode = {"mode": ("A" if options["full_matrices"] else "S") if options["compute_uv"] else "N"}
    results = _emit_lapack_call(state, routine, operands_in_memory_order(state, op), mode)
    bind_results_in_model_order(
        state, op, results if options["compute_uv"] else results_with_zero_factors(state, op, results)
    )


def _import_svd_with_v(state: ImportState, op: Any) -> None:
    """Import the Jacobi and polar SVD routines: they return V instead of its adjoint, and always both factors."""
    mode = {"mode": "A" if lapack_call_options(op)["full_matrices"] else "S"}
    a, s, u, vt, status = _emit_lapack_call(state, "gesdd", operands_in_memory_order(state, op), mode)
    rank = vt.type.rank
    v = state.one("transpose", [vt], {"perm": (*range(rank - 2), rank - 1, rank - 2)})
    if v.type.dtype in ("c64", "c128"):
        v = state.one("conj", [v])
    bind_results_in_model_order(state, op, [a, s, u, v, status])


def _import_gtsv(state: ImportState, op: Any) -> None:
    results = _emit_lapack_call(state, "gtsv", operands_in_memory_order(state, op), {})
    bind_results_in_model_order(state, op, [results[3]])


def _eigenvector_options(op: Any) -> dict[str, str]:
    """Return LAPACK's letters for the computed left and right eigenvectors of a call."""
    options = lapack_call_options(op)
    return {f"compute_{side}": "V" if options[side] else "N" for side in ("left", "right")}


def _import_geev(state: ImportState, op: Any) -> None:
    """Import geev: its eigenvalues are complex; the eigenvectors of a real matrix are packed as in LAPACK."""
    operands = operands_in_memory_order(state, op)
    results = _emit_lapack_call(state, "geev", operands, _eigenvector_options(op))
    values = results[0] if len(results) == 4 else state.one("complex", results[:2])
    bind_results_in_model_order(state, op, [operands[0], values, *results[-3:]])


def _import_hybrid_eig(state: ImportState, op: Any) -> None:
    """Import an eigendecomposition; real routines return complex eigenvectors as pairs of columns."""
    results = _emit_lapack_call(state, "geev", operands_in_memory_order(state, op), _eigenvector_options(op))
    if len(results) == 5:
        results[2:4] = (unpack_eigenvectors(state, results[1], v) for v in results[2:4])
    bind_results_in_model_order(state, op, results)


def _import_geqp3(state: ImportState, op: Any) -> None:
    bind_results_in_model_order(state, op, _emit_lapack_call(state, "geqp3", operands_in_memory_order(state, op), {}))


def _import_syrk(state: ImportState, op: Any) -> None:
    """Import syrk: ``alpha * a @ a.T + beta * c``."""
    a, c, alpha, beta = state.data_operands(op)
    inner = a.type.rank - (2 if lapack_call_options(op)["transpose"] else 1)
    batch = tuple(range(a.type.rank - 2))
    attrs = {"lhs_batch": batch, "rhs_batch": batch, "lhs_contract": (inner,), "rhs_contract": (inner,)}
    product = state.one("dot_general", [a, a], {**attrs, "precision": "HIGHEST"})
    shape = c.type.shape
    scaled = [
        state.one("mul", [state.broadcast_scalar(s, shape), x]) for s, x in ((alpha, product), (beta, c))
    ]
    state.bind(op, [state.one("add", scaled)])


def _import_pivots_to_permutation(state: ImportState, op: Any) -> None:
    pivots = state.data_operands(op)[0]
    size = state.session.parts(op.results[0].type)[1][-1]
    state.bind(op, [permutation_of(state, pivots, size)])


def permutation_of(state: ImportState, pivots: Value, size: Dim) -> Value:
    """Apply the row swaps ``pivots`` to the identity permutation of ``size``; ignore pivots out of range."""
    *batch, count = pivots.type.shape
    shape: tuple[Dim, ...] = (*batch, size)
    start = state.one("iota", (), {"dim": len(batch)}, [TensorType("i32", shape)])
    scalar, row = TensorType("i32"), TensorType("i32", (*batch, 1))
    types = [scalar, start.type]
    test = state.region_of_emitter(types, lambda carried: [_index_less_than_count(state, carried[0], count)])
    swap = lambda carried: _swap_permutation_elements(state, carried[0], carried[1], pivots, row)
    body = state.region_of_emitter(types, swap)
    zero = state.constant(np.zeros((), np.int32), scalar)
    return state.emit("while", [zero, start], {}, (), [test, body])[1]


def _index_less_than_count(state: ImportState, n: Value, count: Dim) -> Value:
    return state.one("lt", [n, state.one("dim", (), {"expr": count}, [n.type])])


def _swap_permutation_elements(
    state: ImportState, k: Value, permutation: Value, pivots: Value, row: TensorType
) -> list[Value]:
    """Swap elements ``k`` and ``pivots[k]`` of every permutation, by comparing all positions with both."""
    t = permutation.type
    rank = t.rank
    zero = state.constant(np.zeros((), np.int32), TensorType("i32"))
    starts = [*[zero] * (rank - 1), k]
    sizes = {"sizes": row.shape}
    (place,) = state.append("dynamic_slice", [pivots, *starts], sizes)  # runs only where there are pivots
    (element,) = state.append("dynamic_slice", [permutation, *starts], sizes)
    spread = {"dims": tuple(range(rank))}
    wide = [state.one("broadcast", [v], spread, [t]) for v in (place, element)]
    number = state.one("iota", (), {"dim": rank - 1}, [t])
    hit = state.one("eq", [number, wide[0]])
    none = state.constant(np.zeros((), np.int32), t)
    picked = state.one("select", [hit, permutation, none])
    other = state.one("broadcast", [sum_over(state, picked, (rank - 1,))], {"dims": tuple(range(rank - 1))}, [t])
    own = state.one("eq", [number, state.broadcast_scalar(k, t.shape)])
    after = state.one("select", [own, other, state.one("select", [hit, wide[1], permutation])])
    end = state.one("dim", (), {"expr": t.shape[-1]}, [TensorType("i32")])
    low, high = state.one("ge", [wide[0], none]), state.one("lt", [wide[0], state.broadcast_scalar(end, t.shape)])
    after = state.one("select", [state.one("and", [low, high]), after, permutation])
    one = state.constant(np.ones((), np.int32), TensorType("i32"))
    return [state.one("add", [k, one]), after]


_SOLVER: dict[str, Importer] = {
    "potrf": _import_potrf,
    "getrf": partial(_import_as_lapack, "getrf"),
    "geqrf": partial(_import_as_lapack, "geqrf"),
    "orgqr": partial(_import_as_lapack, "orgqr"),
    "ormqr": partial(_import_as_lapack, "ormqr"),
    "syevd": _import_syevd,
    "sytrd": _import_sytrd,
    "gesvd": partial(_import_svd, "gesvd"),
    "gesdd": partial(_import_svd, "gesdd"),
    "gesvdj": _import_svd_with_v,
    "gesvdp": _import_svd_with_v,
    "geev": _import_geev,
    "syrk": _import_syrk,
}

CUSOLVER: dict[str, Importer] = {
    **{f"{prefix}solver_{name}_ffi": f for prefix in ("cu", "hip") for name, f in _SOLVER.items()},
    **{f"{prefix}sparse_gtsv2_ffi": _import_gtsv for prefix in ("cu", "hip")},
    **{f"{prefix}_lu_pivots_to_permutation": _import_pivots_to_permutation for prefix in ("cu", "hip")},
    **{f"{prefix}hybrid_{name}": _import_hybrid_eig for prefix in ("cu", "hip") for name in ("eig_real", "eig_comp")},
    **{f"{prefix}hybrid_geqp3": _import_geqp3 for prefix in ("cu", "hip")},
}
