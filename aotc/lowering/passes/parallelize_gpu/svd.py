"""Small singular value decompositions on GPUs by Jacobi's method, one block of threads for each.

Before::

    %b, %s, %u, %vt, %status = lapack %a {routine = gesdd, mode = A} : of f32[9, 64], 9 columns of 64 elements
After::

    %c, %s, %u0, %vt, %status = lapack %a {routine = gesdd, mode = S}     // of the adjoint if it has fewer columns
    %r, %tau = lapack %u0 {routine = geqrf};  %q = lapack (pad %r), %tau {routine = orgqr}
    %u = %q * the signs of the diagonal of %r

The block writes 0 for left vectors of singular values that are 0. A QR factorization of the left vectors replaces these
by orthogonal vectors, and computes the further vectors of a complete basis; it changes only the signs of the others,
which are restored.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aotc.ir.dims.algebra import static
from aotc.ir.opset.linalg_lapack import SVDS
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.pack_contractions.swap_operands import swap_permutation
from aotc.lowering.passes.parallelize_gpu.elementwise_dsl import ElementwiseBuilder
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.linalg.gpu_jacobi import fits_jacobi_block
from aotc.vmfb.dtypes import kind_of, real_of


def parallelize_svd(op: Op, b: Builder) -> Sequence[Value] | None:
    """Rewrite a GPU singular value decomposition so that Jacobi's method in one block computes it; None keeps the op.
    """
    if op.attrs["routine"] not in SVDS or not fits_jacobi_block(op):
        return None
    (a,) = op.operands
    columns, rows = (static(d) for d in a.type.shape[-2:])
    tall = rows >= columns
    matrix = a if tall else _conjugate_transpose(a, b)
    _, values, left, right, status = _lapack_op(op.attrs["routine"], (matrix,), {**op.attrs["options"], "mode": "S"}, b)
    left = _complete_orthonormal_columns(left, op.attrs["options"]["mode"] == "A", b)
    if tall:
        return a, values, left, right, status
    return a, values, _conjugate_transpose(right, b), _conjugate_transpose(left, b), status


def _lapack_op(routine: str, operands: Sequence[Value], options: Mapping[str, Any], b: Builder) -> Sequence[Value]:
    return b.append(b.op("lapack", tuple(operands), {"routine": routine, "options": dict(options)}, hint=routine))


def _conjugate_transpose(x: Value, b: Builder) -> Value:
    """Return the conjugate transpose of each matrix in ``x``."""
    transposed = b.transpose(x, swap_permutation(x.type.rank))
    return b.make("conj", (transposed,)) if kind_of(x.type.dtype) == "c" else transposed


def _complete_orthonormal_columns(vectors: Value, whole: bool, b: Builder) -> Value:
    """Complete the nonzero columns of ``vectors`` to orthonormal columns, or to a basis if ``whole``."""
    *batch, count, size = vectors.type.shape
    rank, m = len(batch), ElementwiseBuilder(b)
    factor, taus = _lapack_op("geqrf", (vectors,), {}, b)
    rows, columns = (b.make("iota", (), {"dim": d}, TensorType("i32", factor.type.shape)) for d in (rank + 1, rank))
    zeros = m.filled(0, factor.type)
    real = TensorType(real_of(factor.type.dtype), factor.type.shape)
    own = m.select(m("eq", rows, columns), factor, zeros)
    own = b.make("real", (own,), {}, real) if kind_of(own.type.dtype) == "c" else own
    zero = b.constant(0, TensorType(real.dtype))
    diagonal = b.reduce(own, zero, (rank + 1,), b.combiner("add", real.dtype))
    if whole:
        extra = {rank: static(size) - static(count)}
        factor, diagonal = b.pad(factor, None, high=extra), b.pad(diagonal, zero, high=extra)
    (basis,) = _lapack_op("orgqr", (factor, taus), {}, b)
    down = m("lt", diagonal, 0)
    return m.select(b.broadcast(down, tuple(range(rank + 1)), basis.type.shape), b.make("neg", (basis,)), basis)
