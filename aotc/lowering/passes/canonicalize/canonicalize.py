"""Apply small rewrites to the whole program, in sweeps, until nothing changes.

Before: ``%1 = mul %x, %one`` / ``%2 = transpose %1 {perm = (0, 1)}``. After: ``%x``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from aotc.ir.dims.algebra import Expr, maximum
from aotc.ir.opset import SCALARS
from aotc.ir.opset.dim_attributes import dim_of, pairs_of
from aotc.ir.tensor.ir import Module, Op, TensorType, Value, walk
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.passes.canonicalize.algebra import simplify_algebra
from aotc.lowering.passes.canonicalize.conditional_updates import conditional_update, updates_read_once
from aotc.lowering.passes.canonicalize.disjoint_scatters import disjoint_scatters
from aotc.lowering.passes.canonicalize.shape import simplify_shape
from aotc.lowering.passes.rewrite import Builder, lift_region, rewrite_module
from aotc.options import Options
from aotc.vmfb.dtypes import size_of

# Sweeps of canonicalize over a program, at most. One rewrite may enable another; the sweeps end when nothing changes.
SWEEPS = 8


def canonicalize(module: Module, options: Options) -> Module:
    """Simplify the ops of ``module`` by algebraic rules, in at most eight sweeps."""
    for _ in range(SWEEPS):
        after = rewrite_module(
            module, partial(_canonicalize_rule, moved=_transposes_only_reduced(module), once=updates_read_once(module))
        )
        if all(after.functions[n] is f for n, f in module.functions.items()):
            break
        module = after
    return module


def _transposes_only_reduced(module: Module) -> set[Value]:
    """Return the results of transposes whose only readers are reductions."""
    if not (module.has("transpose") and module.has("reduce")):
        return set()
    ops = [op for f in module.functions.values() for op in walk(f.body)]
    moved = {op.result for op in ops if op.name == "transpose"}
    moved &= {v for op in ops if op.name == "reduce" for v in op.operands}
    if moved:
        regions = [*(f.body for f in module.functions.values()), *(r for op in ops for r in op.regions)]
        moved -= {v for op in ops if op.name != "reduce" or len(op.results) != 1 for v in op.operands}
        moved -= {v for region in regions for v in region.results}
    return moved


def _canonicalize_rule(op: Op, b: Builder, moved: Collection[Value], once: Collection[Value]) -> Sequence[Value] | None:
    """Return the values that replace the results of ``op`` by the first rule that applies, or None."""
    if once and op.name == "select" and (update := conditional_update(op, b, once)):
        return update
    if op.name == "reduce" and op.operands[0] in moved:
        return _reduce_before_transpose(op, b)
    rule = _RULES.get(op.name)
    if rule is not None:
        return rule(op, b)
    return _simplified_value(op, b)


def _simplified_value(op: Op, b: Builder) -> Sequence[Value] | None:
    """Return the simplified result of an op with one result, or None."""
    if len(op.results) != 1:
        return None
    value = simplify_algebra(op, b) if op.name in SCALARS else simplify_shape(op, b)
    return None if value is None else (value,)


def _remove_false_loop(op: Op, b: Builder) -> Sequence[Value] | None:
    """Remove a loop whose condition is the constant false."""
    test = splat_of(op.regions[0].results[0], b.definitions)
    return op.operands if test is not None and not bool(test) else None


def _take_constant_branch(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace a ``case`` by the only branch that can be taken."""
    index = splat_of(op.operands[0], b.definitions)
    if index is None and len(op.regions) > 1:
        return None
    number = int(index) if index is not None else 0
    branch = op.regions[number if 0 <= number < len(op.regions) else -1]
    for inner in branch.ops:
        b.append(inner)
    return branch.results


def _simplify_unit_reduction(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace a reduction over dims of size 1 by one combination with the initial value."""
    if any(op.inputs[0].type.shape[d] != 1 for d in op.attrs["dims"]):
        return None
    return _combine_single_element(op, b)


def _reduce_before_transpose(op: Op, b: Builder) -> Sequence[Value]:
    """Reduce the operand of a transpose instead, and transpose the result.

    The result is smaller, and its dims are mostly in order already.
    """
    transpose = b.definitions[op.operands[0]]
    perm = transpose.attrs["perm"]
    dims = tuple(sorted(perm[d] for d in op.attrs["dims"]))
    reduced = b.reduce(transpose.operands[0], op.operands[1], dims, op.regions[0])
    left = [d for d in range(len(perm)) if d not in dims]
    return (b.transpose(reduced, [left.index(d) for d in perm if d not in dims]),)


def _simplify_reduce_window(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace a windowed reduction whose windows have one element or contain only padding."""
    a = op.attrs
    if 0 in op.operands[0].type.shape and 0 not in op.results[0].type.shape:
        return _windows_of_padding_only(op, b)
    trivial = all(n == 1 for key in ("window", "strides", "base_dilations") for n in a[key])
    if not trivial or any(w for pair in pairs_of(a) for w in pair):
        return _simplified_value(op, b)
    return _combine_single_element(op, b)


def _simplify_scatter(op: Op, b: Builder) -> Sequence[Value] | None:
    return _simplified_value(op, b) or disjoint_scatters(op, b)


def _known_size_as_constant(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace a known size by a constant."""
    size = dim_of(op.attrs, "expr")
    return None if isinstance(size, Expr) else (b.constant(size, op.result.type),)


def _slice_before_conversion(op: Op, b: Builder) -> Sequence[Value] | None:
    """Rewrite a slice or gather of a conversion as a conversion of the slice: fewer elements are converted."""
    simplified = _simplified_value(op, b)
    definition = b.definitions.get(op.operands[0])
    if simplified is not None or definition is None or definition.name != "convert":
        return simplified
    source, wide = definition.operands[0], op.result.type.dtype
    stored = b.definitions.get(source)
    if size_of(source.type.dtype) >= size_of(wide) or not (stored is None or stored.name == "constant"):
        return None
    read = b.make(op.name, (source, *op.operands[1:]), op.attrs, TensorType(source.type.dtype, op.result.type.shape))
    return (b.convert(read, wide),)


def _windows_of_padding_only(op: Op, b: Builder) -> Sequence[Value]:
    """Rewrite windows over an array without elements as windows over its padding."""
    inits = op.operands[len(op.results) :]
    pairs = zip(op.operands[0].type.shape, op.attrs["base_dilations"], pairs_of(op.attrs), strict=True)
    shape = [low + high + maximum((n - 1) * step + 1, 0) for n, step, (low, high) in pairs]
    around = [b.broadcast(init, (), shape) for init in inits]
    ones = (1,) * len(shape)
    attrs = {**op.attrs, "base_dilations": ones, "padding": ((0, 0),) * len(shape)}
    return b.append(replace(op, operands=(*around, *inits), attrs=attrs))


def _combine_single_element(op: Op, b: Builder) -> Sequence[Value] | None:
    """Replace a reduction of one element by its combination with the initial value."""
    region = op.regions[0]
    if not all(inner.name in SCALARS or inner.name == "constant" for inner in region.ops):
        return None
    shape = op.results[0].type.shape
    lifted = [b.broadcast(v, (), shape) for v in op.inits]
    lifted += [b.reshape(v, shape) for v in op.inputs]
    return lift_region(region, lifted, b)


_RULES: Mapping[str, Callable[[Op, Builder], Sequence[Value] | None]] = {
    "while": _remove_false_loop,
    "case": _take_constant_branch,
    "reduce": _simplify_unit_reduction,
    "reduce_window": _simplify_reduce_window,
    "scatter": _simplify_scatter,
    "dim": _known_size_as_constant,
    "gather": _slice_before_conversion,
    "dynamic_slice": _slice_before_conversion,
    "slice": _slice_before_conversion,
    "transpose": _slice_before_conversion,
}
