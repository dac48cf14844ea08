"""Emitter of kernels with register tiles whose other loops are vectorized here, not by LLVM."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, bounds, sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import scalars_in, statement_scalars
from aotc.ir.loop.ir import Apply, Buffer, For, Kernel, Let, Load, Scalar, Stmt, Store, Var, walk
from aotc.ir.opset import COMPARISONS
from aotc.kernels.emit.body import EmitTile
from aotc.kernels.emit.index import element_offset_at_iteration
from aotc.kernels.emit.real import ONE_BY_ONE
from aotc.kernels.emit.scalar import emit_comparison
from aotc.kernels.emit.vector.scalar_emitter import BITWISE, ScalarEmitter, accesses_in_iteration
from aotc.kernels.emit.vector.vector_loops import VectorLoop
from aotc.kernels.llvm_types import I1, I8, broadcast_register, constant_splat, i64, memory_type
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of


class VectorEmitter(ScalarEmitter):
    """Emits the loops in ``vectors`` as vectors, and everything else as scalars."""

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
        made = self._vectors.get(id(stmt))
        if made is None:
            super()._emit_statement(stmt)
        elif made.is_short:
            self._emit_straight_line_vectors(made)
        else:
            self._emit_loop(self._loop_over_vectors(made))

    def keep(self, stmt: Let) -> None:
        """Compute and bind a loop-invariant scalar before the loop."""
        self._emit_let(stmt.var, self.scalar(stmt.value))

    def _loop_over_vectors(self, made: VectorLoop) -> For:
        """Return a loop over vectors whose body is a loop of one vector."""
        loop = made.loop
        first = sym(f"{loop.var}_vector")
        inner = replace(loop, begin=first, end=first + made.lanes)
        self._vectors[id(inner)] = replace(made, loop=inner)
        return replace(loop, var=f"{loop.var}_vector", step=made.lanes, body=(inner,))

    def _emit_loop(self, loop: For) -> None:
        self._hoist_vector_loads(loop)
        super()._emit_loop(loop)

    def _hoist_vector_loads(self, loop: For) -> None:
        """Hoist vector loads that are invariant in an outer loop out of that loop, within the register budget."""
        least, _ = bounds(loop.end - loop.begin)
        inside = [self._vectors[id(s)] for s in loop.body if id(s) in self._vectors]
        found = [(made, x) for made in inside if made.is_short for x in self._invariant_vector_loads(made)]
        if least and least > 0 and sum(len(list(made.pieces())) for made, _ in found) <= self.target.registers // 2:
            iterations = {id(made): _Vectors(self, made) for made, _ in found}
            for made, x in found:
                iteration = iterations[id(made)]
                self.kept |= {(id(x), at): iteration.loaded(x, at, lanes) for at, lanes in made.pieces()}

    def _invariant_vector_loads(self, made: VectorLoop) -> list[Load]:
        """Return vector loads from read-only buffers whose addresses are computable here."""
        inner = [
            x for x in scalars_in(x for s in made.loop.body for x in statement_scalars(s)) if id(x) in made.differing
        ]
        loads = [x for x in inner if isinstance(x, Load) and x.buffer.name in self._constant]
        return [
            x
            for x in loads
            if all(self._indices.has(s.name) for s in symbols(_first_element_offset(made, x.buffer, x.index)))
        ]

    def _access_offsets_of_loop(self, loop: For) -> Iterator[tuple[Buffer, Dim]]:
        """Yield the offsets of the first elements of vector accesses in ``loop``."""
        for made in [self._vectors[id(s)] for s in walk(loop.body) if id(s) in self._vectors]:
            for buffer, index in accesses_in_iteration(made.loop):
                yield buffer, _first_element_offset(made, buffer, index)

    def _emit_straight_line_vectors(self, made: VectorLoop) -> None:
        """Emit a loop as straight-line vectors."""
        self._indices.push()
        self._scalars.append({})
        iteration = _Vectors(self, made)
        for at, lanes in made.pieces():
            iteration.write(at, lanes)
        self._scalars.pop()
        self._indices.pop()


def _first_element_offset(made: VectorLoop, buffer: Buffer, index: tuple[Dim, ...]) -> Dim:
    return element_offset_at_iteration(buffer, index, made.loop.var, made.loop.begin)


class _Vectors:
    """The values of a loop's iterations as vectors; an iteration is a lane."""

    def __init__(self, emitter: VectorEmitter, made: VectorLoop) -> None:
        self.emitter, self.made, self.builder = emitter, made, emitter.builder
        self.same: dict[tuple[int, int], ir.Value] = {}
        self.firsts: dict[tuple[str, tuple[Dim, ...]], ir.Value] = {}  # addresses
        self.at, self.lanes, self.done = 0, made.lanes, dict[int, ir.Value]()
        self.known: dict[str, ir.Value] = {}

    def write(self, at: int, lanes: int) -> None:
        """Emit ``lanes`` loop iterations from ``at`` on as one vector."""
        self.at, self.lanes = at, lanes
        for s in self.made.loop.body:
            self.done = {}
            match s:
                case Let(var=var, value=value) if id(value) in self.made.differing:
                    self.known[var.name] = self.of(value)
                case Let() if at == 0:
                    self.emitter.keep(s)
                case Store(buffer=buffer, index=index, value=value):
                    self.store(self.of(value), buffer, self.place(buffer, index, at))

    def place(self, buffer: Buffer, index: tuple[Dim, ...], at: int) -> ir.Value:
        """Return the address of the elements of the iterations from ``at`` on."""
        if (buffer.name, index) not in self.firsts:
            self.firsts[buffer.name, index] = self.emitter.address(
                buffer, _first_element_offset(self.made, buffer, index)
            )
        first = self.firsts[buffer.name, index]
        return self.builder.gep(first, [i64(at)], source_etype=memory_type(buffer.dtype)) if at else first

    def loaded(self, node: Load, at: int, lanes: int) -> ir.Value:
        """Load the elements of ``lanes`` iterations from ``at`` on."""
        kind = ir.VectorType(memory_type(node.buffer.dtype), lanes)
        place = self.place(node.buffer, node.index, at)
        found = self.builder.load(place, typ=kind, align=size_of(node.buffer.dtype))
        return self.builder.trunc(found, ir.VectorType(I1, lanes)) if node.buffer.dtype == "i1" else found

    def store(self, value: ir.Value, buffer: Buffer, place: ir.Value) -> None:
        """Store a vector; conditions are stored as bytes."""
        if buffer.dtype == "i1":
            value = self.builder.zext(value, ir.VectorType(I8, self.lanes))
        self.builder.store(value, place, align=size_of(buffer.dtype))

    def of(self, node: Scalar) -> ir.Value:
        """Return the vector register of a scalar expression."""
        if id(node) not in self.made.differing:
            return self.repeated(node)
        if id(node) not in self.done:
            self.done[id(node)] = self.computed(node)
        return self.done[id(node)]

    def computed(self, node: Scalar) -> ir.Value:
        """Return the vector of a scalar that differs between iterations."""
        match node:
            case Var(name=name):
                return self.known[name]
            case Load():
                kept = self.emitter.kept.get((id(node), self.at))
                return self.loaded(node, self.at, self.lanes) if kept is None else kept
            case Apply(fn="select", args=(condition, *others)):
                differs = id(condition) in self.made.differing
                one = self.of(condition) if differs else self.emitter.scalar(condition)
                return self.builder.select(one, *map(self.of, others))
            case Apply(fn=fn, args=args):
                return self.applied(fn, list(map(self.of, args)))
        raise InternalError(f"kernels: cannot emit a vector of {node!r}")

    def applied(self, fn: str, args: list[ir.Value]) -> ir.Value:
        """Return the result of an operation on vectors."""
        if fn in COMPARISONS:
            return emit_comparison(self.builder, fn, args, "f")
        return (BITWISE if fn in BITWISE else ONE_BY_ONE)[fn](self.builder, *args)

    def repeated(self, node: Scalar) -> ir.Value:
        """Return the broadcast of a loop-invariant scalar."""
        key = (id(node), self.lanes)
        if key not in self.same:
            one = self.emitter.scalar(node)
            assert isinstance(one, ir.Value)
            self.same[key] = self.splat(one)
        return self.same[key]

    def splat(self, one: ir.Value) -> ir.Value:
        """Return a vector of one value."""
        if isinstance(one, ir.Constant):
            return constant_splat(ir.VectorType(one.type, self.lanes), one)
        return broadcast_register(self.builder, one, self.lanes)
