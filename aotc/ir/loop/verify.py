"""Verify a kernel: every name defined, every dtype right, every provable index in bounds."""

from __future__ import annotations

from dataclasses import dataclass, field

from aotc.ir.dims.algebra import Dim, Expr, bounds, is_static, product, sym
from aotc.ir.dims.compare import is_possible_relation
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.limits import FINDINGS
from aotc.ir.loop.access import accesses, may_overwrite, statement_sizes
from aotc.ir.loop.ir import (
    WARP,
    Alloc,
    Apply,
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
    walk,
)
from aotc.ir.loop.printer import print_kernel
from aotc.ir.loop.types import ATOMIC_DTYPES, loop_symbol, natural_dtype
from aotc.ir.opset import ACCUMULATED, ATOMIC, COMPARISONS, ELEMENTWISE, SCALARS
from aotc.ir.opset.elementwise import check_operand_count, check_operand_dtypes
from aotc.ir.opset.spec import RuleError
from aotc.vmfb.dtypes import DTYPES, kind_of


def verify_kernel(kernel: Kernel) -> list[str]:
    """Return the errors of ``kernel``, one sentence each (at most 20), or an empty list.

    Checked: buffers and symbols are defined before use. An index has one entry per dim and is not provably out of
    bounds. Operands of a scalar op and the value of a store have the right dtype. Private and shared memory has a
    static size. ``parallel`` is the outermost loop and runs over the grid. Every output is written. An output that may
    share an input's memory overwrites nothing that is read later.
    """
    check = _KernelCheck(kernel.name)
    for name in kernel.dims:
        check.symbols[name] = None
    for buffer in (*kernel.inputs, *kernel.outputs):
        check.define_buffer(buffer, kernel.name)
        if buffer.space != "global":
            check.report_error(f"parameter {buffer.name} is in space {buffer.space}, expected global")
    for dim in (kernel.grid, kernel.flops, kernel.bytes):
        check.check_dim(dim, "the header")
    check.check_block(kernel.body)
    _check_grid(kernel, check)
    _check_outputs(kernel, check)
    for output, source in kernel.aliases:
        if not (0 <= output < len(kernel.outputs) and 0 <= source < len(kernel.inputs)):
            check.report_error(f"alias ({output}, {source}) names no output or input")
        elif not may_overwrite(accesses(kernel.body), kernel.inputs[source], kernel.outputs[output]):
            a, out = kernel.inputs[source].name, kernel.outputs[output].name
            check.report_error(
                f"{out} may not take the memory of {a}, which is not only read where {out} is then written"
            )
    try:
        print_kernel(kernel)
    except ValueError as error:
        check.report_error(str(error))
    return check.found[:FINDINGS]


def _check_grid(kernel: Kernel, check: _KernelCheck) -> None:
    """Check that a parallel loop is the only outermost statement and runs over the grid; without it the grid is 1."""
    parallel = [s for s in kernel.body if isinstance(s, For) and s.kind == "parallel"]
    if parallel and len(kernel.body) != 1:
        check.report_error("a parallel loop is not the only statement of the kernel")
    for loop in parallel:
        if (loop.begin, loop.step) != (0, 1) or loop.end != kernel.grid:
            check.report_error(
                f"the parallel loop runs over ({loop.begin}, {loop.end}, {loop.step}), the grid is {kernel.grid}"
            )
    if not parallel and kernel.grid != 1:
        check.report_error(f"the grid is {kernel.grid} and there is no parallel loop")


def _check_outputs(kernel: Kernel, check: _KernelCheck) -> None:
    """Check that every output is written, unless it has no elements."""
    written: set[str] = set()
    for stmt in walk(kernel.body):
        match stmt:
            case Store(buffer=out) | Tile(out=out):
                written.add(out.name)
            case GridBarrier(counter=counter):
                written.add(counter.name)
            case ExternalCall(args=args) | Either(places=args):
                written.update(buffer.name for buffer, _ in args)
    for out in kernel.outputs:
        if out.name not in written and product(out.shape) != 0:
            check.report_error(f"output {out.name} is never written")


@dataclass(slots=True)
class _KernelCheck:
    """Verifier of one kernel; it records the definitions in scope and the errors that it finds."""

    name: str
    found: list[str] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    symbols: dict[str, Dim | None] = field(default_factory=dict)
    """Name to an expression with the widest true range; None: any symbol of that name is trusted."""
    scalars: dict[str, Var] = field(default_factory=dict)
    depth: int = 0
    never: bool = False
    """True inside a loop without iterations, or behind a test that never holds: indices need not be in bounds there."""

    def report_error(self, message: str) -> None:
        self.found.append(f"kernel {self.name}: {message}")

    # --- names ---

    def define_buffer(self, buffer: Buffer, where: str) -> None:
        """Check the dtype and shape of a buffer, and define its name."""
        if buffer.dtype not in DTYPES:
            self.report_error(f"{where}: buffer {buffer.name} has unknown dtype {buffer.dtype}")
        for dim in buffer.shape:
            self.check_dim(dim, f"the shape of {buffer.name}")
        self.buffers[buffer.name] = buffer

    def check_buffer_is_defined(self, buffer: Buffer, where: str) -> None:
        """Report a buffer that is not defined, or differs from its definition."""
        definition = self.buffers.get(buffer.name)
        if definition is None:
            self.report_error(f"{where}: buffer {buffer.name} is not defined here")
        elif definition is not buffer and definition != buffer:
            self.report_error(f"{where}: buffer {buffer.name} differs from its definition")

    def check_dim(self, e: Dim, where: str) -> None:
        for symbol in symbols(e):
            if symbol.name not in self.symbols:
                self.report_error(f"{where}: {symbol.name} is not defined here")

    def check_element(self, buffer: Buffer, index: tuple[Dim, ...], where: str) -> None:
        """Check that an index has an entry per dim, and that no entry is provably out of bounds."""
        self.check_buffer_is_defined(buffer, where)
        if len(index) != len(buffer.shape):
            self.report_error(f"{where}: {buffer.name} has {len(buffer.shape)} dims, the index has {len(index)}")
            return
        for position, (i, extent) in enumerate(zip(index, buffer.shape)):
            self.check_dim(i, where)
            if self.never:
                continue
            low, high = bounds(i)
            room = bounds(extent)[1]
            if (high is not None and high < 0) or (low is not None and room is not None and low >= room):
                self.report_error(f"{where}: index {i} of dim {position} is never below {extent}")
            elif self.provably_overruns(i, extent):
                self.report_error(f"{where}: index {i} of dim {position} reaches beyond [0, {extent})")

    def provably_overruns(self, i: Dim, extent: Dim) -> bool:
        """Return True if index ``i``, a sum of independent static loop variables, provably leaves ``[0, extent)``."""
        if not isinstance(i, Expr) or isinstance(extent, Expr):
            return False
        names = [atom.name for monomial, _ in i.terms for atom in monomial if not hasattr(atom, "fn")]
        exact = len(names) == len(i.terms) == len(set(names)) and all(self.symbols.get(n) is not None for n in names)
        if not exact or self.depth:
            return False
        low, high = bounds(substitute(i, {n: self.symbols[n] or 0 for n in names}))
        return (low is not None and low < 0) or (high is not None and high >= extent)

    # --- statements ---

    def check_block(self, body: tuple[Stmt, ...]) -> None:
        """Check statements in order; names that they define end with the block."""
        saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
        for stmt in body:
            if len(self.found) >= FINDINGS:
                break
            self.check_statement(stmt)
        self.buffers, self.symbols, self.scalars = saved

    def check_statement(self, stmt: Stmt) -> None:
        """Check a statement and the statements nested in it."""
        match stmt:
            case Store():
                self.check_store(stmt)
            case Let(var, value):
                self.check_scalar(value)
                if value.dtype != var.dtype:
                    self.report_error(f"{var.name}: {var.dtype} is bound to a value of {value.dtype}")
                self.scalars[var.name] = var
                if kind_of(var.dtype) in "iu":
                    self.symbols[var.name] = None
            case For():
                self.check_loop(stmt)
            case If(cond, then, otherwise):
                self.check_predicate(cond)
                self.depth += 1
                saved_never, self.never = self.never, self.never or _is_false(cond)
                self.check_block(then)
                self.never = saved_never
                self.check_block(otherwise)
                self.depth -= 1
            case While(cond, pred, body):
                # The body sees the names that the condition defines; statements after the loop do not.
                saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
                for inner in cond:
                    self.check_statement(inner)
                self.check_predicate(pred)
                self.depth += 1
                self.check_block(body)
                self.depth -= 1
                self.buffers, self.symbols, self.scalars = saved
            case Alloc(buffer):
                self.check_alloc(buffer)
            case Prefetch(buffer, index):
                self.check_element(buffer, index, f"prefetch of {buffer.name}")
            case GridBarrier(counter):
                self.check_buffer_is_defined(counter, "grid_barrier")
                if (counter.space, counter.dtype, counter.shape) != ("global", "u32", ()):
                    self.report_error(f"grid_barrier: {counter.name} is not a u32 in global memory")
            case Shuffle(to, source, mask):
                self.check_shuffle(to, source, mask)
            case WarpMatch(to, source, bits):
                self.check_warp_match(to, source, bits)
            case Tile():
                self.check_tile(stmt)
            case ExternalCall(function, args):
                self.check_library_call(f"call of {function}", args)
            case Either(buffer, cond, places):
                self.check_predicate(cond)
                self.check_library_call(f"either for {buffer.name}", places)
                if any(b.dtype != buffer.dtype for b, _ in places) or buffer.space != "scratch":
                    self.report_error(
                        f"either for {buffer.name}: no {buffer.dtype} in {buffer.space} is one of {places}"
                    )
                self.define_buffer(buffer, "either")

    def check_alloc(self, buffer: Buffer) -> None:
        """Define a local buffer; only scratch memory may have a symbolic size."""
        self.define_buffer(buffer, "alloc")
        if buffer.space == "global":
            self.report_error(f"buffer {buffer.name} is allocated in global memory")
        if not is_static(buffer.shape) and buffer.space != "scratch":
            self.report_error(f"{buffer.space} buffer {buffer.name} has the symbolic size {product(buffer.shape)}")

    def check_warp_match(self, to: Buffer, source: Buffer, bits: int) -> None:
        self.check_thread_buffers("match", to, source)
        if to.dtype != "u32" or not 0 < bits <= WARP or (source.shape and source.shape[0] % WARP):
            self.report_error(f"match: {bits} bits of {source.dtype} in warps of {WARP}, of {source.shape}")

    def check_thread_buffers(self, name: str, to: Buffer, source: Buffer) -> None:
        """Check that both buffers have one private element per thread, of one dtype."""
        for buffer in (to, source):
            self.check_buffer_is_defined(buffer, name)
            if buffer.space != "private" or len(buffer.shape) != 1:
                self.report_error(f"{name}: {buffer.name} has no element for each thread")
        if (to.dtype, to.shape) != (source.dtype, source.shape):
            self.report_error(f"{name}: {to.name} and {source.name} are of two types")

    def check_shuffle(self, to: Buffer, source: Buffer, mask: int) -> None:
        """Check the buffers and the lane mask of a shuffle."""
        self.check_thread_buffers("shuffle", to, source)
        if not 0 < mask < WARP or mask & (mask - 1) or (source.shape and source.shape[0] % WARP):
            self.report_error(
                f"shuffle: {mask} changes no bit of a thread's number in a warp of {WARP}, of {source.shape}"
            )

    def check_library_call(self, where: str, args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]) -> None:
        """Check a library call; its addresses may be out of bounds, as those of empty buffers are."""
        for buffer, index in args:
            self.check_buffer_is_defined(buffer, where)
            if len(index) != len(buffer.shape):
                self.report_error(f"{where}: {buffer.name} has {len(buffer.shape)} dims, the index has {len(index)}")
            for i in index:
                self.check_dim(i, where)

    def check_store(self, stmt: Store) -> None:
        """Check the element, the dtype of the value, and the reduction of a store."""
        where = f"store to {stmt.buffer.name}"
        self.check_element(stmt.buffer, stmt.index, where)
        self.check_scalar(stmt.value)
        if stmt.value.dtype != stmt.buffer.dtype:
            self.report_error(f"{where}: the value is {stmt.value.dtype}, the buffer {stmt.buffer.dtype}")
        if stmt.reduce and stmt.reduce not in (ATOMIC if stmt.atomic else ACCUMULATED):
            self.report_error(f"{where}: unknown reduction {stmt.reduce}")
        if stmt.atomic and stmt.buffer.dtype not in ATOMIC_DTYPES:
            self.report_error(f"{where}: no atomic {stmt.reduce or 'store'} of {stmt.buffer.dtype}")

    def check_loop(self, stmt: For) -> None:
        """Check the bounds, the step and the body of a loop.

        In the body the loop variable has the range of the loop if that is static and every index occurs. Indices in a
        loop without iterations are not compared with bounds.
        """
        where = f"loop {stmt.var}"
        self.check_dim(stmt.begin, where)
        self.check_dim(stmt.end, where)
        if stmt.step < 1:
            self.report_error(f"{where}: the step is {stmt.step}")
        if stmt.kind == "lanes" and not is_static((stmt.begin, stmt.end)):
            self.report_error(f"{where}: lanes from {stmt.begin} to {stmt.end} are not counted")
        symbol = loop_symbol(stmt.var, stmt.begin, stmt.end)
        exact = is_static((stmt.begin, stmt.end)) and stmt.step == 1 and bounds(stmt.end - stmt.begin)[0] != 0
        saved = dict(self.symbols)
        self.symbols[stmt.var] = sym(symbol.name, symbol.lo, symbol.extent) if exact else None
        never, most = self.never, bounds(stmt.end - stmt.begin)[1]
        self.never = never or (most is not None and most <= 0)
        self.check_block(stmt.body)
        self.symbols, self.never = saved, never

    def check_tile(self, t: Tile) -> None:
        """Check that the buffers and symbols of a tile are defined, and that it is not empty."""
        for buffer in (t.out, t.a, t.b):
            self.check_buffer_is_defined(buffer, "tile")
        for dim in statement_sizes(t):
            self.check_dim(dim, "tile")
        if t.rows < 1 or t.cols < 1:
            self.report_error(f"tile: {t.rows} x {t.cols} is empty")

    # --- scalars ---

    def check_predicate(self, cond: Scalar) -> None:
        self.check_scalar(cond)
        if cond.dtype != "i1":
            self.report_error(f"a condition is {cond.dtype}, expected i1")

    def check_scalar(self, root: Scalar) -> None:
        """Check a scalar expression: definitions, indices, and the dtypes of all operands."""
        stack = [root]
        while stack:
            s = stack.pop()
            match s:
                case Var(name, dtype):
                    definition = self.scalars.get(name)
                    if definition is None:
                        self.report_error(f"scalar {name} is not defined here")
                    elif definition.dtype != dtype:
                        self.report_error(f"scalar {name} is {definition.dtype}, used as {dtype}")
                case Load(buffer, index):
                    self.check_element(buffer, index, f"load of {buffer.name}")
                case Index(expr, dtype):
                    self.check_dim(expr, "index")
                    if kind_of(dtype) not in "iu":
                        self.report_error(f"index {expr} as {dtype} is not an integer")
                case Apply():
                    self.check_apply(s)
                    stack += s.args

    def check_apply(self, s: Apply) -> None:
        """Check the number and the dtypes of a scalar op's operands, and its result dtype."""
        row = SCALARS.get(s.fn)
        dtypes = tuple(a.dtype for a in s.args)
        if row is None:
            if s.fn not in ELEMENTWISE:
                self.report_error(f"unknown scalar op {s.fn}")
            return
        try:
            check_operand_count(row, len(dtypes))
            check_operand_dtypes(row, dtypes)
            expected = natural_dtype(s.fn, dtypes)
        except RuleError as error:
            self.report_error(str(error))
            return
        if expected is not None and expected != s.dtype:
            self.report_error(f"{s.fn} of {', '.join(dtypes)} is {expected}, not {s.dtype}")


def _is_false(test: Scalar) -> bool:
    """Return True if ``test`` is a comparison of index expressions that is provably false."""
    match test:
        case Apply(fn, (left, right)) if fn in COMPARISONS:
            a, b = _index_as_dim(left), _index_as_dim(right)
            return a is not None and b is not None and not is_possible_relation(fn, a, b)
    return False


def _index_as_dim(x: Scalar) -> Dim | None:
    """Return the dim of an index or integer constant; None for another scalar."""
    match x:
        case Index(expr=expr):
            return expr
        case Const(value=int(value)):
            return value
    return None
