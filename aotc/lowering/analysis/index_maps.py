"""Index maps of movement ops between the elements of a result and those of an operand.

:func:`operand_index_of_movement` returns the operand element that a result element copies. It exists for every movement
op whose result elements are all copies. :func:`result_index_of_movement` returns the result element to which an operand
element is copied. It exists only if each operand element is copied exactly once; such ops may follow the anchor inside
a fused region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aotc.ir.dims.algebra import Dim, bounds, maximum, minimum, product
from aotc.ir.dims.symbols import count_atoms
from aotc.ir.loop.forms.offsets import delinearize, linearize
from aotc.ir.opset import MOVES
from aotc.ir.opset.dim_attributes import dims_of
from aotc.ir.tensor.ir import Op, Value
from aotc.lowering.threshold import Limit

Index = tuple[Dim, ...]


def value_before_movement(v: Value, makers: Mapping[Value, Op]) -> Value:
    """Return the value behind all movement ops that produce ``v``; without any, ``v`` itself."""
    while (op := makers.get(v)) is not None and op.name in MOVES:
        v = op.operands[0]
    return v


INDEX_ATOMS = Limit(
    48,
    "names and functions in an index expression, at most, before it is bound to a name of its own",
    "each transpose between two reshapes doubles the text of the expression",
)


def is_long_index(i: Dim) -> bool:
    """Return True if expression ``i`` is too long to be nested in others: a reshape after a transpose doubles it."""
    return not INDEX_ATOMS.holds(count_atoms(i, INDEX_ATOMS.value))


def clamped_inside(at: Dim, extent: Dim) -> Dim:
    """Return ``at`` clamped to ``[0, extent)``, for an element that is loaded before a test discards it.

    For an empty array the index is 0, which can be read safely: see ``EMPTY`` of ``aotc/vmfb/memory/pointers.py``.
    """
    if bounds(extent)[0]:
        return minimum(maximum(at, 0), extent - 1)
    return maximum(minimum(at, extent - 1), 0)


def reshape_index(index: Sequence[Dim], source: Sequence[Dim], target: Sequence[Dim]) -> Index:
    """Return the index in shape ``target`` of the element at ``index`` in shape ``source`` (equal element counts).

    Runs of dims with equal products are mapped separately. This keeps the expressions short, and free of divisions
    where dims are only merged.
    """
    result: list[Dim] = []
    i = j = 0
    while i < len(source) or j < len(target):
        begin_i, begin_j = i, j
        left: Dim = 1
        right: Dim = 1
        if i < len(source):
            left, i = source[i], i + 1
        if j < len(target):
            right, j = target[j], j + 1
        while left != right:
            if i < len(source) and (j >= len(target) or _is_simpler_index(left, right)):
                left, i = left * source[i], i + 1
            elif j < len(target):
                right, j = right * target[j], j + 1
            else:
                break
        while i < len(source) and source[i] == 1 and j >= len(target):
            i += 1
        flat = linearize(index[begin_i:i], source[begin_i:i])
        result += delinearize(flat, target[begin_j:j])
    return tuple(result)


def _is_simpler_index(a: Dim, b: Dim) -> bool:
    """Return True if ``a`` is simpler than ``b``: smaller, a number and not an expression, or a shorter text."""
    if isinstance(a, int) and isinstance(b, int):
        return a < b
    return isinstance(a, int) or (not isinstance(b, int) and str(a) < str(b) and len(str(a)) <= len(str(b)))


def operand_index_of_movement(op: Op, index: Index) -> Index:
    """Return the index of operand 0 that result element ``index`` of ``op`` copies.

    Raises
    ------
    KeyError
        If ``op`` is not a pure copy of one element of operand 0.
    """
    source = op.operands[0].type.shape
    match op.name:
        case "broadcast":
            return tuple(0 if source[k] == 1 else index[d] for k, d in enumerate(op.attrs["dims"]))
        case "reshape":
            return reshape_index(index, op.result.type.shape, source)
        case "transpose":
            perm = op.attrs["perm"]
            return tuple(index[perm.index(k)] for k in range(len(perm)))
        case "reverse":
            return tuple(source[k] - 1 - i if k in op.attrs["dims"] else i for k, i in enumerate(index))
        case "slice":
            steps = zip(index, dims_of(op.attrs, "start"), dims_of(op.attrs, "stride"), strict=True)
            return tuple(start + i * stride for i, start, stride in steps)
    raise KeyError(op.name)


def result_index_of_movement(op: Op, index: Index) -> Index | None:
    """Return the result index of element ``index`` of operand 0, or None if there is not exactly one.

    A reshape has one only if its element counts are proven equal. Otherwise the index could belong to another extent,
    and a store would overwrite a different element.
    """
    match op.name:
        case "reshape":
            source, target = op.operands[0].type.shape, op.result.type.shape
            return reshape_index(index, source, target) if product(source) == product(target) else None
        case "transpose":
            return tuple(index[k] for k in op.attrs["perm"])
        case "reverse":
            source = op.operands[0].type.shape
            return tuple(source[k] - 1 - i if k in op.attrs["dims"] else i for k, i in enumerate(index))
    return None
