"""Replace the collectives of one rank's program by calls of the runtime, in one total order.

All ranks run the same program. Two of them that begin two exchanges in different orders wait for each other for ever,
so the order is made part of the data: each call takes a token and returns the next one, through loops and branches.

Before: ``%1 = all_reduce %x {groups: ((0, 1),)}``. After: ``%1, %token_2 = custom_call %x, %token {target:
aotc.all_reduce}``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from aotc.diagnostics import CompileError, Loc
from aotc.ir.opset.collective import COLLECTIVES, REDUCTIONS
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value
from aotc.lowering.analysis.rank_classes import check_groups_agree
from aotc.lowering.passes.leading_dims import along_leading_dim
from aotc.lowering.passes.rewrite import Builder, rewrite_function
from aotc.targets import Mix, Target
from aotc.vmfb.ranks.layout import RANK_CALL, mesh_of

_TOKEN = TensorType("u32")


def with_rank_calls(function: Function, first: int) -> tuple[Function, int]:
    """Return ``function`` with calls in place of collectives, and the next serial number after ``first``.

    Raises
    ------
    CompileError
        If ranks that exchange data may take different branches or numbers of iterations around a collective, or if a
        reduction is none of the runtime's.
    """
    if function.body.names.isdisjoint(COLLECTIVES):
        return function, first
    ranks = mesh_of(function.attrs["ranks"]["mesh"]).size
    function = rewrite_function(function, _without_exchange, COLLECTIVES)
    function = rewrite_function(function, lambda op, b: along_leading_dim(op, b, ranks), COLLECTIVES)
    check_groups_agree(function)
    names = Names(function.body)
    start = Value(names.fresh("token"), _TOKEN)
    zero = Op("constant", (), (start,), {"value": np.zeros((), np.uint32)}, loc=function.loc)
    order = _TokenOrder(names, first, ranks)
    body, _ = order.region_with_ordered_calls(function.body, start)
    return function.with_body(replace(body, ops=(zero, *body.ops))), order.serial


def _without_exchange(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace ops that need no exchange: the number of the only replica, and collectives in groups of one rank."""
    if op.name == "replica_id":
        return (b.constant(0, TensorType("u32")),)
    if op.name == "ragged_all_to_all":
        hint = "use jax.lax.all_to_all, whose parts have equal sizes"
        raise CompileError.at(op.loc, "ragged_all_to_all between ranks is not supported", hint=hint)
    groups = op.attrs.get("groups", ())
    return op.operands if groups and all(len(group) == 1 for group in groups) else None


def check_rank_targets(signatures: Module, targets: Sequence[Target]) -> None:
    """Raise an error unless each rank of a program of several ranks has one device.

    Raises
    ------
    CompileError
        If the options name devices of different kinds.
    """
    mixed = ", ".join(target.name for target in targets if isinstance(target, Mix))
    sharded = next((f for f in signatures.functions.values() if "ranks" in f.attrs), None)
    if sharded is not None and mixed:
        mesh = mesh_of(sharded.attrs["ranks"]["mesh"])
        what = f"the model is for several ranks ({mesh}), and its devices are of several kinds: {mixed}"
        hint = "compile for target='cpu' or target='cuda:sm_90a', without devices="
        raise CompileError.at(sharded.loc, what, hint=hint)


@dataclass(slots=True)
class _TokenOrder:
    """Order the collectives of one rank's program by tokens: each call takes one and returns the next one.

    Attributes: the names in use, the serial number of the next collective, and the number of ranks.
    """

    names: Names
    serial: int
    ranks: int

    def region_with_ordered_calls(self, region: Region, token: Value) -> tuple[Region, Value]:
        """Return a region whose collectives are calls that begin after ``token``, and the token of the last one."""
        ops: list[Op] = []
        for op in region.ops:
            if op.name in COLLECTIVES:
                replacement, token = self._collective_call(op, token)
            elif all(r.names.isdisjoint(COLLECTIVES) for r in op.regions):
                replacement = [op]
            else:
                replacement, token = self._control_flow_with_token(op, token)
            ops += replacement
        return Region(region.params, tuple(ops), region.results), token

    def _fresh_token(self) -> Value:
        return Value(self.names.fresh("token"), _TOKEN)

    def _collective_call(self, op: Op, token: Value) -> tuple[list[Op], Value]:
        """Return the runtime call that replaces the collective ``op`` after ``token``, and the call's own token."""
        if op.name == "partition_id":
            return [replace(op, name="custom_call", attrs=_rank_call_attributes(op.name, {}))], token
        after = self._fresh_token()
        facts = {"serial": self.serial, "place": _model_line_of(op.loc), **_collective_attributes(op, self.ranks)}
        self.serial += 1
        call = Op(
            "custom_call",
            (*op.operands, token),
            (*op.results, after),
            _rank_call_attributes(op.name, facts),
            (),
            op.loc,
        )
        return [call], after

    def _control_flow_with_token(self, op: Op, token: Value) -> tuple[list[Op], Value]:
        """Return a loop or branch that carries a token through its regions, and the token after it."""
        after = self._fresh_token()
        if op.name == "while":
            condition, body = op.regions
            tokens = self._fresh_token(), self._fresh_token()
            tested, _ = self.region_with_ordered_calls(
                replace(condition, params=(*condition.params, tokens[0])), tokens[0]
            )
            ran, last = self.region_with_ordered_calls(replace(body, params=(*body.params, tokens[1])), tokens[1])
            regions: tuple[Region, ...] = (tested, replace(ran, results=(*ran.results, last)))
            return [replace(op, operands=(*op.operands, token), results=(*op.results, after), regions=regions)], after
        if op.name != "case":
            message = f"a collective inside {op.name} is not supported"
            hint = "move the collective out of it; collectives may be in loops and branches"
            raise CompileError.at(op.loc, message, hint=hint)
        sides = [self.region_with_ordered_calls(r, token) for r in op.regions]
        regions = tuple(replace(r, results=(*r.results, last)) for r, last in sides)
        return [replace(op, results=(*op.results, after), regions=regions)], after


def _rank_call_attributes(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "target": RANK_CALL + name, "config": dict(config), "api_version": 4, "has_side_effect": False, "aliases": (),
    }  # fmt: skip


def _collective_attributes(op: Op, ranks: int) -> dict[str, Any]:
    """Return the attributes of a collective for the runtime: groups or pairs, and the reduction."""
    attributes: dict[str, Any] = {}
    if "groups" in op.attrs:
        attributes["groups"] = [list(group) for group in op.attrs["groups"]]
    if "pairs" in op.attrs:
        attributes["pairs"] = [list(pair) for pair in op.attrs["pairs"]]
    if op.regions:
        attributes["reduction"] = _reduction_of_collective(op)
    named = [i for row in (*attributes.get("groups", ()), *attributes.get("pairs", ())) for i in row]
    if named and max(named) >= ranks:
        raise CompileError.at(op.loc, f"{op.name} names rank {max(named)}, expected ranks below {ranks}")
    if "groups" in attributes and sorted(named) != list(range(ranks)):
        hint = "list each rank in exactly one of replica_groups"
        raise CompileError.at(op.loc, f"the groups of {op.name} do not have each of the {ranks} ranks once", hint=hint)
    return attributes


def _reduction_of_collective(op: Op) -> str:
    """Return the name of the op that combines two elements; other reductions raise an error."""
    (region,) = op.regions
    ops: Sequence[Op] = region.ops
    if len(ops) == 1 and ops[0].name in REDUCTIONS and {*ops[0].operands} == {*region.params}:
        return ops[0].name
    reduction = ", ".join(o.name for o in ops) or "nothing"
    hint = f"one of {', '.join(REDUCTIONS)} of the two elements"
    raise CompileError.at(op.loc, f"{op.name} has an unsupported reduction: {reduction}", hint=hint)


def _model_line_of(loc: Loc) -> str:
    """Return the line of the user's model, for messages at run time."""
    return loc.source or loc.name or str(loc)
