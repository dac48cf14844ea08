"""Register tiles with AArch64's matrix instructions ``smmla``, ``usmmla`` and ``bfmmla``: two rows by two columns.

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
    unit = _UNITS.get(shape.form.dot_product_dtype, "none")
    if "x86" in shape.isa or unit not in shape.isa or shape.rows < 2 or not shape.levels:
        return False
    is_contiguous = shape.a_dtype in _INSTRUCTIONS and shape.a_inner == size_of(shape.a_dtype)
    return is_contiguous and shape.levels[-1][1] == _STEP


class SquareTileWriter(TileWriter):
    """Writer of a tile with 2x2 accumulators: two vectors for each pair of rows and vector of columns."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        self.pairs = (shape.rows + 1) // 2
        self.accumulators = self.pairs * shape.vectors * 2
        self.lanes = shape.lanes
        self.words = ir.VectorType(I32, self.lanes)
        pairs = shape.form == BF16_PAIRS
        elements = (BFLOAT, 2 * self.lanes) if pairs else (I8, 4 * self.lanes)
        self.kind = self.instruction_operand_type(ir.VectorType(*elements))
        # halves: the words of the first, and of the second, half of the columns, of two steps interleaved.
        # of_rows: the accumulators of the first, and of the second, row of two squares.
        half, by_four = self.lanes // 2, range(0, 2 * self.lanes, 4)
        self.halves = [[x for n in range(part, part + half) for x in (n, n + self.lanes)] for part in (0, half)]
        self.of_rows = [[x + row for n in by_four for x in (n, n + 1)] for row in (0, 2)]

    def write(self) -> None:
        """Emit the function of the tile: all products, then the stores of each row."""
        state = self.emit_loop_nest(0, [zero_vector(self.vector)] * self.accumulators, self.a, self.panel)
        for row in range(self.shape.rows):
            to = self.advance(self.out, self.mul_const(self.out_row, row))
            for j in range(self.shape.vectors):
                at = (row // 2 * self.shape.vectors + j) * 2
                sums = self.shuffle(state[at], state[at + 1], self.of_rows[row % 2])
                self.store(sums, self.vector_pointer(to, j, self.size))
        self.b.ret_void()

    def emit_innermost_loop(self, extent: ir.Value, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the loop over terms: two steps of a panel per iteration, then a single step if one remains."""
        _, a_step, b_step = self.levels[-1]
        by = innermost_unroll_factor(self.accumulators)
        twice = (self.mul_const(a_step, 2), self.mul_const(b_step, 2))
        unrolled = self.divide_extent(extent, 2 * by)
        state, a, panel = self.emit_loop(unrolled, state, a, panel, (*twice, by), self.emit_two_steps)
        rest = self.divide_extent(extent, 2 * by, rest=True)
        if by > 1:
            pairs = self.divide_extent(rest, 2)
            state, a, panel = self.emit_loop(pairs, state, a, panel, (*twice, 1), self.emit_two_steps)
            rest = self.divide_extent(rest, 2, rest=True)
        return self.emit_loop(rest, state, a, panel, (a_step, b_step, 1), self.emit_single_step)[0]

    def divide_extent(self, value: ir.Value, by: int, rest: bool = False) -> ir.Value:
        """Emit the quotient of an extent and ``by``, or the remainder if ``rest``; fold a constant extent."""
        if isinstance(value, ir.Constant):
            return i64(value.constant % by if rest else value.constant // by)
        return (self.b.urem if rest else self.b.udiv)(value, i64(by))

    def emit_two_steps(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of two steps of a panel, which fill the instruction's 8 bytes per row."""
        following = self.advance(panel, self.levels[-1][2])
        both = [self.load_right_vectors(p, self.words, 4) for p in (panel, following)]
        return self.add_square_products(state, [self.load(self.advance(a, x), I64, 1) for x in self.row_offsets], *both)

    def emit_single_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of one step of a panel; the other half of the instruction's 8 bytes is zero."""
        rows = [self.b.zext(self.load(self.advance(a, x), I32, 1), I64) for x in self.row_offsets]
        first = self.load_right_vectors(panel, self.words, 4)
        return self.add_square_products(state, rows, first, [zero_vector(self.words)] * len(first))

    def add_square_products(self, state: State, rows: State, first: State, second: State) -> State:
        """Emit 2x2 matrix instructions on two steps of a panel; return the new accumulators."""
        pairs = [*rows, *rows[-1:]] if len(rows) % 2 else rows
        left = [self.pack_row_pair(x, y) for x, y in zip(pairs[::2], pairs[1::2], strict=True)]
        right = [
            self.b.bitcast(self.shuffle(x, y, lanes), self.kind)
            for x, y in zip(first, second, strict=True)
            for lanes in self.halves
        ]
        name, n = self.neon_or_sve_name(_INSTRUCTIONS[self.shape.a_dtype]), len(right)
        return [self.call(name, self.vector, x, left[i // n], right[i % n]) for i, x in enumerate(state)]

    def pack_row_pair(self, x: ir.Value, y: ir.Value) -> ir.Value:
        """Emit a left operand: 8 bytes of row ``x``, then 8 of row ``y``, repeated in each 128 bits."""
        kind = ir.VectorType(I64, 2)
        both = undefined_vector(kind)
        for n, part in enumerate((x, y)):
            both = self.b.insert_element(both, part, i32(n))
        if self.scalable:
            both = self.call(sve_repeat_function(self.lanes // 2), ir.VectorType(I64, self.lanes // 2), both)
        return self.b.bitcast(both, self.kind)
