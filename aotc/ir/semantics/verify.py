"""Verify a tensor IR module: SSA order, regions, type rules, calls, dims.

Checked: Every op is in the op table and has its attributes and regions. Every operand is defined before its use, in
this region or an outer one. Result types follow the type rule. A call fits its callee. Every symbol of a body occurs in
a parameter type, or in an earlier ``bind_dim``.
"""

from __future__ import annotations

from collections.abc import Iterator

from aotc.diagnostics import Finding
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import CALLS, OPS, RuleError
from aotc.ir.opset.dim_attributes import DIM_ATTRIBUTES, has_expression
from aotc.ir.opset.spec import dims_may_be_equal, same_shape
from aotc.ir.tensor.ir import Function, Module, Op, Region, TensorType, Value, walk


def verify(module: Module) -> list[Finding]:
    """Return the errors of ``module``, or an empty list."""
    return [f for function in module.functions.values() for f in verify_function(module, function)]


def verify_function(module: Module, function: Function) -> list[Finding]:
    """Return the errors of one function of ``module``."""
    errors = list(_dominance_findings(function))
    bound = {s.name for p in function.body.params for d in p.type.shape for s in symbols(d)}
    bound |= set(function.attrs.get("sizes", ()))
    for op in walk(function.body):
        errors += _check_op(module, op)
        if op.name == "bind_dim":
            bound.add(str(op.attrs["dim"]))
        loose = {s.name for v in op.results for d in v.type.shape for s in symbols(d)} - bound
        if loose and "kind" not in function.attrs:  # a region gets the dims of its caller
            message = f"{op.name}: dims {sorted(loose)} come from no parameter of @{function.name}"
            errors.append(Finding(message, op.loc))
    return errors


def _check_op(module: Module, op: Op) -> Iterator[Finding]:
    """Yield the errors of one op: its attributes, regions, callee and types."""
    spec = OPS.get(op.name)
    if spec is None:
        yield Finding(f"{op.name} is not in the op table", op.loc)
        return
    for name in spec.attrs:
        if name not in op.attrs:
            yield Finding(f"{op.name}: attribute {name} is missing", op.loc)
            return
    if len(op.regions) != spec.regions and (spec.regions >= 0 or not op.regions):
        yield Finding(f"{op.name}: takes {spec.regions} regions, found {len(op.regions)}", op.loc)
        return
    for name in sorted(set(op.attrs) - set(DIM_ATTRIBUTES.get(op.name, ()))):
        if has_expression(op.attrs[name]):
            yield Finding(f"{op.name}: attribute {name} is {op.attrs[name]}, expected numbers", op.loc)
    if op.name in CALLS:
        yield from _check_call(module, op)
    stated = tuple(v.type for v in op.results)
    try:
        inferred = spec.infer(tuple(v.type for v in op.operands), op.attrs, op.regions, stated)
    except RuleError as error:
        yield Finding(str(error), op.loc)
        return
    # A type rule may fail on attributes or operands that it does not expect.
    except (ValueError, IndexError, KeyError, TypeError) as error:
        operands = _type_list_text(tuple(v.type for v in op.operands))
        yield Finding(f"{op.name}: operands {operands} or attributes do not fit: {error}", op.loc)
        return
    if not _have_same_types(inferred, stated):
        texts = _type_list_text(inferred), _type_list_text(stated)
        yield Finding(f"{op.name}: gives {texts[0]}, the results say {texts[1]}", op.loc)


def _check_call(module: Module, op: Op) -> Iterator[Finding]:
    """Yield the errors of a call: a missing callee, or arguments and results of types that do not fit."""
    callee = module.functions.get(op.attrs["callee"])
    if callee is None:
        yield Finding(f"{op.name} of @{op.attrs['callee']}, which does not exist", op.loc)
        return
    for what, actual, formal in (
        ("arguments", op.operands, callee.body.params),
        ("results", op.results, callee.body.results),
    ):
        a, b = tuple(v.type for v in actual), tuple(v.type for v in formal)
        if len(a) != len(b) or not all(map(_types_may_fit, a, b)):
            yield Finding(
                f"{op.name} of @{callee.name}: {what} are {_type_list_text(a)}, expected {_type_list_text(b)}", op.loc
            )


def _types_may_fit(a: TensorType, b: TensorType) -> bool:
    return a.dtype == b.dtype and a.rank == b.rank and all(map(dims_may_be_equal, a.shape, b.shape))


def _have_same_types(a: tuple[TensorType, ...], b: tuple[TensorType, ...]) -> bool:
    return len(a) == len(b) and all(x.dtype == y.dtype and same_shape(x.shape, y.shape) for x, y in zip(a, b))


def _type_list_text(types: tuple[TensorType, ...]) -> str:
    return "(" + ", ".join(map(str, types)) + ")"


def _dominance_findings(function: Function) -> Iterator[Finding]:
    """Yield a finding for each use of a value that is not defined at that point."""
    visible: set[Value] = set()
    yield from _scope_findings(function, function.body, visible)


def _scope_findings(function: Function, region: Region, visible: set[Value]) -> Iterator[Finding]:
    """Yield findings of one region: its values are visible until its end, an op's results after the op's regions."""
    own = list(region.params)
    visible.update(own)
    for op in region.ops:
        for v in op.operands:
            if v not in visible:
                yield Finding(f"{op.name}: operand {v} is not defined before its use", op.loc)
        for inner in op.regions:
            yield from _scope_findings(function, inner, visible)
        for v in op.results:
            if v in visible:
                yield Finding(f"{op.name}: result {v} is defined twice", op.loc)
        visible.update(op.results)
        own.extend(op.results)
    for v in region.results:
        if v not in visible:
            yield Finding(f"@{function.name}: result {v} of a region is not defined in it", function.loc)
    visible.difference_update(own)
