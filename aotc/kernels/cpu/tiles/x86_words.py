"""Register tiles with an unpacked right operand on x86: pairs of bf16, or quads of bytes.

``vdpbf16ps`` and ``vpdpbusd`` add the products of neighbouring elements to each word of a register, so that
neighbouring terms of a column must be one word. In dot products the columns are contiguous in memory, and their words
are transposed: four words of each of as many columns as a register has words. For the values of attention, the bytes of
four terms are in four rows, which are interleaved. Both methods take two shuffles for each register, shared by all rows
of the tile, and no reduction across lanes. A word of the left operand is broadcast by the instruction itself.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS, I8_OFFSET
from aotc.kernels.cpu.tiles.micro_kernel import SIGNS, State, TileWriter
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.limits import HALF_REGISTER
from aotc.kernels.llvm_types import BFLOAT, I32, i64
from aotc.vmfb.dtypes import size_of

QUAD = 4
_WORDS = HALF_REGISTER // size_of("i32")  # words of a 128-bit lane, which shuffles stay within
_OTHERS = 6  # registers besides the accumulators
_UNITS = {(BF16_PAIRS, "bf16"): "bf16", (I8_OFFSET, "i8"): "vnni"}  # the feature by the form and the dtype of ``a``


def transposes_column_words(shape: Shape) -> bool:
    """Return True if the tile computes dot products by transposing 32-bit words of columns in registers."""
    (extent, *_), *others = shape.levels
    whole = not others and extent is not None and extent % _WORDS == 0 and shape.vectors == shape.lanes
    return whole and {"x86", _UNITS.get((shape.form, shape.a_dtype), "none")} <= {*shape.isa}


class WordTileWriter(TileWriter):
    """Base class for tiles of 32-bit words (bf16 pairs or byte quads), with products and shuffles in 128-bit lanes."""

    def add_word_products(self, state: State, a: ir.Value, words: State) -> State:
        """Return the accumulators plus products of a word of each row at ``a`` with vectors of words of columns."""
        left = [self.broadcast(self.load(self.advance(a, x), I32, 1)) for x in self.row_offsets]
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        if self.shape.form == I8_OFFSET:  # the instruction needs unsigned columns
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.shape.lanes}"
            words = [self.b.xor(x, self.splat(SIGNS, x.type)) for x in words]
        else:
            kind = ir.VectorType(BFLOAT, 2 * self.shape.lanes)
            left, words = ([self.b.bitcast(x, kind) for x in vectors] for vectors in (left, words))
        n = len(words)
        return [self.call(name, self.vector, x, words[i % n], left[i // n]) for i, x in enumerate(state)]

    def interleave_halves(self, x: ir.Value, y: ir.Value, half: int) -> ir.Value:
        """Emit a shuffle that interleaves the first or the second halves of each 128-bit lane of two vectors."""
        count = x.type.count
        part = count * _WORDS // self.shape.lanes
        starts = range(part // 2 * half, count, part)
        return self.shuffle(
            x, y, [n + own for start in starts for n in range(start, start + part // 2) for own in (0, count)]
        )

    def bitcast_vector(self, x: ir.Value, bits: int) -> ir.Value:
        """Emit a bitcast of a vector to elements of ``bits`` bits."""
        return self.b.bitcast(x, ir.VectorType(ir.IntType(bits), 32 * self.shape.lanes // bits))


class TransposedTileWriter(WordTileWriter):
    """Writer of a tile of dot products with as many columns as a vector has lanes, by transposing words."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        if not transposes_column_words(shape):
            raise InternalError(f"tile: cannot read words: {shape.form.name}, {shape.vectors} vectors, {shape.levels}")
        column = function.args[-1] if shape.b_column is None else i64(shape.b_column)
        self.column_offsets = [self.mul_const(column, j) for j in range(shape.lanes)]

    def write(self) -> None:
        """Emit the whole function."""
        (extent, a_step, b_step), rows = self.levels[0], self.shape.rows
        chains = 2 if 2 * rows <= 2 * self.shape.lanes - _OTHERS else 1  # alternating chains of additions hide latency
        state: State = [ir.Constant(self.vector, None)] * (chains * rows)
        by = (self.mul_const(a_step, _WORDS), self.mul_const(b_step, _WORDS), 1)
        count = i64(extent.constant // _WORDS)
        state = self.emit_loop(count, state, self.a, self.panel, by, self.emit_step)[0]
        add = self.b.add if self.element == I32 else self.b.fadd
        sums = [add(x, y) for x, y in zip(state[:rows], state[rows:], strict=True)] if chains == 2 else state
        for i, x in enumerate(sums):
            self.store(x, self.advance(self.out, self.mul_const(self.out_row, i)))
        self.b.ret_void()

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of four words of each column; return the new accumulators."""
        rows = self.shape.rows
        columns = [self.load_every_fourth_column(panel, first) for first in range(_WORDS)]
        for n, word in enumerate(self.transpose_words(columns)):
            chain = n * rows % len(state)
            left = self.advance(a, self.mul_const(self.levels[0][1], n))
            own = self.add_word_products(state[chain : chain + rows], left, [word])
            state = [*state[:chain], *own, *state[chain + rows :]]
        return state

    def load_every_fourth_column(self, panel: ir.Value, first: int) -> ir.Value:
        """Emit the loads of the next four words of columns ``first``, ``first + 4`` and so on, as one vector."""
        kind = ir.VectorType(I32, _WORDS)
        parts = [self.load(self.advance(panel, x), kind, 1) for x in self.column_offsets[first::_WORDS]]
        while len(parts) > 1:
            lanes = list(range(2 * parts[0].type.count))
            parts = [self.shuffle(x, y, lanes) for x, y in zip(parts[::2], parts[1::2], strict=True)]
        return parts[0]

    def transpose_words(self, columns: State) -> State:
        """Emit a transposition within 128-bit lanes.

        Return vectors of the first words of all columns, of the second words, and so on.
        """
        first, second, third, fourth = columns
        pairs = [
            [self.bitcast_vector(self.interleave_halves(x, y, half), 64) for half in (0, 1)]
            for x, y in ((first, second), (third, fourth))
        ]
        return [
            self.bitcast_vector(self.interleave_halves(x, y, half), 32)
            for x, y in zip(*pairs, strict=True)
            for half in (0, 1)
        ]


class RowQuadsTileWriter(WordTileWriter):
    """Writer of a tile of bytes whose terms are rows in memory, with four vectors of columns.

    With many rows, the tile computes fewer vectors of columns at a time.
    """

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        if shape.vectors != 4 or not {"x86", "vnni"} <= {*shape.isa} or shape.a_dtype != "i8":
            raise InternalError(f"tile: cannot read quads of {shape.a_dtype}, {shape.vectors} vectors")
        self.b_inner = function.args[-1] if shape.b_inner is None else i64(shape.b_inner)
        self.at_once = next((n for n in (4, 2) if n * shape.rows <= 2 * shape.lanes - _OTHERS), 1)
        self.accumulators = self.at_once * shape.rows
        self.wanted = range(self.at_once)
        parts = shape.lanes // _WORDS
        self.dealt = [part + n * parts for part in range(parts) for n in range(_WORDS)]

    def write(self) -> None:
        """Emit the whole function."""
        for first in range(0, self.shape.vectors, self.at_once):
            self.wanted = range(first, first + self.at_once)
            sums = self.emit_loop_nest(0, [ir.Constant(self.vector, None)] * self.accumulators, self.a, self.panel)
            self.store_accumulators(sums, self.wanted)
        self.b.ret_void()

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of four terms; return the new accumulators."""
        words = ir.VectorType(I32, self.shape.lanes)
        rows = [self.load(self.advance(panel, self.mul_const(self.b_inner, n)), words, 1) for n in range(QUAD)]
        dealt = [self.bitcast_vector(self.shuffle(x, x, self.dealt), 8) for x in rows]
        return self.add_word_products(state, a, self.interleave_rows(dealt))

    def interleave_rows(self, rows: State) -> State:
        """Emit shuffles that interleave four rows to quads, for the vectors of columns in ``self.wanted``."""
        found: State = []
        for half in sorted({n // 2 for n in self.wanted}):
            x, y = (self.bitcast_vector(self.interleave_halves(rows[n], rows[n + 1], half), 16) for n in (0, 2))
            halves = [n % 2 for n in self.wanted if n // 2 == half]
            found += [self.bitcast_vector(self.interleave_halves(x, y, n), 32) for n in halves]
        return found
