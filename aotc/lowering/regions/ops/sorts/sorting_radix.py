"""Radix sort: elements go to their places by one byte of their keys at a time, the least significant first.

Each pass is stable, so after the last one elements are in the order of all bytes; a row of ``n`` elements takes
``passes * n`` steps whatever its order. A pass whose byte is the same in all elements only copies.
(Knuth, The Art of Computer Programming 3, 5.2.5.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from aotc.ir.dims import Dim, sym
from aotc.ir.loop_ir import Alloc, Apply, Buffer, Const, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop_ir import Index as IndexScalar
from aotc.ir.opset.sorting import RADIX
from aotc.ir.tensor_ir import Op
from aotc.lowering.analysis.sort_keys import SortKey, key_bytes
from aotc.lowering.regions.elemental import Elements
from aotc.lowering.regions.region import RegionBuilder
from aotc.lowering.regions.rows import Place
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.float_formats import SMALL_FLOATS, FloatFormat

Cells = list[tuple[Buffer, Place]]
Run = Sequence[tuple[Buffer, Place] | None]
"""Where the elements of a row go, by array; None if nobody reads them there."""
Read = Callable[[Dim], list[Scalar]]
Key = Callable[[Sequence[Scalar]], Scalar]


@dataclass(frozen=True, slots=True)
class Digit:
    """A byte of a key: ``key`` gives the unsigned key of a row's values, ``shift`` the byte in it."""

    key: Key
    shift: int


def unsigned_key(e: Elements, x: Scalar, ascending: bool = True) -> Scalar:
    """Return an unsigned integer that orders like ``x``; floats are in total order, so NaN is the largest."""
    kind, bits = kind_of(x.dtype), 8 * key_bytes(x.dtype)
    name = f"u{bits}"
    top = Const(1 << (bits - 1), name)
    match kind:
        case "b" | "u":
            key: Scalar = x if x.dtype == name else Apply("convert", (x,), name)
        case "i":
            wide = x if x.dtype == f"i{bits}" else Apply("convert", (x,), f"i{bits}")
            key = Apply("xor", (Apply("bitcast", (wide,), name), top), name)
        case "f" if x.dtype in SMALL_FLOATS:
            order = _order_of_codes(e, x, SMALL_FLOATS[x.dtype])
            key = Apply("xor", (Apply("bitcast", (order,), name), top), name)
        case _:
            signed = e.bind(Apply("bitcast", (x,), f"i{bits}"))
            sign = Apply("shr_arith", (signed, Const(bits - 1, f"i{bits}")), f"i{bits}")
            flip = Apply("or", (Apply("bitcast", (sign,), name), top), name)
            key = Apply("xor", (Apply("bitcast", (signed,), name), flip), name)
    return e.bind(key if ascending else Apply("not", (key,), name))


def _order_of_codes(e: Elements, x: Scalar, form: FloatFormat) -> Scalar:
    """Return an i16 that orders like a float of up to 8 bits; the one NaN of ``fnuz``, in place of -0, is the least."""
    code = e.bind(Apply("convert", (Apply("bitcast", (x,), "u8"),), "i16"))
    if form.special == "power":
        return code
    below: Scalar = e.bind(Apply("sub", (Const(form.sign - (form.special != "fnuz"), "i16"), code), "i16"))
    if form.special == "fnuz":
        below = Apply("select", (Apply("eq", (below, Const(0, "i16")), "i1"), Const(-form.sign, "i16"), below), "i16")
    return e.bind(Apply("select", (Apply("ge", (code, Const(form.sign, "i16")), "i1"), below, code), "i16"))


def integer(value: int) -> Const:
    """Return an i64 literal."""
    return Const(value, "i64")


def digits_of(e: Elements, op: Op, keys: Sequence[SortKey]) -> list[Digit]:
    """Return the bytes of a comparator's keys, the least significant first."""
    digits: list[Digit] = []
    for k in reversed(keys):
        key = _evaluate(e, op, k)
        digits += [Digit(key, 8 * n) for n in range(key_bytes(k.value.type.dtype))]
    return digits


def _evaluate(e: Elements, op: Op, key: SortKey) -> Key:
    region = replace(op.regions[0], results=(key.value,))

    def make(values: Sequence[Scalar]) -> Scalar:
        (x,) = e.region(region, tuple(v for x in values for v in (x, x)))
        return unsigned_key(e, x, key.ascending)

    return make


class RadixSort:
    """Writes the passes over the rows of one grid item; :meth:`allocate` stands before the loops that use it."""

    def __init__(self, b: RegionBuilder, e: Elements, digits: Sequence[Digit]) -> None:
        self.b, self.e, self.digits = b, e, digits
        self.counts = Buffer(b.fresh("counts"), "i64", (len(digits), RADIX), "scratch")
        self.total = Buffer(b.fresh("total"), "i64", (), "private")
        self.single = Buffer(b.fresh("single"), "i1", (), "private")

    def allocate(self) -> list[Stmt]:
        """Return the statements that make the counters."""
        return [Alloc(self.counts), Alloc(self.total), Alloc(self.single)]

    def sort(self, read: Read, targets: Sequence[Run], n: Dim, extent: Dim) -> list[Stmt]:
        """Return the statements that sort ``n <= extent`` rows: pass ``k`` writes ``targets[k]``."""
        z = sym(self.b.fresh("z"), 0, RADIX)
        block: list[Stmt] = [
            For(str(z), 0, RADIX, (Store(self.counts, (number, z), Const(0, "i64")),))
            for number in range(len(self.digits))
        ]
        block.append(self._count(read, n))
        for number, target in enumerate(targets):
            block += self._pass(number, read, target, n, extent)
            read = reader([cell for cell in target if cell is not None])
        return block

    def _each_row(self, read: Read, n: Dim, write: Callable[[Dim, list[Scalar], list[Stmt]], None]) -> Stmt:
        """Return the loop over ``n`` rows around what ``write(number, values, block)`` adds to its block."""
        k = sym(self.b.fresh("k"), 0, n)
        block = self.e.new_block()
        write(k, [self.e.bind(x) for x in read(k)], block)
        return For(str(k), 0, n, tuple(block))

    def _count(self, read: Read, n: Dim) -> Stmt:
        """Count how often each value of each byte occurs."""

        def write(k: Dim, values: list[Scalar], block: list[Stmt]) -> None:
            keys: dict[Key, Scalar] = {}
            for number, digit in enumerate(self.digits):
                if digit.key not in keys:
                    keys[digit.key] = digit.key(values)
                at = (number, self._slot(keys[digit.key], digit.shift))
                block.append(Store(self.counts, at, Apply("add", (Load(self.counts, at), integer(1)), "i64")))

        return self._each_row(read, n, write)

    def _slot(self, key: Scalar, shift: int) -> Dim:
        moved = Apply("shr_logic", (key, Const(shift, key.dtype)), key.dtype) if shift else key
        byte = Apply("and", (moved, Const(RADIX - 1, key.dtype)), key.dtype)
        return sym(self.e.bind(Apply("convert", (byte,), "i64"), "n").name, 0, RADIX)

    def _pass(self, number: int, read: Read, target: Run, n: Dim, extent: Dim) -> list[Stmt]:
        begin = [Store(self.total, (), Const(0, "i64")), Store(self.single, (), Const(False, "i1"))]
        offsets = self._offsets(number, n)
        copy, move = self.copy(read, target, n), self._move(number, read, target, n, extent)
        return [*begin, offsets, If(Load(self.single, ()), (copy,), (move,))]

    def _offsets(self, number: int, n: Dim) -> Stmt:
        """Turn counts into the place of the first element of each byte; find out if there is only one byte."""
        z = sym(self.b.fresh("z"), 0, RADIX)
        each = self.e.new_block()
        count = self.e.bind(Load(self.counts, (number, z)))
        before = self.e.bind(Load(self.total, ()))
        all_ = Apply("eq", (count, IndexScalar(n)), "i1")
        each.append(Store(self.single, (), Apply("or", (Load(self.single, ()), all_), "i1")))
        each.append(Store(self.counts, (number, z), before))
        each.append(Store(self.total, (), Apply("add", (before, count), "i64")))
        return For(str(z), 0, RADIX, tuple(each))

    def copy(self, read: Read, target: Run, n: Dim) -> Stmt:
        """Return the loop that copies ``n`` rows."""
        return self._each_row(read, n, lambda k, values, block: _store(target, k, values, block))

    def _move(self, number: int, read: Read, target: Run, n: Dim, extent: Dim) -> Stmt:
        """Put each element at the next place of its byte."""
        digit = self.digits[number]

        def write(k: Dim, values: list[Scalar], block: list[Stmt]) -> None:
            at = (number, self._slot(digit.key(values), digit.shift))
            place = self.e.bind(Load(self.counts, at), "n")
            block.append(Store(self.counts, at, Apply("add", (place, integer(1)), "i64")))
            _store(target, sym(place.name, 0, extent), values, block)

        return self._each_row(read, n, write)


def _store(target: Run, at: Dim, values: list[Scalar], block: list[Stmt]) -> None:
    pairs = zip(target, values, strict=True)
    block += [Store(cell[0], cell[1](at), x) for cell, x in pairs if cell is not None]


def reader(run: Cells) -> Read:
    """Return what reads the rows of ``run``."""
    return lambda k: [Load(buffer, where(k)) for buffer, where in run]
