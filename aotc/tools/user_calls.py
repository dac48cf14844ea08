"""Run a user's custom call in Python, for the reference interpreter."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.diagnostics import CompileError
from aotc.ir.opset.spec import sizes
from aotc.ir.tensor.ir import Op, TensorType
from aotc.lowering.regions.custom_call import describe
from aotc.vmfb.custom_calls import registered
from aotc.vmfb.dtypes import DTYPES, to_numpy


def call_user(op: Op, operands: Sequence[np.ndarray], types: Sequence[TensorType]) -> list[np.ndarray]:
    """Return the results of the function registered for ``op`` on ``operands``.

    Raises
    ------
    CompileError
        If none is registered, or the function raises.
    """
    call = describe(op)
    known = registered(call.name)
    if known is None or known.function is None:
        hint = "register it before, in a file that --custom-calls names"
        raise CompileError.at(op.loc, f"no function is registered for custom call @{call.name}", hint=hint)
    results = [np.zeros(sizes(t), to_numpy(t.dtype)) for t in types]
    for result, operand in op.attrs.get("aliases", ()):
        results[result][...] = operands[operand]
    arrays = [np.ascontiguousarray(a) for a in (*operands, *results)]
    seen = [_as_bits(a, t.dtype) if known.native else a for a, t in zip(arrays, _types(op, types), strict=True)]
    try:
        known.function(*seen, **call.attributes)
    except Exception as error:
        message = f"custom call @{call.name}: its function raises {type(error).__name__}: {error}"
        raise CompileError.at(op.loc, message) from error
    return arrays[len(operands) :]


def _types(op: Op, results: Sequence[TensorType]) -> list[TensorType]:
    return [*(v.type for v in op.operands), *results]


def _as_bits(array: np.ndarray, dtype: str) -> np.ndarray:
    """Return floats of at most 16 bits as compiled functions receive them: unsigned integers with the same bits."""
    row = DTYPES[dtype]
    return array.view(f"u{row.size}") if row.kind == "f" and row.bits <= 16 else array
