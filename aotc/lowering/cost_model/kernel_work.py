"""Count the work of a kernel from its loop IR: operations by how they execute, bytes by how they are accessed.

An innermost loop with independent iterations and contiguous stores is counted as vectorized. A loop that reads what its
previous iteration wrote is a dependence chain. All other code is scalar. Symbolic extents are replaced by estimates.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod

from aotc.ir.dims.algebra import Dim, Expr, Sym
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import scalars_in, statement_scalars
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.forms.tile_forms import BF16_PAIRS
from aotc.ir.loop.ir import (
    Alloc,
    Apply,
    Buffer,
    Either,
    ExternalCall,
    For,
    If,
    Index,
    Kernel,
    Let,
    Load,
    Scalar,
    Stmt,
    Store,
    Tile,
    Var,
    While,
    walk,
)
from aotc.ir.opset import SCALARS
from aotc.lowering.cost_model.machines import GPU_THREADS, MATRIX_WORK
from aotc.lowering.cost_model.work import UNKNOWN_SIZE, estimated_symbol
from aotc.lowering.threshold import Estimate
from aotc.vmfb.dtypes import kind_of, size_of

_FUNCTIONS: dict[str, Callable[[float, float], float]] = {
    "//": lambda a, b: a // b if b else 0, "%": lambda a, b: a % b if b else 0, "max": max, "min": min,
}  # fmt: skip


@dataclass
class KernelWork:
    """Work of a whole kernel.

    Attributes
    ----------
    vector, scalar, chained : float
        Operations on whole vectors, on single elements, and in dependence chains, each of which waits for the previous
        one.
    tile : float
        Floating-point operations of register tiles, converted to operations of f32 tiles.
    random : list of (float, float)
        Random accesses: the number of elements, and the bytes of the array that they are spread over.
    bytes : float
        Bytes of arguments and results that are accessed, each counted once.
    items : float
        The items of the grid.
    threads : float
        On a GPU: items times the threads of each.
    """

    vector: float = 0.0
    scalar: float = 0.0
    chained: float = 0.0
    tile: float = 0.0
    random: list[tuple[float, float]] = field(default_factory=list)
    bytes: float = 0.0
    items: float = 1.0
    threads: float = 1.0


def evaluate_dim_estimate(e: Dim, values: Mapping[str, float]) -> float:
    """Evaluate the dim ``e``; symbols without a value have their estimated size, at most their bound."""
    if not isinstance(e, Expr):
        return e
    total: float = e.const
    for monomial, coefficient in e.terms:
        part: float = coefficient
        for atom in monomial:
            if isinstance(atom, Sym):
                part *= values[atom.name] if atom.name in values else _assumed_atom_value(atom, values)
            else:
                part *= _FUNCTIONS[atom.fn](
                    evaluate_dim_estimate(atom.a, values), evaluate_dim_estimate(atom.b, values)
                )
        total += part
    return total


def _assumed_atom_value(atom: Sym, values: Mapping[str, float]) -> float:
    if atom.extent is None:
        return float(estimated_symbol(atom.name))
    return min(float(UNKNOWN_SIZE.value), evaluate_dim_estimate(atom.extent, values) - 1)


TENSOR_WORK = Estimate(
    9,
    "cost of one operation on tensor cores, in hundredths of one operation of f32 tiles",
    "400 to 680 TFLOP/s on an H200",
    benchmark="python -m benchmarks gpu products",
)


def work_of_kernel(
    kernel: Kernel, vector_bytes: int, sizes: Mapping[str, int] | None = None, matrices: Collection[str] = ()
) -> KernelWork:
    """Return the work of ``kernel``.

    Parameters
    ----------
    kernel : Kernel
    vector_bytes : int
        The bytes of a vector of the target.
    sizes : mapping of str to int, optional
        The sizes of those of its dims that are known.
    matrices : collection of str
        The forms of tiles that run on a matrix unit.
    """
    counter = _WorkCounter(dict(sizes or {}), vector_bytes, matrices)
    counter.work.items = max(evaluate_dim_estimate(kernel.grid, counter.values), 0.0)
    counter.work.threads = counter.work.items
    if kernel.tiling is not None:
        counter.work.tile = evaluate_dim_estimate(kernel.flops, counter.values) * TENSOR_WORK.value / 100
        counter.work.bytes = sum(map(counter.bytes_of, (*kernel.inputs, *kernel.outputs)))
        counter.work.items = counter.work.threads = GPU_THREADS.value
        return counter.work
    counter.count_block(kernel.body, 1.0, None)
    every = list(walk(kernel.body))
    called = {s.function for s in every if isinstance(s, ExternalCall)}
    transforms = [function for function in called if isinstance(function, Transform)]
    if transforms:
        lanes = vector_bytes // size_of(transforms[0].dtype)
        counter.work.vector += evaluate_dim_estimate(kernel.flops, counter.values) / lanes
    elif called or any(isinstance(s, While) for s in every):  # trip counts are unknown here; ``flops`` has the total
        counted = counter.work.vector + counter.work.scalar + counter.work.chained
        counter.work.scalar += max(evaluate_dim_estimate(kernel.flops, counter.values) - counted, 0.0)
    if counter.tiles:
        counter.work.tile = evaluate_dim_estimate(kernel.flops, counter.values) * counter.tiles
    for buffer in (*kernel.inputs, *kernel.outputs):
        counter.work.bytes += min(counter.touched.get(buffer.name, 0.0), counter.bytes_of(buffer))
    return counter.work


@dataclass(frozen=True, slots=True)
class _Loop:
    """Execution of the innermost loop around a statement: vectorized, as a chain, or scalar.

    ``vector`` and ``scalar`` are the vector and scalar instructions per iteration for one operation of the body.
    ``chain`` is True if each iteration waits for the previous one.
    """

    var: str
    iterations: float
    vector: float = 0.0
    scalar: float = 1.0
    chain: bool = False


PAIRS_WORK = Estimate(
    50,
    "cost of one operation of bf16 tiles, in hundredths of one operation of f32 tiles",
    "on a Zen 5, vdpbf16ps has twice the rate; only CPUs with this instruction have bf16 tiles",
    benchmark="python -m benchmarks ops narrow_products",
)
LINE = Estimate(64, "bytes that memory delivers together", "the cache line of x86-64 and most other CPUs")
LOOP_ENTRY = Estimate(10, "scalar operations before the first iteration of a loop", "from transposes of weights")


@dataclass
class _WorkCounter:
    """Walk the statements of a kernel and add up its work.

    In its methods, ``times`` is the number of executions of a statement. ``values`` has a representative value of each
    loop variable.
    """

    values: dict[str, float]
    vector_bytes: int
    matrices: Collection[str] = ()
    work: KernelWork = field(default_factory=KernelWork)
    touched: dict[str, float] = field(default_factory=dict)  # bytes accessed, by buffer
    data: dict[str, str] = field(default_factory=dict)  # names loaded from memory, with the loop in which they vary
    fixed: set[str] = field(default_factory=set)  # those of them that are the same in the whole kernel
    tiles: float = 0.0  # cost of an operation of the kernel's tiles, relative to one of f32 tiles

    def bytes_of(self, buffer: Buffer) -> float:
        return prod(max(evaluate_dim_estimate(d, self.values), 0.0) for d in buffer.shape) * size_of(buffer.dtype)

    def count_block(self, body: Sequence[Stmt], times: float, loop: _Loop | None) -> None:
        for stmt in body:
            self.count_statement(stmt, times, loop)

    def count_statement(self, stmt: Stmt, times: float, loop: _Loop | None) -> None:
        """Count a statement that executes ``times`` times; each branch of an ``If`` with an ``otherwise`` half of them.

        The trip count of a ``While`` is unknown: its body is counted once, see :func:`work_of_kernel`.
        """
        match stmt:
            case For():
                self.count_loop(stmt, times, loop)
            case If(then=then, otherwise=otherwise):
                self.count_scalars(statement_scalars(stmt), times, loop)
                share = times / 2 if otherwise else times
                self.count_block(then, share, loop)
                self.count_block(otherwise, share, loop)
            case While(cond=cond, body=body):
                self.count_block(cond, times, None)
                self.count_scalars(statement_scalars(stmt), times, None)
                self.count_block(body, times, None)
            case Tile():
                self.tiles = max(self.tiles, self.tile_operation_cost(stmt))
                for buffer in (stmt.a, stmt.out):
                    self.record_bytes(buffer, self.bytes_of(buffer))
                self.record_bytes(stmt.b, self.right_operand_bytes(stmt, times))
            case ExternalCall(args=args) | Either(places=args):
                for buffer, _ in args:
                    self.record_bytes(buffer, self.bytes_of(buffer))
            case Let(var=var, value=value):
                inner = scalars_in([value])
                if any(isinstance(s, Load) or (isinstance(s, Var) and s.name in self.data) for s in inner):
                    self.data[var.name] = loop.var if loop and self.varies_in_loop(value, loop.var) else ""
                    if all(self.is_same_in_kernel(part) for part in inner):
                        self.fixed.add(var.name)
                self.count_scalars([value], times, loop)
            case Store(buffer=buffer, index=index):
                self.count_scalars(statement_scalars(stmt), times, loop)
                self.count_operations(1.0 if stmt.reduce else 0.0, times, loop)
                self.count_access(buffer, index, times, loop)

    def tile_operation_cost(self, tile: Tile) -> float:
        """Return the cost of an operation of a tile, relative to one of an f32 tile."""
        size = size_of(tile.b.dtype)
        if tile.form.dot_product_dtype in self.matrices:
            return MATRIX_WORK.value / 100 * size / 2
        return PAIRS_WORK.value / 100 if tile.form == BF16_PAIRS else max(size / 4, 1.0)

    def right_operand_bytes(self, tile: Tile, times: float) -> float:
        """Return the bytes of ``b`` that a tile reads: the whole array, or a slice whose position is loaded."""
        if {s.name for s in symbols(tile.b_base)}.isdisjoint(self.data):
            return self.bytes_of(tile.b)
        terms = prod(evaluate_dim_estimate(extent, self.values) for extent, _, _ in tile.levels) * tile.form.group
        return times * terms * tile.cols * size_of(tile.b.dtype)

    def is_same_in_kernel(self, part: Scalar) -> bool:
        """Return True if a part of a scalar is the same wherever the kernel computes it."""
        if isinstance(part, Load):
            return part.buffer.space == "global" and not any(symbols(e) for e in part.index)
        if isinstance(part, Var):
            return part.name in self.fixed
        return not isinstance(part, Index) or not symbols(part.expr)

    def varies_in_loop(self, value: Scalar, var: str) -> bool:
        """Return True if ``value`` differs between iterations of the loop over ``var``."""
        inner = scalars_in([value])
        names = {s.name for part in inner if isinstance(part, Load) for e in part.index for s in symbols(e)}
        names |= {part.name for part in inner if isinstance(part, Var)}
        return var in names or any(self.data.get(name) == var for name in names)

    def count_loop(self, stmt: For, times: float, loop: _Loop | None) -> None:
        """Count a loop that executes ``times`` times.

        An unrolled loop, or one with a single iteration, does not count as a loop of its own: its body belongs to the
        enclosing loop.
        """
        begin, end = (evaluate_dim_estimate(e, self.values) for e in (stmt.begin, stmt.end))
        iterations = max(-(-(end - begin) // stmt.step), 0.0)
        self.values[stmt.var] = (
            begin if iterations < 4 else (begin + end) // 2
        )  # not the last one, which may be partial
        if stmt.kind == "thread":
            self.work.threads *= max(iterations, 1.0)
        if loop is not None and not _is_counted_loop(stmt):
            self.count_block(stmt.body, times * iterations, loop)
            return
        inner = self.classify_innermost_loop(stmt, iterations)
        self.count_operations(1.0, times * iterations, inner)
        if stmt.kind != "parallel":
            self.count_operations(LOOP_ENTRY.value, times, None)
        if inner.chain:
            self.work.chained += times * (iterations - 1)
        self.count_block(stmt.body, times * iterations, inner)

    def classify_innermost_loop(self, stmt: For, iterations: float) -> _Loop:
        """Return how a loop body executes: vectorized with a scalar remainder, as a dependence chain, or scalar.

        A loop is not vectorized if it contains a loop, a tile or a call, or if it is spread over items or threads. It
        is a chain if it loads what it stores: from another index of the same buffer, or from one that stays the same.
        """
        inside = list(walk(stmt.body))
        alone = any(isinstance(s, While | Tile | ExternalCall) or _is_counted_loop(s) for s in inside)
        if stmt.kind in ("parallel", "thread") or alone or not iterations:
            return _Loop(stmt.var, iterations)
        own = {s.buffer.name for s in inside if isinstance(s, Alloc)}
        scalars = [x for s in inside for x in scalars_in(statement_scalars(s))]
        loads = [x for x in scalars if isinstance(x, Load)]
        for s in inside:
            if isinstance(s, Store) and not s.reduce and s.buffer.name not in own:
                same_buffer = [x for x in loads if x.buffer.name == s.buffer.name]
                if any(x.index != s.index or not self.access_stride(s.buffer, s.index, stmt.var) for x in same_buffer):
                    return _Loop(stmt.var, iterations, chain=True)
        widths = [size_of(x.dtype) for x in scalars if isinstance(x, Load | Apply)]
        stored = [size_of(s.buffer.dtype) for s in inside if isinstance(s, Store)]
        lanes = max(self.vector_bytes // max([*widths, *stored, 1]), 1)
        while lanes > iterations:
            lanes //= 2
        return _Loop(stmt.var, iterations, iterations // lanes / iterations, iterations % lanes / iterations)

    def count_operations(self, operations: float, times: float, loop: _Loop | None) -> None:
        """Count operations that execute ``times`` times in ``loop``."""
        self.work.vector += operations * times * loop.vector if loop else 0.0
        self.work.scalar += operations * times * loop.scalar if loop else operations * times

    def count_scalars(self, values: Iterable[Scalar], times: float, loop: _Loop | None) -> None:
        """Count the functions and loads of ``values``, which are computed ``times`` times."""
        for part in scalars_in(values):
            if isinstance(part, Apply):
                self.count_operations(_vector_operation_weight(part), times, loop)
            elif isinstance(part, Load):
                self.count_access(part.buffer, part.index, times, loop)

    def count_access(self, buffer: Buffer, index: tuple[Dim, ...], times: float, loop: _Loop | None) -> None:
        """Count an element that is read or written ``times`` times, by its stride between iterations of the loop.

        Stride 0 is loaded once before the loop, 1 and -1 are vector accesses. Larger strides are scalar accesses that
        use only part of each cache line. An index that was loaded from memory makes random accesses.
        """
        size = size_of(buffer.dtype)
        names = {s.name for e in index for s in symbols(e)} if self.data else set()
        names -= self.fixed
        stride = self.access_stride(buffer, index, loop.var) if loop else 0.0
        if names:
            moved = loop is None or any(self.data.get(name) == loop.var for name in names)
            self.work.random.append(
                (times if moved or not loop else times / max(loop.iterations, 1), self.bytes_of(buffer))
            )
            stride = size if moved else stride
        if loop and stride == 0:
            times /= max(loop.iterations, 1.0)
        self.record_bytes(buffer, times * size)
        if loop is None or stride in (0, 1, -1):
            self.count_operations(1.0, times, loop if stride else None)
            return
        self.count_operations(1.0, times, None)
        if buffer.space == "global" and not names:
            self.work.random.append((times * min(abs(stride) * size / LINE.value, 1.0), self.bytes_of(buffer)))

    def access_stride(self, buffer: Buffer, index: tuple[Dim, ...], var: str) -> float:
        """Return the distance in elements between the accesses of successive iterations of the loop over ``var``."""
        before = self.element_address(buffer, index)
        self.values[var] += 1
        after = self.element_address(buffer, index)
        self.values[var] -= 1
        return after - before

    def element_address(self, buffer: Buffer, index: tuple[Dim, ...]) -> float:
        """Return the estimated row-major offset of an element, in elements."""
        at = 0.0
        for e, extent in zip(index, buffer.shape):
            at = at * evaluate_dim_estimate(extent, self.values) + evaluate_dim_estimate(e, self.values)
        return at

    def record_bytes(self, buffer: Buffer, size: float) -> None:
        self.touched[buffer.name] = self.touched.get(buffer.name, 0.0) + size


def _is_counted_loop(stmt: Stmt) -> bool:
    return isinstance(stmt, For) and stmt.kind != "unroll" and (stmt.begin, stmt.end) != (0, 1)


COMPLEX_WORK = Estimate(4, "operations on real numbers for one operation on complex numbers")
INTEGER_DIVISION = Estimate(
    120,
    "vector operations that one division of integers counts as; it is computed lane by lane",
    "in the unit of vector_work in the op table",
    benchmark="python -m benchmarks costs",
)


def _vector_operation_weight(s: Apply) -> float:
    """Return the number of vector operations that one operation ``s`` counts as."""
    row = SCALARS.get(s.fn)
    work = row.vector_work if row else 1
    kind = kind_of(s.dtype)
    if work > 1 and kind in "iu":
        return INTEGER_DIVISION.value
    return work * COMPLEX_WORK.value if kind == "c" else work
