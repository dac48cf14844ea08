"""The NumPy reference interpreter of the tensor IR: slow and simple, used to test passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, Expr, Sym
from aotc.ir.dims.symbols import evaluate, substitute, symbols
from aotc.ir.opset import CALLS, OPS
from aotc.ir.opset.collective import COLLECTIVES
from aotc.ir.opset.control import AssertionFailed
from aotc.ir.tensor.ir import Function, Module, Op, Region, Requirement, TensorType, Value
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.messages import render_message

Environment = dict[Value, np.ndarray]


class OperandError(ValueError):
    """An argument's dtype or shape does not fit the function."""


@dataclass(frozen=True, slots=True)
class Hooks:
    """Functions that the interpreter calls.

    ``custom_call(op, operands, result types)`` computes a user's op, which has no reference. ``collective`` with the
    same parameters computes an exchange with other ranks, whose reference is that of one process.
    ``after(frame, op, results)`` is called after every op, in regions too, and returns the results to continue with.
    """

    custom_call: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType]], list[np.ndarray]] | None = None
    collective: Callable[[Op, Sequence[np.ndarray], Sequence[TensorType]], list[np.ndarray]] | None = None
    after: Callable[[Activation, Op, Sequence[np.ndarray]], Sequence[np.ndarray]] | None = None


def interpret(module: Module, *arrays: Any, function: str = "main", hooks: Hooks | None = None) -> list[np.ndarray]:
    """Return the results of ``function`` on ``arrays``, computed by NumPy.

    Parameters
    ----------
    module : Module
        A verified module.
    arrays : array_like
        One per parameter; shapes fit the parameter types, and symbolic dims are bound from them.
    function : str
        The name of the function to run.
    hooks : Hooks, optional
        Hooks of the interpretation.

    Raises
    ------
    OperandError
        If an argument does not fit.
    AssertionFailed
        If an ``assert`` op of the model fails.
    """
    called = module.functions[function]
    values = [np.asarray(a) for a in arrays]
    dims, waiting = bind_arguments(called, values)
    return Activation(module, dims, waiting, hooks or Hooks()).run(called.body, values)


def bind_arguments(called: Function, values: Sequence[np.ndarray]) -> tuple[dict[str, int], list[Requirement]]:
    """Return the value of each symbol for a call with ``values``, and the requirements that are not checked yet.

    These depend on sizes that the call computes.

    Raises
    ------
    OperandError, AssertionFailed
        If the arguments do not fit.
    """
    sizes = called.attrs.get("sizes", {})
    symbol_values = {name: int(values[n].reshape(-1)[k]) for name, (n, k) in sizes.items() if k < values[n].size}
    symbol_values |= {f"size_{n}_{k}": size for n, a in enumerate(values) for k, size in enumerate(a.shape)}
    waiting = _check_requirements(called.attrs.get("requirements", ()), symbol_values)
    return _bind_body(called.body, values, symbol_values, waiting)


def _check_requirements(rows: Sequence[Requirement], dims: Mapping[str, int]) -> list[Requirement]:
    """Check the requirements whose dims are known, and return the others."""
    waiting = []
    for row in rows:
        relation, left, right, message, values = row
        if any(s.name not in dims for e in (left, right, *values) for s in symbols(e)):
            waiting.append(row)
        elif not getattr(operator, relation)(evaluate(left, dims), evaluate(right, dims)):
            raise AssertionFailed(render_message(message, [evaluate(e, dims) for e in values]))
    return waiting


def bind_dims(params: Sequence[TensorType], shapes: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """Return the value of each symbol, solved from the shapes of arguments.

    Raises
    ------
    OperandError
        If the shapes contradict each other or the types.
    """
    solved: dict[str, int] = {}
    open_pairs: list[tuple[Dim, int, str]] = []
    for i, (t, shape) in enumerate(zip(params, shapes)):
        if len(shape) != t.rank:
            raise OperandError(f"argument {i}: expected {t}, found shape {tuple(shape)}")
        open_pairs += [
            (d, n, f"argument {i}: expected {t}, found shape {tuple(shape)}") for d, n in zip(t.shape, shape)
        ]
    while open_pairs:
        rest = []
        for dim, number, message in open_pairs:
            left = substitute(dim, solved)
            if isinstance(left, Expr):
                if not _solve_dim(left, number, solved):
                    rest.append((dim, number, message))
            elif left != number:
                raise OperandError(message)
        if len(rest) == len(open_pairs):
            break
        open_pairs = rest
    return solved


def _solve_dim(e: Expr, number: int, solved: dict[str, int]) -> bool:
    """Solve ``k * symbol + c == number`` for the symbol, and record it in ``solved``; return True on success."""
    if len(e.terms) != 1:
        return False
    (atom, *more), k = e.terms[0]
    if more or not isinstance(atom, Sym):
        return False
    quotient, rest = divmod(number - e.const, k)
    if rest:
        raise OperandError(f"a dim must be of the form {e}, found {number}")
    solved[atom.name] = quotient
    return True


def _bind_body(
    body: Region, arrays: Sequence[np.ndarray], outer: Mapping[str, int], requirements: Sequence[Requirement] = ()
) -> tuple[dict[str, int], list[Requirement]]:
    """Return the values of symbols for a call of ``body``, and the requirements that are not checked yet."""
    if len(arrays) != len(body.params):
        raise OperandError(f"expected {len(body.params)} arguments, found {len(arrays)}")
    for i, (param, a) in enumerate(zip(body.params, arrays)):
        if a.dtype != to_numpy(param.type.dtype):
            raise OperandError(f"argument {i}: expected {param.type}, found dtype {a.dtype}")
    # a callee uses its caller's symbols; its own arguments may not determine all of them
    dims = dict(outer) | bind_dims([p.type for p in body.params], [a.shape for a in arrays])
    return dims, _check_requirements(requirements, dims)


class Activation:
    """Activation of a function (stack frame): values of its symbols and regions, and pending requirements."""

    def __init__(
        self, module: Module, dims: Mapping[str, int], waiting: Sequence[Requirement] = (), hooks: Hooks | None = None
    ) -> None:
        self.module, self.dims, self.waiting = module, dims, waiting
        self.hooks = hooks or Hooks()
        self.environment: Environment = {}

    def run(self, region: Region, arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the results of ``region`` on ``arrays``; outer values come from the frame."""
        environment = self.environment
        environment.update(zip(region.params, arrays))
        for op in region.ops:
            results = self.apply(op)
            environment.update(zip(op.results, self.hooks.after(self, op, results) if self.hooks.after else results))
        return [environment[v] for v in region.results]

    def apply(self, op: Op) -> Sequence[np.ndarray]:
        """Return the results of ``op`` on the values of the frame."""
        operands = [self.environment[v] for v in op.operands]
        if op.name in CALLS:
            body = self.module.functions[op.attrs["callee"]].body
            return Activation(self.module, *_bind_body(body, operands, self.dims), self.hooks).run(body, operands)
        if op.name not in OPS:
            raise InternalError(f"the reference has no op {op.name}")
        attrs = self._concrete_attribute(op.attrs) if self.dims and op.name != "bind_dim" else op.attrs
        types = tuple(TensorType(v.type.dtype, self._shape(v.type)) for v in op.results)
        if op.name == "custom_call" and self.hooks.custom_call:
            return self.hooks.custom_call(op, operands, types)
        if op.name in COLLECTIVES and self.hooks.collective:
            return self.hooks.collective(op, operands, types)
        calls = tuple(self._region_as_function(r) for r in op.regions)
        results = OPS[op.name].reference(operands, attrs, calls, types)
        for value, array in zip(op.results, results):
            if array.dtype != to_numpy(value.type.dtype):
                raise InternalError(f"the reference of {op.name} gave {array.dtype}, expected {value.type}")
        if op.name == "bind_dim":
            self.dims = {**self.dims, str(op.attrs["dim"]): int(operands[0])}
            self.waiting = _check_requirements(self.waiting, self.dims)
        return results

    def _region_as_function(self, region: Region) -> Callable[..., list[np.ndarray]]:
        return lambda *arrays: self.run(region, arrays)

    def _shape(self, t: TensorType) -> tuple[int, ...]:
        return tuple(evaluate(d, self.dims) if isinstance(d, Expr) else d for d in t.shape)

    def _concrete_attribute(self, data: Any) -> Any:
        """Return an attribute value with its dims replaced by numbers."""
        match data:
            case Expr():
                return evaluate(data, self.dims)
            case tuple() | list():
                return tuple(self._concrete_attribute(x) for x in data)
            case Mapping():
                return {k: self._concrete_attribute(v) for k, v in data.items()}
        return data
