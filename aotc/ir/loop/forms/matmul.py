"""Matmuls in the loop IR: the form of a kernel whose ``tiling`` is a matmul, and the layout of its operands in memory.

The body of the kernel is plain loops, which define the meaning. A code template computes the same on tensor cores::

    for z in range(0, batch):
        for row in range(0, m):
            for col in range(0, n):
                total = private("f32[]")
                total[()] = f32(0.0)
                for k in range(0, depth):
                    total[()] += convert(a[z, row, k], "f32") * convert(b[z, k, col], "f32")
                out[z, row, col] = convert(total[()], "bf16")

The loop ``z`` may be missing. Operands have one dtype: 16-bit floats that are widened, f32 that ``reduce_precision``
rounds to :data:`TF32_BITS`, f64, or i8; or two dtypes of 8-bit floats that are widened. The *epilogue*, statements
after the innermost loop, is arbitrary. A *piece* is 16 contiguous, aligned bytes of an operand, the unit of copies to
shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from aotc.ir.dims.algebra import Dim, Expr, bounds, expr_of_atom, mod, product, sym
from aotc.ir.dims.compare import upper_bound_in_loops
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.access import loads_and_indices
from aotc.ir.loop.forms.offsets import linearize
from aotc.ir.loop.forms.tiling import FP8, FP8_PAIRS
from aotc.ir.loop.ir import Alloc, Apply, Buffer, Const, For, Index, Kernel, Let, Load, Scalar, Stmt, Store, Var
from aotc.vmfb.dtypes import size_of

TF32_BITS = (8, 10)
"""Exponent and mantissa bits of TF32, to which tensor cores round f32."""
_SUMS = {"bf16": "f32", "f16": "f32", "tf32": "f32", "f64": "f64", "i8": "i32", **dict.fromkeys(FP8_PAIRS, "f32")}
MOST_COORDINATES = 3  # coordinates of a batch: a tensor map has at most five dimensions


@dataclass(frozen=True, slots=True)
class View:
    """A strided operand: element (i, k) is at ``start + i * outer + k * depth`` of ``buffer``.

    Attributes
    ----------
    buffer : Buffer
    start : Dim
        Depends on the batch only.
    outer, depth : Dim
        Strides from a row of A (column of B) to the next, and from a term of the contraction to the next.
    """

    buffer: Buffer
    start: Dim
    outer: Dim
    depth: Dim

    @property
    def by_rows(self) -> bool:
        """Return True if the operand is contiguous along the rows of A (columns of B), not along k."""
        return self.depth != 1

    @property
    def pitch(self) -> Dim:
        """Return the stride between contiguous lines."""
        return self.depth if self.by_rows else self.outer

    @property
    def in_lines(self) -> bool:
        """Return True if the operand consists of contiguous lines that start at multiples of 16 bytes."""
        count = 16 // size_of(self.buffer.dtype)
        dense = self.outer == 1 if self.by_rows else True
        forward = self.pitch != 0 and _is_forward_stride(self.pitch)
        return dense and forward and is_multiple_dim(self.pitch, count) and is_multiple_dim(self.start, count)

    def in_pieces(self, outer: Dim, depth: Dim) -> bool:
        """Return True if each 16-byte piece is entirely inside or entirely outside of the operand."""
        across = outer if self.by_rows else depth
        return self.in_lines and is_multiple_dim(across, 16 // size_of(self.buffer.dtype))

    def coordinates(self, batch: str, extent: Dim) -> tuple[Dim, tuple[tuple[Dim, Dim, Dim], ...]] | None:
        """Return the operand's start as a constant offset plus value, stride and extent of each batch coordinate.

        None if ``start`` is not such a sum.
        """
        if not isinstance(self.start, Expr):
            return self.start, ()
        offset: Dim = self.start.const
        coordinates: list[tuple[Dim, Dim, Dim]] = []
        for monomial, coefficient in self.start.terms:
            moving = [a for a in monomial if any(s.name == batch for s in symbols(expr_of_atom(a)))]
            rest = product(expr_of_atom(a) for a in monomial if a not in moving) * coefficient
            if not moving:
                offset = offset + rest
            elif len(moving) == 1:
                value = expr_of_atom(moving[0])
                last = upper_bound_in_loops(value, {batch: extent})
                if last is None or not _is_forward_stride(rest):
                    return None
                coordinates.append((value, rest, last + 1))
            else:
                return None
        return (offset, tuple(coordinates)) if len(coordinates) <= MOST_COORDINATES else None


@dataclass(frozen=True, slots=True)
class Gathered:
    """An operand that is not strided, but has contiguous pieces along the contraction: the offset of an element.

    Where the condition ``inside`` is false, the element is 0.
    """

    buffer: Buffer
    place: Dim
    inside: Scalar | None = None


@dataclass(frozen=True, slots=True)
class LoopProduct:
    """The parts of the body of a matmul kernel.

    Attributes
    ----------
    batch, row, col, k : (str, Dim)
        Variables and extents of the loops; a missing batch is ``("", 1)``.
    lets : tuple of Stmt
        Definitions that ``left`` and ``right`` use.
    left, right : Scalar
        The elements of A and of B that tensor cores multiply, before they are rounded to ``operands``.
    operands : str
        The dtype for tensor cores: ``bf16``, ``f16``, ``tf32``, ``f64``, ``i8``, or a pair of :data:`FP8_PAIRS`.
    total : Buffer
        The accumulator.
    epilogue : tuple of Stmt
        The statements after the sum.
    """

    batch: tuple[str, Dim]
    row: tuple[str, Dim]
    col: tuple[str, Dim]
    k: tuple[str, Dim]
    lets: tuple[Stmt, ...]
    left: Scalar
    right: Scalar
    operands: str
    total: Buffer
    epilogue: tuple[Stmt, ...]

    def view(self, right: bool = False) -> View | None:
        """Return the strided memory layout of A, or of B if ``right``; None for computed operands."""
        scalar, (outer, _) = (self.right, self.col) if right else (self.left, self.row)
        if not isinstance(scalar, Load):
            return None
        bound = {s.var.name for s in self.lets if isinstance(s, Let)}
        return matrix_view_of_load(
            scalar, outer, self.k[0], bound, {name for name, _ in (self.batch, self.row, self.col, self.k)}
        )

    def is_widened(self, right: bool = False) -> bool:
        """Return True if A, or B if ``right``, is computed from loads at each use instead of a plain load."""
        scalar = self.right if right else self.left
        return isinstance(scalar, Apply) and scalar.fn != "select" and not self.lets

    def gathered(self, right: bool = False) -> Gathered | None:
        """Return the offset of A (B if ``right``) where it has contiguous pieces along k; else None."""
        inside, load = split_select(self.right if right else self.left)
        if not isinstance(load, Load):
            return None
        flat, (k, extent) = row_major_offset(load), self.k
        for let in reversed([s for s in self.lets if isinstance(s, Let)]):
            if isinstance(let.value, Index):
                flat = substitute(flat, {let.var.name: let.value.expr})
        bound = {s.var.name for s in self.lets if isinstance(s, Let)}
        conditions = loads_and_indices([inside]) if inside is not None else []
        if bound & {s.name for s in symbols(flat)} or not all(isinstance(x, Index | Const) for x in conditions):
            return None
        count = 16 // size_of(load.buffer.dtype)
        if not is_contiguous_in_pieces(flat, k, extent, count):
            return None
        whole = all(_is_one_in_pieces(x.expr, k, extent, count) for x in conditions if isinstance(x, Index))
        return Gathered(load.buffer, flat, inside) if whole else None


def is_contiguous_in_pieces(flat: Dim, name: str, extent: Dim, count: int) -> bool:
    """Return True if ``count`` neighbours in the loop ``name`` are contiguous, from multiples of ``count`` on.

    ``flat`` is the offset of an element.
    """
    if not is_multiple_dim(extent, count):
        return False
    piece, within = sym("piece", 0, extent // count), sym("within", 0, count)
    first = substitute(flat, {name: piece * count})
    return substitute(flat, {name: piece * count + within}) - within == first and is_multiple_dim(first, count)


def _is_one_in_pieces(e: Dim, name: str, extent: Dim, count: int) -> bool:
    """Return True if ``e`` is the same for each ``count`` neighbours in the loop ``name``."""
    piece, within = sym("piece", 0, extent // count), sym("within", 0, count)
    return substitute(e, {name: piece * count + within}) == substitute(e, {name: piece * count})


def split_select(value: Scalar) -> tuple[Scalar | None, Scalar]:
    """Split a scalar ``select(condition, value, 0)`` into condition and value; other scalars have no condition."""
    match value:
        case Apply(fn="select", args=(inside, inner, Const(value=0))):
            return inside, inner
    return None, value


def _is_forward_stride(stride: Dim) -> bool:
    low = bounds(stride)[0]
    return low is not None and low >= 0


def is_multiple_dim(e: Dim, of: int) -> bool:
    """Return True if ``e`` is provably a multiple of ``of``."""
    return mod(e, of) == 0


def read_product(kernel: Kernel) -> LoopProduct:
    """Parse the body of ``kernel`` and return the parts of its matmul.

    Raises
    ------
    ValueError
        If the body is not a matmul.
    """
    loops: list[For] = []
    body = kernel.body
    while len(body) == 1 and isinstance(body[0], For):
        loops.append(body[0])
        body = body[0].body
    axes = [(loop.var, loop.end) for loop in loops]
    match body:
        case (Alloc(total), Store(value=Const()), For() as sum_, *epilogue) if len(axes) in (2, 3) and epilogue:
            *lets, last = sum_.body
            batch = axes[0] if len(axes) == 3 else ("", 1)
            match last:
                case Store(buffer=into, value=Apply(fn="mul", args=(left, right)), reduce="add") if into == total:
                    a, b = (unwidened_operand(x, lets) for x in (left, right))
                    kind = "" if a is None or b is None else _common_operand_dtype(a[1], b[1])
                    if a is None or b is None or _SUMS.get(kind) != total.dtype:
                        raise ValueError(f"kernel {kernel.name}: no operands of tensor cores")
                    k = (sum_.var, sum_.end)
                    return LoopProduct(
                        batch, axes[-2], axes[-1], k, tuple(lets), a[0], b[0], kind, total, tuple(epilogue)
                    )
    raise ValueError(f"kernel {kernel.name}: its body is not a product of matrices")


def _common_operand_dtype(left: str, right: str) -> str:
    """Return the common dtype of two operands for tensor cores; 8-bit floats may have two dtypes."""
    if left in FP8 and right in FP8:
        return f"{FP8[left]}.{FP8[right]}"
    return left if left == right else ""


def unwidened_operand(operand: Scalar, lets: Sequence[Stmt]) -> tuple[Scalar, str] | None:
    """Return a matmul operand before its conversion to the sum's dtype, and its dtype for tensor cores; or None."""
    bound = {s.var.name: s.value for s in lets if isinstance(s, Let)}

    def named(x: Scalar) -> Scalar:
        """Return ``x`` with a name, or the first arm of a select, replaced by the scalar that defines it."""
        match x:
            case Var(name=name) if name in bound:
                return named(bound[name])
            case Apply(fn="select", args=(test, inner, other)):
                return replace(x, args=(test, named(inner), other))
        return x

    if operand.dtype == "f64":
        return named(operand), "f64"
    match named(operand):
        case Apply(fn="convert", args=(inner,)) if inner.dtype in _SUMS or inner.dtype in FP8:
            return named(inner), inner.dtype
        case Apply(fn="reduce_precision", args=(inner, Const(value=exponent), Const(value=significand))):
            return (named(inner), "tf32") if (exponent, significand) == TF32_BITS else None
    return None


def row_major_offset(place: Load | Store) -> Dim:
    """Return the row-major offset of a load or store in its buffer."""
    return linearize(place.index, place.buffer.shape)


def matrix_view_of_load(load: Load, outer: str, k: str, bound: set[str], loops: set[str]) -> View | None:
    """Return the strided layout of the matrix that ``load`` reads in ``loops``; ``outer`` and ``k`` are its axes.

    None if the elements are not strided, or if an index is one of the names ``bound``.
    """
    flat = row_major_offset(load)
    if bound & {s.name for s in symbols(flat)}:
        return None

    def at(i: Dim, j: Dim) -> Dim:
        return substitute(flat, {outer: i, k: j})

    start = at(0, 0)
    row, term = at(1, 0) - start, at(0, 1) - start
    own = {s.name: expr_of_atom(s) for s in symbols(flat)}
    i, j = own.get(outer, 0), own.get(k, 0)
    moved = {s.name for e in (row, term) for s in symbols(e)} & loops
    whole = at(i, j) - start - i * row - j * term == 0  # a text may have 0 in another form, as `z // 2` where z < 2
    return View(load.buffer, start, row, term) if whole and not moved else None
