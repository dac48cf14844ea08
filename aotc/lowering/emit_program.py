"""The host function: shape arithmetic, checks, allocation and the submission, as VM code."""

from __future__ import annotations

from collections.abc import Sequence

from aotc.frontend.dims import Call, Dim, Expr, Sym, symbols
from aotc.frontend.tensor_ir import Function
from aotc.lowering.bufferize import Check
from aotc.lowering.schedule import CommandBuffer
from aotc.vmfb.isa import BY_NAME

_FUNCTIONS = {"//": "floordiv", "%": "mod", "max": "max", "min": "min"}


class Program:
    """VM code of one function under construction."""

    def __init__(self) -> None:
        self.code: list[list] = []
        self.registers = 0
        self._known: dict[Dim, int] = {}

    def op(self, name: str, *operands: object) -> None:
        """Append an instruction."""
        self.code.append([BY_NAME[name].opcode, *operands])

    def register(self) -> int:
        """Return a new register."""
        self.registers += 1
        return self.registers - 1

    def bind(self, symbol: Dim, register: int) -> None:
        """Let ``register`` hold the value of a dim."""
        self._known[symbol] = register

    def value(self, e: Dim) -> int:
        """Return a register that holds ``e``."""
        found = self._known.get(e)
        if found is None:
            found = self._known[e] = self._compute(e)
        return found

    def _compute(self, e: Dim) -> int:
        if not isinstance(e, Expr):
            out = self.register()
            self.op("const", out, int(e))
            return out
        parts = [self._term(monomial, c) for monomial, c in e.terms]
        if e.const:
            parts.append(self.value(e.const))
        total = parts[0]
        for p in parts[1:]:
            total = self._binary("add", total, p)
        return total

    def _term(self, monomial: tuple, c: int) -> int:
        factors = [self._atom(a) for a in monomial] + ([self.value(c)] if c != 1 else [])
        total = factors[0]
        for f in factors[1:]:
            total = self._binary("mul", total, f)
        return total

    def _atom(self, atom: Sym | Call) -> int:
        e = Expr(0, (((atom,), 1),))
        if e in self._known:
            return self._known[e]
        if isinstance(atom, Sym):
            raise KeyError(f"no argument gives the dim {atom.name}")
        self._known[e] = out = self._binary(_FUNCTIONS[atom.fn], self.value(atom.a), self.value(atom.b))
        return out

    def _binary(self, name: str, a: int, b: int) -> int:
        out = self.register()
        self.op(name, out, a, b)
        return out


def emit_program(
    function: Function, arena: Dim, buffer: CommandBuffer, number: int, checks: Sequence[Check]
) -> Program:
    """Return the VM code that runs ``function`` through command buffer ``number``."""
    p = Program()
    _bind_arguments(p, function)
    for n, v in enumerate(function.body.results):
        p.op("result", n, [p.value(d) for d in v.type.shape])
    if arena != 0:
        p.op("arena", p.value(arena))
    if buffer.code:
        p.op("submit", number, [p.value(e) for e in buffer.parameters])
    for check in checks:
        _check(p, function, check)
    p.op("return")
    return p


def _bind_arguments(p: Program, function: Function) -> None:
    """Read the symbols off the arguments' shapes, then check the dims that are expressions."""
    later = []
    bound: set[str] = set()
    for n, v in enumerate(function.body.params):
        for axis, d in enumerate(v.type.shape):
            if not isinstance(d, Expr):
                continue
            names = symbols(d)
            only = next(iter(names)) if len(names) == 1 else None
            if only is not None and d.terms == (((only,), 1),) and d.const == 0 and only.name not in bound:
                register = p.register()
                p.op("dim", register, n, axis)
                p.bind(d, register)
                bound.add(only.name)
            else:
                later.append((n, axis, d))
    for n, axis, d in later:
        p.op("check_dim", n, axis, p.value(d))


def _check(p: Program, function: Function, check: Check) -> None:
    """Assertions are computed with everything else and judged when the work is done."""
    slot = len(function.body.params) + len(function.body.results)

    def load(storage: object, dtype: str) -> int:
        out = p.register()
        place = slot if storage.kind == "arena" else slot + 1  # type: ignore[attr-defined]
        offset = storage.offset if storage.kind == "arena" else storage.number  # type: ignore[attr-defined]
        p.op("load_scalar", out, place, p.value(offset), dtype)
        return out

    values = [load(s, dtype) for s, dtype in check.values]
    p.op("assert_true", load(check.predicate, "i1"), check.message, values)
