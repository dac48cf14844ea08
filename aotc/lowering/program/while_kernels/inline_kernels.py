"""Inline the body of one kernel into another: buffers replaced, local names made unique."""

from __future__ import annotations

from collections.abc import Mapping

from aotc.ir.dims.algebra import Dim, Expr, Sym, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Either,
    ExternalCall,
    For,
    GridBarrier,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Prefetch,
    Scalar,
    Shuffle,
    Stmt,
    Store,
    Tile,
    Var,
    WarpMatch,
    While,
    walk,
)
from aotc.lowering.analysis.index_maps import reshape_index
from aotc.lowering.plans.thresholds import UNROLLED_STEPS


def inline_kernel(kernel: Kernel, buffers: Mapping[str, Buffer], suffix: str) -> tuple[Stmt, ...]:
    """Return the statements of ``kernel`` for its whole grid, one item after the other.

    ``buffers`` maps the names of the kernel's parameters to memory; local names get ``suffix``.
    """
    local = {
        s.buffer.name: Buffer(s.buffer.name + suffix, s.buffer.dtype, s.buffer.shape, s.buffer.space)
        for s in walk(kernel.body)
        if isinstance(s, Alloc | Either)
    }
    bound = {s.var for s in walk(kernel.body) if isinstance(s, For)}
    bound |= {s.var.name for s in walk(kernel.body) if isinstance(s, Let)}
    return InlinedKernelRenamer({**local, **buffers}, bound, suffix).renamed_block(kernel.body)


def substitute_loop_values(body: tuple[Stmt, ...], values: Mapping[str, Dim], suffix: str) -> tuple[Stmt, ...]:
    """Return scalar statements with ``values`` substituted for loop variables; local names get ``suffix``."""
    bound = {s.var.name for s in walk(body) if isinstance(s, Let)}
    return InlinedKernelRenamer({}, bound, suffix, values).renamed_block(body)


class InlinedKernelRenamer:
    """Rewrite a kernel's body: replace ``buffers``, rename ``bound`` names, substitute ``values`` for others."""

    def __init__(
        self, buffers: Mapping[str, Buffer], bound: set[str], suffix: str, values: Mapping[str, Dim] | None = None
    ) -> None:
        self.buffers, self.bound, self.suffix, self.values = buffers, bound, suffix, values or {}
        self.indices: dict[Dim, Dim] = {}

    def renamed_block(self, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
        return tuple(self.renamed_statement(s) for s in body)

    def renamed_name(self, name: str) -> str:
        return name + self.suffix if name in self.bound else name

    def renamed_index(self, e: Dim) -> Dim:
        """Return the index expression ``e`` with names renamed or replaced by ``values``."""
        if not isinstance(e, Expr):
            return e
        renamed = self.indices.get(e)
        if renamed is None:
            names = {s.name: self._renamed_symbol(s) for s in symbols(e) if s.name in self.bound}
            names |= {s.name: self.values[s.name] for s in symbols(e) if s.name in self.values}
            renamed = self.indices[e] = substitute(e, names)
        return renamed

    def _renamed_symbol(self, s: Sym) -> Dim:
        return sym(s.name + self.suffix, s.lo, None if s.extent is None else self.renamed_index(s.extent))

    def renamed_indices(self, index: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(self.renamed_index(i) for i in index)

    def replaced_buffer(self, buffer: Buffer) -> Buffer:
        return self.buffers.get(buffer.name, buffer)

    def replaced_element(self, buffer: Buffer, index: tuple[Dim, ...]) -> tuple[Buffer, tuple[Dim, ...]]:
        """Return the memory and index of an element; for a view of another shape, the index in its memory's shape."""
        new = self.replaced_buffer(buffer)
        index = self.renamed_indices(index)
        return new, index if new.shape == buffer.shape else reshape_index(index, buffer.shape, new.shape)

    def renamed_scalar(self, s: Scalar) -> Scalar:
        """Return the scalar ``s`` with buffers, names and indices replaced."""
        match s:
            case Var(name, dtype):
                return Var(self.renamed_name(name), dtype)
            case Index(expr, dtype):
                return Index(self.renamed_index(expr), dtype)
            case Load(buffer, index):
                return Load(*self.replaced_element(buffer, index))
            case Apply(fn, args, dtype):
                return Apply(fn, tuple(self.renamed_scalar(a) for a in args), dtype)
        return s

    def renamed_statement(self, s: Stmt) -> Stmt:
        """Return the statement ``s`` with buffers and names replaced; short loops become unrolled ones."""
        match s:
            case For(var, begin, end, body, kind, step):
                # An inlined kernel has no grid, so its parallel loop becomes serial.
                short = kind != "thread" and begin == 0 and step == 1 and UNROLLED_STEPS.holds(end)
                kind = "unroll" if short else "serial" if kind == "parallel" else kind
                return For(
                    self.renamed_name(var),
                    self.renamed_index(begin),
                    self.renamed_index(end),
                    self.renamed_block(body),
                    kind,
                    step,
                )
            case Let(var, value):
                return Let(Var(self.renamed_name(var.name), var.dtype), self.renamed_scalar(value))
            case Store(buffer, index, value, reduce, atomic):
                return Store(*self.replaced_element(buffer, index), self.renamed_scalar(value), reduce, atomic)
            case If(cond, then, otherwise):
                return If(self.renamed_scalar(cond), self.renamed_block(then), self.renamed_block(otherwise))
            case While(cond, pred, body):
                return While(self.renamed_block(cond), self.renamed_scalar(pred), self.renamed_block(body))
            case Alloc(buffer):
                return Alloc(self.replaced_buffer(buffer))
            case Prefetch(buffer, index):
                return Prefetch(*self.replaced_element(buffer, index))
            case Barrier() | GridBarrier():
                return s
            case Shuffle(to, source, mask):
                return Shuffle(self.replaced_buffer(to), self.replaced_buffer(source), mask)
            case WarpMatch(to, source, bits):
                return WarpMatch(self.replaced_buffer(to), self.replaced_buffer(source), bits)
            case Tile():
                return self._renamed_tile(s)
            case ExternalCall(function, args):
                return ExternalCall(function, tuple(self.replaced_element(*a) for a in args))
            case Either(buffer, cond, (one, other)):
                return Either(
                    self.replaced_buffer(buffer),
                    self.renamed_scalar(cond),
                    (self.replaced_element(*one), self.replaced_element(*other)),
                )

    def _renamed_tile(self, t: Tile) -> Tile:
        """Return a tile operation with its buffers and offsets replaced."""
        i = self.renamed_index
        return Tile(
            t.rows, t.cols, self.replaced_buffer(t.out), i(t.out_base), i(t.out_row),
            self.replaced_buffer(t.a), i(t.a_base), i(t.a_row), self.replaced_buffer(t.b), i(t.b_base),
            tuple((i(n), i(a), i(b)) for n, a, b in t.levels), t.form,
            a_inner=i(t.a_inner), b_column=i(t.b_column), b_inner=i(t.b_inner), adds=t.adds,
        )  # fmt: skip
