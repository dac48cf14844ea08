"""Which operands an op updates in place: its first results are written over them.

The kernel of such an op does not read these operands: their memory is that of the
results, which holds the operands' values when the kernel starts (``bufferize``
sees to that).
"""

from __future__ import annotations

from aotc.ir.opset import OPS
from aotc.ir.tensor_ir import Function, Op


def updated_operands(op: Op) -> tuple[int, ...]:
    """Return the positions of the operands that results 0, 1... of ``op`` overwrite."""
    return OPS[op.name].in_place(op.attrs)


def overwritten(function: Function) -> int:
    """Return how many leading parameters of an outlined region share memory with its results."""
    if function.attrs["kind"] not in ("single", "update") or not function.body.results:
        return 0
    op = next(op for op in function.body.ops if op.results[0] is function.body.results[0])
    return len(updated_operands(op))
