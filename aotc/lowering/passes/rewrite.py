"""Rebuild functions op by op; all tensor-level passes use this.

A *rule* is called with an op whose operands are already rewritten, and a builder. It returns the values that replace
the op's results, or None to leave the op unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aotc.diagnostics import UNKNOWN, Loc
from aotc.ir.dims.algebra import Dim
from aotc.ir.opset import OPS
from aotc.ir.tensor.copies import Names, copy_ops
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, reads_no_values_of, replaced_values
from aotc.lowering.analysis.constant_values import constant_of, is_computable_from_weights, weights_of
from aotc.lowering.placement.op_targets import op_targets
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy

NO_WIDTHS: Mapping[int, int] = {}


# Ops. A new op is compared with this many of the last ones, and an equal one is used instead; cse finds the others.
RECENT_OPS = 16


@dataclass(slots=True)
class Builder:
    """Appends ops to a region and remembers which op defines a value."""

    names: Names
    definitions: dict[Value, Op] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)
    loc: Loc = UNKNOWN
    weights: set[Value] = field(default_factory=set)  # bound arguments, and values made of them alone

    def append(self, op: Op) -> tuple[Value, ...]:
        """Append ``op`` unchanged to the block under construction."""
        self.ops.append(op)
        for v in op.results:
            self.definitions[v] = op
        if self.weights and is_computable_from_weights(op, self.weights, self.definitions):
            self.weights.update(op.results)
        return op.results

    def is_precomputable(self, value: Value) -> bool:
        """Return True if a value is known before a call: a constant, or computed from bound arguments alone."""
        return value in self.weights or constant_of(value, self.definitions) is not None

    def drop(self, value: Value) -> None:
        """Remove the op that defines the unused ``value``, if it is one of the last ``RECENT_OPS``."""
        op = self.definitions[value]
        for at in range(len(self.ops) - 1, max(len(self.ops) - RECENT_OPS, 0) - 1, -1):
            if self.ops[at] is op:
                del self.ops[at], self.definitions[value]
                return

    def op(
        self, name: str, operands: Sequence[Value], attrs: Mapping[str, Any], result_types: Sequence[TensorType] = (),
        hint: str = "", regions: tuple[Region, ...] = (),
    ) -> Op:  # fmt: skip
        """Return the op ``name`` with fresh results, without appending it; the op table gives the result types."""
        types = OPS[name].infer(tuple(v.type for v in operands), attrs, regions, tuple(result_types))
        results = tuple(Value(self.names.fresh(hint or name), t) for t in types)
        return Op(name, tuple(operands), results, attrs, regions, self.loc)

    def make(
        self, name: str, operands: Sequence[Value], attrs: Mapping[str, Any] | None = None,
        result_type: TensorType | None = None, hint: str = "", regions: tuple[Region, ...] = (),
    ) -> Value:  # fmt: skip
        """Append the op ``name`` and return its only result; the op table infers the type if none is given."""
        types = (result_type,) if result_type else ()
        (result,) = self.append(self.op(name, operands, dict(attrs or {}), types, hint, regions))
        return result

    def constant(self, value: np.ndarray | float, type_: TensorType, hint: str = "") -> Value:
        """Append a constant; a scalar ``value`` fills ``type_``."""
        array = np.asarray(value).astype(to_numpy(type_.dtype), copy=False)
        result = Value(self.names.fresh(hint or "constant"), type_)
        self.append(Op("constant", (), (result,), {"value": array}, loc=self.loc))
        return result

    def convert(self, x: Value, dtype: str) -> Value:
        """Return ``x`` as ``dtype``; nothing is appended if it has that dtype already."""
        return x if x.type.dtype == dtype else self.make("convert", (x,), {}, TensorType(dtype, x.type.shape))

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Return ``x`` in another shape; nothing is appended if it has that shape already."""
        target = TensorType(x.type.dtype, tuple(shape))
        return x if x.type == target else self.make("reshape", (x,), {}, target)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Return ``x`` with dims permuted; nothing is appended for the identity."""
        perm = tuple(perm)
        return x if perm == tuple(range(len(perm))) else self.make("transpose", (x,), {"perm": perm})

    def broadcast(self, x: Value, dims: Sequence[int], shape: Sequence[Dim]) -> Value:
        """Return ``x`` broadcast to ``shape``, with its dims as the dims ``dims`` of the result."""
        return self.make("broadcast", (x,), {"dims": tuple(dims)}, TensorType(x.type.dtype, tuple(shape)))

    def slice(self, x: Value, start: Sequence[Dim], limit: Sequence[Dim], stride: Sequence[int] = ()) -> Value:
        """Return the elements of ``x`` from ``start`` to ``limit`` (exclusive), with steps of ``stride`` or 1."""
        strides = tuple(stride) or (1,) * x.type.rank
        return self.make("slice", (x,), {"start": tuple(start), "limit": tuple(limit), "stride": strides})

    def slice_dim(self, x: Value, dim: int, start: Dim, limit: Dim, stride: int = 1) -> Value:
        """Return a slice of ``x`` along one dim."""
        dims = range(x.type.rank)
        starts = [start if d == dim else 0 for d in dims]
        limits = [limit if d == dim else x.type.shape[d] for d in dims]
        return self.slice(x, starts, limits, [stride if d == dim else 1 for d in dims])

    def pad(
        self, x: Value, value: Value | None = None, low: Mapping[int, Dim] = NO_WIDTHS,
        high: Mapping[int, Dim] = NO_WIDTHS, interior: Mapping[int, int] = NO_WIDTHS,
    ) -> Value:  # fmt: skip
        """Return ``x`` padded with ``value`` (default 0) at the ends of dims, or between elements.

        Widths are by dim, by default 0; a negative width removes elements. Nothing is appended if all are 0.
        """
        if not any((*low.values(), *high.values(), *interior.values())):
            return x
        widths = {"low": low, "high": high, "interior": interior}
        attrs = {key: tuple(of.get(d, 0) for d in range(x.type.rank)) for key, of in widths.items()}
        return self.make("pad", (x, value or self.constant(0, TensorType(x.type.dtype))), attrs)

    def reduce(self, x: Value, init: Value, dims: Sequence[int], combiner: Region) -> Value:
        """Return ``x`` reduced over ``dims``."""
        return self.make("reduce", (x, init), {"dims": tuple(dims)}, regions=(combiner,))

    def combiner(self, name: str, dtype: str) -> Region:
        """Return the region that combines two scalars of ``dtype`` by the op ``name``."""
        x, y, result = (Value(self.names.fresh(hint), TensorType(dtype)) for hint in ("x", "y", name))
        return Region((x, y), (Op(name, (x, y), (result,), loc=self.loc),), (result,))


Rule = Callable[[Op, Builder], "Sequence[Value] | None"]


def rewrite_module(module: Module, rule: Rule, names: Collection[str] = ()) -> Module:
    """Return ``module`` with ``rule`` applied once to every op, in order, nested regions first.

    If ``names`` are given, the rule is called only with ops of these names.
    """
    return module.with_functions({name: rewrite_function(f, rule, names) for name, f in module.functions.items()})


def rewrite_for_target_kind(
    kind: str, module: Module, options: Options, rule: Callable[[Op, Builder, Target], Sequence[Value] | None],
    names: Collection[str] = (),
) -> Module:  # fmt: skip
    """Return ``module`` with ``rule(op, builder, target)`` applied to every op on a target of ``kind``."""
    home, kinds = op_targets(module, options)
    if kind not in kinds:
        return module

    def rule_on_target(op: Op, b: Builder) -> Sequence[Value] | None:
        target = home(op)
        return rule(op, b, target) if target.kind == kind else None

    return rewrite_module(module, rule_on_target, names)


def rewrite_function(function: Function, rule: Rule, names: Collection[str] = ()) -> Function:
    """Return ``function`` with ``rule`` applied once to every op, or only to ops of ``names`` if any are given."""
    if names and function.body.names.isdisjoint(names):
        return function
    builder = Builder(Names(function.body), weights=set(weights_of(function)))
    return function.with_body(_rewrite_region(function.body, rule, names, {}, builder))


def _rewrite_region(
    region: Region, rule: Rule, names: Collection[str], mapped: dict[Value, Value], outer: Builder
) -> Region:
    """Return ``region`` with ``rule`` applied to its ops; ``mapped`` collects the replacements of values."""
    if names and region.names.isdisjoint(names) and reads_no_values_of(region, mapped):
        return region
    builder = Builder(outer.names, outer.definitions, weights=outer.weights)
    for op in region.ops:
        regions = tuple([_rewrite_region(r, rule, names, mapped, builder) for r in op.regions]) if op.regions else ()
        if mapped or regions:
            op = op.on(replaced_values(op.operands, mapped), regions)
        builder.loc = op.loc
        replacements = rule(op, builder) if not names or op.name in names else None
        if replacements is None:
            builder.append(op)
        else:
            mapped.update(zip(op.results, replacements))
    return region.with_ops(builder.ops, replaced_values(region.results, mapped))


def append_region(region: Region, values: Sequence[Value], b: Builder) -> list[Value]:
    """Append a copy of the ops of ``region`` with ``values`` for its parameters; return its results."""
    ops, results = copy_ops(region, values, b.names)
    for inner in ops:
        b.append(inner)
    return list(results)


def lift_region(region: Region, operands: Sequence[Value], b: Builder) -> Sequence[Value]:
    """Append the scalar ops of ``region`` as ops on whole tensors."""
    shape = operands[0].type.shape
    mapped = dict(zip(region.params, operands))

    def broadcast_to_shape(v: Value) -> Value:
        if v not in mapped:
            mapped[v] = b.broadcast(v, (), shape)
        return mapped[v]

    for inner in region.ops:
        type_ = TensorType(inner.result.type.dtype, shape)
        mapped[inner.result] = b.make(inner.name, [broadcast_to_shape(v) for v in inner.operands], inner.attrs, type_)
    return [broadcast_to_shape(v) for v in region.results]
