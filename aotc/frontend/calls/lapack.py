"""LAPACK custom calls: ``cholesky`` and ``triangular_solve`` are ops; the op ``lapack`` covers all other routines.

LAPACK stores matrices by columns. The import emits transposes around the op; these fuse with neighbouring ops.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.mlir_types import DYNAMIC, config_of, dictionary_entries, integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.opset.linalg_lapack import LETTERS, ROUTINES, SVDS, lapack_symbol
from aotc.ir.tensor.ir import TensorType, Value

_TRANSPOSES = {"N": "NO_TRANSPOSE", "T": "TRANSPOSE", "C": "ADJOINT"}


class LapackOptions(dict[str, Any]):
    """The options of a call by name; reading a missing one raises an error that names the option."""

    def __missing__(self, name: str) -> Any:
        names = ", ".join(self) or "none"
        raise CompileError.at(Loc(), f"a linear algebra call lacks the option {name!r}; it has {names}")


def lapack_call_options(op: Any) -> LapackOptions:
    """Return the options of an FFI call by name; characters are stored as unsigned 8-bit numbers."""
    entries = dictionary_entries(config_of(op)).items()
    return LapackOptions({name: chr(a.value) if str(a.type) == "ui8" else a.value for name, a in entries})


def _permuted_to_memory_order(state: ImportState, v: Value, order: Sequence[int]) -> Value:
    """Transpose ``v`` by the permutation ``order``."""
    return v if list(order) == sorted(order) else state.one("transpose", [v], {"perm": tuple(order)})


def _memory_layouts(op: Any, name: str, ranks: Sequence[int]) -> list[list[int]]:
    """Return the memory layout of each value in attribute ``name``: its dims, the slowest in memory first."""
    if name not in op.attributes:
        return [list(range(rank)) for rank in ranks]
    layouts = [integer_tuple(layout) for layout in op.attributes[name]]
    return [list(reversed(layout)) for layout in layouts[: len(ranks)]]


def operands_in_memory_order(state: ImportState, op: Any) -> list[Value]:
    """Return the operands, transposed so that their dims are in memory order."""
    values = state.data_operands(op)
    orders = _memory_layouts(op, "operand_layouts", [v.type.rank for v in values])
    return [_permuted_to_memory_order(state, v, order) for v, order in zip(values, orders, strict=True)]


def bind_results_in_model_order(state: ImportState, op: Any, results: Sequence[Value]) -> None:
    """Transpose ``results`` from memory order to the dim order of the model, and bind them."""
    orders = _memory_layouts(op, "result_layouts", [v.type.rank for v in results])
    logical = [
        _permuted_to_memory_order(state, v, np.argsort(order).tolist())
        for v, order in zip(results, orders, strict=True)
    ]
    state.bind(op, logical)


def _import_lapack_call(routine: str, state: ImportState, op: Any) -> None:
    """Import an FFI call of LAPACK's ``routine`` as the op ``lapack`` between transposes."""
    options = dict(lapack_call_options(op))
    results = state.emit("lapack", operands_in_memory_order(state, op), {"routine": routine, "options": options})
    if routine == "geev" and len(results) == 5:
        results = _complex_vectors(state, results)
    if routine in SVDS and options["mode"] == "N":
        results = results_with_zero_factors(state, op, results)
    bind_results_in_model_order(state, op, results)


def results_with_zero_factors(state: ImportState, op: Any, results: Sequence[Value]) -> tuple[Value, ...]:
    """Return the results of a decomposition; zeros replace factors that the call does not compute."""
    factors = list(results[2:4])
    every = list(op.results)
    orders = _memory_layouts(op, "result_layouts", [len(result.type.shape) for result in every])
    for n, (result, order) in enumerate(zip(every[2:4], orders[2:4], strict=True)):
        if DYNAMIC not in result.type.shape:
            stored = TensorType(state.dtype(result.type), tuple([result.type.shape[d] for d in order]))
            factors[n] = state.constant(np.zeros((), packed_dtype(stored)), stored)
    return *results[:2], *factors, *results[4:]


def _complex_vectors(state: ImportState, results: Sequence[Value]) -> tuple[Value, ...]:
    """Return results with complex eigenvectors; for real matrices, LAPACK packs a conjugate pair as two vectors."""
    real, imag, left, right, status = results
    return real, imag, *(unpack_eigenvectors(state, imag, v) for v in (left, right)), status


def unpack_eigenvectors(state: ImportState, imag: Value, packed: Value) -> Value:
    """Return the complex eigenvectors, one per row, from LAPACK's real ``packed`` format.

    ``imag`` are the imaginary parts of the eigenvalues, positive for the first of a conjugate pair.
    """
    t = packed.type
    dims = {"dims": tuple(range(t.rank - 1))}
    zeros = state.constant(np.zeros((), packed_dtype(t)), t)
    spread = state.one("broadcast", [imag], dims, [t])
    first, second = state.one("gt", [spread, zeros]), state.one("lt", [spread, zeros])
    before, after = (_rows_shifted_down(state, packed, by) for by in (1, -1))
    re = state.one("select", [second, before, packed])
    minus = state.one("neg", [packed])
    im = state.one("select", [first, after, state.one("select", [second, minus, zeros])])
    return state.one("complex", [re, im])


def packed_dtype(t: TensorType) -> Any:
    """Return the NumPy dtype in which LAPACK computes a tensor of type ``t``."""
    return np.dtype({"f32": "float32", "f64": "float64", "c64": "complex64", "c128": "complex128"}[t.dtype])


def _rows_shifted_down(state: ImportState, x: Value, by: int) -> Value:
    """Return ``x`` with its rows shifted down by ``by``, and zeros above."""
    rank = x.type.rank
    zero = state.constant(np.zeros((), packed_dtype(x.type)), TensorType(x.type.dtype))
    low, high = [0] * rank, [0] * rank
    low[-2], high[-2] = by, -by
    return state.one("pad", [x, zero], {"low": tuple(low), "high": tuple(high), "interior": (0,) * rank})


def _import_potrf(state: ImportState, op: Any) -> None:
    """Import potrf as ``cholesky``; the other triangle is the operand's. A failure gives NaN, and status 0."""
    x = state.data_operands(op)[0]
    lower = lapack_call_options(op)["uplo"] == "L"
    factor = state.one("cholesky", [x], {"lower": lower})
    row, column = (
        state.one("iota", (), {"dim": d}, [TensorType("i32", x.type.shape)]) for d in (x.type.rank - 2, x.type.rank - 1)
    )
    inside = state.one("ge" if lower else "le", [row, column])
    status = state.constant(np.zeros((), np.int32), TensorType("i32", x.type.shape[:-2]))
    state.bind(op, [state.one("select", [inside, factor, x]), status])


def _import_trsm(state: ImportState, op: Any) -> None:
    """Import the triangular solve ``trsm`` as the op ``triangular_solve``."""
    options = lapack_call_options(op)
    attrs = {
        "left_side": options["side"] == "L",
        "lower": options["uplo"] == "L",
        "unit_diagonal": options["diag"] == "U",
        "transpose_a": _TRANSPOSES[options["trans_x"]],
    }
    state.bind(op, [state.one("triangular_solve", state.data_operands(op)[:2], attrs)])


LAPACK: dict[str, Importer] = {
    **{f"lapack_{t}potrf_ffi": _import_potrf for t in "sdcz"},
    **{f"lapack_{t}trsm_ffi": _import_trsm for t in "sdcz"},
    **{
        f"lapack_{lapack_symbol(routine, t)}_ffi": partial(_import_lapack_call, routine)
        for routine in ROUTINES
        for t in LETTERS
    },
}
