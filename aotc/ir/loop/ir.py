"""The loop IR: kernels as loops over buffers; it prints as a Python function.

Index arithmetic is the algebra of ``ir.dims`` (loop variables and kernel
dims are symbols); values are the scalar expressions below. ``printer``
prints a kernel as Python, ``parser`` reads it back, ``verify`` checks
it, and ``run`` executes the printed Python with NumPy.

A kernel is called for a range of its grid: the one ``parallel`` loop at the top
is cut into ranges by whoever launches it, so its iterations must be independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, TypeAlias

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.forms.tiling import Tiling

Space: TypeAlias = Literal["global", "private", "shared", "scratch"]
LoopKind: TypeAlias = Literal["parallel", "serial", "unroll", "lanes", "thread", "blocks"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Row-major memory: ``name: dtype[shape]``.

    ``space`` is ``global`` (a kernel parameter), ``private`` (registers or
    stack of one iteration; small, static), ``scratch`` (per-worker memory from
    the arena if its size is static, else from the C library; CPU) or ``shared`` (CUDA block memory; static).
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    space: Space = "global"


# --- scalar expressions ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Const:
    """A literal; ``value`` is a Python bool, int, float or complex of ``dtype``."""

    value: bool | int | float | complex
    dtype: str


@dataclass(frozen=True, slots=True)
class Index:
    """An index expression as a scalar of an integer ``dtype`` (i64 arithmetic, then truncated)."""

    expr: Dim
    dtype: str = "i64"


@dataclass(frozen=True, slots=True)
class Var:
    """A scalar bound by :class:`Let`."""

    name: str
    dtype: str


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a buffer; one index per dim, in elements, in bounds."""

    buffer: Buffer
    index: tuple[Dim, ...]

    @property
    def dtype(self) -> str:
        """Return the element type of the buffer."""
        return self.buffer.dtype


@dataclass(frozen=True, slots=True)
class Apply:
    """A scalar op of ``ir.opset.elementwise.SCALARS`` on scalars, e.g. ``add``, ``exp``, ``lt``.

    ``dtype`` is that of the result. ``convert`` and ``bitcast`` take it as target.
    """

    fn: str
    args: tuple[Scalar, ...]
    dtype: str


Scalar: TypeAlias = Const | Index | Var | Load | Apply

# --- statements --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class For:
    """``for var in range(begin, end, step)``; ``kind`` says how it runs.

    Iterations of kind ``lanes`` are independent but for stores that reduce, and their number is static: a GPU's thread
    does a statement for all of them before the next, and neighbouring elements of memory at once. Those of kind
    ``blocks`` are shared by all blocks of a launch that runs at once: each does every so many.
    """

    var: str
    begin: Dim
    end: Dim
    body: tuple[Stmt, ...]
    kind: LoopKind = "serial"
    step: int = 1


@dataclass(frozen=True, slots=True)
class Let:
    """Bind a scalar. An integer may then be used in index expressions by name."""

    var: Var
    value: Scalar


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[index] = value``.

    ``reduce`` (``add``, ``mul``, ``max``, ``min``, or empty) makes it
    ``buffer[index] = reduce(buffer[index], value)`` where the order of
    combination is free, which is what lets a reduction loop vectorize. ``atomic`` says that
    other items of the grid may do the same to this element at the same time (CUDA).
    """

    buffer: Buffer
    index: tuple[Dim, ...]
    value: Scalar
    reduce: str = ""
    atomic: bool = False


@dataclass(frozen=True, slots=True)
class If:
    """``if cond: then else: otherwise``; ``cond`` is an ``i1`` scalar."""

    cond: Scalar
    then: tuple[Stmt, ...]
    otherwise: tuple[Stmt, ...] = ()


@dataclass(frozen=True, slots=True)
class While:
    """``while True: <cond>; if not pred: break; <body>``."""

    cond: tuple[Stmt, ...]
    pred: Scalar
    body: tuple[Stmt, ...]


@dataclass(frozen=True, slots=True)
class Alloc:
    """Make a private, scratch or shared buffer for the rest of the block (not initialised)."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Prefetch:
    """``buffer[index]`` will be read soon: a CPU may fetch its cache line; nothing else happens.

    The element is there, as one that is loaded, but its value is not asked for: what writes it need not have done so.
    """

    buffer: Buffer
    index: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait for all threads of a CUDA block, or for those of a ``warp`` of it alone: what they wrote is then seen."""

    warp: bool = False


@dataclass(frozen=True, slots=True)
class GridBarrier:
    """Wait for all blocks of a CUDA kernel: what they wrote is then seen.

    They count themselves in ``counter``, a u32 in global memory that is 0 before the kernel begins, and after it in all
    bits but the highest.
    """

    counter: Buffer


WARP = 32
"""Threads of a GPU that run together and read each other's registers."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """``to[t] = source[t ^ mask]`` for each thread ``t`` of a CUDA block; ``mask`` stays within a warp of 32.

    Both are private buffers made outside of the loops over threads, with an element for each thread of the block.
    """

    to: Buffer
    source: Buffer
    mask: int


@dataclass(frozen=True, slots=True)
class WarpMatch:
    """``to[t]`` says which threads of ``t``'s warp have the lowest ``bits`` bits of ``source`` as ``t`` has them.

    A bit for each thread, the first one's the lowest. Both are private buffers of u32, as those of :class:`Shuffle`.
    """

    to: Buffer
    source: Buffer
    bits: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Register-tiled product ``out[i, j] = sum_k a[i, k] * b[k, j]``.

    Shape ``rows x cols``; ``k`` runs over the nest ``levels`` (outermost first).
    Element ``a[i, k]`` is at flat offset ``a_base + i*a_row + sum(k_l*a_step_l)``
    of buffer ``a``; row ``k`` of ``b`` starts at ``b_base + sum(k_l*b_step_l)``
    and its ``cols`` elements are contiguous; ``out[i, j]`` is at ``out_base +
    i*out_row + j``. All in elements of their buffer.

    If ``b_column`` is not 0, columns of ``b`` lie so far apart, and the terms of the only level side by side in both
    operands: a tile of dot products, of any number of ``cols``. If ``b_inner`` is not 0, the terms of a group lie so
    far apart in ``b``, each beside those of its neighbour columns. If it ``adds``, the sums are added to what ``out``
    holds.

    Attributes
    ----------
    levels : tuple of (extent, a_step, b_step)
        The contraction loops.
    form : str
        ``f32``, ``f64`` (plain FMA), ``f32_bf16``, ``f32_f16``, ``f32_s8``: a is f32, b is bf16, f16, i8; ``bf16``: a
        is f32 or bf16, b is bf16 pairs; ``i8``: a i8 or u8, b i8 (k quads), out i32. A step of the innermost level is
        then a group of k, whose elements lie side by side in each of the ``cols`` columns of b. ``i8_o8``:
        the same with b plus 128, of unpacked operands alone. ``f32_i8``, ``f32_i4``, ``bf16_i8`` and ``bf16_i4``: a is
        f32 or bf16, b the bytes of weights of so many bits: of two levels, the first counts runs of k, whose steps lie
        behind the scales of its columns (:mod:`aotc.ir.loop.forms.quantized`).
    a_inner : Dim
        In forms that take several ``k`` in one step of the innermost level (whose
        extent and steps count such groups): from one ``k`` to the next in ``a``.
    """

    rows: int
    cols: int
    out: Buffer
    out_base: Dim
    out_row: Dim
    a: Buffer
    a_base: Dim
    a_row: Dim
    b: Buffer
    b_base: Dim
    levels: tuple[tuple[Dim, Dim, Dim], ...]
    form: str = "f32"
    a_inner: Dim = 1
    b_column: Dim = 0
    b_inner: Dim = 0
    adds: bool = False


@dataclass(frozen=True, slots=True)
class ExternalCall:
    """Call a function of a library that the bundle names and the loader finds, e.g. ``dgetrf``, or a transform.

    Fortran's convention: every argument is the address of an element. A private u8
    scalar is a character, an integer is an i64.
    """

    function: str
    args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]


@dataclass(frozen=True, slots=True)
class Either:
    """In the rest of the block ``buffer`` is the memory from the first place on if ``cond`` holds, else from the other.

    Both are of its dtype and have as many elements from there on, one after the other.
    """

    buffer: Buffer
    cond: Scalar
    places: tuple[tuple[Buffer, tuple[Dim, ...]], tuple[Buffer, tuple[Dim, ...]]]


def is_letter(buffer: Buffer) -> bool:
    """Is an argument of a call in ``buffer`` a character?"""
    return buffer.space == "private" and buffer.dtype == "u8" and not buffer.shape


Stmt: TypeAlias = (
    For
    | Let
    | Store
    | If
    | While
    | Alloc
    | Prefetch
    | Barrier
    | GridBarrier
    | Shuffle
    | WarpMatch
    | Tile
    | ExternalCall
    | Either
)


@dataclass(frozen=True, slots=True)
class Kernel:
    """One launchable function.

    Attributes
    ----------
    name : str
        Unique in the bundle; the exported symbol.
    inputs, outputs : tuple of Buffer
        Global buffers, in the order of the call (inputs first). An output may
        be declared to share the memory of an input in ``aliases``.
    dims : tuple of str
        Symbols that are passed as int64 parameters, in order.
    grid : Dim
        Number of iterations of the ``parallel`` loop.
    body : tuple of Stmt
        A ``parallel`` For over ``range(grid)``, or any statements if grid is 1.
    aliases : tuple of (output number, input number)
        Pairs that may be given the same memory.
    flops, bytes : Dim
        Work of the whole grid, for the cost model.
    tiling : Tiling, optional
        The body is a product as :mod:`aotc.ir.loop.forms.matmul` reads it, and is computed so.
    """

    name: str
    inputs: tuple[Buffer, ...]
    outputs: tuple[Buffer, ...]
    dims: tuple[str, ...]
    grid: Dim
    body: tuple[Stmt, ...]
    aliases: tuple[tuple[int, int], ...] = ()
    flops: Dim = 0
    bytes: Dim = 0
    tiling: Tiling | None = None


def needs_block(kernel: Kernel) -> bool:
    """Does a block of threads run an item of ``kernel`` together?"""
    statements = list(walk(kernel.body))
    shared = any(isinstance(s, Barrier | Shuffle | WarpMatch) for s in statements)
    return shared or any(isinstance(s, For) and s.kind == "thread" for s in statements)


def thread_count(kernel: Kernel) -> int:
    """Return the threads of a block that the loops over threads of ``kernel`` are for, 0 if it has none."""
    loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.kind == "thread"]
    return max((s.end for s in loops if isinstance(s.end, int)), default=0)


def needs_grid(kernel: Kernel) -> bool:
    """Do all blocks of a launch run ``kernel`` together?"""
    return any(isinstance(s, For) and s.kind == "blocks" for s in walk(kernel.body))


def children(stmt: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """Return the blocks of statements inside ``stmt``."""
    match stmt:
        case For(body=body):
            return (body,)
        case If(then=then, otherwise=otherwise):
            return (then, otherwise)
        case While(cond=cond, body=body):
            return (cond, body)
    return ()


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Yield every statement, outer before inner."""
    stack = list(reversed(body))
    while stack:
        stmt = stack.pop()
        yield stmt
        for block in reversed(children(stmt)):
            stack += reversed(block)
