"""The loop IR: kernels as loops over buffers; a kernel prints as a Python function.

Index arithmetic is the algebra of ``ir.dims``, with loop variables and kernel dims as symbols; values are the scalar
expressions below. ``printer`` prints a kernel as Python, ``parser`` reads it back, ``verify`` checks it, and ``run``
executes the printed Python with NumPy.

A kernel is launched for a range of its grid, the ``parallel`` loop at the top. The launcher splits that loop into
ranges, so its iterations must be independent.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from aotc.ir.dims.algebra import Dim
from aotc.ir.loop.forms.fft import Transform
from aotc.ir.loop.forms.tile_forms import F32, TileForm
from aotc.ir.loop.forms.tiling import Tiling

Space: TypeAlias = Literal["global", "private", "shared", "scratch"]
LoopKind: TypeAlias = Literal["parallel", "serial", "unroll", "lanes", "thread", "blocks"]


@dataclass(frozen=True, slots=True)
class Buffer:
    """Row-major memory: ``name: dtype[shape]``.

    ``space`` is ``global`` (a kernel parameter), ``private`` (registers or stack of one iteration; small, static),
    ``scratch`` (per-worker memory from the arena if its size is static, else from the C library; CPU) or ``shared``
    (CUDA block memory; static).
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
    """The element of a buffer at ``index``: one index per dim, in elements, in bounds."""

    buffer: Buffer
    index: tuple[Dim, ...]

    @property
    def dtype(self) -> str:
        """Return the element type of the buffer."""
        return self.buffer.dtype


@dataclass(frozen=True, slots=True)
class Apply:
    """A scalar op of ``ir.opset.elementwise.SCALARS`` on scalars, e.g. ``add``, ``exp``, ``lt``.

    ``dtype`` is the dtype of the result, which ``convert`` and ``bitcast`` convert to.
    """

    fn: str
    args: tuple[Scalar, ...]
    dtype: str


Scalar: TypeAlias = Const | Index | Var | Load | Apply

# --- statements --------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class For:
    """``for var in range(begin, end, step)``; ``kind`` determines how it runs.

    Iterations of kind ``lanes`` are independent except for reducing stores, and their number is static. A GPU thread
    runs each statement of the body for all lanes before the next statement, with vector loads and stores of contiguous
    elements. Iterations of kind ``blocks`` are distributed round-robin to all blocks of a cooperative launch.
    """

    var: str
    begin: Dim
    end: Dim
    body: tuple[Stmt, ...]
    kind: LoopKind = "serial"
    step: int = 1


@dataclass(frozen=True, slots=True)
class Let:
    """Bind ``value`` to a variable; index expressions may refer to an integer variable by name."""

    var: Var
    value: Scalar


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[index] = value``.

    ``reduce`` (``add``, ``mul``, ``max``, ``min``, or empty) makes it ``buffer[index] = reduce(buffer[index], value)``
    with a free order of combination, so that a reduction loop can be vectorized. ``atomic``: other items of the grid
    may update the same element at the same time (CUDA).
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
    """Allocate a private, scratch or shared buffer for the rest of the block (uninitialized)."""

    buffer: Buffer


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Hint that ``buffer[index]`` will be read soon: a CPU may prefetch its cache line.

    The element must be in bounds, as for a load, but it need not be written yet.
    """

    buffer: Buffer
    index: tuple[Dim, ...]


@dataclass(frozen=True, slots=True)
class Barrier:
    """Wait for all threads of a CUDA block, or of a ``warp`` only; their writes are then visible."""

    warp: bool = False


@dataclass(frozen=True, slots=True)
class GridBarrier:
    """Wait for all blocks of a CUDA kernel; their writes are then visible.

    The blocks count themselves in ``counter``, a u32 in global memory. It must be 0 before the kernel starts;
    afterwards all of its bits but the highest are 0.
    """

    counter: Buffer


WARP = 32
"""Threads of a warp, which a GPU runs together; they can read each other's registers."""


@dataclass(frozen=True, slots=True)
class Shuffle:
    """``to[t] = source[t ^ mask]`` for each thread ``t`` of a CUDA block; ``mask`` stays within a warp of 32.

    ``to`` and ``source`` are private buffers with one element for each thread of the block, allocated outside of the
    loops over threads.
    """

    to: Buffer
    source: Buffer
    mask: int


@dataclass(frozen=True, slots=True)
class WarpMatch:
    """``to[t]`` is the mask of threads in ``t``'s warp with the same lowest ``bits`` bits of ``source`` as ``t``.

    Thread 0 is the lowest bit. ``to`` and ``source`` are private u32 buffers as in :class:`Shuffle`.
    """

    to: Buffer
    source: Buffer
    bits: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Register-tiled matmul ``out[i, j] = sum_k a[i, k] * b[k, j]``.

    Shape ``rows x cols``; ``k`` runs over the loop nest ``levels`` (outermost first). Element ``a[i, k]`` is at flat
    offset ``a_base + i*a_row + sum(k_l*a_step_l)`` of buffer ``a``. Row ``k`` of ``b`` starts at
    ``b_base + sum(k_l*b_step_l)``, and its ``cols`` elements are contiguous. ``out[i, j]`` is at
    ``out_base + i*out_row + j``. All offsets are in elements.

    If ``b_column`` is not 0, it is the stride between columns of ``b``, and the terms of the only level are contiguous
    in both operands: a tile of dot products, with any ``cols``. If ``b_inner`` is not 0, it is the stride between the
    terms of a group in ``b``; each term is contiguous with those of the neighbouring columns. With ``adds`` the sums
    are added to ``out``.

    Attributes
    ----------
    levels : tuple of (extent, a_step, b_step)
        The contraction loops.
    form : TileForm
        The dtypes and the layout of ``b``. In a form with groups a step of the innermost level is a group of k, whose
        elements are contiguous in each of the ``cols`` columns of b. In a scaled form of two levels the first counts
        groups of k, whose terms follow the scales of the columns (:mod:`aotc.ir.loop.forms.quantized`).
    a_inner : Dim
        In forms with several ``k`` in a step of the innermost level (whose extent and steps count such groups): the
        stride from one ``k`` to the next in ``a``.
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
    form: TileForm = F32
    a_inner: Dim = 1
    b_column: Dim = 0
    b_inner: Dim = 0
    adds: bool = False


@dataclass(frozen=True, slots=True)
class ExternalCall:
    """Call a library function that the bundle imports and the loader resolves, e.g. ``dgetrf``, or a transform.

    Fortran's calling convention: every argument is the address of an element. A private u8 scalar is a character, an
    integer is an i64.
    """

    function: str | Transform
    args: tuple[tuple[Buffer, tuple[Dim, ...]], ...]


@dataclass(frozen=True, slots=True)
class Either:
    """Define ``buffer``, for the rest of the block, as memory that starts at one of two elements of other buffers.

    ``buffer`` starts at the first of ``places`` if ``cond`` is true, else at the second. Both have the dtype of
    ``buffer``, and enough contiguous elements from there on.
    """

    buffer: Buffer
    cond: Scalar
    places: tuple[tuple[Buffer, tuple[Dim, ...]], tuple[Buffer, tuple[Dim, ...]]]


DEVICE_CALL = "device_"
"""Begins the names of users' functions for GPUs: ``device_element_``, ``device_row_`` and ``device_launch_`` follow.

An :class:`ExternalCall` of the first passes single elements, of the second vectors along the last dim, and of the third
whole arrays: each of its threads then calls the function once.
"""


def calls_device_function(kernel: Kernel) -> bool:
    """Return True if a kernel calls a user's function for GPUs."""
    return any(
        isinstance(s, ExternalCall) and isinstance(s.function, str) and s.function.startswith(DEVICE_CALL)
        for s in walk(kernel.body)
    )


COLLECTIVE_CALL = "collective_"
"""The prefix of the names of collectives, GPU kernels whose code is in the runtime."""


def collective_symbol(kernel: Kernel) -> str:
    """Return the symbol of the collective that a GPU kernel stands for; "" for a kernel with code."""
    match kernel.body:
        case (ExternalCall(function=str(name)),) if name.startswith(COLLECTIVE_CALL):
            return name.removeprefix(COLLECTIVE_CALL)
    return ""


def is_self_contained(kernel: Kernel) -> bool:
    """Return True if ``kernel`` runs neither a user's function nor a collective of the runtime."""
    return not calls_device_function(kernel) and not collective_symbol(kernel)


def is_letter(buffer: Buffer) -> bool:
    """Return True if a library call passes ``buffer`` as a character."""
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
        Global buffers, in the order of the call (inputs first). An output may share the memory of an input, as declared
        in ``aliases``.
    dims : tuple of str
        Symbols that are passed as int64 parameters, in order.
    grid : Dim
        Number of iterations of the ``parallel`` loop.
    body : tuple of Stmt
        A ``parallel`` For over ``range(grid)``, or any statements if grid is 1.
    aliases : tuple of (output number, input number)
        Pairs that may share memory.
    flops, bytes : Dim
        Work of the whole grid, for the cost model.
    tiling : Tiling, optional
        The body is a matmul as :mod:`aotc.ir.loop.forms.matmul` reads it, and a template computes it.
    plan : str
        The text of the lowering plan that the kernel was built from, for readers. Kernels that differ only in ``plan``
            are equal.
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
    plan: str = field(default="", compare=False)


def needs_block(kernel: Kernel) -> bool:
    """Return True if the threads of a GPU block run an item of the kernel together."""
    statements = list(walk(kernel.body))
    shared = any(isinstance(s, Barrier | Shuffle | WarpMatch) for s in statements)
    return shared or any(isinstance(s, For) and s.kind == "thread" for s in statements)


def thread_count(kernel: Kernel) -> int:
    """Return the number of threads per block that the loops over threads in ``kernel`` need; 0 without such loops."""
    loops = [s for s in walk(kernel.body) if isinstance(s, For) and s.kind == "thread"]
    return max((s.end for s in loops if isinstance(s.end, int)), default=0)


def needs_grid(kernel: Kernel) -> bool:
    """Return True if all blocks of a launch of the kernel synchronize with each other."""
    return any(isinstance(s, For) and s.kind == "blocks" for s in walk(kernel.body))


def children(stmt: Stmt) -> tuple[tuple[Stmt, ...], ...]:
    """Return the nested blocks of statements of ``stmt``."""
    match stmt:
        case For(body=body):
            return (body,)
        case If(then=then, otherwise=otherwise):
            return (then, otherwise)
        case While(cond=cond, body=body):
            return (cond, body)
    return ()


def walk(body: tuple[Stmt, ...]) -> Iterator[Stmt]:
    """Yield every statement of ``body`` and its nested blocks, outer before inner."""
    stack = list(reversed(body))
    while stack:
        stmt = stack.pop()
        yield stmt
        for block in reversed(children(stmt)):
            stack += reversed(block)
