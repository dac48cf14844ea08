"""The op table: every op of the tensor IR, with its type rule, its NumPy meaning, and facts about it.

Sets of op names are defined here, by comprehensions over the table. A family of ops has its own file in this folder;
importers and lowering rules of its ops are in files with the family's name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from aotc.ir.opset.attention import ATTENTION
from aotc.ir.opset.collective import COLLECTIVES
from aotc.ir.opset.contract import CONTRACT
from aotc.ir.opset.control import CONTROL
from aotc.ir.opset.elementwise import ELEMENTWISE
from aotc.ir.opset.elementwise_scalars import SCALARS, ScalarOp
from aotc.ir.opset.indexing import INDEXING
from aotc.ir.opset.linalg import LINALG
from aotc.ir.opset.random import RANDOM
from aotc.ir.opset.reduction import REDUCTION
from aotc.ir.opset.shape import SHAPE
from aotc.ir.opset.sorting import SORTING
from aotc.ir.opset.spec import OpSpec, RuleError, merge_op_tables

FAMILIES: Mapping[str, Mapping[str, OpSpec]] = {
    "elementwise": ELEMENTWISE,
    "shape": SHAPE,
    "indexing": INDEXING,
    "reduction": REDUCTION,
    "linalg": LINALG,
    "contract": CONTRACT,
    "attention": ATTENTION,
    "control": CONTROL,
    "collective": COLLECTIVES,
    "random": RANDOM,
    "sorting": SORTING,
}
OPS: dict[str, OpSpec] = merge_op_tables(*FAMILIES.values())


def names(fact: Callable[[OpSpec], bool]) -> frozenset[str]:
    """Return the names of all ops in the table for which ``fact(spec)`` is True."""
    return frozenset(name for name, spec in OPS.items() if fact(spec))


CALLS = names(lambda s: "callee" in s.attrs)
CHECKS = names(lambda s: "message" in s.attrs or "messages" in s.attrs)
CONTROL_FLOW = names(lambda s: s.branches)
EFFECTS = names(lambda s: s.effect)
EXPENSIVE = names(lambda s: s.work > 1)
FOLDED = names(lambda s: s.folds)
FREE = names(lambda s: s.work == 0)
INLINE = names(lambda s: s.inline)
MOVES = names(lambda s: s.moves)
PARTIAL = names(lambda s: s.partial)
PERMUTATIONS = names(lambda s: s.permutes)
PRODUCTS = names(lambda s: s.sums)
SOURCES = FREE - MOVES  # ops without operands, which create their elements
SELECTIONS = names(lambda s: s.moves or s.selects)
PARTIAL_WRITES = names(lambda s: s.writes_part)
TILED_BY_COLUMNS = names(lambda s: s.takes_cols)
LOOPED = names(lambda s: s.folds_state)
VARIADIC = names(lambda s: s.variadic)
VIEWERS = names(lambda s: s.views)

TOTAL = frozenset(name for name, row in SCALARS.items() if row.total)  # of floats, in total order
APPROXIMATIONS = {row.approximates: name for name, row in SCALARS.items() if row.approximates}  # of the loop IR
ACCUMULATED = frozenset(name for name, row in SCALARS.items() if row.accumulates)
NAN_KEEPING = frozenset(  # of floats, NaN where an operand is NaN
    name for name, row in SCALARS.items() if "f" in row.kinds and row.result != "bool" and not row.hides_nan
)
ATOMIC = frozenset(name for name, row in SCALARS.items() if row.atomic)  # of integers of 32 and 64 bits
NEVER_NEGATIVE_ZERO = frozenset(name for name, row in SCALARS.items() if row.signs_no_zero)
COMMUTATIVE = frozenset(name for name, row in SCALARS.items() if row.commutes)
INFIX = {name: row.symbol for name, row in SCALARS.items() if row.symbol and row.arity == 2 and not row.total}
COMPARISONS = {name: symbol for name, symbol in INFIX.items() if SCALARS[name].result == "bool"}
ORDERINGS = frozenset(name for name, symbol in COMPARISONS.items() if symbol[0] in "<>")
PREFIX = {name: row.symbol for name, row in SCALARS.items() if row.symbol and row.arity == 1}

__all__ = [
    "ACCUMULATED", "APPROXIMATIONS", "ATOMIC", "CALLS", "CHECKS", "COLLECTIVES", "COMMUTATIVE", "COMPARISONS",
    "CONTRACT", "CONTROL_FLOW", "EFFECTS", "ELEMENTWISE", "EXPENSIVE", "FAMILIES", "FOLDED", "FREE", "INFIX", "INLINE",
    "MOVES", "NAN_KEEPING", "OPS", "ORDERINGS", "PARTIAL", "PERMUTATIONS", "PREFIX", "PRODUCTS", "SCALARS", "SOURCES",
    "TOTAL", "VARIADIC", "VIEWERS", "OpSpec", "RuleError", "ScalarOp", "names",
]  # fmt: skip
