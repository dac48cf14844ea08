"""Radix sort: order elements by one byte of their keys at a time, the least significant first.

Each pass is stable, so after the last one elements are in the order of all bytes. A row of ``n`` elements takes
``passes * n`` steps whatever its order. A pass whose byte is the same in all elements is skipped. (Knuth, The Art of
Computer Programming 3, 5.2.5.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, Either, For, If, Load, Scalar, Stmt, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset.sorting import RADIX
from aotc.ir.tensor.ir import Op, Region, Value
from aotc.lowering.analysis.sort_keys import SortKey, key_bytes
from aotc.lowering.elements.builder import RegionBuilder
from aotc.lowering.elements.elements import Elements
from aotc.lowering.elements.row_axis import Place
from aotc.vmfb.dtypes import kind_of
from aotc.vmfb.float_formats import SMALL_FLOATS, FloatFormat

Cells = list[tuple[Buffer, Place]]
"""Buffer and place of the elements of a row, for each array."""
Cell: TypeAlias = tuple[Buffer, tuple[Dim, ...]]
Read = Callable[[Dim], list[Scalar]]
Key = Callable[[Elements, Sequence[Scalar]], Scalar]


_FALSE, _TRUE = Const(False, "i1"), Const(True, "i1")


@dataclass(frozen=True, slots=True)
class SortKeyWord:
    """One key of a sort: the region value ``value``, an unsigned integer of ``bytes`` bytes.

    A comparator may replace rare floats by others (-0.0 by 0.0). If ``own`` is not None, the key usually is operand
    ``own`` itself, which is cheaper.
    """

    value: Callable[[Sequence[Scalar]], Scalar]
    bytes: int
    ascending: bool = True
    own: int | None = None

    def key_of_values(self, e: Elements, values: Sequence[Scalar]) -> Scalar:
        """Return the key of ``values``."""
        return unsigned_key(e, self.value(values), self.ascending)

    def key_without_rare_cases(self, e: Elements, values: Sequence[Scalar]) -> Scalar:
        """Return the key of ``values`` without special cases for replaced values."""
        return self.key_of_values(e, values) if self.own is None else unsigned_key(e, values[self.own], self.ascending)


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
    """Return an i16 that orders like a float of up to 8 bits; the NaN of ``fnuz`` formats (coded -0) is the least."""
    code = e.bind(Apply("convert", (Apply("bitcast", (x,), "u8"),), "i16"))
    if form.special == "power":
        return code
    below: Scalar = e.bind(Apply("sub", (Const(form.sign - (form.special != "fnuz"), "i16"), code), "i16"))
    if form.special == "fnuz":
        below = Apply("select", (Apply("eq", (below, Const(0, "i16")), "i1"), Const(-form.sign, "i16"), below), "i16")
    return e.bind(Apply("select", (Apply("ge", (code, Const(form.sign, "i16")), "i1"), below, code), "i16"))


def i64_literal(value: int) -> Const:
    """Return an i64 literal."""
    return Const(value, "i64")


def sort_key_words(e: Elements, op: Op, keys: Sequence[SortKey]) -> list[SortKeyWord]:
    """Return the keys of a comparator, the least significant first."""
    return [_sort_key_word(e, op, k) for k in reversed(keys)]


def _sort_key_word(e: Elements, op: Op, key: SortKey) -> SortKeyWord:
    """Return the key ``key`` of a comparator, with the operand that equals the key for most elements."""
    region = replace(op.regions[0], results=(key.value,))

    def region_value(values: Sequence[Scalar]) -> Scalar:
        (x,) = e.inline_region(region, tuple(v for x in values for v in (x, x)))
        return x

    dtype = key.value.type.dtype
    read = {n // 2 for n, v in enumerate(region.params) if v in _values_needed_for_key(region, key.value)}
    own = read.pop() if len(read) == 1 and key.value not in region.params else None
    simple = own is not None and op.operands[own].type.dtype == dtype and kind_of(dtype) == "f"
    return SortKeyWord(
        region_value, key_bytes(dtype), key.ascending, own if simple and dtype not in SMALL_FLOATS else None
    )


def _values_needed_for_key(region: Region, value: Value) -> set[Value]:
    """Return the values of ``region`` that ``value`` depends on."""
    needed = {value}
    for op in reversed(region.ops):
        if needed & set(op.results):
            needed |= set(op.operands)
    return needed


class RadixSort:
    """Emit a radix sort of rows of up to ``room`` elements, which alternate between two buffers per array.

    One loop runs over the bytes of a key. A pass selects its source and target at run time, because a pass whose byte
    is the same in all elements is skipped. A row begins and ends in the first buffers; without ``source`` it may end in
    the second ones, as :attr:`second` records. ``source`` is the initial row, which is not modified.
    """

    def __init__(
        self,
        b: RegionBuilder,
        e: Elements,
        words: Sequence[SortKeyWord],
        places: Sequence[tuple[Cell, Cell]],
        room: Dim,
        source: Sequence[Cell] = (),
    ) -> None:
        """Name the buffers of the sort: a key of several words is one key of ``number`` bytes.

        ``words`` are the parts of the key, the least significant first. ``places`` has the two buffers of each array.
        ``counts`` are the histograms of the bytes, ``differs`` is True for bytes in which two elements differ, and
        ``rare`` collects bits by which a key differs from the operand that it usually equals.
        """
        self.b, self.e, self.words, self.places, self.room, self.source = b, e, words, places, room, source
        self.number = passes = sum(word.bytes for word in words)
        self.counts = Buffer(b.fresh("counts"), "i64", (passes * RADIX,), "scratch")
        self.total = Buffer(b.fresh("total"), "i64", (), "private")
        self.differs = Buffer(b.fresh("differs"), "i1", (passes,), "private")
        names = ("second", "begun", "some")
        self.second, self.begun, self.some = (Buffer(b.fresh(name), "i1", (), "private") for name in names)
        self.rare = {
            n: Buffer(b.fresh("rare"), f"u{8 * word.bytes}", (), "private")
            for n, word in enumerate(words)
            if word.own is not None
        }

    def allocate_buffers(self) -> list[Stmt]:
        """Return the allocations of counters and buffers, with initial values."""
        flags = (self.second, *((self.begun, self.some) if self.source else ()))
        allocations = [Alloc(x) for x in (self.counts, self.differs, self.total, *flags, *self.rare.values())]
        return [*allocations, *(Store(x, (), _FALSE) for x in flags)]

    def select_row_buffers(self, swapped: bool = False) -> list[Buffer]:
        """Append the selection of the row, or of the next pass's target; return the buffers."""
        second = self.e.bind(Load(self.second, ()))
        return [self._select_row_buffer(second, *(pair if swapped else pair[::-1])) for pair in self.places]

    def _select_row_buffer(self, cond: Scalar, one: Cell, other: Cell) -> Buffer:
        buffer = Buffer(self.b.fresh("row"), one[0].dtype, (self.room,), "scratch")
        self.e.block.append(Either(buffer, cond, (one, other)))
        return buffer

    def sort_statements(self, read: Read, n: Dim, keep: Sequence[Buffer | None] = ()) -> list[Stmt]:
        """Return the statements that sort ``0 < n <= room`` elements from ``read``, and copy them to ``keep``."""
        z = sym(self.b.fresh("z"), 0, self.number * RADIX)
        zero = For(str(z), 0, self.number * RADIX, (Store(self.counts, (z,), i64_literal(0)),))
        none = [Store(x, (), Const(0, x.dtype)) for x in self.rare.values()]
        block: list[Stmt] = [zero, *none, self._count_byte_values(read, n, keep), *self._find_differing_bytes(read, n)]
        first = 0
        for number, word in enumerate(self.words):
            block.append(self._radix_passes(word, self.rare.get(number), first, n))
            first += word.bytes
        return block

    def _count_byte_values(self, read: Read, n: Dim, keep: Sequence[Buffer | None]) -> Stmt:
        """Return the loop that counts the occurrences of each value of each byte."""
        k = sym(self.b.fresh("k"), 0, n)
        block = self.e.new_block()
        values = [self.e.bind(x) for x in read(k)]
        number = 0
        for word, rare in ((word, self.rare.get(n)) for n, word in enumerate(self.words)):
            value = self.e.bind(word.value(values))
            block += [self._record_change(rare, value, values[word.own])] if rare and word.own is not None else []
            key = unsigned_key(self.e, value, word.ascending)
            for byte in range(word.bytes):
                at = (number * RADIX + self._counter_slot(key, 8 * byte),)
                block.append(Store(self.counts, at, Apply("add", (Load(self.counts, at), i64_literal(1)), "i64")))
                number += 1
        block += [Store(to, (k,), x) for to, x in zip(keep, values) if to is not None]
        return For(str(k), 0, n, tuple(block))

    def _record_change(self, rare: Buffer, value: Scalar, own: Scalar) -> Stmt:
        """Return the store that records whether the comparator replaces a value by another."""
        sides = tuple(self.e.bind(Apply("bitcast", (x,), rare.dtype)) for x in (value, own))
        return Store(rare, (), Apply("or", (Load(rare, ()), Apply("xor", sides, rare.dtype)), rare.dtype))

    def _counter_slot(self, key: Scalar, shift: Dim) -> Dim:
        moved = Apply("shr_logic", (key, IndexScalar(shift, key.dtype)), key.dtype) if shift != 0 else key
        byte = Apply("and", (moved, Const(RADIX - 1, key.dtype)), key.dtype)
        return sym(self.e.bind(Apply("convert", (byte,), "i64"), "n").name, 0, RADIX)

    def _find_differing_bytes(self, read: Read, n: Dim) -> list[Stmt]:
        """Return statements that find the bytes in which elements differ: the first element's count is not ``n``.

        With a ``source``, the first pass's target is chosen so that the last pass ends in the first buffers. At least
        one pass runs: rows of all equal keys are too rare to justify a copy loop.
        """
        block = self.e.new_block()
        values = [self.e.bind(x) for x in read(0)]
        first = 0
        for word in self.words:
            key = word.key_of_values(self.e, values)
            d = sym(self.b.fresh("digit"), 0, word.bytes)
            e, before = self.e, self.e.block
            each = e.new_block()
            count = Load(self.counts, ((first + d) * RADIX + self._counter_slot(key, 8 * d),))
            differs = e.bind(Apply("ne", (count, IndexScalar(n)), "i1"))
            each.append(Store(self.differs, (first + d,), differs))
            if self.source:
                each.append(Store(self.second, (), Apply("xor", (Load(self.second, ()), differs), "i1")))
                each.append(Store(self.some, (), Apply("or", (Load(self.some, ()), differs), "i1")))
            e.enter(before)
            block.append(For(str(d), 0, word.bytes, tuple(each)))
            first += word.bytes
        if self.source:
            both = Store(self.differs, (0,), _TRUE), Store(self.second, (), _TRUE)
            block.append(If(Apply("not", (Load(self.some, ()),), "i1"), both))
        return block

    def _counts_to_offsets(self, number: Dim) -> list[Stmt]:
        """Return the loop that turns counts into the position of the first element of each byte value."""
        z = sym(self.b.fresh("z"), 0, RADIX)
        each = self.e.new_block()
        at = (number * RADIX + z,)
        count = self.e.bind(Load(self.counts, at))
        before = self.e.bind(Load(self.total, ()))
        each.append(Store(self.counts, at, before))
        each.append(Store(self.total, (), Apply("add", (before, count), "i64")))
        return [Store(self.total, (), i64_literal(0)), For(str(z), 0, RADIX, tuple(each))]

    def _radix_passes(self, word: SortKeyWord, rare: Buffer | None, first: int, n: Dim) -> Stmt:
        """Return the loop of radix sort passes over the bytes of a key."""
        d = sym(self.b.fresh("digit"), 0, word.bytes)
        block = self.e.new_block()
        rows, targets = self.select_row_buffers(), self.select_row_buffers(swapped=True)
        if self.source:
            begun = self.e.bind(Load(self.begun, ()))
            pairs = zip(rows, self.source, strict=True)
            rows = [self._select_row_buffer(begun, (row, (0,)), source) for row, source in pairs]
        block += self._counts_to_offsets(first + d)
        move = self._move_to_sorted_positions(word.key_without_rare_cases, first + d, 8 * d, rows, targets, n)
        if rare is None:
            block.append(move)
        else:
            other = self._move_to_sorted_positions(word.key_of_values, first + d, 8 * d, rows, targets, n)
            block.append(If(Apply("ne", (Load(rare, ()), Const(0, rare.dtype)), "i1"), (other,), (move,)))
        block.append(Store(self.second, (), Apply("not", (Load(self.second, ()),), "i1")))
        block += [Store(self.begun, (), _TRUE)] if self.source else []
        return For(str(d), 0, word.bytes, (If(Load(self.differs, (first + d,)), tuple(block)),))

    def _move_to_sorted_positions(
        self, key: Key, number: Dim, shift: Dim, rows: Sequence[Buffer], targets: Sequence[Buffer], n: Dim
    ) -> Stmt:
        """Return the loop that moves each element to the next position of its byte value."""
        k = sym(self.b.fresh("k"), 0, n)
        block = self.e.new_block()
        values = [self.e.bind(Load(row, (k,))) for row in rows]
        at = (number * RADIX + self._counter_slot(key(self.e, values), shift),)
        place = self.e.bind(Load(self.counts, at), "n")
        block.append(Store(self.counts, at, Apply("add", (place, i64_literal(1)), "i64")))
        to = (sym(place.name, 0, self.room),)
        block += [Store(target, to, x) for target, x in zip(targets, values, strict=True)]
        return For(str(k), 0, n, tuple(block))
