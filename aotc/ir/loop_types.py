"""What printer, parser and runner of the loop IR share: its words, and what its text leaves out because it follows."""

from __future__ import annotations

from aotc.ir.dims import Dim, Sym, bounds
from aotc.ir.loop_ir import LoopKind
from aotc.ir.opset.elementwise import SCALARS, result_dtype

LOOPS: dict[str, LoopKind] = {"range": "serial", "parallel": "parallel", "unroll": "unroll", "thread": "thread"}

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^",
    "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=",
}  # fmt: skip


def natural_dtype(fn: str, dtypes: tuple[str, ...]) -> str | None:
    """Return the dtype of scalar op ``fn`` on operands of ``dtypes``, or None where it has to be said.

    ``convert`` and ``bitcast`` name their target; everything else follows from
    the operands.
    """
    if fn in ("convert", "bitcast") or not dtypes:
        return None
    return result_dtype(SCALARS[fn], dtypes, None) if fn in SCALARS else dtypes[0]


def loop_symbol(var: str, begin: Dim, end: Dim) -> Sym:
    """Return the symbol of ``for var in range(begin, end)``: at least ``begin``, below ``end``.

    A symbolic ``begin`` counts by its lower bound (0 if that is unknown).
    """
    low = bounds(begin)[0]
    return Sym(var, 0 if low is None else low, end)
