"""Definitions that printer, parser and interpreter of the loop IR share: keywords, operators, implied dtypes."""

from __future__ import annotations

import ast
from typing import Any

from aotc.ir.dims.algebra import Dim, Sym, bounds
from aotc.ir.loop.ir import LoopKind
from aotc.ir.opset import INFIX, PREFIX, SCALARS
from aotc.ir.opset.elementwise import result_dtype

LOOPS: dict[str, LoopKind] = {
    "range": "serial", "parallel": "parallel", "unroll": "unroll", "lanes": "lanes", "thread": "thread",
    "blocks": "blocks",
}  # fmt: skip


def _syntax_node_class(symbol: str, arity: int) -> type:
    """Return the syntax tree node class of an operator."""
    node: Any = ast.parse(f"a {symbol} b" if arity == 2 else f"{symbol}a", mode="eval").body
    return type(node.ops[0] if isinstance(node, ast.Compare) else node.op)


ATOMIC_DTYPES = frozenset({"i32", "u32", "i64", "u64"})
"""Dtypes for which GPUs have atomic updates in memory."""

OPERATORS = {_syntax_node_class(symbol, 2): name for name, symbol in INFIX.items()} | {
    _syntax_node_class(symbol, 1): name for name, symbol in PREFIX.items()
}
"""The scalar op of each operator of Python's syntax tree."""


def natural_dtype(fn: str, dtypes: tuple[str, ...]) -> str | None:
    """Return the implied result dtype of scalar op ``fn`` on operands of ``dtypes``, or None if the text must have it.

    ``convert`` and ``bitcast`` have an explicit target; all others follow from the operands.
    """
    row = SCALARS.get(fn)
    if not dtypes or fn == "bitcast" or (row is not None and row.result == "given"):
        return None
    return result_dtype(row, dtypes, None) if row is not None else dtypes[0]


def loop_symbol(var: str, begin: Dim, end: Dim) -> Sym:
    """Return the symbol of ``for var in range(begin, end)``: at least ``begin``, below ``end``.

    A symbolic ``begin`` counts as its lower bound (0 if unknown).
    """
    low = bounds(begin)[0]
    return Sym(var, 0 if low is None else low, end)
