"""Build kernels around the call of a library function: arguments by address, and code before and after the call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import Dim, is_static, maximum, product, static, sym
from aotc.ir.limits import PRIVATE_BYTES
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, ExternalCall, For, Load, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.elements.builder import RegionBuilder, serial_nest
from aotc.vmfb.dtypes import size_of

Place = tuple[Buffer, Index]


@dataclass
class LibraryCall:
    """Collect the statements before the call of a library function, its arguments, and the statements after it."""

    names: RegionBuilder
    before: list[Stmt] = field(default_factory=list)
    args: list[Place] = field(default_factory=list)
    after: list[Stmt] = field(default_factory=list)
    _numbers: dict[Dim, Buffer] = field(default_factory=dict)

    def allocate_workspace(self, dtype: str, shape: tuple[Dim, ...]) -> Buffer:
        """Allocate workspace, on the stack if it is small."""
        bytes_ = product(shape) * size_of(dtype)
        small = is_static(shape) and static(bytes_) <= PRIVATE_BYTES
        buffer = Buffer(self.names.fresh("w"), dtype, shape, "private" if small else "scratch")
        self.before.append(Alloc(buffer))
        return buffer

    def add_character(self, value: str) -> None:
        """Append a character argument."""
        buffer = self.allocate_workspace("u8", ())
        self.before.append(Store(buffer, (), Const(ord(value), "u8")))
        self.args.append((buffer, ()))

    def add_integer(self, value: Dim) -> None:
        """Append an integer argument; equal integers share memory, because routines only read them."""
        if value not in self._numbers:
            buffer = self._numbers[value] = self.allocate_workspace("i64", ())
            self.before.append(Store(buffer, (), IndexScalar(value)))
        self.args.append((self._numbers[value], ()))

    def add_element_constant(self, value: Const) -> None:
        """Append a number of the element type as an argument."""
        buffer = self.allocate_workspace(value.dtype, ())
        self.before.append(Store(buffer, (), value))
        self.args.append((buffer, ()))

    def add_status_word(self) -> Buffer:
        """Append the status word (LAPACK's ``info``) as an argument; return it for checks."""
        buffer = self.allocate_workspace("i64", ())
        self.args.append((buffer, ()))
        return buffer

    def add_i32_array(self, out: Buffer, head: Index, is_input: bool) -> None:
        """Append an argument of integers that are i32 in the model, converted before and after the call."""
        single = len(out.shape) == len(head)
        count = 1 if single else out.shape[-1]
        wide = self.allocate_workspace("i64", (maximum(count, 1),))
        q = self.names.fresh("q")
        position = sym(q, 0, count)
        at = head if single else (*head, position)
        if is_input:
            value = Apply("convert", (Load(out, at),), "i64")
            self.before.append(For(q, 0, count, (Store(wide, (position,), value),)))
        narrow = Apply("convert", (Load(wide, (position,)),), out.dtype)
        self.after.append(For(q, 0, count, (Store(out, at, narrow),)))
        self.args.append((wide, (0,)))

    def add_matrix_copy(self, source: Buffer, head: Index, shape: tuple[Dim, ...]) -> None:
        """Append a copy of the matrix ``source[head]`` as an argument."""
        buffer = self.allocate_workspace(source.dtype, shape)
        body = loops_over(self.names, shape, lambda at: Store(buffer, at, Load(source, (*head, *at))))
        self.before += body
        self.args.append((buffer, (0,) * len(shape)))

    def external_call(self, function: str | Transform) -> ExternalCall:
        """Return the statement that calls the library function."""
        return ExternalCall(function, tuple(self.args))

    def call_statements(self, function: str | Transform) -> list[Stmt]:
        """Return the statements of the whole call: allocations, arguments, the call, conversions."""
        return [*self.before, self.external_call(function), *self.after]


def loops_over(b: RegionBuilder, shape: tuple[Dim, ...], make: Callable[[Index], Stmt]) -> list[Stmt]:
    """Return a nest of loops over ``shape`` around the statement ``make(index)``."""
    names = [b.fresh("e") for _ in shape]
    at = tuple(sym(name, 0, d) for name, d in zip(names, shape, strict=True))
    return serial_nest(list(zip(names, shape, strict=True)), [make(at)])
