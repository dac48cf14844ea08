"""Emit the host function as VM code: shape arithmetic, checks, allocation and submission."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from aotc.ir.dims.algebra import Call, Dim, Expr, Sym, expr_of_atom, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.program.ir import Bind, Check, Storage
from aotc.ir.tensor.ir import Function
from aotc.lowering.analysis.specialized_dims import fixed_dims
from aotc.lowering.program.schedule import CommandBuffer, slot_and_offset
from aotc.vmfb.abi import Slots
from aotc.vmfb.dtypes import size_of
from aotc.vmfb.isa import BY_NAME

_FUNCTIONS = {"//": "floordiv", "%": "mod", "max": "max", "min": "min"}


class VmProgramBuilder:
    """Builder of the VM code of one function; each dim is computed once, in a register of its own."""

    def __init__(self) -> None:
        self.code: list[list] = []
        self.registers = 0
        self._known: dict[Dim, int] = {}

    def append_instruction(self, name: str, *operands: object) -> None:
        """Append a VM instruction."""
        self.code.append([BY_NAME[name].opcode, *operands])

    def allocate_register(self) -> int:
        """Allocate a new VM register."""
        self.registers += 1
        return self.registers - 1

    def bind_dim(self, symbol: Dim, register: int) -> None:
        """Record that VM register ``register`` contains the dim ``symbol``."""
        self._known[symbol] = register

    def are_dims_known(self, *dims: Dim) -> bool:
        """Return True if every symbol of ``dims`` has a value."""
        return all(self.is_dim_bound(expr_of_atom(s)) for d in dims for s in symbols(d))

    def is_dim_bound(self, symbol: Dim) -> bool:
        """Return True if a register contains the value of a dim."""
        return symbol in self._known

    def register_of_dim(self, e: Dim) -> int:
        """Return the VM register that contains the dim ``e``; append the instructions to compute it if necessary."""
        register = self._known.get(e)
        if register is None:
            register = self._known[e] = self._compute_dim(e)
        return register

    def _compute_dim(self, e: Dim) -> int:
        """Append the instructions that compute the dim ``e``; return the register of the result."""
        if not isinstance(e, Expr):
            out = self.allocate_register()
            self.append_instruction("const", out, int(e))
            return out
        parts = [self._dim_term(monomial, c) for monomial, c in e.terms]
        if e.const:
            parts.append(self.register_of_dim(e.const))
        total = parts[0]
        for p in parts[1:]:
            total = self.append_binary("add", total, p)
        return total

    def _dim_term(self, monomial: tuple, c: int) -> int:
        """Return the register of a product of atoms and a coefficient."""
        factors = [self._dim_atom(a) for a in monomial] + ([self.register_of_dim(c)] if c != 1 else [])
        total = factors[0]
        for f in factors[1:]:
            total = self.append_binary("mul", total, f)
        return total

    def _dim_atom(self, atom: Sym | Call) -> int:
        """Return the register of a symbol or of a call such as ``min``; compute the call once."""
        e = expr_of_atom(atom)
        if e in self._known:
            return self._known[e]
        if isinstance(atom, Sym):
            raise KeyError(f"no argument gives the dim {atom.name}")
        self._known[e] = out = self.append_binary(
            _FUNCTIONS[atom.fn], self.register_of_dim(atom.a), self.register_of_dim(atom.b)
        )
        return out

    def append_binary(self, name: str, a: int, b: int) -> int:
        """Append a binary VM instruction; return its result register."""
        out = self.allocate_register()
        self.append_instruction(name, out, a, b)
        return out


Block: TypeAlias = tuple[int, Dim, Dim]
"""A slot, an offset in it, and a number of bytes."""


@dataclass(frozen=True, slots=True)
class Stage:
    """Part of a call: a command buffer, and the values that the host reads after it.

    Attributes
    ----------
    buffer : CommandBuffer
    number : int
        Number of the command buffer.
    arenas : sequence of Dim
        Bytes of the arena of each memory.
    judged : sequence of Check or Bind
        Assertions and computed sizes that the host reads after this stage; the last stage has none.
    blocks : sequence of Block
        Separate allocations so far, if the memory plan has guards between blocks.
    """

    buffer: CommandBuffer
    number: int
    arenas: Sequence[Dim]
    judged: Sequence[Check | Bind] = ()
    blocks: Sequence[Block] = ()


def emit_program(
    function: Function, slots: Slots, stages: Sequence[Stage], reused: Mapping[int, int]
) -> VmProgramBuilder:
    """Return the VM code that runs the ``stages`` of ``function`` with the pointer table ``slots``.

    ``reused`` maps the number of a result to that of the argument whose memory it reuses.
    """
    p = VmProgramBuilder()
    waiting = _check_sizes(p, function)
    _bind_arguments(p, function)
    _bind_values(p, function, stages)
    unmade = list(enumerate(function.body.results))
    taken: Sequence[Dim] = (0,) * len(stages[0].arenas)
    for stage in stages:
        last = stage is stages[-1]
        # A check or a result comes as soon as its sizes are known; later stages compute the other sizes.
        for row in [row for row in waiting if last or p.are_dims_known(row[1], row[2], *row[4])]:
            _emit_requirement_check(p, row)
            waiting.remove(row)
        for n, v in [(n, v) for n, v in unmade if last or p.are_dims_known(*v.type.shape)]:
            if n in reused:
                p.append_instruction("take", n, reused[n])
            else:
                p.append_instruction("result", n, [p.register_of_dim(d) for d in v.type.shape])
            unmade.remove((n, v))
        _emit_arena_allocation(p, stage.arenas, taken)
        if stage.arenas != taken or stage is stages[0]:
            for slot, offset, size in stage.blocks:
                p.append_instruction("block", slot, p.register_of_dim(offset), p.register_of_dim(size))
            taken = stage.arenas
        if stage.buffer.code:
            p.append_instruction("submit", stage.number, [p.register_of_dim(e) for e in stage.buffer.parameters])
        for step in stage.judged:
            if isinstance(step, Bind):
                _bind_computed(p, slots, step)
            else:
                _emit_assertion_check(p, slots, step)
    p.append_instruction("return")
    return p


def _emit_arena_allocation(p: VmProgramBuilder, sizes: Sequence[Dim], taken: Sequence[Dim]) -> None:
    """Emit the allocation of a larger arena in each memory in which the ``taken`` bytes are not enough."""
    for space, (size, before) in enumerate(zip(sizes, taken, strict=True)):
        if size != before and space == 0:
            p.append_instruction("arena", p.register_of_dim(size))
        elif size != before:
            p.append_instruction("arena_in", space, p.register_of_dim(size))


def _bind_arguments(p: VmProgramBuilder, function: Function) -> None:
    """Emit code that reads symbols from the arguments' shapes, then checks the dims that are expressions."""
    unread = [
        (n, axis, d)
        for n, v in enumerate(function.body.params)
        for axis, d in enumerate(v.type.shape)
        if isinstance(d, Expr)
    ]
    later = []
    bound: set[str] = set()
    progress = True
    while progress:
        progress = False
        for n, axis, d in list(unread):
            names = [s for s in symbols(d) if s.name not in bound]
            if len(names) == 1 and (factor := _symbol_coefficient(d, names[0])):
                _solve_dim(p, (n, axis, d), names[0], factor)
                bound.add(names[0].name)
                progress = True
            elif names:
                continue
            unread.remove((n, axis, d))
            if d != expr_of_atom(names[0]) if names else True:
                later.append((n, axis, d))
    for n, axis, d in [*later, *unread]:
        p.append_instruction("check_dim", n, axis, p.register_of_dim(d))


def _symbol_coefficient(e: Expr, symbol: Sym) -> int:
    """Return ``k`` if ``e`` is ``k * symbol`` plus terms without it, else 0."""
    factor = dict(e.terms).get((symbol,), 0)
    return factor if symbol not in symbols(e - factor * expr_of_atom(symbol)) else 0


def _solve_dim(p: VmProgramBuilder, place: tuple[int, int, Expr], symbol: Sym, factor: int) -> None:
    """Emit code that computes the one unknown of an argument's dim, rounded down; the dim itself is checked later."""
    n, axis, d = place
    lone = expr_of_atom(symbol)
    size = p.allocate_register()
    p.append_instruction("dim", size, n, axis)
    rest = d - factor * lone
    if rest != 0:
        size = (
            p.append_binary("sub", size, p.register_of_dim(rest))
            if factor > 0
            else p.append_binary("sub", p.register_of_dim(rest), size)
        )
    elif factor < 0:
        size = p.append_binary("sub", p.register_of_dim(0), size)
    p.bind_dim(lone, p.append_binary("floordiv", size, p.register_of_dim(abs(factor))) if abs(factor) != 1 else size)


def _check_sizes(p: VmProgramBuilder, function: Function) -> list[tuple]:
    """Emit checks of requirements on argument sizes; return the requirements whose dims are computed later."""
    sizes = {f"size_{n}_{k}": (n, k) for n, v in enumerate(function.body.params) for k in range(v.type.rank)}
    waiting = []
    for row in function.attrs.get("requirements", ()):
        _, left, right, _, values = row
        names = sorted({s.name for e in (left, right, *values) for s in symbols(e)})
        for name in names:
            if name in sizes and not p.is_dim_bound(sym(name)):
                register = p.allocate_register()
                p.append_instruction("dim", register, *sizes[name])
                p.bind_dim(sym(name), register)
        if all(name in sizes for name in names):
            _emit_requirement_check(p, row)
        else:
            waiting.append(row)
    return waiting


def _bind_computed(p: VmProgramBuilder, slots: Slots, bind: Bind) -> None:
    """Emit code that reads a size that kernels computed, and checks that it is not negative."""
    register = _load_from_storage(p, slots, bind.value, bind.dtype)
    p.bind_dim(bind.dim, register)
    _emit_requirement_check(p, ("le", 0, bind.dim, "a size is negative: {0}", (bind.dim,)))


def _load_from_storage(p: VmProgramBuilder, slots: Slots, storage: Storage, dtype: str) -> int:
    """Emit the load of a scalar from a storage; return its register."""
    out = p.allocate_register()
    slot, offset = slot_and_offset(storage, slots)
    p.append_instruction("load_scalar", out, slot, p.register_of_dim(offset), dtype)
    return out


def _bind_values(p: VmProgramBuilder, function: Function, stages: Sequence[Stage]) -> None:
    """Emit code that reads the sizes that are values of arguments, and checks that they are not negative."""
    sizes = function.attrs.get("sizes", {})
    if not sizes:
        return
    used = [d for v in function.body.results for d in v.type.shape]
    for stage in stages:
        used += [*stage.arenas, *stage.buffer.parameters]
    for _, left, right, _, values in function.attrs.get("requirements", ()):
        used += [left, right, *values]
    names = {s.name for d in used for s in symbols(d)}
    for name, (argument, element) in sizes.items():
        if name not in names:
            continue
        dtype = function.body.params[argument].type.dtype
        register = p.allocate_register()
        p.append_instruction("load_scalar", register, argument, p.register_of_dim(element * size_of(dtype)), dtype)
        p.bind_dim(sym(name), register)
        _emit_requirement_check(p, ("le", 0, sym(name), f"a size is negative: {name} is {{0}}", (sym(name),)))


def _emit_requirement_check(p: VmProgramBuilder, row: tuple) -> None:
    """Emit the check of a requirement on sizes: (relation, left, right, message, values in the message)."""
    relation, left, right, message, values = row
    match relation:
        case "gt":
            relation, left, right = "lt", right, left
        case "ge":
            relation, left, right = "le", right, left
    holds = p.append_binary(relation, p.register_of_dim(left), p.register_of_dim(right))
    p.append_instruction("assert_true", holds, message, [p.register_of_dim(e) for e in values])


def _emit_assertion_check(p: VmProgramBuilder, slots: Slots, check: Check) -> None:
    """Emit the check of an assertion whose condition kernels computed."""
    values = [_load_from_storage(p, slots, s, dtype) for s, dtype in check.values]
    p.append_instruction("assert_true", _load_from_storage(p, slots, check.predicate, "i1"), check.message, values)


def join_programs(
    general: tuple[Function, VmProgramBuilder], copies: list[tuple[Function, VmProgramBuilder]]
) -> VmProgramBuilder:
    """Return a program that compares the arguments' sizes and branches to the code specialised for them."""
    joined = VmProgramBuilder()
    entries = []
    for function, _ in copies:
        conditions = []
        for n, axis, size in fixed_dims(general[0], function):
            register = joined.allocate_register()
            joined.append_instruction("dim", register, n, axis)
            conditions.append(joined.append_binary("eq", register, joined.register_of_dim(size)))
        holds = conditions[0]
        for c in conditions[1:]:
            holds = joined.append_binary("and", holds, c)
        entries.append(len(joined.code))
        joined.append_instruction("branch_if", holds, 0)
    joined.code += general[1].code
    for at, (_, program) in zip(entries, copies, strict=True):
        joined.code[at][-1] = len(joined.code)
        joined.code += program.code
    joined.registers = max(joined.registers, *(p.registers for _, p in [general, *copies]))
    return joined
