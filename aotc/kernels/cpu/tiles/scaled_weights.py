"""Register tiles with quantized weights (weight-only quantization), which are dequantized and scaled in registers.

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
    """Return the number of vector registers of the processor: 32 with AVX-512 and outside of x86-64, else 16."""
    return 32 if "x86" not in shape.isa or shape.lanes == 16 else 16


class ScaledTileWriter(TileWriter):
    """Writer of a tile with quantized weights, of the forms ``f32_i8``, ``f32_i4``, ``bf16_i8`` and ``bf16_i4``."""

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        super().__init__(function, shape)
        self.bits, self.pairs = shape.form.bits, shape.form.left == "bf16"
        self.scales: list[ir.Value] = []  # of the weights, if weights are scaled

    def emit_loop_nest(self, depth: int, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the loops over k; the outermost level iterates over groups of terms that share a scale."""
        runs, a_step, b_step = self.levels[0]
        steps = self.levels[1][0]
        head = i64(self.shape.vectors * self.shape.lanes * SCALE_BYTES)
        none = [zero_vector(self.vector)] * self.accumulators
        needed = 2 * self.accumulators + self.shape.vectors + _SPARE
        separate = self.pairs or needed <= _vector_register_count(self.shape)

        def sums(first: State, a: ir.Value, panel: ir.Value) -> State:
            return self.emit_innermost_loop(steps, first, a, self.advance(panel, head))

        def run(state: State, a: ir.Value, panel: ir.Value) -> State:
            if not separate:
                self.scales = self.load_scales(panel)
                return sums(state, a, panel)
            n, scales, own = self.shape.vectors, self.load_scales(panel), sums(none, a, panel)
            return [self.multiply_add(x, scales[i % n], y) for i, (x, y) in enumerate(zip(own, state))]

        if isinstance(runs, ir.Constant) and runs.constant == 1:
            own, scales = sums(none, a, panel), self.load_scales(panel)
            return [self.b.fmul(x, scales[i % self.shape.vectors]) for i, x in enumerate(own)]
        return self.emit_loop(runs, state, a, panel, (a_step, b_step, 1), run)[0]

    def load_scales(self, panel: ir.Value) -> list[ir.Value]:
        """Emit the loads of the scales of a group, one for each column, as vectors."""
        return [self.load(self.vector_pointer(panel, j, self.size), self.vector, 4) for j in range(self.shape.vectors)]

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of one step: one term, or two terms for 4-bit weights and for pairs of bf16."""
        if self.bits == 8 and not self.pairs:
            return self.add_row_products(state, a, self.dequantize_words(self.load_weight_words(panel)))
        if self.pairs:
            left = [self.load_bf16_pair(self.advance(a, x)) for x in self.row_offsets]
            return self.add_broadcast_pair_products(state, left, self.load_bf16_weight_pairs(panel))
        even, odd = (self.dequantize_words(x) for x in self.load_two_terms(panel))
        return self.add_row_products(self.add_row_products(state, a, even), self.advance(a, self.a_inner), odd)

    def load_weight_words(self, panel: ir.Value) -> list[ir.Value]:
        """Emit the loads of the bytes of all columns of a step, extended to words."""
        words = ir.VectorType(I32, self.shape.lanes)
        return [self.b.sext(x, words) for x in self.load_right_vectors(panel, ir.VectorType(I8, self.shape.lanes), 1)]

    def load_two_terms(self, panel: ir.Value) -> tuple[list[ir.Value], list[ir.Value]]:
        """Emit the loads of two terms of all columns: the halves of a byte for 4 bits, two rows of bytes for 8 bits."""
        first = self.load_weight_words(panel)
        if self.bits == 8:
            return first, self.load_weight_words(self.advance(panel, i64(self.shape.vectors * self.shape.lanes)))
        down = self.splat(4, first[0].type)
        return first, [self.b.ashr(x, down) for x in first]

    def load_bf16_weight_pairs(self, panel: ir.Value) -> list[ir.Value]:
        """Emit the loads of two terms of all columns, converted to pairs of bf16."""
        if self.bits == 4 and "x86" in self.shape.isa:
            weights = self.load_right_vectors(panel, ir.VectorType(I8, self.shape.lanes), 1)
            return [self.look_up_bf16_pairs(x) for x in weights]
        even, odd = (self.dequantize_words(x) for x in self.load_two_terms(panel))
        return [self.pack_bf16_pairs(x, y) for x, y in zip(even, odd)]

    def look_up_bf16_pairs(self, bytes_: ir.Value) -> ir.Value:
        """Emit the conversion of both 4-bit numbers of each byte to bf16, by a lookup table in a register.

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

    def pack_bf16_pairs(self, even: ir.Value, odd: ir.Value) -> ir.Value:
        """Emit the exact conversion of two vectors of f32 integers to pairs of bf16; ``even`` is in the low bits."""
        words = ir.VectorType(I32, self.shape.lanes)
        low = self.b.lshr(self.b.bitcast(even, words), self.splat(16, words))
        return self.b.or_(low, self.b.and_(self.b.bitcast(odd, words), self.splat(-0x10000, words)))

    def dequantize_words(self, words: list[ir.Value]) -> list[ir.Value]:
        """Emit the conversion of integers in the lowest bits of words to f32; scale them unless the sums are scaled."""
        table = self.bits == 4 and self.shape.lanes == 16 and "x86" in self.shape.isa  # a lookup table of 16 numbers
        found = [self.look_up_words(x) if table else self.convert_words_to_f32(x) for x in words]
        return [self.b.fmul(x, y) for x, y in zip(found, self.scales)] if self.scales else found

    def convert_words_to_f32(self, words: ir.Value) -> ir.Value:
        """Emit the conversion of 8-bit numbers, or of the lowest 4 bits of words, to f32."""
        if self.bits == 4:
            up = self.splat(28, words.type)
            words = self.b.ashr(self.b.shl(words, up), up)
        return self.b.sitofp(words, self.vector)

    def look_up_words(self, words: ir.Value) -> ir.Value:
        """Emit the conversion of the lowest 4 bits of words to f32, by a lookup table of 16 numbers in a register."""
        numbers = ir.Constant(self.vector, [*range(8), *range(-8, 0)])
        return self.call("llvm.x86.avx512.permvar.sf.512", self.vector, numbers, words)
