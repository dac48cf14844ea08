"""Replace every call by the body of what it calls.

Before: ``%1 = call(%x) {callee: f}``. After: the ops of ``f`` with ``%x`` for its parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from aotc.diagnostics import CompileError
from aotc.frontend.dims import Dim, Expr, substitute, symbols
from aotc.frontend.tensor_ir import Function, Module, Op, Region, TensorType, Value, walk
from aotc.lowering.rewrite import Names, map_attribute
from aotc.options import Options


def inline(module: Module, options: Options) -> Module:
    """Return ``module`` with no ``call``; only public functions are left.

    Raises
    ------
    CompileError
        If functions call each other in a circle, or a callee does not exist.
    """
    flat: dict[str, Region] = {}
    for name in _callees_first(module):
        flat[name] = _Inliner(flat, module.functions[name].body).run()
    kept = {name: f for name, f in module.functions.items() if f.public}
    return replace(module, functions={name: replace(f, body=flat[name]) for name, f in kept.items()})


def _callees_first(module: Module) -> list[str]:
    order: dict[str, bool] = {}
    for root in (name for name, f in module.functions.items() if f.public):
        stack = [(root, iter(_callees(module.functions[root])))]
        order.setdefault(root, False)
        while stack:
            name, rest = stack[-1]
            call = next(rest, None)
            if call is None:
                stack.pop()
                order[name] = True
                order[name] = order.pop(name)
                continue
            callee = call.attrs["callee"]
            if callee not in module.functions:
                raise CompileError.at(call.loc, f"call of {callee}, which does not exist")
            if order.get(callee) is False and any(n == callee for n, _ in stack):
                raise CompileError.at(call.loc, f"{callee} calls itself")
            if not order.get(callee):
                order[callee] = False
                stack.append((callee, iter(_callees(module.functions[callee]))))
    return list(order)


def _callees(function: Function) -> list[Op]:
    return [op for op in walk(function.body) if op.name == "call"]


class _Inliner:
    def __init__(self, flat: Mapping[str, Region], region: Region) -> None:
        self.flat, self.region, self.names = flat, region, Names.of(region)

    def run(self) -> Region:
        if not any(op.name == "call" for op in walk(self.region)):
            return self.region
        return self.expand(self.region, {})

    def expand(self, region: Region, mapped: dict[Value, Value]) -> Region:
        ops: list[Op] = []
        for op in region.ops:
            operands = tuple(mapped.get(v, v) for v in op.operands)
            if op.name == "call":
                results = self.copy(self.flat[op.attrs["callee"]], operands, ops)
                mapped.update(zip(op.results, results))
                continue
            regions = tuple(self.expand(r, mapped) for r in op.regions)
            ops.append(replace(op, operands=operands, regions=regions))
        return Region(region.params, tuple(ops), tuple(mapped.get(v, v) for v in region.results))

    def copy(self, callee: Region, operands: tuple[Value, ...], ops: list[Op]) -> tuple[Value, ...]:
        mapped = dict(zip(callee.params, operands))
        dims = _bind(callee.params, operands)
        ops += self.copied_ops(callee, mapped, dims)
        return tuple(mapped[v] for v in callee.results)

    def copied_ops(self, region: Region, mapped: dict[Value, Value], dims: dict[str, Dim]) -> list[Op]:
        ops = []
        for op in region.ops:
            regions = tuple(self.copied_region(r, mapped, dims) for r in op.regions)
            results = tuple(self.value(v, mapped, dims) for v in op.results)
            attrs = map_attribute(op.attrs, lambda x: _placed(x, dims)) if dims else op.attrs
            ops.append(Op(op.name, tuple(mapped[v] for v in op.operands), results, attrs, regions, op.loc))
        return ops

    def copied_region(self, region: Region, mapped: dict[Value, Value], dims: dict[str, Dim]) -> Region:
        params = tuple(self.value(v, mapped, dims) for v in region.params)
        ops = self.copied_ops(region, mapped, dims)
        return Region(params, tuple(ops), tuple(mapped[v] for v in region.results))

    def value(self, v: Value, mapped: dict[Value, Value], dims: dict[str, Dim]) -> Value:
        shape = tuple(_placed(d, dims) for d in v.type.shape) if dims else v.type.shape
        mapped[v] = Value(self.names.fresh(v.name), TensorType(v.type.dtype, shape))
        return mapped[v]


def _placed(data: Any, dims: Mapping[str, Dim]) -> Any:
    return substitute(data, dims) if isinstance(data, Expr) else data


def _bind(params: tuple[Value, ...], operands: tuple[Value, ...]) -> dict[str, Dim]:
    """Return what the callee's symbols are at this call, by the shapes of its arguments."""
    found: dict[str, Dim] = {}
    for param, operand in zip(params, operands):
        for inner, outer in zip(param.type.shape, operand.type.shape):
            names = list(symbols(inner))
            if len(names) == 1 and isinstance(inner, Expr) and str(inner) == names[0].name:
                found.setdefault(names[0].name, outer)
    return {} if all(isinstance(d, Expr) and str(d) == n for n, d in found.items()) else found
