"""Move assertions and the sizes that the host reads before all work that they do not need.

Before: ``%y = exp %x``, ``%ok = lt %x, %c``, ``assert %ok``. After: ``%ok``, ``assert %ok``, ``%y``: if a check fails,
no work that comes after it runs, and no memory of the caller is written.

The host waits for memory at each of these ops; adjacent ones share a wait, called a *stop*. Checks share a stop if
their conditions need only elementwise work and reductions beyond the ops that have run by then. A check that needs a
loop, a matmul or an op with its own kernel gets another stop, so that earlier checks are verified before that runs.
Checks stay in program order: of several that fail, the first one is reported.

Movement ops and constants are repeated after a stop, so that their results need no memory across it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from aotc.ir.dims.algebra import Expr
from aotc.ir.dims.symbols import symbols
from aotc.ir.opset import FREE, INLINE
from aotc.ir.opset.control import JUDGED
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Function, Module, Op, Region, Value, captured_values, walk
from aotc.ir.tensor.substitute_dims import map_attribute
from aotc.lowering.passes.dce import has_effect
from aotc.options import Options

REPEATED = FREE - {"slice"}  # which would keep its operand alive

def advance_checks(module: Module, options: Options) -> Module:
    """Return ``module`` with assertions and ``bind_dim`` ops as early as their operands can be computed."""
    return module.with_functions({name: _with_early_assertions(f) for name, f in module.functions.items()})


def _with_early_assertions(function: Function) -> Function:
    if not any(op.name in JUDGED for op in function.body.ops):
        return function
    return replace(function, body=_AssertionOrder(function.body).body_with_early_assertions())


class _AssertionOrder:
    """Reorder the ops of one function so that assertions run as early as possible."""

    def __init__(self, body: Region) -> None:
        """Record the definitions and positions of the ops, and for each op with an effect the one before it."""
        self.body = body
        self.names = Names(body)
        self.makers = {v: op for op in body.ops for v in op.results}
        self.place = {op: n for n, op in enumerate(body.ops)}
        self.bound = {str(op.attrs["dim"]): op for op in body.ops if op.name == "bind_dim"}
        acting = [op for op in body.ops if op.name not in JUDGED and has_effect(op)]
        self.before = dict(zip(acting[1:], acting))  # effects keep their order
        self.emitted: list[Op] = []
        self.done: set[Op] = set()
        self.here: set[Op] = set()  # since the last stop, as themselves or as copies
        self.copies: dict[Value, Value] = {}  # of values from before it

    def body_with_early_assertions(self) -> Region:
        """Return the function's body with assertions and the ops they need moved forward."""
        for needed, stops in self._host_waits():
            self._emit_after_stop(needed)
            self._emit_after_stop(stops)
            self.copies.clear()
            self.here.clear()
        self._emit_after_stop(op for op in self.body.ops if op not in self.done)
        results = tuple(map(self._value_after_stop, self.body.results))
        return Region(self.body.params, tuple(self.emitted), results)

    def _host_waits(self) -> Iterator[tuple[list[Op], list[Op]]]:
        """Yield the ops at which the host waits for a value, each with the ops that must run before it."""
        earlier: set[Op] = set()  # needed at earlier stops
        needed: set[Op] = set()
        stops: list[Op] = []
        for op in [op for op in self.body.ops if op.name in JUDGED]:
            own = self._ops_required_before(op) - earlier
            if stops and any(inner in stops or _is_long_running(inner) for inner in own - needed):
                yield sorted(needed, key=self.place.__getitem__), stops
                earlier |= {*needed, *stops}
                needed, stops = set(), []
            needed |= own - earlier
            stops.append(op)
        yield sorted(needed, key=self.place.__getitem__), stops

    def _ops_required_before(self, op: Op) -> set[Op]:
        """Return all ops that must run before ``op``."""
        required: set[Op] = set()
        stack = list(self._direct_dependences(op))
        while stack:
            inner = stack.pop()
            if inner not in required:
                required.add(inner)
                stack += self._direct_dependences(inner)
        return required

    def _direct_dependences(self, op: Op) -> Iterator[Op]:
        """Yield the ops on which ``op`` depends directly: through operands, symbols, or an earlier effect."""
        for v in (*op.operands, *(v for r in op.regions for v in captured_values(r))):
            if v in self.makers:
                yield self.makers[v]
        yield from (self.bound[name] for name in _symbols_of_op(op) & self.bound.keys() if self.bound[name] is not op)
        if op in self.before:
            yield self.before[op]

    # --- the new order ---

    def _emit_after_stop(self, ops: Iterable[Op]) -> None:
        """Append ``ops`` to the new body, with values from before the last stop computed again where they are cheap."""
        for op in ops:
            operands = tuple(map(self._value_after_stop, op.operands))
            self.emitted.append(replace(op, operands=operands))
            self.done.add(op)
            self.here.add(op)

    def _value_after_stop(self, v: Value) -> Value:
        """Return ``v`` as ops after a stop read it: ``v`` itself, or the result of a repeated cheap op."""
        chain: set[Op] = set()
        stack = [v]
        while stack:
            op = self.makers.get(stack.pop())
            if op is not None and op.name in REPEATED and op not in self.here:
                chain.add(op)
                stack += op.operands
        for op in sorted(chain, key=self.place.__getitem__):
            copy = Value(self.names.fresh(op.result.name), op.result.type)
            operands = tuple(self.copies.get(u, u) for u in op.operands)
            self.emitted.append(replace(op, operands=operands, results=(copy,)))
            self.copies[op.result] = copy
            self.here.add(op)
        return self.copies.get(v, v)


def _is_long_running(op: Op) -> bool:
    """Return True if an op becomes a separate kernel or a loop: all ops except elementwise ops and reductions."""
    return op.name not in INLINE and op.name != "reduce"


def _symbols_of_op(op: Op) -> set[str]:
    """Return the symbols in the types and attributes of ``op`` and of the ops in its regions."""
    names: set[str] = set()

    def record_symbols(x: Any) -> Any:
        if isinstance(x, Expr):
            names.update(s.name for s in symbols(x))
        return x

    for inner in (op, *(inner for r in op.regions for inner in walk(r))):
        attributes = (inner.attrs, *(v.type.shape for v in inner.results))
        map_attribute(attributes, record_symbols)
        map_attribute([p.type.shape for r in inner.regions for p in r.params], record_symbols)
    return names
