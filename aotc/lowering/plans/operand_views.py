"""Find operands that kernels read in place: those of matmuls on a GPU, and slices of arrays for attention on a CPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field

from aotc.ir.dims.algebra import Dim, product, sym
from aotc.ir.dims.symbols import substitute
from aotc.ir.loop.forms.matmul import MOST_COORDINATES, is_multiple_dim, matrix_view_of_load
from aotc.ir.loop.ir import Buffer, Load
from aotc.ir.opset import ELEMENTWISE, FREE, MOVES, VIEWERS
from aotc.ir.tensor.ir import Op, TensorType, Value, values_captured_by_op
from aotc.lowering.analysis.constant_values import splat_of
from aotc.lowering.analysis.in_place import UpdatedArrays
from aotc.lowering.analysis.index_maps import Index, linearize, operand_index_of_movement
from aotc.lowering.plans.gpu_matmul_tiles import is_for_tensor_cores
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_LOOPS = ("z", "i", "k")
_WIDENED = frozenset({"bf16", "f16", "f32"})


@dataclass(frozen=True, slots=True)
class OperandViews:
    """Operands that matmuls read in place, through movement ops and conversions; and slices that attention reads.

    Attributes
    ----------
    operands : set of Value
        The operands of the matmuls, which need no memory of their own.
    sources : set of Value
        The stored arrays that are read instead, behind movement ops.
    moves : set of Op
        The movement ops between the sources and the operands.
    slices : set of Op
        The slices at places known at run time that attention reads in place.
    """

    operands: set[Value] = field(default_factory=set)
    sources: set[Value] = field(default_factory=set)
    moves: set[Op] = field(default_factory=set)
    slices: set[Op] = field(default_factory=set)


def operand_views(ops: Sequence[Op], results: Sequence[Value], target: Target, level: int) -> OperandViews:
    """Return the matmul and attention operands that ``target`` reads in place, through movement ops.

    ``results`` are the results of the region with ``ops``; ``level`` is the optimization level.
    """
    views = OperandViews()
    if target.kind == "cpu" and level > 0:
        views.slices.update(_slices_read_by_attention(ops, results))
    makers = {v: op for op in ops for v in op.results}
    if not target.has_ampere:
        return views
    for op in ops:
        if op.name != "matmul":
            continue
        m, n = op.result.type.shape[-2:]
        for v, transposed in zip(
            op.operands, (op.attrs["lhs_transposed"], not op.attrs["rhs_transposed"]), strict=True
        ):
            # The tiles convert such an operand themselves, from its sources.
            if v is op.operands[1] and is_widened_in_tiles(v, m, makers):
                views.operands.add(v)
                continue
            k = v.type.shape[-2 if transposed else -1]
            chain = _producing_movement_ops(v, makers)
            if (
                chain
                and is_for_tensor_cores(op.result.type.shape[:-2], m, n, k)
                and _is_source_copyable(v, transposed, chain)
            ):
                views.operands.add(v)
                views.sources.add(chain[-1].operands[0])
                views.moves.update(chain)
    return views


SHORT_LINE = Limit(
    15,
    "elements of the last dim of a slice, at most, that is copied before attention reads it",
    "by construction: 16 f32 are a cache line; shorter lines apart from each other are read several times",
)


def _slices_read_by_attention(ops: Sequence[Op], results: Sequence[Value]) -> set[Op]:
    """Return the dynamic slices that only attention reads, e.g. those of one layer's keys in the cache of all layers.

    A slice whose array is overwritten before attention reads it is not among them: the whole array would be copied.
    """
    slices = [op for op in ops if op.name == "dynamic_slice" and _has_long_contiguous_lines(op.result.type)]
    if not slices or not any(op.name in VIEWERS for op in ops):
        return set()
    places = {op: n for n, op in enumerate(ops)}
    users: dict[Value, list[Op]] = {}
    for op in ops:
        for v in (*op.operands, *values_captured_by_op(op)):
            users.setdefault(v, []).append(op)
    updated, slices_in_place = UpdatedArrays(ops), set[Op]()
    for op in slices:
        readers = _attention_readers(op.result, users, set(results))
        if readers is not None:
            last = max(places[reader] for reader in readers)
            if not updated.is_updated_in(op.operands[0], ops[places[op] : last]):
                slices_in_place.add(op)
    return slices_in_place


def _has_long_contiguous_lines(slice_: TensorType) -> bool:
    return slice_.rank > 0 and not SHORT_LINE.holds(slice_.shape[-1])


def _attention_readers(v: Value, users: Mapping[Value, Sequence[Op]], results: Set[Value]) -> list[Op] | None:
    """Return the attention ops that read ``v``, also through movement ops; None if another op, or no op, reads it."""
    readers: list[Op] = []
    stack = [v]
    while stack:
        value = stack.pop()
        if value in results:
            return None
        for user in users.get(value, ()):
            if user.name in MOVES:
                stack.append(user.result)
            elif user.name in VIEWERS:
                readers.append(user)
            else:
                return None
    return readers or None


WIDENED_IN_TILES = Limit(
    64,
    "rows of a product, at most, whose right operand is widened inside its tiles, not before the product",
    "on an H200, 64 x 4096 x 4096 in bf16 with 8-bit integers takes 18.7 us with widening in the tiles, 33.3 us with "
    "widening before; 256 rows take 45.2 and 30.2 us",
)
WIDENED_RUNS = Limit(
    16,
    "rows of an f32 product, at most, whose right operand is computed from several arrays inside its tiles",
    "on an H200, 64 rows with int4:64 take 54.8 us, 47.7 us with widening before; 8 rows take 20.4 and 45.5 us",
)
WIDENED_PERCENT = Limit(
    60,
    "bytes of the stored arrays, at most, in percent of the operand computed from them, for tiles to widen it",
    "8-bit integers with a scale for every 8 terms, in place of bf16",
)


def is_widened_in_tiles(v: Value, rows: Dim, makers: Mapping[Value, Op]) -> bool:
    """Return True if register tiles convert the right operand themselves, from fewer stored bytes.

    Such an operand consists of elementwise and movement ops on smaller arrays, e.g. on quantized integers and their
    scales, or on 16-bit floats. Constants that one number fills do not count as arrays.
    """
    definition = makers.get(v)
    if not WIDENED_IN_TILES.holds(rows) or v.type.dtype not in _WIDENED or definition is None:
        return False
    read, count, seen, stack = 0, 0, {v}, [v]
    while stack:
        maker = makers.get(value := stack.pop())
        if maker is not None and (maker.name in ELEMENTWISE or (maker.name in FREE and maker.name != "constant")):
            stack += [x for x in maker.operands if x not in seen]
            seen.update(maker.operands)
            continue
        if splat_of(value, makers) is not None:
            continue
        size = product(value.type.shape)
        if not isinstance(size, int):
            return False
        read += size * size_of(value.type.dtype)
        count += 1
    size = product(v.type.shape)
    if not isinstance(size, int):
        return False
    if count > 1 and v.type.dtype == "f32" and not WIDENED_RUNS.holds(rows):
        return False
    return WIDENED_PERCENT.holds(100 * read // max(size * size_of(v.type.dtype), 1))


def _producing_movement_ops(v: Value, makers: Mapping[Value, Op]) -> list[Op]:
    """Return the movement ops that produce ``v``, the last one first.

    Reshapes directly after the source are omitted, as they do not move elements; the list may be empty.
    """
    chain: list[Op] = []
    while (op := makers.get(v)) is not None and op.name in MOVES:
        chain.append(op)
        v = op.operands[0]
    while chain and chain[-1].name == "reshape":
        chain.pop()
    return chain


def _is_source_copyable(v: Value, transposed: bool, chain: list[Op]) -> bool:
    """Return True if a GPU template can copy the source of movement ops ``chain`` directly, instead of ``v``.

    The index of an element of ``v`` is followed backward through ``chain``. In the source, it must be an affine view
    with contiguous lines that start at multiples of 16 bytes.
    """
    *batch, rows, cols = v.type.shape
    outer, depth = (cols, rows) if transposed else (rows, cols)
    z, i, k = (sym(name, 0, extent) for name, extent in zip(_LOOPS, (*(batch or [1]), outer, depth), strict=True))
    index: Index = (*([z] if batch else []), *((k, i) if transposed else (i, k)))
    for op in chain:
        index = operand_index_of_movement(op, index)
    source = chain[-1].operands[0].type
    view = matrix_view_of_load(Load(Buffer("x", source.dtype, source.shape), index), "i", "k", set(), set(_LOOPS))
    if view is None or not view.in_lines:
        return False
    if view.by_rows and (size_of(source.dtype) == 1 or (size_of(source.dtype) == 4 and not transposed)):
        return False  # the transpose is for the tensor cores, which cannot read the source's layout in this dtype
    extent: Dim = batch[0] if batch else 1
    coordinates = view.coordinates("z", extent)
    return coordinates is not None and len(coordinates[1]) <= MOST_COORDINATES


def has_aligned_rows(v: Value, makers: Mapping[Value, Op]) -> bool:
    """Return True if ``v`` has a contiguous last dim in memory, with rows that start at multiples of 16 bytes.

    The memory is that of the source behind the movement ops that produce ``v``.
    """
    axes = [sym(f"i{n}", 0, extent) for n, extent in enumerate(v.type.shape)]
    at: Index = tuple(axes)
    while (op := makers.get(v)) is not None and op.name in MOVES:
        at, v = operand_index_of_movement(op, at), op.operands[0]
    flat, count = linearize(at, v.type.shape), max(16 // size_of(v.type.dtype), 1)
    start = substitute(flat, {f"i{n}": 0 for n in range(len(axes))})
    rest = flat - start
    for n, axis in enumerate(axes):
        step = substitute(flat, {f"i{m}": int(m == n) for m in range(len(axes))}) - start if axis != 0 else 0
        rest = rest - axis * step
        if not (step == 1 if n == len(axes) - 1 else is_multiple_dim(step, count)):
            return False
    return rest == 0 and is_multiple_dim(start, count)
