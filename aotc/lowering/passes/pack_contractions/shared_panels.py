"""Find the matmul with most rows for each known right operand: panels are packed for that matmul, and stored once.

A matrix may be the right operand of matmuls in several functions (specialized copies), or of several matmuls in one
function. A prompt has many rows, a decoding step one. Panels packed for many rows are as fast for few rows: 0.96 to
1.05 of the time for one to four rows by AVX-512 (1 x 768 x 768 to 4 x 4096 x 4096, one core of a Zen 5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from aotc.ir.dims.algebra import Dim, Expr
from aotc.ir.opset import MOVES, PRODUCTS
from aotc.ir.tensor.ir import Function, Module, Op, TensorType, Value, walk
from aotc.lowering.analysis.constant_values import weights_of


def widest_product_rows(module: Module) -> dict[Value, Dim]:
    """Return, for matmuls that share their right operand with one of more rows, the largest number of rows.

    The keys are the results of the matmuls with fewer rows.
    """
    products: dict[Any, list[Op]] = {}
    arrays: dict[int, Any] = {}
    for f in module.functions.values():
        ops = [] if f.body.names.isdisjoint(PRODUCTS) else list(walk(f.body))
        definitions = {v: op for op in ops for v in op.results}
        for op in (op for op in ops if op.name in PRODUCTS):
            root = _matrix_identity_key(op.operands[1], f, definitions, arrays)
            if root is not None:
                dtypes = tuple(v.type.dtype for v in (*op.operands, op.result))
                products.setdefault((op.name, op.attrs.get("rhs_transposed"), dtypes, root), []).append(op)
    most_rows: dict[Value, Dim] = {}
    for ops in products.values():
        most = max((_matmul_row_count(op) for op in ops), key=lambda m: float("inf") if isinstance(m, Expr) else m)
        most_rows.update((op.result, most) for op in ops if _matmul_row_count(op) != most)
    return most_rows


def with_widest_panel_rows(op: Op, widest: Mapping[Value, Dim]) -> Op:
    """Return ``op`` with the row count that determines its panels: that of the matmul with most rows."""
    most = widest.get(op.result)
    if most is None:
        return op
    *lead, _, n = op.result.type.shape
    return replace(op, results=(Value(op.result.name, TensorType(op.result.type.dtype, (*lead, most, n))),))


def _matmul_row_count(op: Op) -> Dim:
    return op.result.type.shape[-2]


def _matrix_identity_key(v: Value, function: Function, definitions: Mapping[Value, Op], arrays: dict[int, Any]) -> Any:
    """Return a key shared by equal matrices: the array or weight, and the ops applied to it; None if unknown."""
    moves: list[tuple[Any, ...]] = []
    weights = weights_of(function)
    while v not in weights:
        op = definitions.get(v)
        if op is not None and op.name == "constant":
            value = op.attrs["value"]
            if id(value) not in arrays:
                arrays[id(value)] = value.shape, value.dtype.str, _array_sample_bytes(value)
            return arrays[id(value)], tuple(moves)
        if op is None or not (op.name in MOVES or op.name == "convert") or len(op.operands) > 1:
            return None
        moves.append((op.name, op.result.type, repr(op.attrs)))
        v = op.operands[0]
    names = function.attrs.get("arg_names") or [p.name for p in function.body.params]
    return names[function.body.params.index(v)], tuple(moves)


# Elements sampled to tell a constant matrix from others of its shape. Matrices with equal samples are packed with the
# same panel width, and nothing else follows. Comparing all elements would take as long as reading the model.
MATRIX_SAMPLES = 4096


def _array_sample_bytes(array: np.ndarray) -> bytes:
    flat = array.reshape(-1)
    return flat[:: max(1, flat.size // MATRIX_SAMPLES)].tobytes()
