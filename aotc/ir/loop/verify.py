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
from aotc.ir.opset.elementwise import check_count, check_dtypes
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
        check.buffer(buffer, kernel.name)
        if buffer.space != "global":
            check.report(f"parameter {buffer.name} is in space {buffer.space}, expected global")
    for dim in (kernel.grid, kernel.flops, kernel.bytes):
        check.dim(dim, "the header")
    check.block(kernel.body)
    _check_grid(kernel, check)
    _check_outputs(kernel, check)
    for output, source in kernel.aliases:
        if not (0 <= output < len(kernel.outputs) and 0 <= source < len(kernel.inputs)):
            check.report(f"alias ({output}, {source}) names no output or input")
        elif not may_overwrite(accesses(kernel.body), kernel.inputs[source], kernel.outputs[output]):
            a, out = kernel.inputs[source].name, kernel.outputs[output].name
            check.report(f"{out} may not take the memory of {a}, which is not only read where {out} is then written")
    try:
        print_kernel(kernel)
    except ValueError as error:
        check.report(str(error))
    return check.found[:FINDINGS]


def _check_grid(kernel: Kernel, check: _KernelCheck) -> None:
    parallel = [s for s in kernel.body if isinstance(s, For) and s.kind == "parallel"]
    if parallel and len(kernel.body) != 1:
        check.report("a parallel loop is not the only statement of the kernel")
    for loop in parallel:
        if (loop.begin, loop.step) != (0, 1) or loop.end != kernel.grid:
            check.report(
                f"the parallel loop runs over ({loop.begin}, {loop.end}, {loop.step}), the grid is {kernel.grid}"
            )
    if not parallel and kernel.grid != 1:
        check.report(f"the grid is {kernel.grid} and there is no parallel loop")


def _check_outputs(kernel: Kernel, check: _KernelCheck) -> None:
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
            check.report(f"output {out.name} is never written")


@dataclass(slots=True)
class _KernelCheck:
    name: str
    found: list[str] = field(default_factory=list)
    buffers: dict[str, Buffer] = field(default_factory=dict)
    symbols: dict[str, Dim | None] = field(default_factory=dict)
    """Name to an expression with the widest true range; None: any symbol of that name is trusted."""
    scalars: dict[str, Var] = field(default_factory=dict)
    depth: int = 0
    never: bool = False
    """True inside a loop without iterations, or behind a test that never holds: indices need not be in bounds there."""

    def report(self, message: str) -> None:
        self.found.append(f"kernel {self.name}: {message}")

    # --- names ---

    def buffer(self, buffer: Buffer, where: str) -> None:
        if buffer.dtype not in DTYPES:
            self.report(f"{where}: buffer {buffer.name} has unknown dtype {buffer.dtype}")
        for dim in buffer.shape:
            self.dim(dim, f"the shape of {buffer.name}")
        self.buffers[buffer.name] = buffer

    def use(self, buffer: Buffer, where: str) -> None:
        known = self.buffers.get(buffer.name)
        if known is None:
            self.report(f"{where}: buffer {buffer.name} is not defined here")
        elif known is not buffer and known != buffer:
            self.report(f"{where}: buffer {buffer.name} differs from its definition")

    def dim(self, e: Dim, where: str) -> None:
        for symbol in symbols(e):
            if symbol.name not in self.symbols:
                self.report(f"{where}: {symbol.name} is not defined here")

    def element(self, buffer: Buffer, index: tuple[Dim, ...], where: str) -> None:
        self.use(buffer, where)
        if len(index) != len(buffer.shape):
            self.report(f"{where}: {buffer.name} has {len(buffer.shape)} dims, the index has {len(index)}")
            return
        for position, (i, extent) in enumerate(zip(index, buffer.shape)):
            self.dim(i, where)
            if self.never:
                continue
            low, high = bounds(i)
            room = bounds(extent)[1]
            if (high is not None and high < 0) or (low is not None and room is not None and low >= room):
                self.report(f"{where}: index {i} of dim {position} is never below {extent}")
            elif self.overruns(i, extent):
                self.report(f"{where}: index {i} of dim {position} reaches beyond [0, {extent})")

    def overruns(self, i: Dim, extent: Dim) -> bool:
        """Does index ``i``, a sum of independent static loop variables, leave ``[0, extent)`` for certain?"""
        if not isinstance(i, Expr) or isinstance(extent, Expr):
            return False
        names = [atom.name for monomial, _ in i.terms for atom in monomial if not hasattr(atom, "fn")]
        exact = len(names) == len(i.terms) == len(set(names)) and all(self.symbols.get(n) is not None for n in names)
        if not exact or self.depth:
            return False
        low, high = bounds(substitute(i, {n: self.symbols[n] or 0 for n in names}))
        return (low is not None and low < 0) or (high is not None and high >= extent)

    # --- statements ---

    def block(self, body: tuple[Stmt, ...]) -> None:
        saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
        for stmt in body:
            if len(self.found) >= FINDINGS:
                break
            self.statement(stmt)
        self.buffers, self.symbols, self.scalars = saved

    def statement(self, stmt: Stmt) -> None:
        match stmt:
            case Store():
                self.store(stmt)
            case Let(var, value):
                self.scalar(value)
                if value.dtype != var.dtype:
                    self.report(f"{var.name}: {var.dtype} is bound to a value of {value.dtype}")
                self.scalars[var.name] = var
                if kind_of(var.dtype) in "iu":
                    self.symbols[var.name] = None
            case For():
                self.loop(stmt)
            case If(cond, then, otherwise):
                self.predicate(cond)
                self.depth += 1
                saved_never, self.never = self.never, self.never or _is_false(cond)
                self.block(then)
                self.never = saved_never
                self.block(otherwise)
                self.depth -= 1
            case While(cond, pred, body):
                saved = dict(self.buffers), dict(self.symbols), dict(self.scalars)
                for inner in cond:
                    self.statement(inner)
                self.predicate(pred)
                self.depth += 1
                self.block(body)
                self.depth -= 1
                self.buffers, self.symbols, self.scalars = saved
            case Alloc(buffer):
                self.alloc(buffer)
            case Prefetch(buffer, index):
                self.element(buffer, index, f"prefetch of {buffer.name}")
            case GridBarrier(counter):
                self.use(counter, "grid_barrier")
                if (counter.space, counter.dtype, counter.shape) != ("global", "u32", ()):
                    self.report(f"grid_barrier: {counter.name} is not a u32 in global memory")
            case Shuffle(to, source, mask):
                self.shuffle(to, source, mask)
            case WarpMatch(to, source, bits):
                self.match(to, source, bits)
            case Tile():
                self.tile(stmt)
            case ExternalCall(function, args):
                self.call(f"call of {function}", args)
            case Either(buffer, cond, places):
                self.predicate(cond)
                self.call(f"either for {buffer.name}", places)
                if any(b.dtype != buffer.dtype for b, _ in places) or buffer.space != "scratch":
                    self.report(f"either for {buffer.name}: no {buffer.dtype} in {buffer.space} is one of {places}")
                self.buffer(buffer, "either")

    def alloc(self, buffer: Buffer) -> None:
        self.buffer(buffer, "alloc")
        if buffer.space == "global":
            self.report(f"buffer {buffer.name} is allocated in global memory")
        if not is_static(buffer.shape) and buffer.space != "scratch":
            self.report(f"{buffer.space} buffer {buffer.name} has the symbolic size {product(buffer.shape)}")

    def match(self, to: Buffer, source: Buffer, bits: int) -> None:
        self.of_threads("match", to, source)
        if to.dtype != "u32" or not 0 < bits <= WARP or (source.shape and source.shape[0] % WARP):
            self.report(f"match: {bits} bits of {source.dtype} in warps of {WARP}, of {source.shape}")

    def of_threads(self, name: str, to: Buffer, source: Buffer) -> None:
        for buffer in (to, source):
            self.use(buffer, name)
            if buffer.space != "private" or len(buffer.shape) != 1:
                self.report(f"{name}: {buffer.name} has no element for each thread")
        if (to.dtype, to.shape) != (source.dtype, source.shape):
            self.report(f"{name}: {to.name} and {source.name} are of two types")

    def shuffle(self, to: Buffer, source: Buffer, mask: int) -> None:
        self.of_threads("shuffle", to, source)
        if not 0 < mask < WARP or mask & (mask - 1) or (source.shape and source.shape[0] % WARP):
            self.report(f"shuffle: {mask} changes no bit of a thread's number in a warp of {WARP}, of {source.shape}")

    def call(self, where: str, args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]) -> None:
        """Check a library call; its addresses may be out of bounds, as those of empty buffers are."""
        for buffer, index in args:
            self.use(buffer, where)
            if len(index) != len(buffer.shape):
                self.report(f"{where}: {buffer.name} has {len(buffer.shape)} dims, the index has {len(index)}")
            for i in index:
                self.dim(i, where)

    def store(self, stmt: Store) -> None:
        where = f"store to {stmt.buffer.name}"
        self.element(stmt.buffer, stmt.index, where)
        self.scalar(stmt.value)
        if stmt.value.dtype != stmt.buffer.dtype:
            self.report(f"{where}: the value is {stmt.value.dtype}, the buffer {stmt.buffer.dtype}")
        if stmt.reduce and stmt.reduce not in (ATOMIC if stmt.atomic else ACCUMULATED):
            self.report(f"{where}: unknown reduction {stmt.reduce}")
        if stmt.atomic and stmt.buffer.dtype not in ATOMIC_DTYPES:
            self.report(f"{where}: no atomic {stmt.reduce or 'store'} of {stmt.buffer.dtype}")

    def loop(self, stmt: For) -> None:
        where = f"loop {stmt.var}"
        self.dim(stmt.begin, where)
        self.dim(stmt.end, where)
        if stmt.step < 1:
            self.report(f"{where}: the step is {stmt.step}")
        if stmt.kind == "lanes" and not is_static((stmt.begin, stmt.end)):
            self.report(f"{where}: lanes from {stmt.begin} to {stmt.end} are not counted")
        symbol = loop_symbol(stmt.var, stmt.begin, stmt.end)
        exact = is_static((stmt.begin, stmt.end)) and stmt.step == 1 and bounds(stmt.end - stmt.begin)[0] != 0
        saved = dict(self.symbols)
        self.symbols[stmt.var] = sym(symbol.name, symbol.lo, symbol.extent) if exact else None
        never, most = self.never, bounds(stmt.end - stmt.begin)[1]
        self.never = never or (most is not None and most <= 0)
        self.block(stmt.body)
        self.symbols, self.never = saved, never

    def tile(self, t: Tile) -> None:
        for buffer in (t.out, t.a, t.b):
            self.use(buffer, "tile")
        for dim in statement_sizes(t):
            self.dim(dim, "tile")
        if t.rows < 1 or t.cols < 1:
            self.report(f"tile: {t.rows} x {t.cols} is empty")

    # --- scalars ---

    def predicate(self, cond: Scalar) -> None:
        self.scalar(cond)
        if cond.dtype != "i1":
            self.report(f"a condition is {cond.dtype}, expected i1")

    def scalar(self, root: Scalar) -> None:
        stack = [root]
        while stack:
            s = stack.pop()
            match s:
                case Var(name, dtype):
                    known = self.scalars.get(name)
                    if known is None:
                        self.report(f"scalar {name} is not defined here")
                    elif known.dtype != dtype:
                        self.report(f"scalar {name} is {known.dtype}, used as {dtype}")
                case Load(buffer, index):
                    self.element(buffer, index, f"load of {buffer.name}")
                case Index(expr, dtype):
                    self.dim(expr, "index")
                    if kind_of(dtype) not in "iu":
                        self.report(f"index {expr} as {dtype} is not an integer")
                case Apply():
                    self.apply(s)
                    stack += s.args

    def apply(self, s: Apply) -> None:
        row = SCALARS.get(s.fn)
        dtypes = tuple(a.dtype for a in s.args)
        if row is None:
            if s.fn not in ELEMENTWISE:
                self.report(f"unknown scalar op {s.fn}")
            return
        try:
            check_count(row, len(dtypes))
            check_dtypes(row, dtypes)
            expected = natural_dtype(s.fn, dtypes)
        except RuleError as error:
            self.report(str(error))
            return
        if expected is not None and expected != s.dtype:
            self.report(f"{s.fn} of {', '.join(dtypes)} is {expected}, not {s.dtype}")


def _is_false(test: Scalar) -> bool:
    """Is ``test`` a comparison of index expressions that is provably false?"""
    match test:
        case Apply(fn, (left, right)) if fn in COMPARISONS:
            a, b = _index_as_dim(left), _index_as_dim(right)
            return a is not None and b is not None and not is_possible_relation(fn, a, b)
    return False


def _index_as_dim(x: Scalar) -> Dim | None:
    match x:
        case Index(expr=expr):
            return expr
        case Const(value=int(value)):
            return value
    return None
