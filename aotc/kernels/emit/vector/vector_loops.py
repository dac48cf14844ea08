"""Select the loops next to register tiles and transposes that are emitted as vectors, without LLVM's vectorizer.

Such a loop computes floats of one type, and conditions, by plain operations. Its elements are contiguous or invariant.
Its iterations fill whole vectors, or are so few that the remainder forms shorter vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from aotc.ir.dims.algebra import Call, Dim, bounds, lone_atom
from aotc.ir.dims.symbols import symbols
from aotc.ir.loop.access import scalars_in, statement_scalars
from aotc.ir.loop.forms.tile_forms import F32, F64
from aotc.ir.loop.ir import Alloc, Apply, For, If, Index, Kernel, Let, Load, Scalar, Stmt, Store, Tile, Var, walk
from aotc.ir.opset import COMPARISONS, EXPENSIVE
from aotc.kernels.emit.index import flat_index, stride_of_offset
from aotc.kernels.emit.real import ONE_BY_ONE
from aotc.kernels.emit.vector.scalar_emitter import BITWISE
from aotc.kernels.emit.vector.transposes import match_transposing_copy
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_FLOATS = ("f32", "f64")


# Vectors of a loop up to which they are written one after the other, without a loop. A loop next to a tile is as wide
# as the tile, at most four vectors, and LLVM would unroll it.
PIECES = 8


@dataclass(frozen=True, slots=True)
class VectorLoop:
    """A loop to emit as vectors, with its float dtype and lanes.

    ``differing`` has the ``id()`` of each scalar that differs between iterations.
    """

    loop: For
    dtype: str
    lanes: int
    differing: frozenset[int]  # by id()

    @property
    def iterations(self) -> Dim:
        """Return the number of iterations."""
        return self.loop.end - self.loop.begin

    def vector_pieces(self) -> Iterator[tuple[int, int]]:
        """Yield the first iteration and the number of lanes of each vector of a short loop."""
        assert isinstance(self.iterations, int)
        at = 0
        while at < self.iterations:
            lanes = min(self.lanes, 1 << (self.iterations - at).bit_length() - 1)
            yield at, lanes
            at += lanes

    @property
    def is_short(self) -> bool:
        """Return True if the loop is unrolled completely."""
        return isinstance(self.iterations, int) and self.iterations <= PIECES * self.lanes


def vector_loops(kernel: Kernel, target: Target) -> Mapping[int, VectorLoop] | None:
    """Return the loops of a kernel to emit as vectors, by ``id()``; None if LLVM must optimize some other loop."""
    found: dict[int, VectorLoop] = {}

    def can_be_emitted_directly(stmt: Stmt) -> bool:
        """Return True if a statement needs no optimization by LLVM, and record the vector loops in it."""
        match stmt:
            case For() if made := _plan_vector_loop(stmt, target):
                found[id(stmt)] = made
                return True
            case For() if match_transposing_copy(stmt, kernel):
                return True
            case For(kind="serial" | "parallel", body=body):
                return all(map(can_be_emitted_directly, body))
            case If(then=then, otherwise=otherwise):
                return all(map(can_be_emitted_directly, (*then, *otherwise)))
            case Tile(form=form, b_column=0):
                return form in (F32, F64)
            case Let():
                return not _computes_expensive_functions(statement_scalars(stmt))
        return isinstance(stmt, Alloc)

    calls = any(isinstance(s, Tile) or match_transposing_copy(s, kernel) for s in walk(kernel.body))
    return found if calls and all(map(can_be_emitted_directly, kernel.body)) else None


def _computes_expensive_functions(scalars: Sequence[Scalar]) -> bool:
    return any(isinstance(x, Apply) and x.fn in EXPENSIVE for x in scalars_in(scalars))


def _plan_vector_loop(loop: For, target: Target) -> VectorLoop | None:
    """Return a loop as vectors; None if the loop has unsuitable statements, dtypes, strides or bounds."""
    stores = [s for s in loop.body if isinstance(s, Store)]
    if loop.kind != "serial" or loop.step != 1 or not all(isinstance(s, Let | Store) for s in loop.body):
        return None
    differing = _scalars_differing_by_iteration(loop)
    inner = scalars_in(x for s in loop.body for x in statement_scalars(s))
    moved = {s.buffer.dtype for s in (*stores, *(x for x in inner if isinstance(x, Load) and id(x) in differing))}
    (dtype,) = floats if len(floats := moved - {"i1"}) == 1 else {""}
    same = [x for x in inner if id(x) not in differing]
    if dtype not in _FLOATS or any(s.reduce for s in stores) or _computes_expensive_functions(same):
        return None
    made = VectorLoop(loop, dtype, target.vector_bytes // size_of(dtype), differing)
    places = {s.buffer.name: flat_index(s.buffer, s.index) for s in stores}
    along = bool(stores) and all(stride_of_offset(flat, loop.var) == 1 for flat in places.values())
    fits = along and all(_is_vectorizable_scalar(x, made, places) for x in inner)
    return made if fits and (made.is_short or _has_whole_vectors(made)) else None


def _scalars_differing_by_iteration(loop: For) -> frozenset[int]:
    """Return the ``id()`` of each scalar in the loop that differs between iterations."""
    names = {loop.var}
    known: dict[int, bool] = {}

    def differs(scalar: Scalar) -> bool:
        if id(scalar) not in known:
            known[id(scalar)] = compute_whether_differs(scalar)
        return known[id(scalar)]

    def compute_whether_differs(scalar: Scalar) -> bool:
        match scalar:
            case Var(name=name):
                return name in names
            case Load(index=index):
                return any(s.name in names for i in index for s in symbols(i))
            case Index(expr=expr):
                return any(s.name in names for s in symbols(expr))
            case Apply(args=args):
                return sum(map(differs, args)) > 0  # sum, not any: visit all arguments
        return False

    for s in loop.body:
        if sum(map(differs, statement_scalars(s))) and isinstance(s, Let):
            names.add(s.var.name)
    return frozenset(at for at, found in known.items() if found)


def _is_vectorizable_scalar(scalar: Scalar, made: VectorLoop, places: Mapping[str, Dim]) -> bool:
    """Return True if a scalar is loop-invariant, or has a vector instruction.

    ``places`` has the offsets of the elements that the loop stores, by the name of the buffer.
    """
    flat = flat_index(scalar.buffer, scalar.index) if isinstance(scalar, Load) else 0
    if isinstance(scalar, Load) and scalar.buffer.name in places and flat != places[scalar.buffer.name]:
        return False
    if id(scalar) not in made.differing:
        return True
    match scalar:
        case Load(buffer=buffer):
            return buffer.dtype in (made.dtype, "i1") and stride_of_offset(flat, made.loop.var) == 1
        case Apply(fn=fn, args=args) if fn in BITWISE:
            return all(a.dtype == "i1" for a in args)
        case Apply(fn="select", args=(_, *floats)):
            return all(a.dtype == made.dtype for a in floats)
        case Apply(fn=fn, args=args):
            return (fn in ONE_BY_ONE or fn in COMPARISONS) and all(a.dtype == made.dtype for a in args)
    return isinstance(scalar, Var) and scalar.dtype in (made.dtype, "i1")


def _has_whole_vectors(made: VectorLoop) -> bool:
    """Return True if a loop has at least one iteration, and its iterations fill whole vectors."""
    least, _ = bounds(made.iterations)
    return least is not None and least > 0 and _divides_extent(made.lanes, made.iterations)


def _divides_extent(lanes: int, dim: Dim) -> bool:
    """Return True if ``dim`` is provably a multiple of ``lanes``."""
    if isinstance(dim, int):
        return dim % lanes == 0
    atom = lone_atom(dim)
    if isinstance(atom, Call) and atom.fn in ("min", "max"):
        return _divides_extent(lanes, atom.a) and _divides_extent(lanes, atom.b)
    return dim.const % lanes == 0 and all(factor % lanes == 0 for _, factor in dim.terms)
