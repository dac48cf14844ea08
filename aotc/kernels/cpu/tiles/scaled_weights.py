"""Tiles with quantized weights (weight-only quantization): dequantized and scaled in registers.

The first of the two levels of k counts the groups of a scale. With one group (a scale for each column) the accumulators
are scaled at the end. With several groups, and enough registers, each group has its own accumulators, which are scaled
and added; otherwise the weights are scaled, once for all rows of the tile. Pairs of bf16 must be exact integers, so
they always have accumulators for each group, even if the others are spilled meanwhile.
"""

from __future__ import annotations

import numpy as np
from llvmlite import ir

from aotc.ir.loop.forms.quantized import SCALE_BYTES
from aotc.kernels.cpu.tiles.micro_kernel import State, TileWriter
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.llvm_types import I8, I16, I32, i64, zero_vector

_SPARE = 4  # registers besides accumulators, weights and scales: an element of ``a``, and temporaries


def _vector_register_count(shape: Shape) -> int:
    """Return the vector registers of the processor: 32 with AVX-512 and outside of x86-64, else 16."""
    return 32 if "x86" not in shape.isa or shape.lanes == 16 else 16


class ScaledTileWriter(TileWriter):
    """Writer of a tile with quantized weights: ``f32_i8`` or ``f32_i4``, or, in pairs, ``bf16_i8`` or ``bf16_i4``."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        self.bits, self.pairs = shape.form.bits, shape.form.left == "bf16"
        self.scales: list[ir.Value] = []  # of the weights, if weights are scaled

    def nest(self, depth: int, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the loops over k; the outermost level has the groups of terms that share a scale."""
        runs, a_step, b_step = self.levels[0]
        steps = self.levels[1][0]
        head = i64(self.shape.vectors * self.shape.lanes * SCALE_BYTES)
        none = [zero_vector(self.vector)] * self.accumulators
        apart = self.pairs or 2 * self.accumulators + self.shape.vectors + _SPARE <= _vector_register_count(self.shape)

        def sums(first: State, a: ir.Value, panel: ir.Value) -> State:
            return self.innermost(steps, first, a, self.at(panel, head))

        def run(state: State, a: ir.Value, panel: ir.Value) -> State:
            if not apart:
                self.scales = self.scale_vectors(panel)
                return sums(state, a, panel)
            n, scales, own = self.shape.vectors, self.scale_vectors(panel), sums(none, a, panel)
            return [self.fma(x, scales[i % n], y) for i, (x, y) in enumerate(zip(own, state))]

        if isinstance(runs, ir.Constant) and runs.constant == 1:
            own, scales = sums(none, a, panel), self.scale_vectors(panel)
            return [self.b.fmul(x, scales[i % self.shape.vectors]) for i, x in enumerate(own)]
        return self.loop(runs, state, a, panel, (a_step, b_step, 1), run)[0]

    def scale_vectors(self, panel: ir.Value) -> list[ir.Value]:
        """Load the scales of a group, one for each column, as vectors."""
        return [self.load(self.vector_at(panel, j, self.size), self.vector, 4) for j in range(self.shape.vectors)]

    def step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of one step: one term, or two terms for 4-bit weights and for pairs of bf16."""
        if self.bits == 8 and not self.pairs:
            return self.outer_product(state, a, self.numbers(self.integers(panel)))
        if self.pairs:
            left = [self.pair(self.at(a, x)) for x in self.row_offsets]
            return self.pairs_of_bf16(state, left, self.right_pairs(panel))
        even, odd = (self.numbers(x) for x in self.two_terms(panel))
        return self.outer_product(self.outer_product(state, a, even), self.at(a, self.a_inner), odd)

    def integers(self, panel: ir.Value) -> list[ir.Value]:
        """Return the bytes of all columns of a step, as words."""
        words = ir.VectorType(I32, self.shape.lanes)
        return [self.b.sext(x, words) for x in self.b_vectors(panel, ir.VectorType(I8, self.shape.lanes), 1)]

    def two_terms(self, panel: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """Return two terms of all columns: the halves of a byte for 4 bits, two rows of bytes for 8 bits."""
        first = self.integers(panel)
        if self.bits == 8:
            return first, self.integers(self.at(panel, i64(self.shape.vectors * self.shape.lanes)))
        down = self.splat(4, first[0].type)
        return first, [self.b.ashr(x, down) for x in first]

    def right_pairs(self, panel: ir.Value) -> list[ir.Value]:
        """Return two terms of all columns as pairs of bf16."""
        if self.bits == 4 and "x86" in self.shape.isa:
            return [self.looked_up_pairs(x) for x in self.b_vectors(panel, ir.VectorType(I8, self.shape.lanes), 1)]
        even, odd = (self.numbers(x) for x in self.two_terms(panel))
        return [self.side_by_side(x, y) for x, y in zip(even, odd)]

    def looked_up_pairs(self, bytes_: ir.Value) -> ir.Value:
        """Return both 4-bit numbers of each byte as bf16, from a lookup table in a register.

        The register has the 16 numbers twice, as indices have 5 bits. The bits of the second number are shifted to the
        start of the upper half of a word; the instruction ignores other bits.
        """
        numbers = [int(np.float32(x).view("u4")) >> 16 for x in (*range(8), *range(-8, 0))]
        words, halves = ir.VectorType(I32, self.shape.lanes), ir.VectorType(I16, 2 * self.shape.lanes)
        low = self.b.zext(bytes_, words)
        places = self.b.or_(low, self.b.shl(low, self.splat(12, words)))
        table = ir.Constant(halves, numbers * 2)
        pairs = self.call("llvm.x86.avx512.permvar.hi.512", halves, table, self.b.bitcast(places, halves))
        return self.b.bitcast(pairs, words)

    def side_by_side(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """Return two vectors of f32 integers as pairs of bf16, exact; the first one in the low bits."""
        words = ir.VectorType(I32, self.shape.lanes)
        low = self.b.lshr(self.b.bitcast(even, words), self.splat(16, words))
        return self.b.or_(low, self.b.and_(self.b.bitcast(odd, words), self.splat(-0x10000, words)))

    def numbers(self, words: list[ir.Value]) -> list[ir.Value]:
        """Return the integers in the lowest bits of words as f32, scaled if the weights are scaled."""
        table = self.bits == 4 and self.shape.lanes == 16 and "x86" in self.shape.isa  # a lookup table of 16 numbers
        found = [self.looked_up(x) if table else self.converted(x) for x in words]
        return [self.b.fmul(x, y) for x, y in zip(found, self.scales)] if self.scales else found

    def converted(self, words: ir.Value) -> ir.Value:
        """Return the 8-bit numbers, or the lowest 4 bits, as f32."""
        if self.bits == 4:
            up = self.splat(28, words.type)
            words = self.b.ashr(self.b.shl(words, up), up)
        return self.b.sitofp(words, self.vector)

    def looked_up(self, words: ir.Value) -> ir.Value:
        """Return the 4-bit numbers from a lookup table of 16 in a register, indexed by the lowest bits of words."""
        numbers = ir.Constant(self.vector, [*range(8), *range(-8, 0)])
        return self.call("llvm.x86.avx512.permvar.sf.512", self.vector, numbers, words)
