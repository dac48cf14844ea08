"""JAX's TPU calls for linear algebra, imported as the equivalent ops.

Matrices are stored by rows. Results may differ by the phase of an eigenvector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.frontend.calls.cusolver import permutation_of
from aotc.frontend.mlir_types import attribute_value
from aotc.frontend.session import Importer, ImportState
from aotc.ir.tensor.ir import TensorType, Value


def _swapped_matrix_dims(state: ImportState, x: Value) -> Value:
    rank = x.type.rank
    return state.one("transpose", [x], {"perm": (*range(rank - 2), rank - 1, rank - 2)})


def _emit_tpu_lapack_call(
    state: ImportState, routine: str, operands: list[Value], options: Mapping[str, Any]
) -> list[Value]:
    """Emit a ``lapack`` op on transposed matrices and return its results, the first transposed back."""
    first = _swapped_matrix_dims(state, operands[0])
    results = list(state.emit("lapack", [first, *operands[1:]], {"routine": routine, "options": dict(options)}))
    return [_swapped_matrix_dims(state, results[0]), *results[1:]]


def _import_qr(state: ImportState, op: Any) -> None:
    state.bind(op, _emit_tpu_lapack_call(state, "geqrf", state.data_operands(op), {})[:2])


def _import_product_of_reflectors(state: ImportState, op: Any) -> None:
    state.bind(op, _emit_tpu_lapack_call(state, "orgqr", state.data_operands(op), {})[:1])


def _import_eigh(state: ImportState, op: Any) -> None:
    """Import eigh. The configuration is text: lower, sorted, iteration limit, tolerance."""
    lower = attribute_value(op, "backend_config", "1").split(",")[0] == "1"
    options = {"mode": "V", "uplo": "L" if lower else "U"}
    state.bind(op, _emit_tpu_lapack_call(state, "syevd", state.data_operands(op), options)[:2])


def _import_lu(state: ImportState, op: Any) -> None:
    """Import LU. JAX's pivots are numbered from 0, LAPACK's from 1."""
    (x,) = state.data_operands(op)
    factors, pivots, _ = _emit_tpu_lapack_call(state, "getrf", [x], {})
    one = state.constant(np.ones((), np.int32), TensorType("i32", pivots.type.shape))
    pivots = state.one("sub", [pivots, one])
    state.bind(op, [factors, pivots, permutation_of(state, pivots, x.type.shape[-2])])


TPU_LINALG: dict[str, Importer] = {
    "Qr": _import_qr,
    "ProductOfElementaryHouseholderReflectors": _import_product_of_reflectors,
    "Eigh": _import_eigh,
    "LuDecomposition": _import_lu,
}
