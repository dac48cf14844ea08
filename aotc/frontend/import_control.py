"""Import of control: while, case, if, calls, composites, custom calls."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir

from aotc.frontend.dims import Expr
from aotc.frontend.import_elementwise import CHLO
from aotc.frontend.import_indexing import CUSTOM_INDEXING
from aotc.frontend.import_lapack import LAPACK
from aotc.frontend.import_state import Importer, State, get_value
from aotc.frontend.tensor_ir import TensorType, Value


def _while(state: State, op: Any) -> None:
    inits = state.operands(op)
    body = op.regions[1].blocks[0]
    back = list(body.operations)[-1].operation.operands
    regions = []
    for region in op.regions:
        block = region.blocks[0]
        params = [state.new_value(v.type) for v in inits]
        for i, (param, init) in enumerate(zip(params, inits)):
            # a carried value that the body hands back untouched keeps its shape value
            if init in state.known and back[i] == body.arguments[i]:
                state.known[param] = state.known[init]
        regions.append(state.region(block, params))
    state.bind(op, state.emit("while", inits, {}, (), regions))


def _case(state: State, op: Any) -> None:
    regions = [state.region(r.blocks[0], ()) for r in op.regions]
    state.bind(op, state.emit("case", state.operands(op), {}, (), regions))


def _if(state: State, op: Any) -> None:
    """Branch 0 of the case is the true branch."""
    (pred,) = state.operands(op)
    index = state.one("convert", [state.one("not", [pred])], {}, [TensorType("i32")])
    regions = [state.region(r.blocks[0], ()) for r in op.regions]
    state.bind(op, state.emit("case", [index], {}, (), regions))


def _call(state: State, op: Any) -> None:
    call_function(state, op, op.attributes["callee"].value)


def call_function(state: State, op: Any, callee: str) -> None:
    """Emit a call of the clone of ``callee`` that fits the actual arguments."""
    operands = state.operands(op)
    clone = state.session.symbols["clone"](state, callee, operands)
    results = state.emit("call", operands, {"callee": clone.name}, [v.type for v in clone.results])
    state.known.update((r, k) for r, k in zip(results, clone.known) if k is not None)
    state.bind(op, results)


def _composite(state: State, op: Any) -> None:
    name = op.attributes["name"].value
    attributes = op.attributes.get("composite_attributes", {})
    if name == "chlo.top_k" and "k" in attributes:
        state.bind(op, state.emit("top_k", state.operands(op), {"k": attributes["k"].value}))
    elif name.removeprefix("chlo.") in CHLO and name.startswith("chlo."):
        state.bind(op, [state.one(CHLO[name.removeprefix("chlo.")], state.operands(op))])
    else:
        call_function(state, op, op.attributes["decomposition"].value)


def _shape_assertion(state: State, op: Any) -> None:
    test, *numbers = state.operands(op)
    known = state.known.get(test)
    message = get_value(op, "error_message", "a shape assertion failed")
    if known is not None and not isinstance(known[0], Expr):
        if not known[0]:
            state.fail(f"a shape assertion never holds: {message}")
        return
    state.emit("assert", [test, *numbers], {"message": message})
    state.assume(test)


_IDENTITIES = frozenset(
    {"Sharding", "annotate_device_placement", "LayoutConstraint", "SPMDFullToShardShape", "SPMDShardToFullShape"}
)


_CUSTOM: dict[str, Importer] = {**CUSTOM_INDEXING, **LAPACK}


def _custom_call(state: State, op: Any) -> None:
    target = op.attributes["call_target_name"].value
    if target == "shape_assertion":
        _shape_assertion(state, op)
    elif target in _CUSTOM:
        _CUSTOM[target](state, op)
    elif target in _IDENTITIES:
        state.bind(op, state.operands(op))
    else:
        attrs = {"target": target, "config": _config(op), "api_version": get_value(op, "api_version", 1)}
        given = [state.static_type(r.type) for r in op.results]
        state.bind(op, state.emit("custom_call", state.operands(op), attrs, given))


def _config(op: Any) -> Any:
    for name in ("mhlo.backend_config", "backend_config"):
        if name in op.attributes:
            return _plain(op.attributes[name])
    return {}


def _plain(attribute: Any) -> Any:
    """Return an attribute as plain data; what has no plain form as text."""
    if isinstance(attribute, ir.DictAttr):
        named = (attribute[i] for i in range(len(attribute)))
        return {a.name: _plain(a.attr) for a in named}
    if isinstance(attribute, ir.ArrayAttr):
        return tuple(_plain(a) for a in attribute)
    return attribute.value if hasattr(attribute, "value") else str(attribute)


def return_values(state: State, op: Any) -> list[Value]:
    """Return the operands of a terminator."""
    return state.operands(op)


CONTROL: dict[str, Importer] = {
    "stablehlo.while": _while,
    "stablehlo.case": _case,
    "stablehlo.if": _if,
    "func.call": _call,
    "stablehlo.composite": _composite,
    "stablehlo.custom_call": _custom_call,
}
