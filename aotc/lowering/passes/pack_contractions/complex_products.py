"""Express products of complex matrices as products of real ones, for which tiles exist.

The real and imaginary parts of the left operand are rows of one real product, those of the right operand its columns.
The result consists of sums and differences of the four quarters of that product::

    [re(a)]                     [re(a) re(b)   re(a) im(b)]
    [im(a)] @ [re(b)  im(b)]  = [im(a) re(b)   im(a) im(b)]
"""

from __future__ import annotations

from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import real_of


def product_of_parts(op: Op, b: Builder) -> Op:
    """Return the real ``matmul`` of the parts of a complex one; append its operands, but not itself."""
    rank, flags = op.result.type.rank, (bool(op.attrs["lhs_transposed"]), bool(op.attrs["rhs_transposed"]))
    rows, columns = (rank - 1 if flags[0] else rank - 2), (rank - 2 if flags[1] else rank - 1)
    dtype = op.result.type.dtype
    operands = [_parts_along(b.convert(x, dtype), axis, b) for x, axis in zip(op.operands, (rows, columns))]
    *batch, m, n = op.result.type.shape
    return b.op("matmul", operands, op.attrs, (TensorType(real_of(dtype), (*batch, 2 * m, 2 * n)),))


def whole_of_quarters(quarters: Value, b: Builder) -> Value:
    """Return the complex product, given the real product of the parts."""
    rows, columns = quarters.type.rank - 2, quarters.type.rank - 1
    m, n = (d // 2 for d in quarters.type.shape[-2:])
    halves = [b.slice_dim(quarters, rows, low, low + m) for low in (0, m)]
    (real, cross), (other, both) = ([b.slice_dim(x, columns, low, low + n) for low in (0, n)] for x in halves)
    return b.make("complex", (b.make("sub", (real, both)), b.make("add", (cross, other))))


def _parts_along(x: Value, axis: int, b: Builder) -> Value:
    """Return the real parts followed by the imaginary parts along ``axis``."""
    return b.make("concatenate", (b.make("real", (x,)), b.make("imag", (x,))), {"dim": axis})
