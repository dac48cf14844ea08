"""Requirements: relations of sizes that every call must satisfy, derived from the size constraints of the op table.

The host program checks a requirement before it runs anything that depends on these sizes. Its message names the
arguments.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.mlir_types import DYNAMIC
from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import OPS, RuleError
from aotc.ir.opset.spec import SIZES_DIFFER, Constraint
from aotc.ir.tensor.ir import Requirement, TensorType, Value


class Scope(Protocol):
    """The part of :class:`~aotc.frontend.session.ImportState` that this module uses."""

    loc: Loc
    op: str

    def require(self, relation: str, left: Dim, right: Dim, message: str, values: Sequence[Dim] = ()) -> None: ...
    def append(
        self, name: str, operands: Sequence[Value], attrs: Mapping[str, Any], declared: Sequence[TensorType]
    ) -> tuple[Value, ...]: ...


def require_constraints(
    state: Scope, name: str, operands: Sequence[Value], attrs: Mapping[str, Any], declared: Sequence[TensorType]
) -> Sequence[Value]:
    """Require the size constraints of op ``name``; return its operands with equal sizes as equal expressions."""
    types = before = tuple(v.type for v in operands)
    for _ in range(1 + len(types)):  # one constraint may choose a form that another must use
        constraints = _require_op_constraints(state, name, types, attrs, tuple(declared))
        forms = {c.place: c.form for c in constraints if c.place}
        if not forms:
            break
        after = tuple(
            replace(t, shape=tuple(forms.get((k, d), n) for d, n in enumerate(t.shape))) for k, t in enumerate(types)
        )
        if after == types:
            break
        types = after
    return operands if types == before else [_with_given_sizes(state, v, t.shape) for v, t in zip(operands, types)]


def _require_op_constraints(
    state: Scope, name: str, types: tuple[TensorType, ...], attrs: Mapping[str, Any], declared: tuple[TensorType, ...]
) -> list[Constraint]:
    """Require the size constraints of op ``name`` for operands of these ``types``, and return them."""
    try:
        constraints = list(OPS[name].constraints(types, attrs, declared))
    except (IndexError, KeyError, ValueError):
        try:  # wrong number or rank of operands: the type rule reports it
            OPS[name].infer(types, attrs, (), declared)
        except RuleError as error:
            message, hint = broken_type_rule(state.op, error)
            raise CompileError.at(state.loc, message, hint=hint) from None
        raise
    for c in constraints:
        state.require(c.relation, c.left, c.right, c.message)
    return constraints


def broken_type_rule(op: str, error: RuleError) -> tuple[str, str]:
    """Return message and hint for operands that violate a type rule of ``op``, or of an op that it expands to."""
    message = str(error)
    hint = f"element types and sizes that {op} takes" if op else "operands of other types"
    return (message if not op or op in message else f"{op}: {message}"), hint


def require_shape(state: Scope, v: Value, shape: Sequence[Dim]) -> Value:
    """Require that ``v`` has the dims ``shape``, and return ``v`` with these dims."""
    for own, size in zip(v.type.shape, shape):
        if own != size:
            state.require("eq", own, size, SIZES_DIFFER)
    return _with_given_sizes(state, v, shape)


def _with_given_sizes(state: Scope, v: Value, shape: Sequence[Dim]) -> Value:
    """Replace the sizes of ``v`` by the expressions in ``shape``, which are equal at run time."""
    if v.type.shape == tuple(shape):
        return v
    (same,) = state.append("reshape", [v], {}, [TensorType(v.type.dtype, tuple(shape))])
    return same


def require_types(state: Scope, values: Sequence[Value], declared: Sequence[TensorType]) -> Sequence[Value]:
    """Require that ``values`` have the shapes of the ``declared`` types of the same rank, and return them."""
    if len(declared) != len(values):
        return values
    return [require_shape(state, v, t.shape) if v.type.rank == t.rank else v for v, t in zip(values, declared)]


def require_stated_sizes(state: Scope, results: Sequence[Value], stated: Iterable[tuple[int, ...]]) -> None:
    """Require that ``results`` have the sizes that their types in the model state."""
    for v, shape in zip(results, stated):
        if len(shape) == v.type.rank:
            for size, own in zip(shape, v.type.shape):
                if size not in (DYNAMIC, own):
                    state.require("eq", own, size, "a size of {0} in its result, which is stated as {1}")


def require_bounds(state: Scope, results: Sequence[Value], bounds: Iterable[tuple[int, ...]]) -> None:
    """Require that the sizes of ``results`` are at most the bounds in their types in the model."""
    for v, most in zip(results, bounds):
        for size, bound in zip(v.type.shape, most):
            if bound != DYNAMIC:
                state.require("le", size, bound, "a size of {0} in its result, of which the type allows {1}")


def with_argument_sizes(
    rows: Iterable[Requirement], params: Sequence[Value], sizes: Mapping[str, tuple[int, int]], names: Sequence[str]
) -> list[Requirement]:
    """Append to the messages of requirements the sizes of the arguments on which they depend.

    Parameters
    ----------
    rows : iterable of Requirement
        The requirements.
    params : sequence of Value
        The arguments, with ``names``.
    sizes : mapping of str to (int, int)
        For each symbol that is the value of an argument: numbers of the argument and of the element.
    """
    places: dict[str, tuple[str, Dim]] = {}
    for lone in (True, False):
        for n, v in enumerate(params):
            for k, d in enumerate(v.type.shape):
                for s in sorted(symbols(d), key=str):
                    if not lone or d == sym(s.name):
                        places.setdefault(s.name, (f"dimension {k} of {names[n]}", d))
    for name, (n, k) in sizes.items():
        what = f"element {k} of {names[n]}" if params[n].type.rank else names[n]
        places.setdefault(name, (what, sym(name)))
    return [_with_reported_sizes(row, places) for row in rows]


def _with_reported_sizes(row: Requirement, places: Mapping[str, tuple[str, Dim]]) -> Requirement:
    """Append the sizes that a requirement mentions to its message; ``places`` describes each symbol."""
    relation, left, right, message, values = row
    mentioned = dict.fromkeys(name for e in values for name in sorted(s.name for s in symbols(e)))
    shown = dict(places[name] for name in mentioned if name in places)
    text = ", ".join(f"{what} is {{{len(values) + k}}}" for k, what in enumerate(shown))
    return relation, left, right, f"{message} ({text})" if shown else message, (*values, *shown.values())
