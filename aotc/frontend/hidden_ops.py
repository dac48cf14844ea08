"""Ops disguised as custom calls, so that they survive portable artifacts: CHLO ops, and ops on complex numbers.

jaxlib's portable artifacts cannot represent most CHLO ops: StableHLO's serializer rejects the module, and
``jax.export`` writes expansions, which are less accurate than aotc's own ops. JAX also expands functions of complex
numbers. A custom call such as ``stablehlo.custom_call @aotc.chlo.digamma(%x)`` survives both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir

from aotc.frontend.mlir_types import inner_operations

_CHLO, _STABLEHLO, _CALL = "chlo.", "stablehlo.", "stablehlo.custom_call"
_OURS = "aotc."


def operations_of(module: ir.Module) -> Iterator[Any]:
    """Return the ops of a module, including those in regions."""
    stack = [module.operation]
    while stack:
        op = stack.pop()
        for inner in inner_operations(op):
            stack.append(inner)
            yield inner


def hide_ops(module: ir.Module, complex_too: bool = False) -> None:
    """Replace ops without regions and attributes by calls: CHLO ops, and all ops on complex numbers."""
    for op in list(operations_of(module)):
        hidden = op.name.startswith(_CHLO) or (complex_too and _is_of_complex(op))
        if hidden and not op.regions and not len(op.attributes):
            target = ir.StringAttr.get(_OURS + op.name, op.context)
            replace_op(op, _CALL, {"call_target_name": target})


def _is_of_complex(op: Any) -> bool:
    """Return True for a StableHLO op with one operand type and one result, both tensors of complex numbers."""
    if not op.name.startswith(_STABLEHLO) or not len(op.operands) or len(op.results) != 1:
        return False
    kind = op.results[0].type
    return kind == op.operands[0].type and "complex<" in str(kind)


def reveal_hidden_ops(module: ir.Module) -> None:
    """Replace the custom calls that :func:`hide_ops` created by the original ops."""
    for op in list(operations_of(module)):
        if op.name == _CALL:
            reveal_hidden_op(op)


def reveal_hidden_op(op: Any) -> Any:
    """Replace a custom call by the op that it hides, and return that op; return another custom call unchanged.

    Raises
    ------
    ir.MLIRError
        If the hidden op cannot have the call's operands and results.
    """
    target = op.attributes["call_target_name"].value
    name = target.removeprefix(_OURS)
    if name == target or not name.startswith((_CHLO, _STABLEHLO)):
        return op
    new = replace_op(op, name, {})
    new.verify()
    return new


def replace_op(op: Any, name: str, attributes: dict[str, Any]) -> Any:
    """Replace an op without regions by an op called ``name`` with the same operands and result types; return it."""
    with ir.InsertionPoint(op), op.location:
        new = ir.Operation.create(
            name, results=[r.type for r in op.results], operands=list(op.operands), attributes=attributes
        )
    for old, result in zip(op.results, new.results, strict=True):
        old.replace_all_uses_with(result)
    op.erase()
    return new
