"""Register tiles of AArch64's matrix instructions ``smmla``, ``usmmla`` and ``bfmmla``: two rows by two columns.

An accumulator is a 2 x 2 square: ``[r0c0, r0c1, r1c0, r1c1]``. The instruction multiplies 8 terms of i8 or 4 of bf16,
twice as many as a step of a panel has. Two steps are combined by ``zip1`` and ``zip2``, so that panels have the layout
of ``sdot`` and ``bfdot``. An odd last row is paired with itself, an odd last step with zeros. ``bfmmla`` rounds as
``bfdot`` does, or once for two products; it flushes subnormals to 0.
"""

from __future__ import annotations

from llvmlite import ir

from aotc.ir.loop.forms.tile_forms import BF16_PAIRS
from aotc.kernels.cpu.tiles.micro_kernel import State, TileWriter, innermost_unroll_factor
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.emit.vector.sve import sve_repeat_function
from aotc.kernels.llvm_types import BFLOAT, I8, I32, I64, i32, i64, undefined_vector, zero_vector
from aotc.vmfb.dtypes import size_of

_STEP = 4  # bytes of a row in a step of a panel
_UNITS = {"i8": "i8mm", "bf16": "bf16"}
_INSTRUCTIONS = {"i8": "smmla.v4i32.v16i8", "u8": "usmmla.v4i32.v16i8", "bf16": "bfmmla"}  # by the dtype of ``a``


def uses_2x2_matrix_instructions(shape: Shape) -> bool:
    """Return True if 2x2 matrix instructions (SMMLA, BFMMLA) compute a tile of this shape."""
    if "x86" in shape.isa or _UNITS.get(shape.form.unit, "none") not in shape.isa or shape.rows < 2 or not shape.levels:
        return False
    is_contiguous = shape.a_dtype in _INSTRUCTIONS and shape.a_inner == size_of(shape.a_dtype)
    return is_contiguous and shape.levels[-1][1] == _STEP


class SquareTileWriter(TileWriter):
    """Writer of a tile in squares: two for each pair of rows and vector of columns."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        self.pairs = (shape.rows + 1) // 2
        self.accumulators = self.pairs * shape.vectors * 2
        self.lanes = shape.lanes
        self.words = ir.VectorType(I32, self.lanes)
        pairs = shape.form == BF16_PAIRS
        self.kind = self.operand(ir.VectorType(*((BFLOAT, 2 * self.lanes) if pairs else (I8, 4 * self.lanes))))
        # halves: the words of the first, and of the second, half of the columns, of two steps interleaved.
        # of_rows: the accumulators of the first, and of the second, row of two squares.
        half, by_four = self.lanes // 2, range(0, 2 * self.lanes, 4)
        self.halves = [[x for n in range(part, part + half) for x in (n, n + self.lanes)] for part in (0, half)]
        self.of_rows = [[x + row for n in by_four for x in (n, n + 1)] for row in (0, 2)]

    def write(self) -> None:
        """Write the function of the tile: all products, then the stores of each row."""
        state = self.nest(0, [zero_vector(self.vector)] * self.accumulators, self.a, self.panel)
        for row in range(self.shape.rows):
            to = self.at(self.out, self.times(self.out_row, row))
            for j in range(self.shape.vectors):
                at = (row // 2 * self.shape.vectors + j) * 2
                sums = self.shuffle(state[at], state[at + 1], self.of_rows[row % 2])
                self.store(sums, self.vector_at(to, j, self.size))
        self.b.ret_void()

    def innermost(self, extent: ir.Value, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the loop over terms: two steps of a panel per iteration, then a single step if one remains."""
        _, a_step, b_step = self.levels[-1]
        by = innermost_unroll_factor(self.accumulators)
        twice = (self.times(a_step, 2), self.times(b_step, 2))
        state, a, panel = self.loop(self.divided(extent, 2 * by), state, a, panel, (*twice, by), self.two_steps)
        rest = self.divided(extent, 2 * by, rest=True)
        if by > 1:
            state, a, panel = self.loop(self.divided(rest, 2), state, a, panel, (*twice, 1), self.two_steps)
            rest = self.divided(rest, 2, rest=True)
        return self.loop(rest, state, a, panel, (a_step, b_step, 1), self.one_step)[0]

    def divided(self, value: ir.Value, by: int, rest: bool = False) -> ir.Value:
        """Return ``value // by``, or ``value % by`` if ``rest``; of a constant, a constant."""
        if isinstance(value, ir.Constant):
            return i64(value.constant % by if rest else value.constant // by)
        return (self.b.urem if rest else self.b.udiv)(value, i64(by))

    def two_steps(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of two steps of a panel: all 8 bytes of an instruction are terms."""
        following = self.at(panel, self.levels[-1][2])
        both = [self.b_vectors(p, self.words, 4) for p in (panel, following)]
        return self.squares(state, [self.load(self.at(a, x), I64, 1) for x in self.row_offsets], *both)

    def one_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of one step of a panel: the other half of the instruction's 8 bytes is zero."""
        rows = [self.b.zext(self.load(self.at(a, x), I32, 1), I64) for x in self.row_offsets]
        first = self.b_vectors(panel, self.words, 4)
        return self.squares(state, rows, first, [zero_vector(self.words)] * len(first))

    def squares(self, state: State, rows: State, first: State, second: State) -> State:
        """Return the accumulators after 2x2 matrix instructions on two panel steps."""
        pairs = [*rows, *rows[-1:]] if len(rows) % 2 else rows
        left = [self.side_by_side(x, y) for x, y in zip(pairs[::2], pairs[1::2], strict=True)]
        right = [
            self.b.bitcast(self.shuffle(x, y, lanes), self.kind)
            for x, y in zip(first, second, strict=True)
            for lanes in self.halves
        ]
        name, n = self.instruction(_INSTRUCTIONS[self.shape.a_dtype]), len(right)
        return [self.call(name, self.vector, x, left[i // n], right[i % n]) for i, x in enumerate(state)]

    def side_by_side(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Return a left operand: 8 bytes of row ``x``, then 8 of row ``y``, repeated in each 128 bits."""
        kind = ir.VectorType(I64, 2)
        both = undefined_vector(kind)
        for n, part in enumerate((x, y)):
            both = self.b.insert_element(both, part, i32(n))
        if self.scalable:
            both = self.call(sve_repeat_function(self.lanes // 2), ir.VectorType(I64, self.lanes // 2), both)
        return self.b.bitcast(both, self.kind)
