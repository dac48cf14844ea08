"""Print a kernel as a Python function that Numba compiles, with the functions of :mod:`aotc.kernels.runtime`.

::

    def k0(x: "f32[3, 8]", o: "f32[3]", scratch, begin, end):
        for i in range(begin, end):
            acc = private((1,), f32)
            acc[0] = f32(0.0)
            for j in range(0, 8):
                acc[0] = acc[0] + f32(tanh(x[i, j]))
            o[i] = acc[0]

The parameters are the arrays, the kernel's dims, the worker's scratch memory (bytes), and a range of the grid. An array
without dims has one element. Numba ignores the annotations, which are the dtypes and shapes of the loop IR. The text
does not poll for cancellation, and omits prefetches.
"""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, is_static
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    Either,
    ExternalCall,
    For,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Prefetch,
    Scalar,
    Stmt,
    Store,
    Tile,
    Var,
    While,
    is_letter,
)
from aotc.ir.loop.scratch import scratch_layout
from aotc.kernels.numba_front.scalars import ScalarPrinter, numba_storage_dtype, strip_parens
from aotc.vmfb.dtypes import DTYPES

GPU_NAMES = ("grid_barrier", "template")
"""Functions of :mod:`aotc.kernels.runtime.gpu`."""
_NAME = re.compile(r"\b[A-Za-z_]\w*\b(?!\()")
_RESERVED = frozenset({*dir(builtins), "cuda", "items", "scratch", "begin", "end"})
_MASKED = {"i2", "i4", "u2", "u4"}


class NumbaSource(NamedTuple):
    """A kernel printed as a Python function, and the names that it imports from the runtime."""

    text: str
    names: tuple[str, ...]

    @property
    def module(self) -> str:
        """Return the text of a module with the function."""
        cuda = "from numba import cuda\n\n" if self.is_for_gpus else ""
        return f"{cuda}{import_line(self.names)}\n\n\n{self.text}"

    @property
    def is_for_gpus(self) -> bool:
        """Return True if the function uses numba.cuda."""
        return "cuda." in self.text


def import_line(names: tuple[str, ...]) -> str:
    """Return the import of ``names`` from the runtime."""
    for_gpus = [f"from aotc.kernels.runtime.gpu import {name}" for name in names if name in GPU_NAMES]
    if for_gpus:
        return "\n".join([import_line(tuple(name for name in names if name not in GPU_NAMES)), *for_gpus])
    if not names:
        return "import aotc.kernels.runtime"
    line = f"from aotc.kernels.runtime import {', '.join(names)}"
    if len(line) <= 120:
        return line
    return "from aotc.kernels.runtime import (\n" + "".join(f"    {name},\n" for name in names) + ")"


def numba_source(kernel: Kernel) -> NumbaSource:
    """Return ``kernel`` as a Python function for Numba.

    Raises
    ------
    InternalError
        If the kernel needs threads of a GPU.
    """
    return print_without_name_clashes(partial(SourcePrinter, kernel))


def print_without_name_clashes(printer_of: Callable[[frozenset[str]], SourcePrinter]) -> NumbaSource:
    """Print a kernel with local names that differ from the names of the runtime functions that its text calls."""
    first = printer_of(frozenset())
    first.print_function()
    printer = printer_of(frozenset(first.scalars.used) | _RESERVED)
    text = printer.print_function()
    return NumbaSource(text, tuple(sorted(printer.scalars.used)))


def grid_loop(kernel: Kernel) -> For:
    """Return the parallel loop over a kernel's grid; for a kernel without grid, a loop of one iteration."""
    match kernel.body:
        case (For(kind="parallel") as loop,):
            return loop
    return For("item", 0, 1, kernel.body, "parallel")


class SourcePrinter:
    """Printer of the function of a kernel for a CPU, statement by statement."""

    def __init__(self, kernel: Kernel, reserved: frozenset[str]) -> None:
        self.kernel, self.reserved, self.scalars = kernel, reserved, ScalarPrinter()
        self.lines: list[str] = []
        self.kinds: dict[str, str] = {}  # of each local name, what Numba's type depends on
        self.integers: dict[str, str] = {}  # dtypes of integers bound by Let
        self.names: dict[str, str] = {}
        self.scratch = scratch_layout(kernel)[0]
        self.heap: list[list[str]] = []

    def print_function(self) -> str:
        """Return the text of the whole function: header, grid loop and body."""
        kernel = self.kernel
        arrays = [f'{self.bind_buffer_name(b)}: "{buffer_type_text(b)}"' for b in (*kernel.inputs, *kernel.outputs)]
        dims = [f'{self.bind_local_name(name, "i64")}: "dim"' for name in kernel.dims]
        loop = grid_loop(kernel)
        var = self.bind_local_name(loop.var, "i64")
        begin, step = self.dim_text(loop.begin), loop.step
        first, last = (f"{n} * {step}" if step != 1 else n for n in ("begin", "end"))
        if loop.begin != 0:
            first, last = f"{begin} + {first}", f"{begin} + {last}"
        steps = f", {step}" if step != 1 else ""
        self.lines.append(f"    for {var} in range({first}, {last}{steps}):")
        self.print_block(loop.body, " " * 8)
        header = f"def {kernel.name}({', '.join([*arrays, *dims, 'scratch', 'begin', 'end'])}):"
        return "\n".join([header, *self.lines]) + "\n"

    # --- names ---

    def bind_local_name(self, name: str, kind: str) -> str:
        """Return the Python local variable for ``name``; a name with values of two types becomes two variables."""
        local = name
        while local in self.reserved or keyword.iskeyword(local) or self.kinds.get(local, kind) != kind:
            local += f"_{kind}" if self.kinds.get(local, kind) != kind else "_"
        self.kinds[local] = kind
        self.names[name] = local
        return local

    def bind_buffer_name(self, buffer: Buffer) -> str:
        """Return the local name of a buffer, by its storage dtype and rank; see :meth:`bind_local_name`."""
        return self.bind_local_name(buffer.name, f"{numba_storage_dtype(buffer.dtype)}_{max(len(buffer.shape), 1)}")

    def buffer_text(self, buffer: Buffer) -> str:
        return self.names[buffer.name]

    # --- indices ---

    def dim_text(self, e: Dim) -> str:
        return _NAME.sub(self._print_integer_expression, str(e))

    def _print_integer_expression(self, found: re.Match[str]) -> str:
        name = self.names.get(found[0], found[0])
        return self.scalars.cast(name, "i64") if self.integers.get(name, "i64") != "i64" else name

    def index_text(self, index: tuple[Dim, ...]) -> str:
        return ", ".join(map(self.dim_text, index)) if index else "0"

    def shape_text(self, shape: tuple[Dim, ...]) -> str:
        return f"({', '.join(map(self.dim_text, shape or (1,)))}{',' if len(shape) < 2 else ''})"

    def element_text(self, buffer: Buffer, index: tuple[Dim, ...]) -> str:
        return f"{self.buffer_text(buffer)}[{self.index_text(index)}]"

    def element_offset_text(self, buffer: Buffer, index: tuple[Dim, ...]) -> str:
        """Return the text of the offset of an element in memory order."""
        flat: Dim = 0
        for size, at in zip(buffer.shape, index, strict=True):
            flat = flat * size + at
        return self.dim_text(flat)

    # --- statements ---

    def print_block(self, body: tuple[Stmt, ...], indent: str) -> None:
        begin = len(self.lines)
        self.heap.append([])
        for stmt in body:
            self.print_statement(stmt, indent)
        for name in self.heap.pop():
            self.lines.append(indent + self.scalars.call("release", name))
        if len(self.lines) == begin:
            self.lines.append(f"{indent}pass")

    def print_statement(self, stmt: Stmt, indent: str) -> None:
        """Append the lines of a statement, and of the statements inside it, to ``lines``."""
        match stmt:
            case Let(var, value):
                text = self.scalar_text(value)
                is_float = DTYPES[var.dtype].kind == "f"
                name = self.bind_local_name(var.name, var.dtype if is_float else numba_storage_dtype(var.dtype))
                if DTYPES[var.dtype].kind in "iu":
                    self.integers[name] = var.dtype
                self.lines.append(f"{indent}{name} = {text}")
            case Store(buffer, index, value, reduce):
                place, text = self.element_text(buffer, index), self.scalar_text(value)
                if reduce:
                    old = self._loaded_element_text(place, buffer.dtype)
                    text = self.scalars.combine(reduce, old, text, buffer.dtype)
                self.lines.append(f"{indent}{place} = {strip_parens(text)}")
            case For(var, begin, end, body, _, step):
                bounds = f"{self.dim_text(begin)}, {self.dim_text(end)}{f', {step}' if step != 1 else ''}"
                self.lines.append(f"{indent}for {self.bind_local_name(var, 'i64')} in range({bounds}):")
                self.print_block(body, indent + "    ")
            case If(cond, then, otherwise):
                self.lines.append(f"{indent}if {strip_parens(self.scalar_text(cond))}:")
                self.print_block(then, indent + "    ")
                if otherwise:
                    self.lines.append(f"{indent}else:")
                    self.print_block(otherwise, indent + "    ")
            case While(cond, pred, body):
                inner = indent + "    "
                self.lines.append(f"{indent}while True:")
                for before in cond:
                    self.print_statement(before, inner)
                self.lines += [f"{inner}if not {self.scalar_text(pred)}:", f"{inner}    break"]
                self.print_block(body, inner)
            case Alloc(buffer):
                self.lines.append(f"{indent}{self._print_allocation(buffer)}")
            case Prefetch():
                pass
            case Tile():
                self.lines.append(indent + self._print_tile(stmt))
            case Either(buffer, cond, places):
                shape = self.shape_text(buffer.shape)
                one, other = (
                    self.scalars.call("view", self.buffer_text(b), self.element_offset_text(b, at), shape)
                    for b, at in places
                )
                choice = f"{one} if {self.scalar_text(cond)} else {other}"
                self.lines.append(f"{indent}{self.bind_buffer_name(buffer)} = {choice}")
            case ExternalCall(function, args):
                self.lines.append(indent + self._print_library_call(function, args))
            case _:
                raise InternalError(f"kernels: {type(stmt).__name__} has no text for Numba on a CPU")

    def _print_allocation(self, buffer: Buffer) -> str:
        shape, kind = self.shape_text(buffer.shape), self.scalars.name(numba_storage_dtype(buffer.dtype))
        if buffer.space == "private":
            return f"{self.bind_buffer_name(buffer)} = {self.scalars.call('private', shape, kind)}"
        if is_static(buffer.shape):
            at = str(self.scratch[buffer.name])
            return f"{self.bind_buffer_name(buffer)} = {self.scalars.call('scratch_at', 'scratch', at, shape, kind)}"
        name = self.bind_buffer_name(buffer)
        self.heap[-1].append(name)
        return f"{name} = {self.scalars.call('allocate', shape, kind)}"

    # --- calls ---

    def _print_library_call(self, function: str | Transform, args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]) -> str:
        if isinstance(function, Transform):
            return self._print_transform(function, args)
        places = [self._memory_from_element(buffer, index) for buffer, index in args]
        letters = sum(is_letter(buffer) for buffer, _ in args)
        return self.scalars.call("library_call", repr(function), str(letters), f"({', '.join(places)},)")

    def _memory_from_element(self, buffer: Buffer, index: tuple[Dim, ...]) -> str:
        """Return the text of the memory that starts at an element."""
        return self.scalars.call("view", self.buffer_text(buffer), self.element_offset_text(buffer, index), "(1,)")

    def _print_transform(self, t: Transform, args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]) -> str:
        (x, _, out, *rest), scale = args, repr(t.scale)
        numbers = [self.element_text(*argument) for argument in rest[len(rest) - t.arguments :]]
        signals = [self._memory_from_element(*x), self._memory_from_element(*out)]
        if t.real:
            return self.scalars.call("real_transform", *signals, str(2 * t.points), scale)
        width = str(t.width or 1) if t.width or not t.pitch else numbers.pop(0)
        stride = str(t.stride or 1) if t.stride or not t.pitch else numbers.pop(0)
        return self.scalars.call("transform", *signals, str(t.points), width, stride, str(t.inverse), scale)

    def _print_tile(self, t: Tile) -> str:
        form = t.form
        levels = ", ".join(f"({', '.join(map(self.dim_text, level))})" for level in t.levels)
        common = {"shape": f"({t.rows}, {t.cols})", "levels": f"({levels},)", "adds": str(t.adds)}
        out = self._tile_operand_text(t.out, t.out_base, t.out_row)
        left = self._tile_operand_text(t.a, t.a_base, t.a_row, t.a_inner)
        if form.scaled:
            own = {"as_a": self._element_reader(t.a.dtype), "form": f"({form.bits}, {form.group})"}
            right = self._tile_operand_text(t.b, t.b_base)
            return self.scalars.call("quantized_tile", out, left, right, *_keyword_arguments_text(own | common))
        inner = t.b_inner if t.b_inner != 0 else 1
        column = t.b_column if t.b_column != 0 else 1 if t.b_inner != 0 else form.group
        reader = self.scalars.name("offset_i8") if form.offset else self._element_reader(t.b.dtype)
        types = f"({self.scalars.name(t.out.dtype)}, {self._element_reader(t.a.dtype)}, {reader})"
        own = {"types": types, "group": str(form.group)}
        right = self._tile_operand_text(t.b, t.b_base, column, inner)
        return self.scalars.call("tile", out, left, right, *_keyword_arguments_text(own | common))

    def _tile_operand_text(self, buffer: Buffer, *numbers: Dim) -> str:
        """Return the text of a tile's operand: its array, first element and strides."""
        return f"({', '.join([self.buffer_text(buffer), *map(self.dim_text, numbers)])})"

    def _element_reader(self, dtype: str) -> str:
        """Return the function that reads an element of ``dtype``."""
        return self.scalars.name(f"from_{dtype}" if numba_storage_dtype(dtype) != dtype else dtype)

    # --- scalars ---

    def scalar_text(self, s: Scalar) -> str:
        """Return a scalar expression of the loop IR as a Python expression."""
        match s:
            case Const():
                return self.scalars.constant(s)
            case Index(expr, dtype):
                text = self.dim_text(expr)
                return self.scalars.cast(text, "i64") if dtype == "i64" else self.scalars.convert(text, "i64", dtype)
            case Var(name=name):
                return self.names[name]
            case Load(buffer, index):
                return self._loaded_element_text(self.element_text(buffer, index), buffer.dtype)
            case Apply():
                return self.scalars.apply(s, [self.scalar_text(a) for a in s.args])

    def _loaded_element_text(self, place: str, dtype: str) -> str:
        if dtype in _MASKED:
            return self.scalars.cast(place, dtype)
        bits = DTYPES[dtype].bits
        if DTYPES[dtype].kind == "f" and bits < 8:
            return self.scalars.cast(f"{place} & {(1 << bits) - 1}", "u8")
        return place


def buffer_type_text(buffer: Buffer) -> str:
    return f"{buffer.dtype}[{', '.join(map(str, buffer.shape))}]"


def _keyword_arguments_text(fields: dict[str, str]) -> list[str]:
    return [f"{name}={value}" for name, value in fields.items()]
