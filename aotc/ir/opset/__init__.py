"""The op table: every op of the tensor IR, its type rule and its NumPy meaning."""

from __future__ import annotations

from aotc.ir.opset.collective import COLLECTIVES
from aotc.ir.opset.contract import CONTRACT
from aotc.ir.opset.control import CONTROL
from aotc.ir.opset.elementwise import ELEMENTWISE, SCALARS, ScalarOp
from aotc.ir.opset.indexing import INDEXING
from aotc.ir.opset.linalg import LINALG
from aotc.ir.opset.random import RANDOM
from aotc.ir.opset.reduction import REDUCTION
from aotc.ir.opset.shape import SHAPE
from aotc.ir.opset.sorting import SORTING
from aotc.ir.opset.spec import OpSpec, RuleError, merge

OPS: dict[str, OpSpec] = merge(
    ELEMENTWISE, SHAPE, INDEXING, REDUCTION, LINALG, CONTRACT, CONTROL, COLLECTIVES, RANDOM, SORTING
)

__all__ = ["OPS", "SCALARS", "OpSpec", "RuleError", "ScalarOp"]
