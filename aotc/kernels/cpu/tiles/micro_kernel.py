"""The micro-kernel of a CPU matmul: a register tile in explicit vector code, one function for each tile shape.

All constants are literals in the code. The accumulators stay in registers across all levels of ``k``: the code is an
outer product of ``rows`` broadcasts of ``a`` and ``vectors`` vectors of ``b`` for each k, as in BLIS (the reasons: K.
Goto and R. van de Geijn, "Anatomy of high-performance matrix multiplication", 2008). The function is ``noinline``,
except for a single dot product, and ``linkonce_odr``. Its name is a digest of the shape: every kernel of a bundle that
needs the shape calls the same function.
"""

from __future__ import annotations

from collections.abc import Callable

from llvmlite import ir

from aotc.ir.loop.forms import tile_forms as forms
from aotc.kernels.cpu.tiles.shape import Shape
from aotc.kernels.emit.vector.sve import sve_instruction_function
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.llvm_types import (
    BFLOAT,
    F32,
    F64,
    HALF,
    I8,
    I16,
    I32,
    I64,
    PTR,
    VOID,
    broadcast_register,
    i32,
    i64,
    zero_vector,
)
from aotc.vmfb.dtypes import size_of

ELEMENTS = {"f32": F32, "f64": F64, "i32": I32, "i64": I64}
NARROW = {forms.F32_BF16: (I16, 2), forms.F32_F16: (HALF, 2), forms.F32_I8: (I8, 1)}
"""LLVM type and bytes of elements of ``b`` that are widened in registers."""
LINE = 64
SIGNS = -0x7F7F7F80
"""Bytes 0x80. An i8 xor this is the number plus 128 as u8; a u8 xor this is the number minus 128 as i8."""


def tile_function_type(arguments: int) -> ir.FunctionType:
    """Return the LLVM type of a register tile's function: three pointers, then ``arguments`` integers."""
    return ir.FunctionType(VOID, [PTR] * 3 + [I64] * arguments)


def add_tile_function(module: ir.Module, shape: Shape, arguments: int, writer: type[TileWriter]) -> ir.Function:
    """Add the function of ``shape``, with ``arguments`` arguments after its pointers, to ``module``."""
    function = ir.Function(module, tile_function_type(arguments), shape.name)
    function.linkage = "linkonce_odr"
    function.attributes.add("alwaysinline" if shape.is_one_dot else "noinline")
    function.attributes.add("nounwind")
    for pointer in function.args[:3]:
        pointer.add_attribute("noalias")
    writer(function, shape).write()
    return function


# Unroll factor of the innermost loop of a tile, at most; the remaining iterations are a second loop.
UNROLL = 4
# Accumulator vectors of a tile up to which its innermost loop is unrolled. More accumulators hide the loop's own
# instructions without unrolling, and LLVM takes half as long. Without unrolling, 18 to 28 vectors of f32 with AVX-512
# take 0.99 to 1.01 of the time of an unroll factor of 4. 12 vectors with AVX2 take up to 2.0, as they spill.
UNROLLED_TILE = 16


def innermost_unroll_factor(accumulators: int) -> int:
    """Return the unroll factor of the innermost loop of a tile with this number of accumulator vectors."""
    return UNROLL if accumulators <= UNROLLED_TILE else 1


State = list[ir.Value]


class TileWriter:
    """Writer of the function of one tile shape.

    ``State`` is the list of accumulator vectors: all vectors of columns of the first row, then of the next row.
    """

    def __init__(self, function: ir.Function, shape: Shape) -> None:
        self.shape = shape
        self.b = ir.IRBuilder(function.append_basic_block("entry"))
        self.a, self.panel, self.out, *arguments = function.args
        values = iter(arguments)

        def value(known: int | None) -> ir.Value:
            return next(values) if known is None else i64(known)

        self.a_row, self.a_inner, self.out_row = (value(x) for x in (shape.a_row, shape.a_inner, shape.out_row))
        self.levels = [tuple(value(x) for x in level) for level in shape.levels]
        self.element = ELEMENTS[shape.form.out]
        self.vector, self.size = ir.VectorType(self.element, shape.lanes), size_of(shape.form.out)
        self.accumulators = shape.rows * shape.vectors
        self.scalable = "sve" in shape.isa
        self.row_offsets = [self.mul_const(self.a_row, i) for i in range(shape.rows)]

    def write(self) -> None:
        """Emit the whole function: zero the accumulators, loop over k, and store the results."""
        extra = self.shape.vectors if self._has_offset_left_operand else 0
        state = [zero_vector(self.vector)] * (self.accumulators + extra)
        state = self.emit_loop_nest(0, state, self.a, self.panel)
        if extra:
            sums = state[self.accumulators :]
            state = [self.b.sub(x, sums[i % extra]) for i, x in enumerate(state[: self.accumulators])]
        self.store_accumulators(self.in_storage_order(state), range(self.shape.vectors))
        self.b.ret_void()

    def store_accumulators(self, sums: State, columns: range) -> None:
        """Emit the stores of the accumulators of all rows, or their addition to memory, for some vectors of columns."""
        add = self.b.add if self.element in (I32, I64) else self.b.fadd
        for i in range(self.shape.rows):
            row = self.advance(self.out, self.mul_const(self.out_row, i))
            for x, j in zip(sums[i * len(columns) :], columns):
                place = self.vector_pointer(row, j, self.size)
                self.store(add(self.load(place, self.vector, self.size), x) if self.shape.adds else x, place)

    def in_storage_order(self, state: State) -> State:
        """Return the accumulators in storage order: by rows, then columns."""
        return state

    @property
    def _has_offset_left_operand(self) -> bool:
        """Return True if the elements of ``a`` are offset by 128, with a correction of the sums at the end.

        VNNI multiplies unsigned ``a`` by signed ``b``; AArch64's ``sdot`` needs both signed, and ``usdot`` of i8mm is
        as VNNI. The correction, the offset times the sum of ``b``, is accumulated as one more row.
        """
        isa, dtype = self.shape.isa, self.shape.a_dtype
        shifted = "i8" if "vnni" in isa else "u8" if "dot" in isa and "i8mm" not in isa else ""
        return self.shape.form == forms.I8_QUADS and dtype == shifted

    # --- helpers ---

    def shuffle(self, x: ir.Value, y: ir.Value, lanes: list[int]) -> ir.Value:
        """Emit a shuffle: the elements at ``lanes`` of the concatenation of two vectors."""
        return self.b.shuffle_vector(x, y, ir.Constant(ir.VectorType(I32, len(lanes)), lanes))

    def mul_const(self, value: ir.Value, factor: int) -> ir.Value:
        """Emit the product of an index and a constant; fold it if the index is constant."""
        if isinstance(value, ir.Constant):
            return i64(value.constant * factor)
        return self.b.mul(value, i64(factor))

    def advance(self, pointer: ir.Value, offset: ir.Value) -> ir.Value:
        """Emit a pointer that is ``offset`` bytes after ``pointer``."""
        if isinstance(offset, ir.Constant) and offset.constant == 0:
            return pointer
        return self.b.gep(pointer, [offset], source_etype=I8)

    def vector_pointer(self, pointer: ir.Value, j: int, size: int) -> ir.Value:
        """Emit the pointer to vector ``j`` of elements of ``size`` bytes."""
        return self.advance(pointer, i64(j * self.shape.lanes * size))

    def call(self, name: str, result: ir.Type, *args: ir.Value) -> ir.Value:
        return call_intrinsic(self.b, name, result, list(args))

    def broadcast(self, scalar: ir.Value) -> ir.Value:
        return broadcast_register(self.b, scalar, self.shape.lanes)

    def load(self, pointer: ir.Value, kind: ir.Type, align: int) -> ir.Value:
        return self.b.load(pointer, align=align, typ=kind)

    def store(self, value: ir.Value, pointer: ir.Value) -> None:
        self.b.store(value, pointer, align=self.size)

    def splat(self, number: int, kind: ir.VectorType) -> ir.Constant:
        return ir.Constant(kind, [number] * kind.count)

    # --- loops over k ---

    def emit_loop_nest(self, depth: int, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the loops over k from level ``depth`` inwards; return the accumulators after them."""
        extent, a_step, b_step = self.levels[depth]
        last = depth == len(self.levels) - 1

        def outer(state: State, a: ir.Value, panel: ir.Value) -> State:
            return self.emit_loop_nest(depth + 1, state, a, panel)

        if not last:
            return self.emit_loop(extent, state, a, panel, (a_step, b_step, 1), outer)[0]
        return self.emit_innermost_loop(extent, state, a, panel)

    def emit_innermost_loop(self, extent: ir.Value, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the innermost loop, over contiguous groups of terms; return the accumulators after it."""
        _, a_step, b_step = self.levels[-1]
        by = innermost_unroll_factor(self.accumulators)
        if by == 1:
            return self.emit_loop(extent, state, a, panel, (a_step, b_step, 1), self.emit_step)[0]
        if isinstance(extent, ir.Constant):
            whole, rest = (i64(x) for x in divmod(extent.constant, by))
        else:
            whole, rest = (op(extent, i64(by)) for op in (self.b.udiv, self.b.urem))
        state, a, panel = self.emit_loop(whole, state, a, panel, (a_step, b_step, by), self.emit_step)
        return self.emit_loop(rest, state, a, panel, (a_step, b_step, 1), self.emit_step)[0]

    def emit_loop(
        self,
        extent: ir.Value,
        state: State,
        a: ir.Value,
        panel: ir.Value,
        by: tuple[ir.Value, ir.Value, int],
        body: Callable[[State, ir.Value, ir.Value], State],
    ) -> tuple[State, ir.Value, ir.Value]:
        """Emit a loop of ``extent`` iterations of ``body``; return the accumulators and both pointers after it.

        ``by`` has the strides in ``a`` and in the panel in bytes, and the unroll factor.
        """
        if isinstance(extent, ir.Constant) and extent.constant == 0:
            return state, a, panel
        a_step, b_step, unroll = by
        known = isinstance(extent, ir.Constant)  # and not 0: test at the bottom, as LLVM's loop rotation would do
        before, top, inside, after = self.b.block, *(self.b.append_basic_block(x) for x in ("head", "body", "end"))
        self.b.branch(top)
        self.b.position_at_end(top)
        start = [*state, a, panel, i64(0)]
        phis = [self.b.phi(x.type) for x in start]
        if known:
            self.b.branch(inside)
        else:
            self.b.cbranch(self.b.icmp_signed("<", phis[-1], extent), inside, after)
        self.b.position_at_end(inside)
        now, a_now, b_now = list(phis[:-3]), phis[-3], phis[-2]
        for u in range(unroll):
            a_next = self.advance(a_now, self.mul_const(a_step, u))
            now = body(now, a_next, self.advance(b_now, self.mul_const(b_step, u)))
        a_next = self.advance(a_now, self.mul_const(a_step, unroll))
        ends = [a_next, self.advance(b_now, self.mul_const(b_step, unroll))]
        ends.append(self.b.add(phis[-1], i64(1)))
        for phi, first, next_ in zip(phis, start, [*now, *ends]):
            phi.add_incoming(first, before)
            phi.add_incoming(next_, self.b.block)
        if known:
            self.b.cbranch(self.b.icmp_signed("<", ends[-1], extent), top, after)
        else:
            self.b.branch(top)
        self.b.position_at_end(after)
        return (now, *ends[:2]) if known else (list(phis[:-3]), phis[-3], phis[-2])

    # --- one step of k ---

    def emit_step(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit the products of one group of terms; return the new accumulators."""
        return STEPS[self.shape.form](self, state, a, panel)

    def load_right_vectors(self, panel: ir.Value, kind: ir.Type, size: int = 0) -> list[ir.Value]:
        """Emit the loads of all vectors of one step of ``b``, and prefetches of a later step."""
        size = size or self.size
        if self.shape.prefetch:
            for offset in range(0, self.shape.vectors * self.shape.lanes * size, LINE):
                ahead = self.advance(self.advance(panel, i64(self.shape.prefetch)), i64(offset))
                self.emit_prefetch(ahead)
        return [self.load(self.vector_pointer(panel, j, size), kind, size) for j in range(self.shape.vectors)]

    def emit_prefetch(self, pointer: ir.Value) -> None:
        """Emit the prefetch of a cache line."""
        self.call("llvm.prefetch.p0", VOID, pointer, *(i32(x) for x in (0, 3, 1)))

    def multiply_add(self, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
        """Emit ``x * y + z``, fused if the target has FMA."""
        if self.element in (I32, I64):
            return self.b.add(self.b.mul(x, y), z)
        if "fma" not in self.shape.isa:
            return self.b.fadd(self.b.fmul(x, y), z)
        suffix = f"v{self.shape.lanes}{'f64' if self.shape.form == forms.F64 else 'f32'}"
        return self.call(f"llvm.fma.{suffix}", self.vector, x, y, z)

    def add_outer_product(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus the outer product of ``a`` (broadcast rows) and ``b`` (vectors)."""
        n = len(b)
        return [self.multiply_add(a[i // n], b[i % n], x) for i, x in enumerate(state)]

    def emit_step_single(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit a step whose operands have the accumulators' dtype."""
        return self.add_row_products(state, a, self.load_right_vectors(panel, self.vector))

    def emit_step_widening(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit a step whose ``b`` has narrow elements, which are widened to f32."""
        kind, size = NARROW[self.shape.form]
        narrow = self.load_right_vectors(panel, ir.VectorType(kind, self.shape.lanes), size)
        return self.add_row_products(state, a, [self.widen_to_f32(x) for x in narrow])

    def widen_to_f32(self, x: ir.Value) -> ir.Value:
        """Emit the conversion of a vector of narrow elements of ``b`` to f32.

        The bits of a bf16 are the upper half of an f32's; for f16 the target has an instruction.
        """
        words = ir.VectorType(I32, self.shape.lanes)
        match self.shape.form.right:
            case "bf16":
                return self.b.bitcast(self.b.shl(self.b.zext(x, words), self.splat(16, words)), self.vector)
            case "f16":
                return self.b.fpext(x, self.vector)
            case "i8":
                return self.b.sitofp(self.b.sext(x, words), self.vector)
        return x

    def add_row_products(self, state: State, a: ir.Value, b: list[ir.Value]) -> State:
        """Return the accumulators plus the outer product of the elements of all rows at ``a`` and the vectors ``b``."""
        rows = (self.broadcast(self.load(self.advance(a, x), self.element, self.size)) for x in self.row_offsets)
        return self.add_outer_product(state, list(rows), b)

    def emit_step_bf16(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit a step of two bf16 terms, by an instruction for pairs or as two steps of f32."""
        words_type = ir.VectorType(I32, self.shape.lanes)
        words = self.load_right_vectors(panel, words_type)
        if "bf16" in self.shape.isa and self.shape.a_dtype == "bf16":
            pairs = [self.load_bf16_pair(self.advance(a, x)) for x in self.row_offsets]
            return self.add_broadcast_pair_products(state, pairs, words)
        shift, mask = self.splat(16, words_type), self.splat(-0x10000, words_type)
        for half in (0, 1):
            bits = [self.b.and_(x, mask) if half else self.b.shl(x, shift) for x in words]
            b = [self.b.bitcast(x, self.vector) for x in bits]
            start = self.advance(a, self.mul_const(self.a_inner, half))
            rows = [self.load_widened_to_f32(self.advance(start, x)) for x in self.row_offsets]
            state = self.add_outer_product(state, rows, b)
        return state

    def add_broadcast_pair_products(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus both products of each pair of bf16 in ``a`` (words) and ``b`` (vectors)."""
        return self.add_bf16_pair_products(state, [self.broadcast(x) for x in a], b)

    def add_bf16_pair_products(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus both products of all bf16 pairs in vectors ``a`` and ``b``, by instructions."""
        kind = self.instruction_operand_type(ir.VectorType(BFLOAT, 2 * self.shape.lanes))
        left, right = ([self.b.bitcast(x, kind) for x in vectors] for vectors in (a, b))
        n, x86 = len(b), "llvm.x86.avx512bf16.dpbf16ps.512"
        name = x86 if "x86" in self.shape.isa else self.neon_or_sve_name("bfdot.v4f32.v8bf16")
        return [self.call(name, self.vector, x, left[i // n], right[i % n]) for i, x in enumerate(state)]

    def neon_or_sve_name(self, name: str) -> str:
        """Return the LLVM function of a NEON instruction, or of the SVE instruction with the same name."""
        return (
            sve_instruction_function(name.partition(".")[0], self.shape.lanes)
            if self.scalable
            else f"llvm.aarch64.neon.{name}"
        )

    def instruction_operand_type(self, kind: ir.VectorType) -> ir.VectorType:
        """Return the type in which an operand of type ``kind`` is passed to an instruction: words for SVE."""
        return ir.VectorType(I32, self.shape.lanes) if self.scalable else kind

    def load_bf16_pair(self, pointer: ir.Value) -> ir.Value:
        """Emit the load of the bf16 at ``pointer`` and of the next one in k as one word, the first in the low bits."""
        if self.shape.a_inner == size_of("bf16"):
            return self.load(pointer, I32, 2)
        low, high = (self.b.zext(self.load(p, I16, 2), I32) for p in (pointer, self.advance(pointer, self.a_inner)))
        return self.b.or_(low, self.b.shl(high, i32(16)))

    def load_widened_to_f32(self, pointer: ir.Value) -> ir.Value:
        """Emit the load of the bf16 or f32 at ``pointer``, converted to f32 and broadcast to a vector."""
        if self.shape.a_dtype == "f32":
            return self.broadcast(self.load(pointer, self.element, 4))
        bits = self.b.zext(self.load(pointer, I16, 2), I32)
        return self.broadcast(self.b.bitcast(self.b.shl(bits, i32(16)), self.element))

    def emit_step_i8(self, state: State, a: ir.Value, panel: ir.Value) -> State:
        """Emit a step of four 8-bit terms (a quad), by the best instruction of the target."""
        b = self.load_right_vectors(panel, self.vector)
        a_words = [self.broadcast(self.load(self.advance(a, x), I32, 1)) for x in self.row_offsets]
        if "vnni" in self.shape.isa or "dot" in self.shape.isa:
            return self.add_quads_by_dot_instruction(state, a_words, b)
        dot = self.add_quads_by_i16_pairs if "x86" in self.shape.isa else self.add_quads_by_i32_products
        return dot(state, a_words, b)

    def add_quads_by_dot_instruction(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus products of quads, by a dot-product instruction (VNNI, ``sdot``, ``usdot``)."""
        sign = self.splat(SIGNS, self.vector)
        if self._has_offset_left_operand:
            a = [*(self.b.xor(x, sign) for x in a), sign]
        n = len(b)
        if "x86" in self.shape.isa:
            name = f"llvm.x86.avx512.vpdpbusd.{32 * self.shape.lanes}"  # AVX-VNNI has it with 256 bits
        else:
            kind = self.instruction_operand_type(ir.VectorType(I8, 4 * self.shape.lanes))
            a, b = ([self.b.bitcast(x, kind) for x in vectors] for vectors in (a, b))
            unsigned = self.shape.a_dtype == "u8" and not self._has_offset_left_operand
            name = self.neon_or_sve_name(f"{'usdot' if unsigned else 'sdot'}.v4i32.v16i8")
        return [self.call(name, self.vector, x, a[i // n], b[i % n]) for i, x in enumerate(state)]

    def add_quads_by_i16_pairs(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus products of quads of bytes, as pairs of i16 (``pmaddwd``).

        The first instruction multiplies terms 0 and 2, the second one terms 1 and 3.
        """
        half = ir.VectorType(I16, 2 * self.shape.lanes)
        name = {4: "llvm.x86.sse2.pmadd.wd", 8: "llvm.x86.avx2.pmadd.wd", 16: "llvm.x86.avx512.pmaddw.d.512"}
        eight = self.splat(8, half)

        def halves(word: ir.Value, signed: bool) -> tuple[ir.Value, ir.Value]:
            x, right = self.b.bitcast(word, half), self.b.ashr if signed else self.b.lshr
            return right(self.b.shl(x, eight), eight), right(x, eight)

        a_halves = [halves(x, self.shape.a_dtype == "i8") for x in a]
        b_halves = [halves(x, True) for x in b]
        for part in (0, 1):
            state = [
                self.b.add(x, self.call(name[self.shape.lanes], self.vector, left[part], right[part]))
                for x, (left, right) in zip(state, ((i, j) for i in a_halves for j in b_halves))
            ]
        return state

    def add_quads_by_i32_products(self, state: State, a: list[ir.Value], b: list[ir.Value]) -> State:
        """Return the accumulators plus products of quads of bytes, term by term as i32, without dot instructions."""
        top = self.splat(24, self.vector)
        for t in range(4):
            up = self.splat(24 - 8 * t, self.vector)
            narrow = self.b.ashr if self.shape.a_dtype == "i8" else self.b.lshr
            left = [narrow(self.b.shl(x, up), top) for x in a]
            right = [self.b.ashr(self.b.shl(x, up), top) for x in b]
            state = [self.b.add(x, self.b.mul(i, j)) for x, (i, j) in zip(state, ((i, j) for i in left for j in right))]
        return state


STEPS = {
    forms.F32: TileWriter.emit_step_single,
    forms.F32_BF16: TileWriter.emit_step_widening,
    forms.F32_F16: TileWriter.emit_step_widening,
    forms.F32_I8: TileWriter.emit_step_widening,
    forms.F64: TileWriter.emit_step_single,
    forms.BF16_PAIRS: TileWriter.emit_step_bf16,
    forms.I8_QUADS: TileWriter.emit_step_i8,
    forms.I32: TileWriter.emit_step_single,
    forms.I64: TileWriter.emit_step_single,
}
