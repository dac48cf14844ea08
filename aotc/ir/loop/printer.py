"""Print a kernel as a Python function that ``parser`` reads back to an equal kernel.

::

    def k0(x: "f32[3, 8]", /, out: "f32[3]", *, grid: "3"):
        for i in parallel(0, 3):
            acc = private("f32[]")
            acc[()] = f32(0.0)
            for j in range(0, 8):
                acc[()] += tanh(x[i, j])
            out[i] = acc[()]
"""

from __future__ import annotations

import keyword
import math
import struct
from dataclasses import dataclass

from aotc.ir.dims.algebra import Dim, Sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.forms.tile_forms import F32
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
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
)
from aotc.ir.loop.types import LOOPS, loop_symbol, natural_dtype
from aotc.ir.opset import ACCUMULATED, INFIX, PREFIX

_ASSIGN = {"": "=", **{name: f"{INFIX[name]}=" for name in ACCUMULATED if name in INFIX}}
_LOOP = {kind: word for word, kind in LOOPS.items()}
_NAN = struct.pack("<d", math.nan)


def print_kernel(kernel: Kernel) -> str:
    """Return ``kernel`` as the text of a Python function, with a final newline.

    Raises
    ------
    ValueError
        If a symbol name has two different ranges in one scope, or if a scalar refers to a buffer without text (an
        allocated ``global`` buffer).
    """
    return _KernelPrinter().kernel_text(kernel)


@dataclass(slots=True)
class _NameScope:
    """A name in scope: the symbol that its definition implies, and the symbol that occurs in expressions."""

    implied: Sym
    used: Sym | None = None

    def range_text(self) -> str:
        """Return keywords for the bounds in which the used symbol differs from the implied one: ``lo=1``."""
        if self.used is None or self.used == self.implied:
            return ""
        parts = []
        if self.used.lo != self.implied.lo:
            parts.append(f"lo={self.used.lo}")
        if self.used.extent != self.implied.extent:
            parts.append(f"extent={self.used.extent}")
        return ", ".join(parts)


@dataclass(frozen=True, slots=True)
class _Test:
    """The line ``if not pred: break`` between the condition of a :class:`While` and its body."""

    pred: Scalar


class _KernelPrinter:
    """Printer of one kernel; it appends lines, and tracks the names in scope."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.scopes: dict[str, _NameScope] = {}

    def kernel_text(self, kernel: Kernel) -> str:
        """Return the text of the whole kernel."""
        self.scopes = {name: _NameScope(Sym(name)) for name in kernel.dims}
        dims = list(self.scopes.values())
        arguments = [self.parameter_text(b) for b in kernel.inputs]
        arguments += ["/"] if kernel.inputs else []
        arguments += [self.parameter_text(b) for b in kernel.outputs]
        trailer = [f'grid: "{self.dim_text(kernel.grid)}"']
        if kernel.aliases:
            trailer.append(f'aliases: "{list(kernel.aliases)}"')
        for name, work in (("flops", kernel.flops), ("bytes", kernel.bytes)):
            if work != 0:
                trailer.append(f'{name}: "{self.dim_text(work)}"')
        if kernel.tiling is not None:
            trailer.append(f'tiling: "{kernel.tiling}"')
        self.print_block(kernel.body, "    ")
        ranges = [(scope.implied.name, scope.range_text()) for scope in dims]
        declared = [f'{name}: "dim({text})"' if text else f'{name}: "dim"' for name, text in ranges]
        header = f"def {kernel.name}({', '.join([*arguments, '*', *declared, *trailer])}):"
        return "\n".join([header, *self.lines]) + "\n"

    def parameter_text(self, buffer: Buffer) -> str:
        return f'{buffer.name}: "{self.type_text(buffer)}"'

    def type_text(self, buffer: Buffer) -> str:
        return f"{buffer.dtype}[{', '.join(map(self.dim_text, buffer.shape))}]"

    def dim_text(self, e: Dim) -> str:
        """Return the text of a dim; raise ValueError if a symbol is used with two different ranges."""
        for symbol in symbols(e):
            scope = self.scopes.setdefault(symbol.name, _NameScope(symbol))
            if scope.used is None:
                scope.used = symbol
            elif scope.used != symbol:
                raise ValueError(f"symbol {symbol.name} is used with two ranges: {scope.used!r} and {symbol!r}")
        return str(e)

    def index_text(self, index: tuple[Dim, ...]) -> str:
        return ", ".join(map(self.dim_text, index)) if index else "()"

    # --- statements ---

    def print_block(self, body: tuple[Stmt | _Test, ...], indent: str) -> None:
        """Append the lines of a block's statements, in a new scope of names."""
        outer = dict(self.scopes)
        begin = len(self.lines)
        lets: list[tuple[int, Let, str, _NameScope]] = []
        for stmt in body:
            if isinstance(stmt, Let):
                scope = _NameScope(Sym(stmt.var.name))
                lets.append((len(self.lines), stmt, self.scalar_text(stmt.value), scope))
                self.lines.append("")
                self.scopes[stmt.var.name] = scope
            else:
                self.print_statement(stmt, indent)
        for line, let, value, scope in lets:
            self.lines[line] = indent + _let_text(let, value, scope)
        if len(self.lines) == begin:
            self.lines.append(f"{indent}pass")
        self.scopes = outer

    def print_statement(self, stmt: Stmt | _Test, indent: str) -> None:
        """Append the lines of a statement."""
        match stmt:
            case _Test(pred):
                self.lines += [f"{indent}if not {self.scalar_text(pred, nested=True)}:", f"{indent}    break"]
            case Store(buffer, index, value, reduce, atomic):
                place = f"{buffer.name}[{self.index_text(index)}]"
                text = self.scalar_text(value)
                if atomic:
                    self.lines.append(f"{indent}{place} = atomic_{reduce}({place}, {text})")
                elif reduce in _ASSIGN:
                    self.lines.append(f"{indent}{place} {_ASSIGN[reduce]} {text}")
                else:
                    self.lines.append(f"{indent}{place} = reduce_{reduce}({place}, {text})")
            case For():
                self.print_loop(stmt, indent)
            case If(cond, then, otherwise):
                self.lines.append(f"{indent}if {self.scalar_text(cond)}:")
                self.print_block(then, indent + "    ")
                if otherwise:
                    self.lines.append(f"{indent}else:")
                    self.print_block(otherwise, indent + "    ")
            case While(cond, pred, body):
                self.lines.append(f"{indent}while True:")
                self.print_block((*cond, _Test(pred), *body), indent + "    ")
            case Alloc(buffer):
                if buffer.space == "global":
                    raise ValueError(f"buffer {buffer.name} is global and cannot be allocated in a kernel")
                self.lines.append(f'{indent}{buffer.name} = {buffer.space}("{self.type_text(buffer)}")')
            case Prefetch(buffer, index):
                self.lines.append(f"{indent}prefetch({buffer.name}[{self.index_text(index)}])")
            case Barrier(warp):
                self.lines.append(f"{indent}{'warp_' if warp else ''}barrier()")
            case GridBarrier(counter):
                self.lines.append(f"{indent}grid_barrier({counter.name})")
            case Shuffle(to, source, mask):
                self.lines.append(f"{indent}shuffle({to.name}, {source.name}, mask={mask})")
            case WarpMatch(to, source, bits):
                self.lines.append(f"{indent}match({to.name}, {source.name}, bits={bits})")
            case Tile():
                self.lines.append(indent + self.tile_text(stmt))
            case Either(buffer, cond, ((one, at), (other, other_at))):
                chosen = f"{one.name}[{self.index_text(at)}], {other.name}[{self.index_text(other_at)}]"
                text = f'either({self.scalar_text(cond)}, {chosen}, "{self.type_text(buffer)}")'
                self.lines.append(f"{indent}{buffer.name} = {text}")
            case ExternalCall(function, args):
                places = [f"{buffer.name}[{self.index_text(index)}]" for buffer, index in args]
                self.lines.append(f'{indent}call({", ".join([repr(function), *places])})')

    def print_loop(self, stmt: For, indent: str) -> None:
        """Append a loop. Its first line is written last, as the body decides which bounds of its symbol are printed."""
        arguments = [self.dim_text(stmt.begin), self.dim_text(stmt.end)]
        arguments += [str(stmt.step)] if stmt.step != 1 else []
        line, hidden = len(self.lines), self.scopes.get(stmt.var)
        self.lines.append("")
        scope = self.scopes[stmt.var] = _NameScope(loop_symbol(stmt.var, stmt.begin, stmt.end))
        self.print_block(stmt.body, indent + "    ")
        if hidden is None:
            del self.scopes[stmt.var]
        else:
            self.scopes[stmt.var] = hidden
        arguments += filter(None, [scope.range_text()])
        kind = _LOOP[stmt.kind]
        self.lines[line] = f"{indent}for {stmt.var} in {kind}({', '.join(arguments)}):"

    def tile_text(self, t: Tile) -> str:
        """Return a ``Tile`` statement as a call with keyword arguments, without default values."""
        levels = ", ".join(f"({', '.join(map(self.dim_text, level))})" for level in t.levels)
        fields = {
            "rows": t.rows, "cols": t.cols, "out_base": self.dim_text(t.out_base), "out_row": self.dim_text(t.out_row),
            "a_base": self.dim_text(t.a_base), "a_row": self.dim_text(t.a_row), "b_base": self.dim_text(t.b_base),
            "levels": f"[{levels}]",
        }  # fmt: skip
        if t.form != F32:
            fields["form"] = repr(t.form)
        if t.a_inner != 1:
            fields["a_inner"] = self.dim_text(t.a_inner)
        fields |= {k: self.dim_text(n) for k, n in (("b_column", t.b_column), ("b_inner", t.b_inner)) if n != 0}
        fields |= {"adds": "True"} if t.adds else {}
        rest = ", ".join(f"{name}={value}" for name, value in fields.items())
        return f"tile({t.out.name}, {t.a.name}, {t.b.name}, {rest})"

    # --- scalars ---

    def scalar_text(self, s: Scalar, nested: bool = False) -> str:
        """Return the text of a scalar; a ``nested`` operator is in parentheses."""
        match s:
            case Const(value, dtype):
                return f"{dtype}({_literal_text(value)})"
            case Index(expr, dtype):
                return f"index({self.dim_text(expr)})" if dtype == "i64" else f'index({self.dim_text(expr)}, "{dtype}")'
            case Var(name=name):
                return name
            case Load(buffer, index):
                return f"{buffer.name}[{self.index_text(index)}]"
        return self.apply_text(s, nested)

    def apply_text(self, s: Apply, nested: bool) -> str:
        """Return an operator or a call; a dtype is printed only if the operands do not determine it."""
        natural = natural_dtype(s.fn, tuple(a.dtype for a in s.args)) == s.dtype
        if natural and s.fn in INFIX and len(s.args) == 2:
            left, right = (self.scalar_text(a, nested=True) for a in s.args)
            text = f"{left} {INFIX[s.fn]} {right}"
            return f"({text})" if nested else text
        if natural and s.fn in PREFIX and len(s.args) == 1:
            text = PREFIX[s.fn] + self.scalar_text(s.args[0], nested=True)
            return f"({text})" if nested else text
        arguments = [self.scalar_text(a) for a in s.args]
        if not natural:
            arguments.append(f'"{s.dtype}"')
        name = f"{s.fn}_" if keyword.iskeyword(s.fn) else s.fn
        return f"{name}({', '.join(arguments)})"


def _let_text(stmt: Let, value: str, scope: _NameScope) -> str:
    extra = [] if stmt.var.dtype == stmt.value.dtype else [f'dtype="{stmt.var.dtype}"']
    extra += filter(None, [scope.range_text()])
    return f"{stmt.var.name} = " + (f"let({', '.join([value, *extra])})" if extra else value)


def _literal_text(value: bool | int | float | complex) -> str:
    if isinstance(value, complex):
        return f"{_float_text(value.real)}, {_float_text(value.imag)}"
    return _float_text(value) if isinstance(value, float) else repr(value)


def _float_text(value: float) -> str:
    """Return the text of a float; NaNs with other bits than the default one are written by their bits."""
    if not math.isnan(value):
        return repr(value)
    bits = struct.pack("<d", value)
    return "nan" if bits == _NAN else f"nan_bits({int.from_bytes(bits, 'little'):#x})"
