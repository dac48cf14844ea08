"""Import of MLIR's ``scf`` ops and ``cf.assert``, which occur next to StableHLO in models of other producers.

``scf.for`` and ``scf.while`` become ``while``, ``scf.if`` and ``scf.index_switch`` become ``case``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aotc.frontend.importers.control import assert_test, import_branch
from aotc.frontend.mlir_types import integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.tensor.ir import Region, TensorType, Value
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.messages import escape_braces


def _import_for(state: ImportState, op: Any) -> None:
    """Import a counted loop: the counter is the first carried value."""
    _refuse_by_element(state)
    low, high, step, *carried = state.operands(op)
    if state.known.get(step, (1,))[0] == 0:
        state.fail("scf.for has a step of 0", "a positive step")
    unsigned = "unsignedCmp" in op.attributes
    block = op.regions[0].blocks[0]
    inits = [low, *carried]

    def test(params: Sequence[Value]) -> list[Value]:
        sides = [params[0], high]
        if unsigned:
            dtype = high.type.dtype.replace("i", "u")
            sides = [state.one("bitcast", [v], {}, [TensorType(dtype)]) for v in sides]
        return [state.one("lt", sides)]

    def body(params: Sequence[Value]) -> list[Value]:
        after = _import_loop_block(state, block, params)
        return [state.one("add", [params[0], step]), *after]

    untouched = [False, *_unchanged_carried_values(block)]
    state.bind(op, _emit_loop(state, inits, untouched, test, body)[1:])


def _import_while(state: ImportState, op: Any) -> None:
    """Import ``scf.while``: its first region computes the condition and the arguments of the second, the body.

    If the first region passes its arguments on unchanged, it becomes the condition of ``while``. Otherwise it is
    emitted twice, before the loop and at the end of the body, and its condition is a carried value.
    """
    _refuse_by_element(state)
    before, after = (region.blocks[0] for region in op.regions)
    inits = state.operands(op)
    forwarded = list(list(before.operations)[-1].operation.operands)[1:]
    if forwarded == list(before.arguments):
        results = _emit_loop(
            state, inits, _unchanged_carried_values(after),
            lambda params: _import_loop_block(state, before, params)[:1],
            lambda params: _import_loop_block(state, after, params),
        )  # fmt: skip
        state.bind(op, results)
        return

    def body(params: Sequence[Value]) -> list[Value]:
        return _import_loop_block(state, before, _import_loop_block(state, after, params[1:]))

    first = _import_loop_block(state, before, inits)
    state.bind(op, _emit_loop(state, first, [False] * len(first), lambda params: [params[0]], body)[1:])


def _emit_loop(
    state: ImportState,
    inits: Sequence[Value],
    untouched: Sequence[bool],
    test: Callable[[Sequence[Value]], list[Value]],
    body: Callable[[Sequence[Value]], list[Value]],
) -> Sequence[Value]:
    """Emit ``while`` and return its results; carried values that are ``untouched`` keep their shape values."""
    types = [v.type for v in inits]

    def region(make: Callable[[Sequence[Value]], list[Value]], declared: Sequence[TensorType]) -> Region:
        """Return a region of the loop in which untouched values have the shape values of their initial ones."""
        def emit_with_shape_values(params: list[Value]) -> Sequence[Value]:
            for param, init, same in zip(params, inits, untouched, strict=True):
                if same and init in state.known:
                    state.known[param] = state.known[init]
            return make(params)

        return state.region_of_emitter(types, emit_with_shape_values, declared)

    return state.emit("while", inits, {}, (), [region(test, ()), region(body, types)])


def _unchanged_carried_values(block: Any) -> list[bool]:
    """Return a bool for each carried value: the block yields it unchanged; a leading counter has no entry."""
    back = list(list(block.operations)[-1].operation.operands)
    arguments = list(block.arguments)[len(block.arguments) - len(back) :]
    return [a == b for a, b in zip(arguments, back, strict=True)]


def _import_loop_block(state: ImportState, block: Any, params: Sequence[Value]) -> list[Value]:
    state.bind_values(block.arguments, params)
    return state.session.import_block(state, block)


def _refuse_by_element(state: ImportState) -> None:
    if state.by_element:
        state.fail(f"{state.op} in the computation of another op is not supported", "write stablehlo.while")


def _import_index_switch(state: ImportState, op: Any) -> None:
    """Import a branch on an index; the first region is the default, for an index without a case."""
    (value,) = state.operands(op)
    cases = integer_tuple(op.attributes["cases"])
    t = TensorType("i32", value.type.shape)
    number = state.constant(np.array(len(cases), np.int32), t)
    for k, case in enumerate(cases):
        is_case = state.one("eq", [value, state.constant(np.array(case, to_numpy(value.type.dtype)), value.type)])
        number = state.one("select", [is_case, state.constant(np.array(k, np.int32), t), number])
    default, *regions = op.regions
    import_branch(state, op, number, [*regions, default])


def _import_execute_region(state: ImportState, op: Any) -> None:
    if len(op.regions[0].blocks) != 1:
        state.fail(f"scf.execute_region of {len(op.regions[0].blocks)} blocks is not supported", "write scf.if")
    state.bind(op, _import_loop_block(state, op.regions[0].blocks[0], ()))


def _import_assert(state: ImportState, op: Any) -> None:
    assert_test(state, state.value(op.operands[0]), (), escape_braces(op.attributes["msg"].value))


CONTROL_SCF: dict[str, Importer] = {
    "scf.for": _import_for,
    "scf.while": _import_while,
    "scf.index_switch": _import_index_switch,
    "scf.execute_region": _import_execute_region,
    "cf.assert": _import_assert,
}
