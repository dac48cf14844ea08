"""Find the trip counts of loops in which a counter moves by a constant step to a constant bound."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aotc.ir.opset import ORDERINGS
from aotc.ir.tensor.ir import Function, Op, Region, Value
from aotc.vmfb.dtypes import to_numpy


@dataclass(frozen=True, slots=True)
class _Affine:
    """A carried integer, by its position in the loop state, plus a constant; or a constant alone."""

    carried: int | None
    constant: int


def trip_count(op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]) -> int | None:
    """Return the trip count of a ``while``, or None if it is not known.

    The condition must compare ``counter + constant`` with a constant, and each iteration must add a constant to the
    counter. If the counter would overflow, the result is None. After fusion, the ops of a loop may be in dispatched
    functions; these are followed.

    Parameters
    ----------
    op : Op
    constants : mapping
        The constants outside of the loop, by value.
    functions : mapping
        The functions that dispatches call.
    """
    condition, body = op.regions
    reader = _LoopStateReader(op, constants, functions)
    compared = reader.comparison_sides(condition.results[0], condition, {})
    if compared is None:
        return None
    relation, left, right = compared
    if left.carried is None and right.carried is not None:
        relation, left, right = _swapped_relation(relation), right, left
    if left.carried is None or right.carried is not None:
        return None
    step = reader.affine_form(body.results[left.carried], body, reader.affine_params(body))
    begin = reader.integer_outside_loop(op.operands[left.carried])
    if step is None or step.carried != left.carried or begin is None:
        return None
    iterations = _iterations_of_comparison(relation, begin.constant + left.constant, right.constant, step.constant)
    if iterations is None:
        return None
    last = begin.constant + iterations * step.constant
    range_ = np.iinfo(to_numpy(op.operands[left.carried].type.dtype))
    reached = [n + m for n in (begin.constant, last) for m in (0, left.constant)]
    wraps = not all(range_.min <= n <= range_.max for n in reached)
    return None if wraps else iterations


def state_after(
    op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function], iterations: int
) -> dict[int, int]:  # fmt: skip
    """Return the carried integers of a ``while`` that are known after ``iterations`` iterations, by their positions."""
    body, reader, state = op.regions[1], _LoopStateReader(op, constants, functions), dict[int, int]()
    params = reader.affine_params(body)
    for n, init in enumerate(op.operands):
        begin = reader.integer_outside_loop(init)
        step = None if begin is None else reader.affine_form(body.results[n], body, params)
        if begin is None or step is None or step.carried != n:
            continue
        reached, range_ = begin.constant + iterations * step.constant, np.iinfo(to_numpy(init.type.dtype))
        if range_.min <= reached <= range_.max:
            state[n] = reached
    return state


def counters(
    op: Op, constants: Mapping[Value, Op], functions: Mapping[str, Function]
) -> dict[Value, tuple[int, int]]:  # fmt: skip
    """Return start and step of each counter of a ``while``, by the parameter of its body.

    A counter is a carried integer with a known start and a constant step.
    """
    body = op.regions[1]
    begins, nexts = (state_after(op, constants, functions, n) for n in (0, 1))
    return {body.params[n]: (begins[n], nexts[n] - begins[n]) for n in begins if n in nexts}


def _iterations_of_comparison(relation: str, begin: int, end: int, step: int) -> int | None:
    """Return the number of iterations of ``i = begin``, ``begin + step``... while ``i relation end`` is true."""
    match relation:
        case "gt" | "ge":
            return _iterations_of_comparison(_swapped_relation(relation), -begin, -end, -step)
        case "le":
            return _iterations_of_comparison("lt", begin, end + 1, step)
        case "lt":
            return 0 if begin >= end else -(-(end - begin) // step) if step > 0 else None
        case "ne" if step and (end - begin) % step == 0 and (end - begin) // step >= 0:
            return (end - begin) // step
    return None


def _swapped_relation(relation: str) -> str:
    """Return the relation with swapped operands: ``lt`` for ``gt``."""
    match relation[0]:
        case "l":
            return "g" + relation[1]
        case "g":
            return "l" + relation[1]
    return relation


@dataclass(frozen=True, slots=True)
class _LoopStateReader:
    """Read values of a loop as affine functions of one carried integer, through reshapes and dispatches."""

    loop: Op
    constants: Mapping[Value, Op]
    functions: Mapping[str, Function]

    def integer_outside_loop(self, v: Value) -> _Affine | None:
        """Return the known integer of a value outside of the loop, or None."""
        return _constant_integer_of(self.constants[v]) if v in self.constants else None

    def affine_params(self, region: Region) -> dict[Value, _Affine | None]:
        """Return the params of a region of the loop as affine values.

        A carried integer that no iteration changes is its constant initial value, if that is known.
        """
        body = self.loop.regions[1]
        rows = enumerate(zip(region.params, body.params, body.results, self.loop.operands, strict=True))
        unchanged = {n: self.integer_outside_loop(begin) for n, (_, old, new, begin) in rows if new is old}
        return {v: unchanged.get(n) or _Affine(n, 0) for n, v in enumerate(region.params)}

    def comparison_sides(
        self, v: Value, region: Region, forms: Mapping[Value, _Affine | None]
    ) -> tuple[str, _Affine, _Affine] | None:
        """Return the relation and both sides of the comparison that computes ``v``, or None."""
        forms = forms or self.affine_params(region)
        op = _defining_op_in(region, v)
        if op is None:
            return None
        if op.name == "dispatch":
            inner = self.functions[op.attrs["callee"]].body
            return self.comparison_sides(
                inner.results[op.results.index(v)], inner, self.affine_arguments(op, region, forms)
            )
        if op.name == "reshape":
            return self.comparison_sides(op.operands[0], region, forms)
        if op.name not in ORDERINGS and op.name != "ne":
            return None
        left, right = (self.affine_form(x, region, forms) for x in op.operands)
        return None if left is None or right is None else (op.name, left, right)

    def affine_form(self, v: Value, region: Region, forms: Mapping[Value, _Affine | None]) -> _Affine | None:
        """Return ``v`` as a carried integer plus a constant, or None."""
        if v in forms:
            return forms[v]
        op = _defining_op_in(region, v)
        if op is None:
            return self.integer_outside_loop(v)
        match op.name:
            case "constant":
                return _constant_integer_of(op)
            case "dispatch":
                inner = self.functions[op.attrs["callee"]].body
                return self.affine_form(
                    inner.results[op.results.index(v)], inner, self.affine_arguments(op, region, forms)
                )
            case "reshape":
                return self.affine_form(op.operands[0], region, forms)
            case "add" | "sub" as name:
                left, right = (self.affine_form(x, region, forms) for x in op.operands)
                if left is None or right is None or (right.carried is not None and name == "sub"):
                    return None
                if left.carried is not None and right.carried is not None:
                    return None
                carried = right.carried if left.carried is None else left.carried
                return _Affine(carried, left.constant + (right.constant if name == "add" else -right.constant))
        return None

    def affine_arguments(
        self, op: Op, region: Region, forms: Mapping[Value, _Affine | None]
    ) -> dict[Value, _Affine | None]:
        """Return a dispatch's arguments as affine functions of carried integers, by callee parameter."""
        params = self.functions[op.attrs["callee"]].body.params
        return {p: self.affine_form(x, region, forms) for p, x in zip(params, op.operands, strict=True)}


def _constant_integer_of(op: Op) -> _Affine | None:
    value = op.attrs["value"]
    return _Affine(None, int(value.reshape(-1)[0])) if value.size == 1 and value.dtype.kind in "iu" else None


def _defining_op_in(region: Region, v: Value) -> Op | None:
    return next((op for op in region.ops if v in op.results), None)
