"""Emit kernels with register tiles whose other loops are vectorized here instead of by LLVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, bounds, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.ir import Apply, Buffer, For, Kernel, Let, Load, Scalar, Stmt, Store, Var, walk
from aotc.ir.opset import COMPARISONS
from aotc.kernels.emit.body import EmitTile
from aotc.kernels.emit.index import element_offset_at_iteration
from aotc.kernels.emit.scalar import emit_comparison
from aotc.kernels.emit.vector.scalar_emitter import BITWISE, ScalarEmitter, accesses_in_iteration
from aotc.kernels.emit.vector.vector_loops import VectorLoop
from aotc.kernels.llvm_types import I1, I8, broadcast_register, constant_splat, i64, memory_type
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, size_of


class VectorEmitter(ScalarEmitter):
    """Emitter of a kernel whose loops in ``vectors`` become vector code; everything else is scalar."""

    def __init__(
        self, builder: ir.IRBuilder, kernel: Kernel, target: Target, emit_tile: EmitTile,
        vectors: Mapping[int, VectorLoop],
    ) -> None:  # fmt: skip
        super().__init__(builder, kernel, target, emit_tile)
        self._vectors = dict(vectors)
        self.kept: dict[tuple[int, int], ir.Value] = {}  # vectors that were hoisted out of a loop
        shared = {kernel.inputs[source].name for _, source in kernel.aliases}
        self._constant = {b.name for b in kernel.inputs} - shared

    def _emit_statement(self, stmt: Stmt) -> None:
        """Emit a statement; a loop in ``vectors`` becomes straight-line vectors or a loop over vectors."""
        made = self._vectors.get(id(stmt))
        if made is None:
            super()._emit_statement(stmt)
        elif made.is_short:
            self._emit_straight_line_vectors(made)
        else:
            self._emit_loop_and_remainder(made)

    def emit_invariant_let(self, stmt: Let) -> None:
        """Compute a loop-invariant scalar before the loop, and bind its name."""
        self._emit_let(stmt.var, self.scalar(stmt.value))

    def _emit_loop_and_remainder(self, made: VectorLoop) -> None:
        """Emit a loop over vectors; what is left of a known number of iterations is straight-line vectors."""
        step, count, end = made.lanes * made.vectors_per_iteration, made.iterations, made.loop.end
        middle = end - count % step if isinstance(count, int) else end
        self._emit_loop(self._loop_over_vectors(replace(made, loop=replace(made.loop, end=middle))))
        if middle != end:
            self._emit_straight_line_vectors(replace(made, loop=replace(made.loop, begin=middle)))

    def _loop_over_vectors(self, made: VectorLoop) -> For:
        """Return a loop that steps by whole vectors, whose body is the loop of one vector or of a few."""
        loop = made.loop
        first, step = sym(f"{loop.var}_vector"), made.lanes * made.vectors_per_iteration
        inner = replace(loop, begin=first, end=first + step)
        self._vectors[id(inner)] = replace(made, loop=inner)
        return replace(loop, var=f"{loop.var}_vector", step=step, body=(inner,))

    def _emit_loop(self, loop: For) -> None:
        self._hoist_vector_loads(loop)
        super()._emit_loop(loop)

    def _hoist_vector_loads(self, loop: For) -> None:
        """Emit vector loads that are invariant in an outer loop before that loop, within the register budget."""
        least, _ = bounds(loop.end - loop.begin)
        inside = [self._vectors[id(s)] for s in loop.body if id(s) in self._vectors]
        found = [(made, x) for made in inside if made.is_short for x in self._invariant_vector_loads(made)]
        registers = sum(len(list(made.vector_pieces())) for made, _ in found)
        if least and least > 0 and registers <= self.target.registers // 2:
            iterations = {id(made): _VectorizedIteration(self, made) for made, _ in found}
            for made, x in found:
                iteration = iterations[id(made)]
                self.kept |= {(id(x), at): iteration.load_vector(x, at, lanes) for at, lanes in made.vector_pieces()}

    def _invariant_vector_loads(self, made: VectorLoop) -> list[Load]:
        """Return the vector loads of a loop from read-only buffers whose addresses are computable at this point."""
        inner = [x for x in made.scalars() if id(x) in made.differing]
        loads = [x for x in inner if isinstance(x, Load) and x.buffer.name in self._constant]
        return [
            x
            for x in loads
            if all(self._indices.is_bound(s.name) for s in symbols(_first_element_offset(made, x.buffer, x.index)))
        ]

    def _access_offsets_of_loop(self, loop: For) -> Iterator[tuple[Buffer, Dim]]:
        """Yield the buffer and the offset of the first element of each vector access in ``loop``."""
        for made in [self._vectors[id(s)] for s in walk(loop.body) if id(s) in self._vectors]:
            for buffer, index in accesses_in_iteration(made.loop):
                yield buffer, _first_element_offset(made, buffer, index)

    def _emit_straight_line_vectors(self, made: VectorLoop) -> None:
        """Emit all iterations of a short loop as straight-line vector code."""
        self._indices.enter_block()
        self._scalars.append({})
        iteration = _VectorizedIteration(self, made)
        for at, lanes in made.vector_pieces():
            iteration.emit_iterations(at, lanes)
        iteration.emit_deferred_stores()
        self._scalars.pop()
        self._indices.leave_block()


def _first_element_offset(made: VectorLoop, buffer: Buffer, index: tuple[Dim, ...]) -> Dim:
    """Return the offset, in the first iteration, of an element that a vector loop accesses."""
    return element_offset_at_iteration(buffer, index, made.loop.var, made.loop.begin)


def _may_defer_stores(made: VectorLoop, registers: int) -> bool:
    """Return True if the stored vectors of a short loop fit registers, and no iteration loads what it has stored."""
    stored = [s.buffer.name for s in made.loop.body if isinstance(s, Store)]
    loads = [x for x in made.scalars() if isinstance(x, Load)]
    vectors = len(list(made.vector_pieces())) * len(stored)
    return vectors <= registers // 2 and not any(x.buffer.name in stored for x in loads)


class _VectorizedIteration:
    """Emitter of several iterations of a loop as vectors; each iteration is a lane."""

    def __init__(self, emitter: VectorEmitter, made: VectorLoop) -> None:
        self.emitter, self.made, self.builder = emitter, made, emitter.builder
        self.same: dict[tuple[int, int], ir.Value] = {}
        self.firsts: dict[tuple[str, tuple[Dim, ...]], ir.Value] = {}  # addresses
        self.at, self.lanes, self.done = 0, made.lanes, dict[int, ir.Value]()
        self.known: dict[str, ir.Value] = {}
        self.deferred: list[tuple[ir.Value, ir.Value, str]] = []
        self.may_defer = _may_defer_stores(made, emitter.target.registers)

    def emit_deferred_stores(self) -> None:
        """Emit the stores behind the loads of all iterations: a load may wait for a store before it."""
        for value, place, dtype in self.deferred:
            self.builder.store(value, place, align=size_of(dtype))
        self.deferred.clear()

    def emit_iterations(self, at: int, lanes: int) -> None:
        """Emit ``lanes`` iterations of the loop, from iteration ``at`` on, as one vector each statement."""
        self.at, self.lanes = at, lanes
        for s in self.made.loop.body:
            self.done = {}
            match s:
                case Let(var=var, value=value) if id(value) in self.made.differing:
                    self.known[var.name] = self.vector_of(value)
                case Let() if at == 0:
                    self.emitter.emit_invariant_let(s)
                case Store(buffer=buffer, index=index, value=value):
                    self.store_vector(self.vector_of(value), buffer, self.vector_address(buffer, index, at))

    def vector_address(self, buffer: Buffer, index: tuple[Dim, ...], at: int) -> ir.Value:
        """Return the address of the elements that the iterations from ``at`` on access."""
        if (buffer.name, index) not in self.firsts:
            self.firsts[buffer.name, index] = self.emitter.address(
                buffer, _first_element_offset(self.made, buffer, index)
            )
        first = self.firsts[buffer.name, index]
        return self.builder.gep(first, [i64(at)], source_etype=memory_type(buffer.dtype)) if at else first

    def load_vector(self, node: Load, at: int, lanes: int) -> ir.Value:
        """Load the elements that ``lanes`` iterations from ``at`` on read."""
        kind = ir.VectorType(memory_type(node.buffer.dtype), lanes)
        place = self.vector_address(node.buffer, node.index, at)
        found = self.builder.load(place, typ=kind, align=size_of(node.buffer.dtype))
        return self.builder.trunc(found, ir.VectorType(I1, lanes)) if node.buffer.dtype == "i1" else found

    def store_vector(self, value: ir.Value, buffer: Buffer, place: ir.Value) -> None:
        """Store a vector; conditions are stored as bytes."""
        if buffer.dtype == "i1":
            value = self.builder.zext(value, ir.VectorType(I8, self.lanes))
        self.deferred.append((value, place, buffer.dtype))
        if not self.may_defer:
            self.emit_deferred_stores()

    def vector_of(self, node: Scalar) -> ir.Value:
        """Return the vector register of a scalar expression."""
        if id(node) not in self.made.differing:
            return self.broadcast_invariant(node)
        if id(node) not in self.done:
            self.done[id(node)] = self.emit_differing_scalar(node)
        return self.done[id(node)]

    def emit_differing_scalar(self, node: Scalar) -> ir.Value:
        """Emit the vector of a scalar that differs between iterations."""
        match node:
            case Var(name=name):
                return self.known[name]
            case Load():
                kept = self.emitter.kept.get((id(node), self.at))
                return self.load_vector(node, self.at, self.lanes) if kept is None else kept
            case Apply(fn="select", args=(condition, *others)):
                differs = id(condition) in self.made.differing
                one = self.vector_of(condition) if differs else self.emitter.scalar(condition)
                return self.builder.select(one, *map(self.vector_of, others))
            case Apply(fn=fn, args=args):
                return self.apply_to_vectors(fn, list(map(self.vector_of, args)))
        raise InternalError(f"kernels: cannot emit a vector of {node!r}")

    def apply_to_vectors(self, fn: str, args: list[ir.Value]) -> ir.Value:
        """Emit an operation on vectors."""
        if fn in COMPARISONS:
            return emit_comparison(self.builder, fn, args, kind_of(self.made.dtype))
        return (BITWISE if fn in BITWISE else self.made.operations)[fn](self.builder, *args)

    def broadcast_invariant(self, node: Scalar) -> ir.Value:
        """Return a loop-invariant scalar, broadcast to a vector."""
        key = (id(node), self.lanes)
        if key not in self.same:
            one = self.emitter.scalar(node)
            assert isinstance(one, ir.Value)
            self.same[key] = self.splat(one)
        return self.same[key]

    def splat(self, one: ir.Value) -> ir.Value:
        """Broadcast a register to a vector."""
        if isinstance(one, ir.Constant):
            return constant_splat(ir.VectorType(one.type, self.lanes), one)
        return broadcast_register(self.builder, one, self.lanes)
