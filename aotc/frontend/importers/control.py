"""Import of control flow: while, case, if, calls, composites, assertions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.frontend.affinity import transferred_to_devices
from aotc.frontend.entry_attrs import argument_affinities
from aotc.frontend.importers.elementwise import COMPOSITES, is_complex_only
from aotc.frontend.importers.reduction import sum_over
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.mlir_types import leaf_types
from aotc.frontend.session import Importer, ImportState
from aotc.frontend.stated_types import check_results
from aotc.ir.dims.algebra import Expr
from aotc.ir.tensor.ir import Region, TensorType, Value


def _import_while(state: ImportState, op: Any) -> None:
    """Import ``while``; carried values that the body returns unchanged keep their shape values."""
    inits = state.operands(op)
    if state.by_element and any(v.type.rank for v in inits):
        state.bind(op, _masked_loop(state, op, inits))
        return
    body = op.regions[1].blocks[0]
    back = list(body.operations)[-1].operation.operands
    untouched = [b == a for b, a in zip(back, body.arguments) for _ in leaf_types(a.type)]
    regions = []
    for region in op.regions:
        block = region.blocks[0]
        params = [state.new_value(v.type) for v in inits]
        for param, init, same in zip(params, inits, untouched):
            # a carried value that the body does not change keeps its shape value
            if init in state.known and same:
                state.known[param] = state.known[init]
        carried = [] if region is op.regions[0] else [v.type for v in inits]
        regions.append(state.region(block, params, carried))
    state.bind(op, state.emit("while", inits, {}, (), regions))


def _masked_loop(state: ImportState, op: Any, inits: Sequence[Value]) -> Sequence[Value]:
    """Import a loop in a computation that is mapped over tensors; return the final carried values.

    The loop runs until the condition fails for every element. Elements that finish early keep their values, as if each
    element had its own loop.
    """
    shape = max((v.type.shape for v in inits), key=len)
    starts = [state.broadcast_scalar(v, shape) for v in inits]
    condition, body = (r.blocks[0] for r in op.regions)

    def is_running(params: Sequence[Value]) -> Value:
        state.bind_values(condition.arguments, params)
        (test,) = state.session.import_block(state, condition)
        return state.broadcast_scalar(test, shape)

    def step(params: Sequence[Value]) -> list[Value]:
        """Return the next state; elements whose loop has ended keep their state."""
        test = is_running(params)
        state.bind_values(body.arguments, params)
        after = state.session.import_block(state, body)
        return [
            state.one("select", [test, state.broadcast_scalar(new, shape), old])
            for new, old in zip(after, params, strict=True)
        ]

    whole = tuple(range(len(shape)))
    types = [v.type for v in starts]
    test = state.region_of_emitter(types, lambda params: [sum_over(state, is_running(params), whole)])
    return state.emit("while", starts, {}, (), [test, state.region_of_emitter(types, step)])


def _import_case(state: ImportState, op: Any) -> None:
    import_branch(state, op, state.value(op.operands[0]), list(op.regions))


def import_branch(state: ImportState, op: Any, index: Value, regions: Sequence[Any]) -> None:
    """Import a branch: bind the results of region number ``index``, or of the last region if out of range.

    A region without a block has no results.
    """
    if state.by_element:
        state.bind(op, _select_branch_by_element(state, regions, index))
        return
    number = state.known.get(index)
    if number is not None and not isinstance(number[0], Expr):
        taken = number[0] if 0 <= number[0] < len(regions) else -1
        state.bind(op, _inline_region_ops(state, regions[taken]))
        return
    declared: list[TensorType] = []
    branches: list[Region] = []
    for region in regions:
        branches.append(state.region(region.blocks[0], (), declared) if len(region.blocks) else Region((), (), ()))
        declared = declared or [v.type for v in branches[0].results]
    state.bind(op, state.emit("case", [index], {}, (), branches))


def _inline_region_ops(state: ImportState, region: Any) -> list[Value]:
    return state.session.import_block(state, region.blocks[0]) if len(region.blocks) else []


def _select_branch_by_element(state: ImportState, regions: Sequence[Any], index: Value) -> list[Value]:
    """Import all branches; for each element return the values of the branch that its ``index`` selects."""
    shape = index.type.shape
    branches = [_inline_region_ops(state, region) for region in regions]
    selected = [state.broadcast_scalar(v, shape) for v in branches[-1]]
    for k in reversed(range(len(branches) - 1)):
        test = state.one("eq", [index, state.constant(np.int32(k), index.type)])
        chosen = [state.broadcast_scalar(v, shape) for v in branches[k]]
        selected = [state.one("select", [test, a, b]) for a, b in zip(chosen, selected, strict=True)]
    return selected


def _import_if(state: ImportState, op: Any) -> None:
    """Import ``if`` as a case whose branch 0 is the true branch."""
    (pred,) = state.operands(op)
    import_branch(state, op, state.convert(state.one("not", [pred]), "i32"), list(op.regions))


def _import_call(state: ImportState, op: Any) -> None:
    call_function(state, op, op.attributes["callee"].value)


def call_function(state: ImportState, op: Any, callee: str) -> None:
    """Emit a call of the clone of ``callee`` for the operands of ``op``, moved to the devices that ``callee`` names."""
    operands: Sequence[Value] = state.operands(op)
    homes = _devices_named_by_callee(state, callee)
    operands = transferred_to_devices(state, operands, homes["arguments"]) if homes else operands
    clone = state.session.clone(state, callee, operands)
    results = state.emit("call", operands, {"callee": clone.name}, [v.type for v in clone.results])
    state.known.update((r, k) for r, k in zip(results, clone.known) if k is not None)
    state.bind(op, transferred_to_devices(state, results, homes["results"]) if homes else results)


def _devices_named_by_callee(state: ImportState, callee: str) -> dict[str, list[str]]:
    """Return the devices that ``callee`` names for its arguments and results; empty if it names none."""
    function = state.session.symbols.get(callee)
    if function is None:
        return {}
    devices = argument_affinities(
        function, state.session.devices, loc_from_mlir(function.operation.location, state.session.path)
    )
    if state.by_element and any(map(any, devices.values())):
        state.fail(f"{callee}, which is called in the computation of another op, names devices")
    return devices if any(map(any, devices.values())) else {}


def _import_alias(state: ImportState, op: Any) -> None:
    """Import an op that only groups, orders or annotates values: bind its results to its operands."""
    state.bind(op, state.operands(op))


def _import_get_tuple_element(state: ImportState, op: Any) -> None:
    operand, index = op.operands[0], op.attributes["index"].value
    start = sum(len(leaf_types(operand.type.get_type(n))) for n in range(index))
    state.bind(op, state.leaves(operand)[start:])


def _import_composite(state: ImportState, op: Any) -> None:
    """Import a composite: by its own importer if there is one, else by a call of its decomposition."""
    name = op.attributes["name"].value
    attributes = op.attributes.get("composite_attributes", {})
    if name == "chlo.top_k" and "k" in attributes:
        state.bind(op, state.emit("top_k", state.operands(op), {"k": attributes["k"].value}))
    elif name in COMPOSITES and not is_complex_only(op, name):
        COMPOSITES[name](state, op)
    else:
        call_function(state, op, op.attributes["decomposition"].value)
    check_results(state, op, f"composite {name!r}")


def assert_test(state: ImportState, test: Value, numbers: Sequence[Value], message: str) -> None:
    """Require that every element of ``test`` is true; ``numbers`` are the values of the fields in ``message``."""
    elements = state.known.get(test)
    if elements is not None and not any(isinstance(k, Expr) for k in elements):
        if not all(elements):
            state.fail(f"an assertion is always false: {message}", "correct the model, or the shapes of its arguments")
        return
    if not state.assert_dims(test, numbers, message):
        state.emit("assert", [_all_elements_true(state, test), *numbers], {"message": message})
    state.assume(test)


def _all_elements_true(state: ImportState, test: Value) -> Value:
    """Return an i1 scalar that is true if every element of ``test`` is."""
    if test.type.rank == 0:
        return test
    fails = state.one("not", [test])
    return state.one("not", [sum_over(state, fails, tuple(range(test.type.rank)))])


CONTROL: dict[str, Importer] = {
    "stablehlo.while": _import_while,
    "stablehlo.case": _import_case,
    "stablehlo.tuple": _import_alias,
    "stablehlo.get_tuple_element": _import_get_tuple_element,
    "stablehlo.after_all": _import_alias,
    "stablehlo.create_token": _import_alias,
    "stablehlo.optimization_barrier": _import_alias,
    **dict.fromkeys(("stablehlo.if", "scf.if"), _import_if),
    "func.call": _import_call,
    "stablehlo.composite": _import_composite,
}
