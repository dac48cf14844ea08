"""Emit kernels whose loops LLVM's passes do not improve: few passes run on them, so the emitter optimizes itself.

Sorts and selections move single elements to data-dependent positions. Their only vectorizable loops test a block of
elements, and are emitted as vectors here. This emitter also hoists loop-invariant parts of addresses and stores zeros
by memset, as LLVM's passes would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeAlias

from llvmlite import ir

from aotc.ir.dims.algebra import Dim, Expr, bounds
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import is_any_test_loop, scalars_in, statement_scalars
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Const,
    Either,
    ExternalCall,
    For,
    Index,
    Kernel,
    Let,
    Load,
    Scalar,
    Stmt,
    Store,
    Tile,
    Var,
    children,
    walk,
)
from aotc.ir.opset import EXPENSIVE
from aotc.kernels.emit import memory
from aotc.kernels.emit.body import BodyEmitter, EmitTile
from aotc.kernels.emit.index import element_offset_at_iteration, flat_index
from aotc.kernels.emit.metadata import LoopMetadata
from aotc.kernels.formulas.llvm_values import call_intrinsic
from aotc.kernels.limits import COUNTED_PLACES
from aotc.kernels.llvm_types import I1, I8, VOID, Register, broadcast_register, i32, memory_type
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, kind_of, size_of

Place: TypeAlias = tuple[ir.Value, Dim]
_SHIFTS = {"shl": ir.IRBuilder.shl, "shr_logic": ir.IRBuilder.lshr, "shr_arith": ir.IRBuilder.ashr}
BITWISE = {"and": ir.IRBuilder.and_, "or": ir.IRBuilder.or_, "xor": ir.IRBuilder.xor}


def needs_no_llvm_passes(kernel: Kernel) -> bool:
    """Return True if the scalar emitter can compile the kernel without LLVM's passes.

    Such a kernel has no loops, or it calls external functions, selects among buffers or tests blocks. It has no
    register tiles, expensive functions or loops that could be vectorized.
    """
    stmts = list(walk(kernel.body))
    if any(isinstance(s, Tile) for s in stmts):
        return False
    if any(isinstance(s, ExternalCall) for s in stmts):
        return all(isinstance(s, Alloc | ExternalCall | Store) or _is_grid_loop(s) for s in stmts)
    has_no_loops = all(isinstance(s, Let | Store) for s in stmts)
    if not has_no_loops and not any(isinstance(s, Either) or is_any_test_loop(s) for s in stmts):
        return False
    scalars = scalars_in(x for s in stmts for x in statement_scalars(s))
    if any(isinstance(x, Apply) and x.fn in EXPENSIVE for x in scalars):
        return False
    return not any(isinstance(s, For) and _could_be_vectorized(s) for s in stmts)


def _float_register_of_bits(builder: ir.IRBuilder, raw: ir.Value, dtype: str) -> ir.Value:
    """Return the register of a float, given a register with its bits in memory form."""
    kind = memory_type(dtype)
    return memory.decode_element(builder, raw if kind == raw.type else builder.bitcast(raw, kind), dtype)


def _is_grid_loop(stmt: Stmt) -> bool:
    return isinstance(stmt, For) and stmt.kind == "parallel"


def _has_computed_index(index: tuple[Dim, ...], loop: For) -> bool:
    """Return True if an index depends on a value that the iteration loads or computes."""
    bound = {s.var.name for s in loop.body if isinstance(s, Let)}
    return any(a.name in bound for i in index for a in symbols(i))


def _could_be_vectorized(loop: For) -> bool:
    """Return True if LLVM could vectorize the loop: it computes or reduces elements."""
    if is_any_test_loop(loop) or _is_grid_loop(loop) or not all(isinstance(s, Let | Store) for s in loop.body):
        return False
    if any(_has_computed_index(index, loop) for _, index in accesses_in_iteration(loop)):
        return False
    stores = [s for s in loop.body if isinstance(s, Store)]
    kept = {s.buffer.name for s in stores if not s.index and not s.reduce}
    scalars = scalars_in(x for s in loop.body for x in statement_scalars(s))
    if any(isinstance(x, Load) and x.buffer.name in kept for x in scalars):
        return False
    return any(isinstance(x, Apply) for x in scalars)


def _statements_of_iteration(body: Sequence[Stmt]) -> Iterator[Stmt]:
    """Yield the statements of a loop iteration, except those inside nested counted loops."""
    for s in body:
        yield s
        if not isinstance(s, For):
            yield from _statements_of_iteration([inner for block in children(s) for inner in block])


# Unroll factor of a loop that stores elements at loaded indices (the scatter of a radix sort). An iteration is a dozen
# instructions, two of which are the loop's own. LLVM's passes that would choose a factor do not run on this code. Sorts
# of 10,000 f32, i32 and bf16, against all of LLVM's passes: not unrolled 1.15, 1.09 and 1.19 of the time, unrolled four
# times 1.0, 1.0 and 1.05 (Zen 5).
MOVES_AT_ONCE = 4
# Unroll factor of a loop whose iterations update several histograms (see COUNTED_PLACES); its iterations are long
# already. Code generation of a sort of f32 takes 7.3 ms with 1, 8.9 with 2 and 9.7 with 4, and 8.2 with all of LLVM's
# passes (Zen 5, busy).
COUNTS_AT_ONCE = 2
# Operations of an iteration that moves elements, up to which its loop is unrolled MOVES_AT_ONCE times. Longer
# iterations take long to compile and gain little. Moves by a byte of f32 have 10 operations. Moves of rows with -0.0
# have 14: against all of LLVM's passes they take 1.24 of the time not unrolled, 1.14 unrolled four times.
MOVED_OPERATIONS = 14


def _unroll_factor(loop: For) -> int:
    """Return the unroll factor of a loop; it is above 1 only for short loops that scatter or count."""
    iterations = loop.end - loop.begin
    if (
        not isinstance(iterations, int)
        or iterations % MOVES_AT_ONCE
        or not all(isinstance(s, Let | Store) for s in loop.body)
    ):
        return 1
    if _is_scattering_loop(loop):
        return MOVES_AT_ONCE
    placed = sum(isinstance(s, Store) and _has_computed_index(s.index, loop) for s in loop.body)
    operations = sum(isinstance(x, Apply) for x in scalars_in(x for s in loop.body for x in statement_scalars(s)))
    if placed >= COUNTED_PLACES:
        return COUNTS_AT_ONCE
    return MOVES_AT_ONCE if placed and operations <= MOVED_OPERATIONS else 1


def _is_scattering_loop(loop: For) -> bool:
    """Return True if a loop only moves elements to non-contiguous positions."""
    return all(
        isinstance(s, Store)
        and isinstance(s.value, Load)
        and element_offset_at_iteration(s.buffer, s.index, loop.var, 1)
        - element_offset_at_iteration(s.buffer, s.index, loop.var, 0)
        != 1
        for s in loop.body
    )


def has_loop_to_unroll(kernel: Kernel) -> bool:
    """Return True if the kernel has a loop that LLVM should unroll."""
    return any(isinstance(s, For) and _unroll_factor(s) > 1 for s in walk(kernel.body))


def _is_zero_fill_loop(loop: For) -> bool:
    """Return True if a loop only stores zeros contiguously."""
    match loop:
        case For(var=var, begin=0, end=end, step=1, body=(Store(buffer, index, Const(value=0), reduce=""),)):
            is_contiguous = (
                element_offset_at_iteration(buffer, index, var, 1) - element_offset_at_iteration(buffer, index, var, 0)
                == 1
            )
            least, _ = bounds(end)  # memset's size is unsigned
            return kind_of(buffer.dtype) in "biu" and is_contiguous and least is not None and least >= 0
    return False


class _ScalarMetadata(LoopMetadata):
    """Loop metadata for kernels without LLVM's passes: unroll factors only, because no pass reads alias information."""

    def __init__(self, module: ir.Module, kernel: Kernel, target: Target, scratch: Iterable[str]) -> None:
        self._module = module

    def access_annotation(self, buffer: Buffer) -> Callable[[ir.Instruction], None]:
        """Return an annotation that does nothing: no pass reads alias information."""
        return lambda instruction: None

    def annotate_loop(self, loop: For, backedge: ir.Instruction) -> None:
        """Mark the back edge of ``loop`` with its unroll factor."""
        copies = _unroll_factor(loop)
        unroll = ["llvm.loop.unroll.count", i32(copies)] if copies > 1 else ["llvm.loop.unroll.disable"]
        self.attach_loop_metadata(backedge, unroll)


class ScalarEmitter(BodyEmitter):
    """Emitter of a kernel that LLVM's passes would not improve."""

    metadata = _ScalarMetadata

    def __init__(self, builder: ir.IRBuilder, kernel: Kernel, target: Target, emit_tile: EmitTile) -> None:
        super().__init__(builder, kernel, target, emit_tile)
        # Loaded floats by id() of their registers: bits, register, dtype. Conversions to a wider float keep registers.
        self._raw: dict[int, tuple[ir.Value, ir.Value, str]] = {}
        self._places: tuple[dict[tuple[str, Dim], Place], ...] = ()  # hoisted addresses of the enclosing loops

    # --- addresses ---

    def address(self, buffer: Buffer, flat: Dim) -> ir.Value:
        """Return the pointer to element ``flat`` of ``buffer``, relative to a hoisted address if there is one."""
        folded = self._indices.fold_unrolled_variables(flat)
        for found in reversed(self._places):
            if place := found.get((buffer.name, folded)):
                return self._address_beyond_hoisted(buffer, *place)
        return super().address(buffer, flat)

    def _address_beyond_hoisted(self, buffer: Buffer, pointer: ir.Value, flat: Dim) -> ir.Value:
        parts = 2 if kind_of(buffer.dtype) == "c" else 1
        return self.builder.gep(pointer, [self._indices.emit(flat * parts)], source_etype=memory_type(buffer.dtype))

    def _emit_loop(self, loop: For) -> None:
        self._places = (*self._places, self._hoist_address_parts(loop))
        super()._emit_loop(loop)
        self._places = self._places[:-1]

    def _hoist_address_parts(self, loop: For) -> dict[tuple[str, Dim], Place]:
        """Emit the loop-invariant parts of a loop's addresses before the loop.

        The result has the hoisted pointers by buffer and offset. They may point outside of the buffers.
        """
        found: dict[tuple[str, Dim], Place] = {}
        for buffer, number in self._access_offsets_of_loop(loop):
            flat = self._indices.fold_unrolled_variables(number)
            fixed, moving = self._split_invariant_offset(flat)
            if isinstance(fixed, Expr) and moving != 0 and buffer.name in self._pointers:
                found[buffer.name, flat] = (
                    self._address_beyond_hoisted(buffer, self._pointers[buffer.name], fixed),
                    moving,
                )
        return found

    def _access_offsets_of_loop(self, loop: For) -> Iterator[tuple[Buffer, Dim]]:
        """Yield the buffer and the offset of each access in an iteration of ``loop``."""
        yield from ((buffer, flat_index(buffer, index)) for buffer, index in accesses_in_iteration(loop))

    def _split_invariant_offset(self, flat: Dim) -> tuple[Dim, Dim]:
        """Split an offset into a part that is computable before the loop, and the remainder."""
        terms = flat.terms if isinstance(flat, Expr) else ()
        fixed: Dim = flat.const if isinstance(flat, Expr) else flat
        for term in (Expr(0, (t,)) for t in terms):
            if all(self._indices.is_bound(a.name) for a in symbols(term)):
                fixed = fixed + term
        return fixed, flat - fixed

    # --- statements ---

    def _emit_statement(self, stmt: Stmt) -> None:
        if isinstance(stmt, For) and is_any_test_loop(stmt):
            self._emit_any_true(stmt)
        elif isinstance(stmt, For) and _is_zero_fill_loop(stmt):
            self._emit_memset(stmt)
        else:
            super()._emit_statement(stmt)

    def _emit_memset(self, loop: For) -> None:
        """Emit a loop that stores zeros as one memset."""
        (store,) = loop.body
        assert isinstance(store, Store)
        size = self._indices.fold_unrolled_variables(loop.end) * size_of(store.buffer.dtype)
        place, zero = (
            self.address(store.buffer, element_offset_at_iteration(store.buffer, store.index, loop.var, 0)),
            ir.Constant(I8, 0),
        )
        arguments = [place, zero, self._indices.emit(size), ir.Constant(I1, 0)]
        call_intrinsic(self.builder, "llvm.memset.p0.i64", VOID, arguments)

    def _emit_scalar_node(self, node: Scalar, done: dict[int, Register]) -> Register:
        """Emit one node of a scalar expression; a shift whose amount is in range becomes a plain instruction."""
        match node:
            case Apply(fn=fn, args=(x, Index(expr=expr) as by)) if fn in _SHIFTS:
                low, high = bounds(expr)
                if low is not None and high is not None and 0 <= low <= high < DTYPES[x.dtype].bits:
                    return _SHIFTS[fn](self.builder, done[id(x)], done[id(by)])
            case Apply("bitcast", (x,), to) if kind_of(to) in "iu" and self._has_bits(done[id(x)], x.dtype):
                return self._raw[id(done[id(x)])][0]
            case Load(buffer=buffer, index=index) if kind_of(buffer.dtype) == "f" and size_of(buffer.dtype) > 1:
                raw = self.builder.load(self._element_address(buffer, index), typ=ir.IntType(8 * size_of(buffer.dtype)))
                value = _float_register_of_bits(self.builder, raw, buffer.dtype)
                self._raw[id(value)] = raw, value, buffer.dtype
                return value
        return super()._emit_scalar_node(node, done)

    def _has_bits(self, register: object, dtype: str) -> bool:
        """Return True if a register is a float of ``dtype`` that was loaded with its bits."""
        return id(register) in self._raw and self._raw[id(register)][2] == dtype

    def _emit_store(self, stmt: Store) -> None:
        """Emit a store; a float that is only moved is stored as its bits."""
        if isinstance(stmt.value, Var | Load) and not stmt.reduce:
            value = self.scalar(stmt.value)
            if self._has_bits(value, stmt.buffer.dtype):
                self.builder.store(self._raw[id(value)][0], self._element_address(stmt.buffer, stmt.index))
                return
        super()._emit_store(stmt)

    # --- blocks ---

    def _emit_any_true(self, loop: For) -> None:
        """Emit a loop that tests whether a condition is true for any element of a block, as one vector test."""
        *_, store = loop.body
        assert isinstance(store, Store)
        lanes = _VectorizedBlock(self, loop)
        condition = lanes.vector_of(store.value)
        found = call_intrinsic(self.builder, f"llvm.vector.reduce.or.v{lanes.count}i1", I1, [condition])
        place = self.address(store.buffer, 0)
        before = self.scalar(Load(store.buffer, ()))
        value = self.builder.or_(before, found)
        self.builder.store(self.builder.zext(value, I8), place)


class _VectorizedBlock:
    """Vectors with the values of all iterations of a loop; each iteration is a lane.

    A 16-bit float is represented by its bits; the only operation on it is a bitcast.
    """

    def __init__(self, emitter: ScalarEmitter, loop: For) -> None:
        self.emitter, self.builder, self.loop = emitter, emitter.builder, loop
        assert isinstance(loop.begin, int)
        assert isinstance(loop.end, int)
        self.begin, self.count = loop.begin, loop.end - loop.begin
        self.known: dict[str, ir.Value] = {}
        for s in loop.body:
            if isinstance(s, Let):
                self.known[s.var.name] = self.vector_of(s.value)

    def _vector_type_of(self, kind: ir.Type) -> ir.Type:
        return ir.VectorType(kind, self.count)

    def vector_of(self, node: Scalar) -> ir.Value:
        """Return the vector register of a scalar expression."""
        match node:
            case Const(value=int(value), dtype=dtype):
                return ir.Constant(self._vector_type_of(memory_type(dtype)), int(value))
            case Var(name=name) if name in self.known:
                return self.known[name]
            case Load(buffer=buffer, index=index) if any(a.name == self.loop.var for d in index for a in symbols(d)):
                return self._load_lanes(buffer, index)
            case Apply(fn=fn, args=args, dtype=dtype):
                return self._apply_to_lanes(fn, [self.vector_of(x) for x in args], args[0].dtype, dtype)
        return broadcast_register(self.builder, self.emitter.scalar(node), self.count)

    def _load_lanes(self, buffer: Buffer, index: tuple[Dim, ...]) -> ir.Value:
        """Load one element per iteration as a vector."""
        flat = element_offset_at_iteration(buffer, index, self.loop.var, self.begin)
        loaded = self.builder.load(
            self.emitter.address(buffer, flat), typ=self._vector_type_of(memory_type(buffer.dtype))
        )
        loaded.align = size_of(buffer.dtype)
        return loaded

    def _apply_to_lanes(self, fn: str, args: list[ir.Value], source: str, to: str) -> ir.Value:
        """Emit a conversion, comparison, shift or bitwise operation on vectors."""
        make, kind = self.builder, memory_type(to)
        match fn:
            case "bitcast":
                return args[0] if args[0].type.element == kind else make.bitcast(args[0], self._vector_type_of(kind))
            case "convert":
                widen = make.sext if kind_of(source) == "i" else make.zext
                return widen(args[0], self._vector_type_of(kind))
            case "gt":
                return make.icmp_unsigned(">", *args)
            case "shr_arith":
                return make.ashr(*args)
        return BITWISE[fn](make, *args)


def accesses_in_iteration(loop: For) -> Iterator[tuple[Buffer, tuple[Dim, ...]]]:
    """Yield the buffer and the index of each access in a loop iteration."""
    for s in _statements_of_iteration(loop.body):
        if isinstance(s, Store):
            yield s.buffer, s.index
        yield from ((x.buffer, x.index) for x in scalars_in(statement_scalars(s)) if isinstance(x, Load))
