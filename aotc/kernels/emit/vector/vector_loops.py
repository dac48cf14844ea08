"""Select the loops that are emitted as vectors, without LLVM's vectorizer.

They are next to register tiles and transposes, or their kernel only maps elements to others. Such a loop computes
floats or integers of one type, and conditions, by plain operations. Its elements are contiguous or invariant. Its
iterations fill whole vectors, or their number is known, and the remainder forms shorter vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from llvmlite import ir

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
from aotc.kernels.llvm_types import Emit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_FLOATS = ("f32", "f64")
_INTEGERS = ("i8", "i16", "i32", "i64", "u8", "u16", "u32", "u64")
INTEGER_ONE_BY_ONE: dict[str, Emit] = {"add": ir.IRBuilder.add, "sub": ir.IRBuilder.sub, "mul": ir.IRBuilder.mul}
"""Scalar ops on integers that are one LLVM instruction on vectors; ``BITWISE`` has others."""

# Vectors of a loop up to which they are written one after the other, without a loop. A loop next to a tile is as wide
# as the tile, at most four vectors, and LLVM would unroll it.
PIECES = 8


# Vectors of an iteration of a loop that is not written out. LLVM interleaves as many.
VECTORS = 4


@dataclass(frozen=True, slots=True)
class VectorLoop:
    """A loop to emit as vectors, with its dtype and lanes.

    ``differing`` has the ``id()`` of each scalar that differs between iterations.
    """

    loop: For
    dtype: str
    lanes: int
    differing: frozenset[int]  # by id()

    @property
    def operations(self) -> Mapping[str, Emit]:
        """Return the emitters of the scalar ops on elements that have a vector instruction."""
        return ONE_BY_ONE if self.dtype in _FLOATS else {**INTEGER_ONE_BY_ONE, **BITWISE}

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

    def scalars(self) -> list[Scalar]:
        """Return all scalar expressions of an iteration, with their parts."""
        return scalars_in(x for s in self.loop.body for x in statement_scalars(s))

    @property
    def vectors_per_iteration(self) -> int:
        """Return the number of vectors of an iteration of the vector loop."""
        counts = (VECTORS, VECTORS // 2, 1)
        known = isinstance(self.iterations, int)
        return next(n for n in counts if n == 1 or known or _divides_extent(n * self.lanes, self.iterations))

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
    is_direct = (calls or _is_plain_map(kernel)) and all(map(can_be_emitted_directly, kernel.body))
    return found if is_direct and (calls or not any(map(_has_invariant_choice, found.values()))) else None


def _is_plain_map(kernel: Kernel) -> bool:
    """Return True if a kernel loads nothing that it stores: LLVM keeps such elements in registers between loops."""
    loads = [x for s in walk(kernel.body) for x in scalars_in(statement_scalars(s)) if isinstance(x, Load)]
    stored = {s.buffer.name for s in walk(kernel.body) if isinstance(s, Store)}
    return not any(x.buffer.name in stored for x in loads)


def _has_invariant_choice(made: VectorLoop) -> bool:
    """Return True if a loop selects by a loop-invariant condition: LLVM makes two loops, which load only one side."""
    choices = [x for x in made.scalars() if isinstance(x, Apply) and x.fn == "select"]
    return any(id(x.args[0]) not in made.differing for x in choices)


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
    (dtype,) = elements if len(elements := moved - {"i1"}) == 1 else {""}
    same = [x for x in inner if id(x) not in differing]
    if dtype not in (*_FLOATS, *_INTEGERS) or any(s.reduce for s in stores) or _computes_expensive_functions(same):
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
        case Apply(fn=fn, args=args) if fn in BITWISE and args[0].dtype == "i1":
            return True
        case Apply(fn="select", args=(_, *floats)):
            return all(a.dtype == made.dtype for a in floats)
        case Apply(fn=fn, args=args):
            return (fn in made.operations or fn in COMPARISONS) and all(a.dtype == made.dtype for a in args)
    return isinstance(scalar, Var) and scalar.dtype in (made.dtype, "i1")


def _has_whole_vectors(made: VectorLoop) -> bool:
    """Return True if the number of iterations is known, or is positive and a multiple of the lanes."""
    if isinstance(made.iterations, int):
        return True
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
