"""Check result types that a model states for ops whose types MLIR's verifier does not check."""

from __future__ import annotations

from typing import Any

from aotc.frontend.mlir_types import DYNAMIC, leaf_types
from aotc.frontend.session import ImportState
from aotc.ir.tensor.ir import TensorType


def check_results(state: ImportState, op: Any, what: str) -> None:
    """Reject ``op`` if the types of its imported results differ from the stated ones; ``what`` names it in the message.

    Unknown sizes are checked at run time. Shapes are not compared in a computation that is mapped over tensors: there
    values have more dims than the model states.
    """
    for n, result in enumerate(op.results):
        imported = state.values.get(result, ())
        if imported is None:  # refused already
            continue
        stated = [TensorType(*state.session.parts(leaf)) for leaf in leaf_types(result.type)]
        types = [v.type for v in imported]
        if len(types) != len(stated) or not all(map(_types_agree, types, stated, [state.by_element] * len(types))):
            actual = ", ".join(map(str, types)) or "nothing"
            expected = ", ".join(map(str, stated))
            message = f"result {n} of {what} is {actual}, but the model states {expected}"
            state.fail(message, f"state {actual}, or convert the result with another op")


def _types_agree(actual: TensorType, stated: TensorType, mapped: int) -> bool:
    """Return True if dtypes are equal and, unless ``mapped``, no two known sizes differ."""
    if actual.dtype != stated.dtype or mapped:
        return actual.dtype == stated.dtype
    if actual.rank != stated.rank:
        return False
    pairs = zip(actual.shape, stated.shape, strict=True)
    return all(a == b or b == DYNAMIC or not isinstance(a, int) for a, b in pairs)
