"""Move assertions out of loops and branches, so that the host program can evaluate them.

Before: ``while(%x) { %ok = ...; assert(%ok, %v) {message}; ... }``. After: the loop carries ``%ok`` and ``%v``, ends
when ``%ok`` is false, and ``assert`` follows the loop. A ``case`` returns ``%ok`` and ``%v`` as results; its other
branches return ``true``.

``fail`` becomes an assertion of ``false``. If one of two branches always fails and the other only returns values, the
``case`` is removed: ``equinox.error_if`` costs only its condition.

In a loop or a branch, ops after a failed assertion run on meaningless values until the host evaluates the assertion. A
loop whose end is not a fixed count could then run forever, so it stops at a failed assertion. Outside of loops and
branches no op runs after a failed assertion: see ``advance_checks``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aotc.diagnostics import Loc
from aotc.ir.opset import CHECKS, ORDERINGS
from aotc.ir.tensor.copies import Names, copy_ops
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.lowering.passes.dce import dce
from aotc.lowering.passes.rewrite import Builder
from aotc.options import Options
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.messages import escape_braces

_TRUTH = TensorType("i1")


def hoist_checks(module: Module, options: Options) -> Module:
    """Return ``module`` with assertions in no loop and no branch, and without ``fail``."""
    if not any(_has_checks(f.body) for f in module.functions.values()):
        return module
    clean = dce(module, options)
    return clean.with_functions({name: _with_hoisted_checks(f) for name, f in clean.functions.items()})


def _with_hoisted_checks(function: Function) -> Function:
    if not _has_checks(function.body):
        return function
    return replace(function, body=_CheckHoister(Names(function.body)).body_with_hoisted_checks(function.body))


def _has_checks(region: Region) -> bool:
    return not region.names.isdisjoint(CHECKS)


@dataclass(frozen=True, slots=True)
class _NestedCheck:
    """An assertion to be moved out: the condition, the values of its message, and the message."""

    holds: Value
    values: tuple[Value, ...]
    message: str
    loc: Loc

    @property
    def carried(self) -> tuple[Value, ...]:
        """Return the values that loops and branches must carry so that the check can run outside of them."""
        return self.holds, *self.values

    def with_carried_values(self, values: Sequence[Value]) -> _NestedCheck:
        """Return the check with its carried values replaced by ``values`` of an outer region."""
        return replace(self, holds=values[0], values=tuple(values[1:]))


class _CheckHoister:
    """Move the assertions of one function out of its loops and branches."""

    def __init__(self, names: Names) -> None:
        self.names = names
        self.before: list[Value] = []  # conditions of the checks so far, in the enclosing loops and branches

    def body_with_hoisted_checks(self, region: Region) -> Region:
        """Return a function's body with each check as an assertion outside of all loops and branches."""
        b = Builder(self.names)
        for op in region.ops:
            for check in self.append_without_checks(op, b):
                b.loc = check.loc
                b.append(Op("assert", check.carried, (), {"message": check.message}, (), check.loc))
            self.before.clear()
        return Region(region.params, tuple(b.ops), region.results)

    def append_without_checks(self, op: Op, b: Builder) -> list[_NestedCheck]:
        """Append ``op`` without the checks nested in it; return the checks."""
        b.loc = op.loc
        if op.name == "assert":
            checks = [_NestedCheck(op.operands[0], op.operands[1:], op.attrs["message"], op.loc)]
        elif op.name == "fail":
            checks = self._hoist_fail(op, b)
        elif op.name == "case" and any(map(_has_checks, op.regions)):
            checks = self._replace_failing_branch(op, b) or self._hoist_from_branches(op, b)
        elif op.name == "while" and (any(map(_has_checks, op.regions)) or (self.before and not _is_counted_loop(op))):
            checks = self._hoist_from_loop(op, b)
        else:
            b.append(op)
            checks = []
        self.before += [check.holds for check in checks]
        return checks

    def rebuild_nested_region(self, region: Region) -> tuple[Builder, list[_NestedCheck]]:
        """Rebuild a nested region without its checks; return the builder and the checks."""
        b, seen = Builder(self.names), len(self.before)
        checks = [check for op in region.ops for check in self.append_without_checks(op, b)]
        del self.before[seen:]
        return b, checks

    def _hoist_fail(self, op: Op, b: Builder) -> list[_NestedCheck]:
        """Replace a ``fail`` by one check per message, and its results by zeros; return the checks."""
        (index,), messages = op.operands, op.attrs["messages"]
        for v in op.results:
            zero = b.constant(0, TensorType(v.type.dtype))
            b.append(Op("broadcast", (zero,), (v,), {"dims": ()}, (), op.loc))
        checks = []
        for n, message in enumerate(messages):
            compare = "ne" if 0 < n < len(messages) - 1 else "gt" if n == 0 else "lt"
            alone = len(messages) == 1
            holds = b.constant(0, _TRUTH) if alone else b.make(compare, [index, b.constant(n, index.type)])
            checks.append(_NestedCheck(holds, (), escape_braces(message), op.loc))
        return checks

    def _replace_failing_branch(self, op: Op, b: Builder) -> list[_NestedCheck]:
        """Replace a ``case`` of which one branch fails and the other has no ops; return its checks.

        The ops of the failing branch are appended. The results are those of the other branch, and a check requires that
        it is the selected one.
        """
        if len(op.regions) != 2:
            return []
        passing = next((n for n, r in enumerate(op.regions) if not r.ops), None)
        if passing is None or not any(inner.name == "fail" for inner in op.regions[1 - passing].ops):
            return []
        builder, checks = self.rebuild_nested_region(op.regions[1 - passing])
        for failing_op in builder.ops:
            b.append(failing_op)
        zero = b.constant(0, op.operands[0].type)
        chosen = b.make("ne" if passing else "eq", [op.operands[0], zero])
        for v, passed in zip(op.results, op.regions[passing].results):
            b.append(Op("reshape", (passed,), (v,), {}, (), op.loc))
        return [replace(check, holds=b.make("or", [chosen, check.holds])) for check in checks]

    def _hoist_from_branches(self, op: Op, b: Builder) -> list[_NestedCheck]:
        """Append a ``case`` that also returns the conditions of checks in its branches; return the checks."""
        branches = [self.rebuild_nested_region(region) for region in op.regions]
        rows: list[list[Value]] = [list(region.results) for region in op.regions]
        for n, (_, checks) in enumerate(branches):
            for check in checks:
                for k, (other, _) in enumerate(branches):
                    rows[k] += check.carried if k == n else _values_of_unreached_check(check, other)
        regions = tuple(Region((), tuple(builder.ops), tuple(row)) for (builder, _), row in zip(branches, rows))
        every = [check for _, checks in branches for check in checks]
        return self._op_with_check_results(op, op.operands, regions, every, b)

    def _hoist_from_loop(self, op: Op, b: Builder) -> list[_NestedCheck]:
        """Append a loop that also carries the conditions of its checks and stops at a failed one; return the checks."""
        early: list[_NestedCheck] = []
        seen = len(self.before)
        if _has_checks(op.regions[0]):
            op, early = self._rotate_loop(op, b)
            self.before += [check.holds for check in early]
        condition, body = op.regions
        rebuilt, checks = self.rebuild_nested_region(body)
        starts = [v for check in checks for v in _values_of_unreached_check(check, b)]
        params = [[Value(self.names.fresh(v.name), v.type) for v in starts] for _ in range(2)]
        test = Builder(self.names, ops=list(condition.ops))
        (going,) = condition.results
        for holds in [v for v, _ in _split_values_by_check(params[0], checks)] + (
            [] if _is_counted_loop(op) else self.before
        ):
            going = test.make("and", [going, holds])
        del self.before[seen:]
        carried = [v for check in checks for v in check.carried]
        regions = (
            Region((*condition.params, *params[0]), tuple(test.ops), (going,)),
            Region((*body.params, *params[1]), tuple(rebuilt.ops), (*body.results, *carried)),
        )
        return [*early, *self._op_with_check_results(op, (*op.operands, *starts), regions, checks, b)]

    def _rotate_loop(self, op: Op, b: Builder) -> tuple[Op, list[_NestedCheck]]:
        """Return a loop rotated so that the body ends with the condition, and the checks of the first condition."""
        condition, body = op.regions
        first = Builder(self.names)
        (start,) = self._append_region_copy(condition, op.operands, first)
        rebuilt, checks = self.rebuild_nested_region(Region((), tuple(first.ops), ()))
        for inner in rebuilt.ops:
            b.append(inner)
        again = Builder(self.names, ops=list(body.ops))
        (going,) = self._append_region_copy(condition, body.results, again)
        params = [Value(self.names.fresh("going"), _TRUTH) for _ in range(2)]
        unused = [Value(self.names.fresh(v.name), v.type) for v in condition.params]
        regions = (
            Region((*unused, params[0]), (), (params[0],)),
            Region((*body.params, params[1]), tuple(again.ops), (*body.results, going)),
        )
        unread = Value(self.names.fresh("going"), _TRUTH)
        rotated = replace(op, operands=(*op.operands, start), results=(*op.results, unread), regions=regions)
        return rotated, checks

    def _append_region_copy(self, region: Region, operands: Sequence[Value], b: Builder) -> list[Value]:
        """Append a copy of a region's ops with ``operands`` for its parameters, and return its results."""
        ops, results = copy_ops(region, operands, self.names)
        for op in ops:
            b.append(op)
        return list(results)

    def _op_with_check_results(
        self, op: Op, operands: Sequence[Value], regions: tuple[Region, ...], checks: list[_NestedCheck], b: Builder
    ) -> list[_NestedCheck]:
        """Append ``op`` with the values of ``checks`` as further results, and return the checks on these results."""
        more = [Value(self.names.fresh(v.name), v.type) for check in checks for v in check.carried]
        b.append(replace(op, operands=tuple(operands), results=(*op.results, *more), regions=regions))
        return [
            check.with_carried_values((holds, *values))
            for (holds, values), check in zip(_split_values_by_check(more, checks), checks)
        ]


def _values_of_unreached_check(check: _NestedCheck, b: Builder) -> list[Value]:
    """Return the values that stand for a check that was not reached: true, and zeros for the message."""
    return [b.constant(n == 0, v.type) for n, v in enumerate(check.carried)]


def _split_values_by_check(
    values: Sequence[Value], checks: Sequence[_NestedCheck]
) -> list[tuple[Value, Sequence[Value]]]:
    """Return, for each check, its condition and the values of its message, from carried ``values`` in a row."""
    rest = list(values)
    shared: list[tuple[Value, Sequence[Value]]] = []
    for check in checks:
        count = len(check.carried)
        shared.append((rest[0], rest[1:count]))
        del rest[:count]
    return shared


def _is_counted_loop(op: Op) -> bool:
    """Return True if a loop counts an integer by a constant step up to a fixed bound."""
    condition, body = op.regions
    test = _defining_op(condition, condition.results[0])
    if test is None or test.name not in ORDERINGS:
        return False
    for counter, bound in (test.operands, test.operands[::-1]):
        if counter in condition.params and _is_loop_invariant(condition, bound) and kind_of(bound.type.dtype) in "iu":
            at = condition.params.index(counter)
            step = _defining_op(body, body.results[at])
            adds = step is not None and step.name == "add" and body.params[at] in step.operands
            return adds and step is not None and any(_is_constant_in_region(body, v) for v in step.operands)
    return False


def _defining_op(region: Region, v: Value) -> Op | None:
    return next((op for op in region.ops if v in op.results), None)


def _is_constant_in_region(region: Region, v: Value) -> bool:
    definition = _defining_op(region, v)
    return definition is not None and definition.name == "constant"


def _is_loop_invariant(region: Region, v: Value) -> bool:
    return v not in region.params and (_defining_op(region, v) is None or _is_constant_in_region(region, v))
