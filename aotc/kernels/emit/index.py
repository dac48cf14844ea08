"""Emit index expressions as LLVM i64 arithmetic."""

from __future__ import annotations

from typing import TypeAlias

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Call, Dim, Expr, Sym, bounds, expr_of_atom
from aotc.ir.dims.symbols import calls_in, substitute, substitute_symbols, symbols
from aotc.ir.loop.access import statement_index_exprs
from aotc.ir.loop.ir import Buffer, For, Let, walk
from aotc.kernels.llvm_types import i64
from aotc.support.memoize import memoized

_NO_WRAP = ("nsw",)
Frame: TypeAlias = tuple[dict[str, ir.Value], dict[Dim, ir.Value]]


def flat_index(buffer: Buffer, index: tuple[Dim, ...]) -> Dim:
    """Return the row-major offset of the element of ``buffer`` at an index, in elements."""
    return _row_major_offset(buffer.shape, index)


@memoized
def _row_major_offset(shape: tuple[Dim, ...], index: tuple[Dim, ...]) -> Dim:
    """Return the row-major offset of an element in elements.

    The results are cached, because kernels compute the same offsets repeatedly.
    """
    flat: Dim = 0
    stride: Dim = 1
    for at, extent in zip(reversed(index), reversed(shape)):
        flat = flat + at * stride
        stride = stride * extent
    return flat


def element_offset_at_iteration(buffer: Buffer, index: tuple[Dim, ...], var: str, iteration: Dim) -> Dim:
    """Return the offset of an element in elements when the loop variable ``var`` has the value ``iteration``."""
    return _offset_at_iteration(flat_index(buffer, index), var, iteration)


@memoized
def _offset_at_iteration(flat: Dim, var: str, iteration: Dim) -> Dim:
    """Return an offset with the loop variable ``var`` replaced by ``iteration``.

    The results are cached, because each enclosing loop asks for the offsets of inner accesses.
    """
    return substitute(flat, {var: iteration})


@memoized
def stride_of_offset(flat: Dim, var: str) -> Dim | None:
    """Return the change of an offset, in elements, when ``var`` grows by 1.

    None if the change depends on ``var``.
    """
    found = [s for s in symbols(flat) if s.name == var]
    step = substitute_symbols(flat, {s: Expr(1, (((s,), 1),)) for s in found}) - flat
    return None if any(s.name == var for s in symbols(step)) else step


class IndexEmitter:
    """Emitter of index expressions, each at most once per block of statements.

    A *frame* has the values computed in one block; they are reused in the block and in nested ones. Names are bound to
    registers, or to numbers (variables of unrolled loops), which are folded into expressions.

    Parameters
    ----------
    builder : llvmlite.ir.IRBuilder
        Where to emit; the caller controls its position.
    """

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.builder = builder
        self._names: list[dict[str, ir.Value]] = [{}]
        self._numbers: dict[str, int] = {}
        self._known: list[dict[Dim, ir.Value]] = [{}]

    def enter_block(self, frame: Frame | None = None) -> None:
        """Enter a block of statements, or re-enter a block with the frame that :meth:`leave_block` returned."""
        names, known = ({}, {}) if frame is None else frame
        self._names.append(names)
        self._known.append(known)

    def leave_block(self) -> Frame:
        """Leave the block; return its frame: the names that were bound and the values that were computed in it."""
        return self._names.pop(), self._known.pop()

    def bind_name(self, name: str, value: ir.Value) -> None:
        """Bind ``name`` to an i64 register for the rest of the block."""
        self._names[-1][name] = value

    def is_bound(self, name: str) -> bool:
        """Return True if ``name`` is bound to a register."""
        return any(name in frame for frame in self._names)

    def bind_number(self, name: str, value: int) -> None:
        """Replace the variable ``name`` of an unrolled loop by a constant from now on.

        The caller emits the body once for each number.
        """
        self._numbers[name] = value

    def unbind_number(self, name: str) -> None:
        """End the replacement of the loop variable ``name`` by a constant."""
        del self._numbers[name]

    def fold_unrolled_variables(self, dim: Dim) -> Dim:
        """Return ``dim`` with the constant variables of unrolled loops substituted."""
        return substitute(dim, self._numbers) if self._numbers else dim

    def emit(self, dim: Dim) -> ir.Value:
        """Emit ``dim`` and return its i64 register."""
        dim = self.fold_unrolled_variables(dim)
        if not isinstance(dim, Expr):
            return i64(int(dim))
        for frame in reversed(self._known):
            if dim in frame:
                return frame[dim]
        value = self._emit_sum(dim)
        self._known[-1][dim] = value
        return value

    def hoist_divisions(self, loop: For) -> None:
        """Emit the divisions in a loop that do not depend on its variable before the loop.

        LLVM does not hoist divisions by a variable. Divisions by a possible 0 stay in the loop, which may have no
        iteration.
        """
        inside = list(walk((loop,)))
        own = {s.var for s in inside if isinstance(s, For)} | {s.var.name for s in inside if isinstance(s, Let)}
        for atom in dict.fromkeys(
            a for s in inside for e in statement_index_exprs(s) for a in calls_in(e) if _is_division_by_size(a)
        ):
            names = {s.name for e in (atom.a, atom.b) for s in symbols(e)}
            if (bounds(atom.b)[0] or 0) > 0 and not names & own and all(map(self.is_bound, names)):
                self._emit_atom(atom)

    def _innermost_block_depth(self, dim: Dim) -> int:
        """Return the nesting depth of the innermost block that defines a name in ``dim``."""
        found = 0
        for symbol in symbols(dim):
            for depth in range(len(self._names) - 1, found, -1):
                if symbol.name in self._names[depth]:
                    found = depth
                    break
        return found

    def _emit_sum(self, dim: Expr) -> ir.Value:
        """Emit the sum of the terms of ``dim``, first those of outer blocks, so that LLVM can hoist the partial sum."""
        terms = [(self._innermost_block_depth(Expr(0, ((m, 1),))), m, c) for m, c in dim.terms]
        terms.sort(key=lambda term: term[0])
        total: ir.Value | None = None
        for _, monomial, coefficient in terms:
            value = self._emit_monomial(monomial)
            if total is not None and coefficient == -1:
                total = self.builder.sub(total, value, flags=_NO_WRAP)
                continue
            if coefficient != 1:
                value = self.builder.mul(value, i64(coefficient), flags=_NO_WRAP)
            total = value if total is None else self.builder.add(total, value, flags=_NO_WRAP)
        if total is None:
            return i64(dim.const)
        if dim.const:
            total = self.builder.add(total, i64(dim.const), flags=_NO_WRAP)
        return total

    def _emit_monomial(self, monomial: tuple[Sym | Call, ...]) -> ir.Value:
        """Emit the product of the atoms of a monomial."""
        value = self._emit_atom(monomial[0])
        for atom in monomial[1:]:
            value = self.builder.mul(value, self._emit_atom(atom), flags=_NO_WRAP)
        return value

    def _emit_atom(self, atom: Sym | Call) -> ir.Value:
        """Emit a name, or a call of an index function, and cache its register in the current block."""
        if isinstance(atom, Sym):
            return self._emit_name(atom.name)
        key = expr_of_atom(atom)
        for frame in reversed(self._known):
            if key in frame:
                return frame[key]
        value = self._emit_index_function(atom)
        self._known[-1][key] = value
        return value

    def _emit_name(self, name: str) -> ir.Value:
        for frame in reversed(self._names):
            if name in frame:
                return frame[name]
        raise InternalError(f"kernels: index uses the unknown name {name!r}")

    def _emit_index_function(self, atom: Call) -> ir.Value:
        """Emit a call of ``min``, ``max``, floor division or modulo."""
        a, b = self.emit(atom.a), self.emit(atom.b)
        builder = self.builder
        if atom.fn in ("max", "min"):
            keep = builder.icmp_signed(">" if atom.fn == "max" else "<", a, b)
            return builder.select(keep, a, b)
        low = bounds(atom.a)[0]
        if low is not None and low >= 0:
            return self._emit_division(atom, a, b)
        return self._emit_floor_division(atom.fn, a, b, atom.b)

    def _emit_division(self, atom: Call, a: ir.Value, b: ir.Value) -> ir.Value:
        """Emit the quotient (``//``) or the remainder of a non-negative number."""
        return self.builder.udiv(a, b) if atom.fn == "//" else self.builder.urem(a, b)

    def _emit_floor_division(self, fn: str, a: ir.Value, b: ir.Value, divisor: Dim) -> ir.Value:
        """Emit floor division or modulo for ``a`` that may be negative; the divisor is positive."""
        builder = self.builder
        if isinstance(divisor, int) and divisor & (divisor - 1) == 0:
            if fn == "//":
                return builder.ashr(a, i64(divisor.bit_length() - 1))
            return builder.and_(a, i64(divisor - 1))
        remainder = builder.srem(a, b)
        below = builder.icmp_signed("<", remainder, i64(0))
        if fn == "%":
            return builder.select(below, builder.add(remainder, b), remainder)
        quotient = builder.sdiv(a, b)
        return builder.select(below, builder.sub(quotient, i64(1)), quotient)


def _is_division_by_size(call: Call) -> bool:
    return call.fn in ("//", "%") and isinstance(call.b, Expr)
