"""Which eigenvectors and singular vectors a block of a GPU's threads finds by Jacobi's method."""

from __future__ import annotations

from aotc.ir.opset.linalg_lapack import JACOBI_ROUTINES, SVDS
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.costs.table_algorithms import BLOCK_FACTOR, JACOBI_BYTES
from aotc.vmfb.dtypes import size_of


def turned_in_block(op: Op) -> bool:
    """Has a block of threads room for the columns of a matrix and its vectors, so that it does a routine's work?

    Of a singular value decomposition the columns are those of the matrix or of its adjoint, whichever has fewer.
    """
    routine = op.attrs["routine"]
    if routine not in JACOBI_ROUTINES:
        return False
    *_, columns, rows = op.operands[0].type.shape
    if not (isinstance(columns, int) and isinstance(rows, int)):
        return False
    few, many = min(columns, rows), max(columns, rows)
    full = routine in SVDS and op.attrs["options"]["mode"] == "A"
    fits = JACOBI_BYTES.holds(few * (many + few) * size_of(op.operands[0].type.dtype))
    return few > 0 and fits and BLOCK_FACTOR.holds(many * (many if full else few))
