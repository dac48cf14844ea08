"""Layout of a matmul's epilogue: pieces in which results are stored, and operands that are loaded ahead in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.dims.symbols import substitute, symbols
from aotc.ir.loop.access import statement_scalars
from aotc.ir.loop.forms.matmul import LoopProduct, is_contiguous_in_pieces, row_major_offset
from aotc.ir.loop.ir import Apply, Buffer, For, Index, Let, Load, Scalar, Stmt, Store
from aotc.kernels.cuda.templates.threads import PIECE_BYTES
from aotc.vmfb.dtypes import DTYPES, size_of

SUMS, HELD = "aotc_sums", "aotc_held"
"""Registers of a piece: its accumulators, and, numbered, the operands that were loaded for it."""
PIECE, LANE = "aotc_piece", "aotc_lane"
"""The number of a piece in a row or column, and the number of an element in a piece."""


@dataclass(frozen=True, slots=True)
class ResultPieces:
    """Layout of the pieces in which a template stores results.

    Attributes
    ----------
    width : int
        Elements of a piece.
    down : bool
        True if the elements of a piece are neighbours in a column; False if in a row.
    held : tuple of (str, int)
        Dtype and number of elements of each operand that is loaded ahead for a piece; 1 if all elements share the
        operand.
    far : tuple of (int, int)
        Operands among these that depend on row and column, prefetched when their tile starts: index of the pointer, and
        bytes of an element.
    """

    width: int = 1
    down: bool = False
    held: tuple[tuple[str, int], ...] = ()
    far: tuple[tuple[int, int], ...] = ()


ONE_BY_ONE = ResultPieces()


@dataclass(frozen=True, slots=True)
class PieceStatements:
    """Loop-IR statements for the device functions of a piece.

    Attributes
    ----------
    body : tuple of Stmt
        The epilogue of a piece.
    loads : tuple of Load
        Operands that are loaded ahead, in terms of :data:`PIECE` and :data:`LANE`.
    far : tuple of Load
        The operands of :attr:`ResultPieces.far`, in terms of row and column.
    """

    pieces: ResultPieces
    body: tuple[Stmt, ...]
    loads: tuple[Load, ...]
    far: tuple[Load, ...]


def piece_statements(product: LoopProduct) -> PieceStatements:
    """Choose the layout of the stores of ``product``; return it with the statements of the epilogue of a piece."""
    width, down = _store_piece_width(product)
    if not width:
        return PieceStatements(ResultPieces(1, _is_column_contiguous(product)), product.epilogue, (), ())
    axis = product.row if down else product.col
    lane, piece = sym(LANE, 0, width), sym(PIECE, 0, axis[1] // width)
    own = {axis[0]: piece * width + lane}
    held = list(_epilogue_operands_to_preload(product, axis, width))
    counts = [width if _load_depends_on(load, axis[0]) else 1 for load in held]
    registers = {
        load: Load(Buffer(f"{HELD}{n}", load.dtype, (count,), "private"), (lane if count > 1 else 0,))
        for n, (load, count) in enumerate(zip(held, counts))
    }
    total = Load(Buffer(SUMS, product.total.dtype, (width,), "private"), (lane,))
    rewritten = EpilogueSubstitution(own, {Load(product.total, ()): total, **registers})
    body = For(LANE, 0, width, tuple(rewritten.substitute_in_statement(s) for s in product.epilogue), "lanes")
    far = tuple(
        load for load in held if _load_depends_on(load, product.row[0]) and _load_depends_on(load, product.col[0])
    )
    loads = tuple(Load(x.buffer, tuple(substitute(i, own) for i in x.index)) for x in held)
    pieces = ResultPieces(width, down, tuple((x.dtype, n) for x, n in zip(held, counts)))
    return PieceStatements(pieces, (body,), loads, far)


def result_pieces(product: LoopProduct, buffers: Sequence[str]) -> ResultPieces:
    """Return the layout of the stores of ``product``; ``buffers`` are the names of its kernel's buffers, in order."""
    found = piece_statements(product)
    far = tuple((buffers.index(x.buffer.name), size_of(x.buffer.dtype)) for x in found.far)
    return replace(found.pieces, far=far)


# Widths of a piece that are tried, in elements: an accumulator is loaded back by instructions of 16 bytes.
WIDTHS, DOUBLE_WIDTHS = (16, 8, 4), (4, 2)


def _store_piece_width(product: LoopProduct) -> tuple[int, bool]:
    """Return the number of elements of a piece, and True if the piece is part of a column.

    A width of 0 stands for stores of single elements. Pieces require an epilogue of definitions and non-reducing stores
    only, whose offsets depend on no computed value.
    """
    stores = [s for s in product.epilogue if isinstance(s, Store)]
    bound = _epilogue_variables(product)
    if not all(isinstance(s, Let) or (isinstance(s, Store) and not s.reduce) for s in product.epilogue):
        return 0, False
    flats = [row_major_offset(s) for s in stores]
    if any(bound & {s.name for s in symbols(flat)} for flat in flats):
        return 0, False
    most = PIECE_BYTES // min(size_of(s.buffer.dtype) for s in stores)
    widths = DOUBLE_WIDTHS if product.total.dtype == "f64" else WIDTHS
    for width in (w for w in widths if w <= most):
        for down, (name, extent) in ((False, product.col), (True, product.row)):
            if all(is_contiguous_in_pieces(flat, name, extent, width) for flat in flats):
                return width, down
    return 0, False


def _is_column_contiguous(product: LoopProduct) -> bool:
    """Return True if the elements of a column are contiguous in memory, and those of a row are not."""
    last = product.epilogue[-1]
    if not isinstance(last, Store):
        return False
    flat, (row, _), (col, _) = row_major_offset(last), product.row, product.col

    def result_offset(i: int, j: int) -> Dim:
        return substitute(flat, {row: i, col: j})

    return result_offset(1, 0) - result_offset(0, 0) == 1 and result_offset(0, 1) - result_offset(0, 0) != 1


def _epilogue_variables(product: LoopProduct) -> set[str]:
    return {s.var.name for s in product.epilogue if isinstance(s, Let)}


# Bytes of a lane's accumulators that its warp stages at a time: a 32nd of the warp's staging area, which has 16 rows of
# 128 bytes (STAGING).
STAGED_BYTES = 64
# Registers of a thread for epilogue operands that are loaded ahead, for a chunk of 16 rows and 32 columns. Their loads
# overlap with the stores of the chunks before. A tile of 256 columns has 128 accumulators a thread at the same time.
# The linker's log: none is spilled with three operands of 16 registers each.
HELD_VALUES = 48
REGISTER_BYTES = 4


def _epilogue_operands_to_preload(product: LoopProduct, axis: tuple[str, Dim], width: int) -> Iterator[Load]:
    """Yield the epilogue operands to load ahead within the register budget, in pieces or once for a piece."""
    left, bound = HELD_VALUES, _epilogue_variables(product)
    together = STAGED_BYTES // size_of(product.total.dtype)
    for load in dict.fromkeys(_unconditional_loads(x for s in product.epilogue for x in statement_scalars(s))):
        flat = row_major_offset(load)
        names = {s.name for s in symbols(flat)}
        whole = axis[0] not in names or is_contiguous_in_pieces(flat, axis[0], axis[1], width)
        across = (product.col if axis == product.row else product.row)[0]
        cost = (together // width if across in names else 1) * (width if axis[0] in names else 1)
        cost *= max(size_of(load.dtype) // REGISTER_BYTES, 1)
        simple = load.buffer.space == "global" and DTYPES[load.dtype].kind != "c"
        if simple and whole and not bound & names and cost <= left:
            left -= cost
            yield load


def _unconditional_loads(scalars: Iterator[Scalar]) -> Iterator[Load]:
    """Yield the loads that are executed unconditionally."""
    stack, seen = list(scalars)[::-1], set()
    while stack:
        node = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        match node:
            case Apply(fn="select", args=(test, *_)):
                stack.append(test)
            case Apply(args=args):
                stack += args[::-1]
            case Load():
                yield node


def _load_depends_on(load: Load, name: str) -> bool:
    return any(s.name == name for s in symbols(row_major_offset(load)))


@dataclass(slots=True)
class EpilogueSubstitution:
    """Substitution of dims and loads in scalar expressions; shared subexpressions stay shared."""

    dims: dict[str, Dim]
    loads: dict[Load, Load] = field(default_factory=dict)
    done: dict[int, Scalar] = field(default_factory=dict)

    def substitute_in_statement(self, stmt: Stmt) -> Stmt:
        """Return ``stmt``, a definition or a store, with the substitutions applied."""
        if isinstance(stmt, Let):
            return replace(stmt, value=self.substitute_in_scalar(stmt.value))
        assert isinstance(stmt, Store)
        index = tuple(substitute(i, self.dims) for i in stmt.index)
        return replace(stmt, index=index, value=self.substitute_in_scalar(stmt.value))

    def substitute_in_scalar(self, root: Scalar) -> Scalar:
        """Return the scalar ``root`` with the substitutions applied."""
        stack = [root]
        while stack:
            node = stack[-1]
            waiting = [a for a in node.args if id(a) not in self.done] if isinstance(node, Apply) else []
            if waiting:
                stack += waiting
                continue
            stack.pop()
            self.done[id(node)] = self._substituted_node(node)
        return self.done[id(root)]

    def _substituted_node(self, node: Scalar) -> Scalar:
        match node:
            case Apply(args=args):
                return replace(node, args=tuple(self.done[id(a)] for a in args))
            case Load() if node in self.loads:
                return self.loads[node]
            case Load(index=index):
                return replace(node, index=tuple(substitute(i, self.dims) for i in index))
            case Index(expr=expr):
                return replace(node, expr=substitute(expr, self.dims))
        return node
