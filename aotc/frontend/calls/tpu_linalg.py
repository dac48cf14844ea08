"""JAX's TPU calls for linear algebra, imported as the equivalent ops.

Matrices are stored by rows. Results may differ by the phase of an eigenvector.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aotc.frontend.calls.cusolver import permutation_of
from aotc.frontend.mlir_types import attribute_value
from aotc.frontend.session import Importer, State
from aotc.ir.tensor.ir import TensorType, Value


def _swapped(state: State, x: Value) -> Value:
    rank = x.type.rank
    return state.one("transpose", [x], {"perm": (*range(rank - 2), rank - 1, rank - 2)})


def _call(state: State, routine: str, operands: list[Value], options: Mapping[str, Any]) -> list[Value]:
    """Emit a ``lapack`` op and return its results; the first operand and result are transposed to columns and back."""
    first = _swapped(state, operands[0])
    results = list(state.emit("lapack", [first, *operands[1:]], {"routine": routine, "options": dict(options)}))
    return [_swapped(state, results[0]), *results[1:]]


def _qr(state: State, op: Any) -> None:
    state.bind(op, _call(state, "geqrf", state.data_operands(op), {})[:2])


def _product_of_reflectors(state: State, op: Any) -> None:
    state.bind(op, _call(state, "orgqr", state.data_operands(op), {})[:1])


def _eigh(state: State, op: Any) -> None:
    """Import eigh. The configuration is text: lower, sorted, iteration limit, tolerance."""
    lower = attribute_value(op, "backend_config", "1").split(",")[0] == "1"
    options = {"mode": "V", "uplo": "L" if lower else "U"}
    state.bind(op, _call(state, "syevd", state.data_operands(op), options)[:2])


def _lu(state: State, op: Any) -> None:
    """Import LU. JAX's pivots are numbered from 0, LAPACK's from 1."""
    (x,) = state.data_operands(op)
    factors, pivots, _ = _call(state, "getrf", [x], {})
    one = state.constant(np.ones((), np.int32), TensorType("i32", pivots.type.shape))
    pivots = state.one("sub", [pivots, one])
    state.bind(op, [factors, pivots, permutation_of(state, pivots, x.type.shape[-2])])


TPU_LINALG: dict[str, Importer] = {
    "Qr": _qr,
    "ProductOfElementaryHouseholderReflectors": _product_of_reflectors,
    "Eigh": _eigh,
    "LuDecomposition": _lu,
}
