"""What is known about a value at compile time: the constant that it is, the one number that fills it."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from aotc.ir.opset import MOVES
from aotc.ir.tensor_ir import Op, Region, Value, walk
from aotc.lowering.analysis.cost import SPLAT_ELEMENTS


def constants_in(*regions: Region) -> dict[Value, Op]:
    """Return the constants of regions, and of those inside, by what they make."""
    return {op.result: op for region in regions for op in walk(region) if op.name == "constant"}


def constant_of(v: Value, definitions: Mapping[Value, Op]) -> np.ndarray | None:
    """Return the array of a constant as it is stored (shape ``()`` if one number fills it), or None."""
    op = definitions.get(v)
    return op.attrs["value"] if op is not None and op.name == "constant" else None


def splat_of(v: Value, definitions: Mapping[Value, Op]) -> np.ndarray | None:
    """Return the scalar (shape ``()``) that fills ``v``, looking through movement, or None."""
    op = definitions.get(v)
    while op is not None and op.name in MOVES:
        op = definitions.get(op.operands[0])
    if op is None or op.name != "constant":
        return None
    value = op.attrs["value"]
    if value.ndim == 0:
        return value
    if value.size and SPLAT_ELEMENTS.holds(value.size):
        raw = np.ascontiguousarray(value).reshape(value.size, 1).view(np.uint8)
        if (raw == raw[0]).all():
            return value.reshape(-1)[0].reshape(())
    return None


def integer_of(v: Value, definitions: Mapping[Value, Op]) -> int | None:
    """Return the integer that the scalar ``v`` is, or None."""
    value = splat_of(v, definitions)
    return int(value) if value is not None and v.type.rank == 0 else None
