"""Replace every call by the body of its callee.

Before: ``%1 = call(%x) {callee: f}``. After: the ops of ``f`` with ``%x`` for its parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

from aotc.diagnostics import CompileError, Loc
from aotc.ir.dims.algebra import Dim, Expr
from aotc.ir.dims.symbols import symbols
from aotc.ir.tensor.copies import Names
from aotc.ir.tensor.ir import Module, Op, Region, TensorType, Value, reads_no_values_of, replaced_values, walk
from aotc.ir.tensor.substitute_dims import with_dims_in
from aotc.options import Options

# Ops of a program whose calls are replaced, at most. Fifty times those of a large model; a few functions that call
# each other twice have more ops than fit any memory.
MOST_INLINED = 1 << 20


def inline(module: Module, options: Options) -> Module:
    """Return ``module`` with no ``call``, and only its public functions.

    Raises
    ------
    CompileError
        If functions call each other recursively, a callee does not exist, or the inlined program has too many ops.
    """
    _check_calls(module)
    public = {name: f for name, f in module.functions.items() if f.public}
    return replace(
        module, functions={n: f.with_body(_Inliner(module, f.body).inlined_body()) for n, f in public.items()}
    )


def _check_calls(module: Module) -> None:
    """Raise an error for recursion, a missing callee, or too many ops after inlining."""
    done: dict[str, bool] = {}
    sizes: dict[str, int] = {}  # ops of a function without calls
    for root in (name for name, f in module.functions.items() if f.public):
        stack = [(root, iter(_calls_in_region(module.functions[root].body)))]
        done.setdefault(root, False)
        while stack:
            name, rest = stack[-1]
            call = next(rest, None)
            if call is None:
                stack.pop()
                done[name] = True
                sizes[name] = _inlined_op_count(module.functions[name].body, sizes)
                continue
            callee = call.attrs["callee"]
            if callee not in module.functions:
                raise CompileError.at(call.loc, f"call of {callee}, which does not exist")
            if done.get(callee) is False:
                hint = "use a loop: jax.lax.while_loop, scan or fori_loop"
                raise CompileError.at(call.loc, f"{callee} calls itself", hint=hint)
            if callee not in done:
                done[callee] = False
                stack.append((callee, iter(_calls_in_region(module.functions[callee].body))))


def _inlined_op_count(region: Region, sizes: Mapping[str, int]) -> int:
    """Return the number of ops of ``region`` after its calls are replaced by bodies of ``sizes``."""
    size = 0
    for op in walk(region):
        size += sizes[op.attrs["callee"]] if op.name == "call" else 1
        if op.name == "call" and size > MOST_INLINED:
            message = f"the program has more than {MOST_INLINED:,} ops after inlining"
            raise CompileError.at(op.loc, message, hint="use a loop in place of many nested calls")
    return size


def _calls_in_region(region: Region) -> list[Op]:
    return [op for op in walk(region) if op.name == "call"] if "call" in region.names else []


@dataclass(slots=True)
class _CallFrame:
    """A region being copied: the copies of its values, symbols and locations, and the call that it replaces."""

    region: Region
    rest: Iterator[Op]
    mapped: dict[Value, Value]
    dims: dict[str, Dim]
    call: Op | None = None
    at: Loc | None = None  # where the public function makes this call
    locs: dict[Loc, Loc] = field(default_factory=dict)

    def inlined_location(self, loc: Loc) -> Loc:
        """Return a callee op's location ``loc`` as a location in the public function (call stack included)."""
        if self.at is None:
            return loc
        location = self.locs.get(loc)
        if location is None:
            location = self.locs[loc] = loc.within(self.at)
        return location


class _Inliner:
    """Copy one public function with its calls inlined; values of callees get fresh names."""

    def __init__(self, module: Module, region: Region) -> None:
        self.module, self.root, self.names = module, region, Names(region)

    def inlined_body(self) -> Region:
        """Return the body of the public function with all calls inlined."""
        root = _CallFrame(self.root, iter(()), {}, {})
        return self.inlined_region(self.root, root, own=True) if _calls_in_region(self.root) else self.root

    def inlined_region(self, region: Region, outer: _CallFrame, own: bool) -> Region:
        """Return a copy of ``region`` inside ``outer``; ``own`` is True for a region of the public function itself."""
        mapped, dims = outer.mapped, outer.dims
        if own and "call" not in region.names and reads_no_values_of(region, mapped):
            return region
        params = region.params if own else tuple(self.inlined_value(v, mapped, dims) for v in region.params)
        ops: list[Op] = []
        stack = [_CallFrame(region, iter(region.ops), mapped, dims, at=outer.at, locs=outer.locs)]
        while stack:
            frame = stack[-1]
            op = next(frame.rest, None)
            if op is None:
                self._leave_call(stack)
            elif op.name == "call":
                stack.append(self._enter_call(op, frame))
            else:
                ops.append(self.inlined_op(op, frame, own and len(stack) == 1))
        results = replaced_values(region.results, mapped)
        return region.with_ops(ops, results) if own else Region(params, tuple(ops), results)

    def _enter_call(self, call: Op, caller: _CallFrame) -> _CallFrame:
        """Return the frame of a call: the callee's parameters and symbols mapped to those of the caller."""
        callee = self.module.functions[call.attrs["callee"]].body
        operands = tuple(caller.mapped.get(v, v) for v in call.operands)
        dims = {**caller.dims, **_bind_callee_symbols(callee.params, operands)}
        dims = {name: d for name, d in dims.items() if str(d) != name}
        mapped = dict(zip(callee.params, operands))
        return _CallFrame(callee, iter(callee.ops), mapped, dims, call, caller.inlined_location(call.loc))

    def _leave_call(self, stack: list[_CallFrame]) -> None:
        """Pop the innermost frame; map the results of its call to the values of the callee."""
        frame = stack.pop()
        if frame.call is not None:
            results = (frame.mapped.get(v, v) for v in frame.region.results)
            stack[-1].mapped.update(zip(frame.call.results, results))

    def inlined_op(self, op: Op, frame: _CallFrame, own: bool) -> Op:
        """Return a copy of ``op`` on the values and symbols of ``frame``."""
        mapped, dims = frame.mapped, frame.dims
        regions = tuple([self.inlined_region(r, frame, own) for r in op.regions]) if op.regions else ()
        operands = replaced_values(op.operands, mapped)
        if own:
            return op.on(operands, regions)
        results = tuple(self.inlined_value(v, mapped, dims) for v in op.results)
        attrs = with_dims_in(op.attrs, dims) if dims else op.attrs
        return Op(op.name, operands, results, attrs, regions, frame.inlined_location(op.loc))

    def inlined_value(self, v: Value, mapped: dict[Value, Value], dims: dict[str, Dim]) -> Value:
        """Return the inlined copy of a callee's value ``v``; create it on first use."""
        shape = with_dims_in(v.type.shape, dims) if dims else v.type.shape
        mapped[v] = Value(self.names.fresh(v.name), TensorType(v.type.dtype, shape))
        return mapped[v]


def _bind_callee_symbols(params: tuple[Value, ...], operands: tuple[Value, ...]) -> dict[str, Dim]:
    """Return the values of the callee's symbols at this call, from the shapes of its arguments."""
    dims: dict[str, Dim] = {}
    for param, operand in zip(params, operands):
        for inner, outer in zip(param.type.shape, operand.type.shape):
            names = list(symbols(inner))
            if len(names) == 1 and isinstance(inner, Expr) and str(inner) == names[0].name:
                dims.setdefault(names[0].name, outer)
    return dims
