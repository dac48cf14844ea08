"""Emit a kernel's loop IR as LLVM IR: one iteration of the kernel's grid becomes one function.

The function is ``void body(ptr buffers, ptr dims, i64 item, ptr scratch, ptr monitor)``; emitters for other devices may
have other parameters. The caller adds a loop over items or a thread index.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from llvmlite import ir

from aotc.diagnostics import InternalError
from aotc.ir.dims.algebra import Dim, Expr, is_static, product
from aotc.ir.loop.access import is_any_test_loop, max_number_buffers
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Barrier,
    Buffer,
    Const,
    Either,
    ExternalCall,
    For,
    GridBarrier,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Prefetch,
    Scalar,
    Shuffle,
    Stmt,
    Store,
    Tile,
    Var,
    WarpMatch,
    While,
    is_letter,
)
from aotc.ir.loop.scratch import buffer_bytes, scratch_layout
from aotc.kernels.emit import library, memory, scalar
from aotc.kernels.emit.convert import convert_register
from aotc.kernels.emit.index import IndexEmitter, flat_index
from aotc.kernels.emit.metadata import LoopMetadata, mark_load_invariant
from aotc.kernels.emit.poll import CancellationPolls
from aotc.kernels.emit.vector.transposes import emit_transposed, match_transposing_copy
from aotc.kernels.llvm_types import I8, I64, PTR, VOID, Register, i64, memory_type
from aotc.targets import Target
from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.dtypes import DTYPES, size_of

EmitTile = Callable[["BodyEmitter", Tile], None]
Emitter = Callable[[ir.IRBuilder, Kernel, Target, EmitTile], "BodyEmitter"]
PARAMETERS = (PTR, PTR, I64, PTR, PTR)


def emit_body(
    module: ir.Module, name: str, kernel: Kernel, target: Target, emit_tile: EmitTile,
    emitter: Emitter | None = None, parameters: Sequence[ir.Type] = PARAMETERS,
) -> ir.Function:  # fmt: skip
    """Add the LLVM function that runs one grid item of ``kernel`` to ``module``.

    Parameters
    ----------
    module : llvmlite.ir.Module
        Receives the function and the functions that it calls.
    name : str
        Its name; it is ``alwaysinline`` and has external linkage.
    kernel : Kernel
        The loop IR.
    target : Target
        The machine; only tiles depend on it.
    emit_tile : callable
        ``emit_tile(context, stmt)`` emits a :class:`Tile` statement.
    emitter : callable, optional
        Creates the emitter of the statements, by default :class:`BodyEmitter`.
    parameters : sequence of llvmlite.ir.Type, optional
        The types of the function's parameters.

    Raises
    ------
    InternalError
        If the loop IR uses a name, op or dtype that does not exist.
    """
    function = ir.Function(module, ir.FunctionType(VOID, parameters), name)
    function.attributes.add("alwaysinline")
    function.attributes.add("nounwind")
    entry = ir.IRBuilder(function.append_basic_block("entry"))
    body = (emitter or BodyEmitter)(entry, kernel, target, emit_tile)
    body.emit()
    body.builder.ret_void()
    return function


def _load_buffer_pointer(builder: ir.IRBuilder, number: int) -> ir.Value:
    """Load pointer ``number`` from the function's table of buffers, which nothing writes during the kernel."""
    table = builder.function.args[0]
    address = builder.gep(table, [i64(number)], inbounds=True, source_etype=PTR)
    return mark_load_invariant(builder.load(address, typ=PTR))


class BodyEmitter:
    """Emitter of the statements of a kernel; also the interface that register tiles use.

    Attributes
    ----------
    builder : llvmlite.ir.IRBuilder
        Where statements are emitted.
    target : Target
        The machine.
    """

    metadata = LoopMetadata

    def __init__(self, builder: ir.IRBuilder, kernel: Kernel, target: Target, emit_tile: EmitTile) -> None:
        self.builder, self.kernel, self.target = builder, kernel, target
        self._emit_tile = emit_tile
        self._indices = self.create_index_emitter(builder)
        self._scalars: list[dict[str, Register]] = [{}]
        self._pointers: dict[str, ir.Value] = {}
        self._scratch, self._unsettled = scratch_layout(kernel)[0], max_number_buffers(kernel)
        self._heap: list[list[ir.Value]] = []  # addresses to free at the end of each open block

    @staticmethod
    def create_index_emitter(builder: ir.IRBuilder) -> IndexEmitter:
        """Create the emitter of index expressions."""
        return IndexEmitter(builder)

    def emit(self) -> None:
        """Emit the whole body of the kernel."""
        item = self._bind_parameters()
        self._metadata = self.metadata(self.builder.module, self.kernel, self.target, self._scratch)
        self._polls = CancellationPolls(self.builder, self.kernel) if self.target.kind == "cpu" else None
        match self.kernel.body:
            case (For(kind="parallel") as loop,):
                begin = self._indices.emit(loop.begin)
                step = self.builder.mul(item, i64(loop.step), flags=("nsw",))
                self._indices.bind_name(loop.var, self.builder.add(begin, step, flags=("nsw",)))
                self._emit_block(loop.body)
            case body:
                self._emit_block(body)

    # --- buffers ---

    def _bind_parameters(self) -> ir.Value:
        """Bind the names of buffers and dims to the function's parameters; return the index of the item in the grid."""
        kernel, builder = self.kernel, self.builder
        buffers = (*kernel.inputs, *kernel.outputs)
        for number, buffer in enumerate(buffers):
            self._pointers[buffer.name] = _load_buffer_pointer(builder, number)
        table = builder.function.args[1]
        for number, name in enumerate(kernel.dims):
            address = builder.gep(table, [i64(number)], inbounds=True, source_etype=I64)
            self._indices.bind_name(name, mark_load_invariant(builder.load(address, typ=I64)))
        return builder.function.args[2]

    def address(self, buffer: Buffer, flat: Dim) -> ir.Value:
        """Return the pointer to element ``flat`` (a flat index) of ``buffer``."""
        pointer = self._pointers.get(buffer.name)
        if pointer is None:
            raise InternalError(f"kernels: {self.kernel.name} uses the unknown buffer {buffer.name!r}")
        kind = memory_type(buffer.dtype)
        folded = self._indices.fold_unrolled_variables(flat)
        if DTYPES[buffer.dtype].kind == "c":
            folded = folded * 2
        if not isinstance(folded, Expr) and folded == 0:
            return pointer
        return self.builder.gep(pointer, [self._indices.emit(folded)], inbounds=True, source_etype=kind)

    def index(self, dim: Dim) -> ir.Value:
        """Return the value of ``dim`` as an i64."""
        return self._indices.emit(dim)

    def _element_address(self, buffer: Buffer, index: tuple[Dim, ...]) -> ir.Value:
        """Return the pointer to the element of ``buffer`` at a multi-dimensional index."""
        if len(index) != len(buffer.shape):
            raise InternalError(f"kernels: {len(index)} indices for {buffer.name} of rank {len(buffer.shape)}")
        return self.address(buffer, flat_index(buffer, index))

    # --- scalars ---

    def scalar(self, expression: Scalar) -> Register:
        """Emit a scalar expression and return its register; an expression object that is used twice is emitted once."""
        done = self._registers_of_block()
        stack: list[Scalar] = [expression]
        while stack:
            node = stack[-1]
            if id(node) in done:
                stack.pop()
                continue
            waiting = [a for a in node.args if id(a) not in done] if isinstance(node, Apply) else []
            if waiting:
                stack += reversed(waiting)
                continue
            done[id(node)] = self._emit_scalar_node(node, done)
            stack.pop()
        return done[id(expression)]

    def _registers_of_block(self) -> dict[int, Register]:
        """Return the registers of scalars that have already been emitted in this block, by ``id()`` of the scalar."""
        return {}

    def _emit_scalar_node(self, node: Scalar, done: dict[int, Register]) -> Register:
        """Emit one node of a scalar expression; ``done`` has the registers of its operands, by ``id()``."""
        match node:
            case Const(value=value, dtype=dtype):
                return scalar.literal_register(value, dtype)
            case Index(expr=expr, dtype=dtype):
                return convert_register(self.builder, self._indices.emit(expr), "i64", dtype)
            case Var(name=name):
                return self._load_variable(name)
            case Load(buffer=buffer, index=index):
                address, annotate = self._element_address(buffer, index), self._metadata.access_annotation(buffer)
                found = memory.load_element(self.builder, address, buffer.dtype, annotate)
                return memory.freeze_value(self.builder, found, not index) if buffer.name in self._unsettled else found
            case Apply(fn=fn, args=args, dtype=dtype):
                values, dtypes = [done[id(a)] for a in args], [a.dtype for a in args]
                return scalar.emit_scalar_op(self.builder, fn, values, dtypes, dtype)
        raise InternalError(f"kernels: unknown scalar {node!r}")

    def _load_variable(self, name: str) -> Register:
        """Return the register of a scalar variable, from the innermost block that defines it."""
        for frame in reversed(self._scalars):
            if name in frame:
                return frame[name]
        raise InternalError(f"kernels: {self.kernel.name} uses the unknown scalar {name!r}")

    # --- statements ---

    def _emit_block(self, body: tuple[Stmt, ...]) -> None:
        """Emit statements in a new scope of names and heap memory; free that memory at the end."""
        self._indices.enter_block()
        self._scalars.append({})
        self._heap.append([])
        for stmt in body:
            self._emit_statement(stmt)
        for address in self._heap.pop():
            library.emit_free(self.builder, address)
        self._scalars.pop()
        self._indices.leave_block()

    def _emit_statement(self, stmt: Stmt) -> None:
        """Emit a statement by the method of its class."""
        match stmt:
            case For(kind="unroll" | "lanes") if not is_any_test_loop(stmt):
                self._emit_unrolled_loop(stmt)
            case For() if self.target.kind == "cpu" and (copy := match_transposing_copy(stmt, self.kernel)):
                ends = [self.address(copy.x, copy.x_at), self.address(copy.out, copy.out_at)]
                emit_transposed(self.builder, [*ends, self.index(copy.x_row), self.index(copy.out_row)], copy)
            case For():
                self._emit_loop(stmt)
            case Let(var=var, value=value):
                self._emit_let(var, self.scalar(value))
            case Store(atomic=True):
                raise InternalError("kernels: a CPU kernel has no atomic stores")
            case Store():
                self._emit_store(stmt)
            case If():
                self._emit_if(stmt)
            case While():
                self._emit_while(stmt)
            case Alloc(buffer=buffer):
                self._emit_alloc(buffer)
            case Prefetch(buffer=buffer, index=index):
                memory.prefetch_cache_line(self.builder, self._element_address(buffer, index))
            case Tile():
                self._emit_tile(self, stmt)
            case Either(buffer=buffer, cond=cond, places=(first, second)):
                one, other = self._element_address(*first), self._element_address(*second)
                self._pointers[buffer.name] = self.builder.select(self.scalar(cond), one, other)
            case ExternalCall(function=function, args=args):
                if self._polls is not None:
                    self._polls.emit_poll(self._heap)
                places = [self._element_address(buffer, index) for buffer, index in args]
                library.call_fortran_function(self.builder, function, places, sum(is_letter(b) for b, _ in args))
            case Barrier() | GridBarrier() | Shuffle() | WarpMatch():
                raise InternalError("kernels: a CPU kernel has no threads to wait for")

    def _emit_let(self, var: Var, value: Register) -> None:
        """Bind a variable to a register; integers can also be used in index expressions."""
        self._scalars[-1][var.name] = value
        if DTYPES[var.dtype].kind in "iu":
            self._indices.bind_name(var.name, convert_register(self.builder, value, var.dtype, "i64"))

    def _emit_store(self, stmt: Store) -> None:
        """Emit a store, or the combination of a value with the stored one if the statement reduces."""
        buffer, value = stmt.buffer, self.scalar(stmt.value)
        address, annotate = self._element_address(buffer, stmt.index), self._metadata.access_annotation(buffer)
        if stmt.reduce:
            old = memory.load_element(self.builder, address, buffer.dtype, annotate)
            value = scalar.emit_combination(self.builder, stmt.reduce, old, value, buffer.dtype)
        memory.store_element(self.builder, value, address, buffer.dtype, annotate)

    def _emit_alloc(self, buffer: Buffer) -> None:
        """Emit the allocation of a local buffer: on the heap, in thread-local scratch memory, or on the stack.

        Scratch buffers of unknown size come from the heap; private buffers are on the stack.
        """
        if buffer.space == "scratch" and not is_static(buffer.shape):
            size = self._indices.emit(
                self._indices.fold_unrolled_variables(product(buffer.shape) * size_of(buffer.dtype))
            )
            self._pointers[buffer.name] = address = library.emit_malloc(self.builder, size)
            self._heap[-1].append(address)
            return
        if buffer.space == "scratch":
            offset = i64(self._scratch[buffer.name])
            base = self.builder.function.args[3]
            self._pointers[buffer.name] = self.builder.gep(base, [offset], inbounds=True, source_etype=I8)
            return
        kind = memory_type(buffer.dtype)
        count = buffer_bytes(buffer) // size_of(buffer.dtype) * (2 if DTYPES[buffer.dtype].kind == "c" else 1)
        with self.builder.goto_entry_block():
            local = self.builder.alloca(ir.ArrayType(kind, max(count, 1)), name=buffer.name)
            local.align = ALIGNMENT if count > 1 else size_of(buffer.dtype)
            local.type = PTR  # llvmlite's pointer is typed: it rejects stores of floats
        self._pointers[buffer.name] = local

    def _emit_unrolled_loop(self, loop: For) -> None:
        """Emit the body of a loop once for each value of its variable."""
        begin, end = self._indices.fold_unrolled_variables(loop.begin), self._indices.fold_unrolled_variables(loop.end)
        if isinstance(begin, Expr) or isinstance(end, Expr):
            raise InternalError(f"kernels: the unrolled loop {loop.var} has a symbolic range")
        for value in range(begin, end, loop.step):
            self._indices.bind_number(loop.var, value)
            self._emit_block(loop.body)
            self._indices.unbind_number(loop.var)

    def _emit_loop(self, loop: For) -> None:
        """Emit a rotated loop, as LLVM's loop passes expect: a test before the loop, then one at the bottom."""
        builder = self.builder
        if self.kernel.dims:
            self._indices.hoist_divisions(loop)
        begin_dim, end_dim = (
            self._indices.fold_unrolled_variables(loop.begin),
            self._indices.fold_unrolled_variables(loop.end),
        )
        base, iterations = None, end_dim - begin_dim
        if isinstance(iterations, int) and isinstance(begin_dim, Expr) and self.target.kind == "cpu":
            # The number of iterations is constant, which LLVM does not derive from two bounds.
            base, begin_dim, end_dim = self._indices.emit(begin_dim), 0, iterations
        begin, end = self._indices.emit(begin_dim), self._indices.emit(end_dim)
        body, after = builder.append_basic_block(loop.var), builder.append_basic_block("after_" + loop.var)
        if isinstance(begin_dim, int) and isinstance(end_dim, int):
            if end_dim <= begin_dim:
                builder.branch(after)
                builder.position_at_end(after)
                builder.function.blocks.remove(body)
                return
            builder.branch(body)
        else:
            builder.cbranch(builder.icmp_signed("<", begin, end), body, after)
        backedge = self._emit_iterations(loop, (begin, end, i64(loop.step)), body, after, base)
        self._metadata.annotate_loop(loop, backedge)

    def _emit_iterations(
        self, loop: For, steps: tuple[ir.Value, ir.Value, ir.Value], body: ir.Block, after: ir.Block,
        base: ir.Value | None = None,
    ) -> ir.Instruction:  # fmt: skip
        """Emit a loop from begin to end by step, and return its back edge; ``base`` is added to the loop variable."""
        builder, (begin, end, step) = self.builder, steps
        before = builder.block
        builder.position_at_end(body)
        variable = builder.phi(I64, name=loop.var)
        variable.add_incoming(begin, before)
        self._indices.enter_block()
        self._indices.bind_name(loop.var, variable if base is None else builder.add(base, variable, flags=("nsw",)))
        self._emit_iteration_start(loop)
        self._emit_block(loop.body)
        self._indices.leave_block()
        following = builder.add(variable, step, flags=("nsw",))
        variable.add_incoming(following, builder.block)
        backedge = builder.cbranch(builder.icmp_signed("<", following, end), body, after)
        builder.position_at_end(after)
        return backedge

    def _emit_iteration_start(self, loop: Stmt) -> None:
        """Emit the start of an iteration: a poll for cancellation; GPU kernels do not poll."""
        if self._polls is not None:
            self._polls.emit_iteration_poll(loop, self._heap)

    def _emit_if(self, stmt: If) -> None:
        """Emit a conditional with basic blocks for both arms."""
        condition = self.scalar(stmt.cond)
        builder = self.builder
        then, after = builder.append_basic_block("then"), builder.append_basic_block("end_if")
        otherwise = builder.append_basic_block("else") if stmt.otherwise else after
        builder.cbranch(condition, then, otherwise)
        builder.position_at_end(then)
        self._emit_block(stmt.then)
        builder.branch(after)
        if stmt.otherwise:
            builder.position_at_end(otherwise)
            self._emit_block(stmt.otherwise)
            builder.branch(after)
        builder.position_at_end(after)

    def _emit_while(self, stmt: While) -> None:
        """Emit a loop that tests its condition before each iteration."""
        builder = self.builder
        test, body, after = (builder.append_basic_block(n) for n in ("while", "do", "end_while"))
        builder.branch(test)
        builder.position_at_end(test)
        self._emit_iteration_start(stmt)
        self._indices.enter_block()
        self._scalars.append({})
        for inner in stmt.cond:
            self._emit_statement(inner)
        builder.cbranch(self.scalar(stmt.pred), body, after)
        builder.position_at_end(body)
        self._emit_block(stmt.body)
        builder.branch(test)
        builder.position_at_end(after)
        self._scalars.pop()
        self._indices.leave_block()
