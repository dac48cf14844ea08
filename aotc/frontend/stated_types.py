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
        found = state.values.get(result, ())
        if found is None:  # refused already
            continue
        stated = [TensorType(*state.session.parts(leaf)) for leaf in leaf_types(result.type)]
        types = [v.type for v in found]
        if len(types) != len(stated) or not all(map(_types_agree, types, stated, [state.by_element] * len(types))):
            given = ", ".join(map(str, types)) or "nothing"
            wanted = ", ".join(map(str, stated))
            message = f"result {n} of {what} is {given}, but the model states {wanted}"
            state.fail(message, f"state {given}, or convert the result with an op of its own")


def _types_agree(found: TensorType, stated: TensorType, mapped: int) -> bool:
    if found.dtype != stated.dtype or mapped:
        return found.dtype == stated.dtype
    if found.rank != stated.rank:
        return False
    pairs = zip(found.shape, stated.shape, strict=True)
    return all(a == b or b == DYNAMIC or not isinstance(a, int) for a, b in pairs)
