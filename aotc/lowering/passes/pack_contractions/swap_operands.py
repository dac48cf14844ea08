"""Swap the operands of a matmul: ``a b`` is the transpose of ``b' a'``."""

from __future__ import annotations

from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.rewrite import Builder


def swap_permutation(rank: int) -> tuple[int, ...]:
    """Return the permutation that swaps the last two of ``rank`` dims."""
    return (*range(rank - 2), rank - 1, rank - 2)


def swaps_matrix(op: Op) -> bool:
    """Return True if ``op`` is a transpose that swaps only the last two dims."""
    return op.name == "transpose" and tuple(op.attrs["perm"]) == swap_permutation(op.result.type.rank)


def transposed_product(op: Op, b: Builder) -> Op:
    """Return the ``matmul`` op that computes the transposed result of ``op``, with swapped operands."""
    *batch, m, n = op.result.type.shape
    flags = {"lhs_transposed": not op.attrs["rhs_transposed"], "rhs_transposed": not op.attrs["lhs_transposed"]}
    types = (TensorType(op.result.type.dtype, (*batch, n, m)),)
    return b.op("matmul", op.operands[::-1], {**op.attrs, **flags}, types)


def transpose_batch(transposed: Value, b: Builder) -> Value:
    """Return each matrix of a batch transposed; a row or a column is only reshaped."""
    shape = transposed.type.shape
    if 1 in shape[-2:]:
        return b.reshape(transposed, (*shape[:-2], shape[-1], shape[-2]))
    return b.transpose(transposed, swap_permutation(len(shape)))
