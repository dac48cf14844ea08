"""Import of MLIR's ``shape`` ops, by which lowerings of TensorFlow, MHLO and torch-mlir compute shapes.

A shape is an i64 vector of known length, a size an i64 scalar. A constraint is checked where it occurs, so a witness
has no value and ``shape.assuming`` runs its region.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from aotc.frontend.importers.control import assert_test
from aotc.frontend.importers.shape_broadcasting import common_size
from aotc.frontend.importers.shape_tensor import import_dimension_size, index_constant, tensor_of_scalars
from aotc.frontend.mlir_types import integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim
from aotc.ir.dims.compare import decide_relation
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.messages import escape_braces


def _shape_vector(state: ImportState, values: Sequence[Value]) -> Value:
    """Concatenate scalars to a shape vector."""
    wide = [state.convert(v, "i64") for v in values]
    return tensor_of_scalars(state, wide, TensorType("i64", (len(wide),)))


def _dims_as_vector(state: ImportState, dims: Sequence[Dim]) -> Value:
    return _shape_vector(state, [_dim_as_scalar(state, d) for d in dims])


def _dim_as_scalar(state: ImportState, d: Dim) -> Value:
    return state.one("dim", (), {"expr": d}, [TensorType("i64")])


def _extents_of_vector(state: ImportState, v: Value) -> list[Value]:
    """Return the elements of a shape vector as scalars, which needs a known rank."""
    if v.type.rank != 1 or not isinstance(v.type.shape[0], int):
        state.fail(f"{state.op} on {v.type}: the rank of a shape is not known", "give every tensor a rank")
    attrs = [{"start": (n,), "limit": (n + 1,), "stride": (1,)} for n in range(v.type.shape[0])]
    return [state.one("reshape", [state.one("slice", [v], a)], {}, [TensorType(v.type.dtype)]) for a in attrs]


def _dims_of_vector(state: ImportState, v: Value) -> tuple[Dim, ...]:
    return state.dims_of(v, f"the shape of {state.op}")


def _import_shape_of(state: ImportState, op: Any) -> None:
    """Import ``shape.shape_of``: bind the vector of an array's sizes."""
    state.bind(op, [_dims_as_vector(state, state.value(op.operands[0]).type.shape)])


def _import_const_shape(state: ImportState, op: Any) -> None:
    sizes = integer_tuple(op.attributes["shape"])
    state.bind(op, [state.constant(np.array(sizes, np.int64), TensorType("i64", (len(sizes),)))])


def _import_const_size(state: ImportState, op: Any) -> None:
    state.bind(op, [index_constant(state, op.attributes["value"].value)])


def _import_num_elements(state: ImportState, op: Any) -> None:
    total = index_constant(state, 1)
    for extent in _extents_of_vector(state, state.value(op.operands[0])):
        total = state.one("mul", [total, extent])
    state.bind(op, [total])


def _import_alias(state: ImportState, op: Any) -> None:
    """Import an op that only changes the MLIR type of a shape, a size or a witness: bind the result to the operand."""
    state.bind(op, state.operands(op))


def _import_from_extents(state: ImportState, op: Any) -> None:
    state.bind(op, [_shape_vector(state, state.operands(op))])


def _import_rank(state: ImportState, op: Any) -> None:
    state.bind(op, [index_constant(state, len(_extents_of_vector(state, state.value(op.operands[0]))))])


def _constant_index(state: ImportState, v: Value, most: int) -> int:
    """Return the constant index ``v``, from 0 to ``most``; refuse the op otherwise."""
    (index,) = state.known.get(v, (None,))
    if not isinstance(index, int):
        state.fail(f"the index of {state.op} is not a constant", "index with arith.constant")
    if not 0 <= index <= most:
        state.fail(f"{state.op} at {index} of a shape", f"an index from 0 to {most}")
    return index


def _import_get_extent(state: ImportState, op: Any) -> None:
    shape, where = state.operands(op)
    extents = _extents_of_vector(state, shape)
    state.bind(op, [extents[_constant_index(state, where, len(extents) - 1)]])


def _import_dim(state: ImportState, op: Any) -> None:
    x, where = state.operands(op)
    state.bind(op, [import_dimension_size(state, op, x, where)])


def _import_split_at(state: ImportState, op: Any) -> None:
    shape, where = state.operands(op)
    extents = _extents_of_vector(state, shape)
    place = _constant_index(state, where, len(extents))
    state.bind(op, [_shape_vector(state, extents[:place]), _shape_vector(state, extents[place:])])


def _import_concat(state: ImportState, op: Any) -> None:
    state.bind(
        op, [_shape_vector(state, [extent for v in state.operands(op) for extent in _extents_of_vector(state, v)])]
    )


def _size_arithmetic_importer(name: str) -> Importer:
    """Return the importer of an op on two sizes, or on two shapes of the same rank."""
    return lambda state, op: state.bind(op, [state.one(name, state.operands(op))])


def _aligned_operand_sizes(state: ImportState, op: Any) -> list[list[Dim]]:
    """Return the sizes of all operand shapes for each dim of the longest; shapes are aligned at their last dims."""
    shapes = [_dims_of_vector(state, v) for v in state.operands(op)]
    rank = max(map(len, shapes), default=0)
    return [[s[d - rank + len(s)] for s in shapes if d - rank + len(s) >= 0] for d in range(rank)]


def _import_cstr_broadcastable(state: ImportState, op: Any) -> None:
    for sizes in _aligned_operand_sizes(state, op):
        common_size(state, sizes)
    state.bind(op, ())


def _import_broadcast(state: ImportState, op: Any) -> None:
    state.bind(op, [_dims_as_vector(state, [common_size(state, sizes) for sizes in _aligned_operand_sizes(state, op)])])


def _import_cstr_eq(state: ImportState, op: Any) -> None:
    """Require that all operand shapes are equal."""
    shapes = [_dims_of_vector(state, v) for v in state.operands(op)]
    for first, other in pairwise(shapes):
        if len(other) != len(first):
            state.fail(f"{op.name}: shapes of {len(first)} and {len(other)} sizes", "shapes of one rank")
        for a, b in zip(first, other):
            if decide_relation("eq", a, b) is False:
                state.fail(f"{op.name}: sizes {a} and {b} differ", "equal shapes")
            state.require("eq", a, b, "sizes {0} and {1} differ")
    state.bind(op, ())


def _import_cstr_require(state: ImportState, op: Any) -> None:
    assert_test(state, state.value(op.operands[0]), (), escape_braces(op.attributes["msg"].value))
    state.bind(op, ())


def _import_const_witness(state: ImportState, op: Any) -> None:
    if not op.attributes["passing"].value:
        state.fail("shape.const_witness false: the model states that this is always false", "correct the shapes")
    state.bind(op, ())


def _import_assuming(state: ImportState, op: Any) -> None:
    state.bind(op, state.session.import_block(state, op.regions[0].blocks[0]))


def _all_tests(state: ImportState, tests: Sequence[Value]) -> Value:
    result = state.constant(np.array(True), TensorType("i1"))
    for test in tests:
        result = state.one("and", [result, test])
    return result


def _import_shape_eq(state: ImportState, op: Any) -> None:
    """Import ``shape_eq``: False for different ranks, else a comparison of all sizes."""
    shapes = [_extents_of_vector(state, v) for v in state.operands(op)]
    if len({len(shape) for shape in shapes}) > 1:
        state.bind(op, [state.constant(np.array(False), TensorType("i1"))])
        return
    pairs = [pair for first, other in pairwise(shapes) for pair in zip(first, other, strict=True)]
    state.bind(op, [_all_tests(state, [state.one("eq", list(pair)) for pair in pairs])])


def _import_is_broadcastable(state: ImportState, op: Any) -> None:
    """Import a test of broadcasting: for each dim, two sizes are equal or one of them is 1."""
    one, tests = index_constant(state, 1), []
    for sizes in _aligned_operand_sizes(state, op):
        values = [_dim_as_scalar(state, d) for d in sizes]
        for n, a in enumerate(values):
            for b in values[:n]:
                pairs = [(a, b), (a, one), (b, one)]
                same, *ones = (state.one("eq", list(pair)) for pair in pairs)
                tests.append(state.one("or", [same, state.one("or", ones)]))
    state.bind(op, [_all_tests(state, tests)])


def _import_any(state: ImportState, op: Any) -> None:
    """Import ``shape.any`` as the first of its operands: the model guarantees that all are equal."""
    operands = state.operands(op)
    if not operands:
        state.fail(f"{op.name} of nothing has no value", "one shape at least")
    state.bind(op, operands[:1])


def _import_reduce(state: ImportState, op: Any) -> None:
    """Import ``shape.reduce``: inline its region for each size of the shape.

    The region's arguments are the index of the dim, its size, and the carried values.
    """
    shape, *values = state.operands(op)
    block = op.regions[0].blocks[0]
    for n, extent in enumerate(_extents_of_vector(state, shape)):
        state.bind_values(block.arguments, [index_constant(state, n), extent, *values])
        values = state.session.import_block(state, block)
    state.bind(op, values)


_CASTS = ("to_extent_tensor", "from_extent_tensor", "value_as_shape", "size_to_index", "index_to_size")
_MEANINGS: dict[str, Callable[[ImportState, Any], None]] = {
    **dict.fromkeys(_CASTS, _import_alias),
    "shape_of": _import_shape_of,
    "const_shape": _import_const_shape,
    "const_size": _import_const_size,
    "num_elements": _import_num_elements,
    "from_extents": _import_from_extents,
    "rank": _import_rank,
    "get_extent": _import_get_extent,
    "dim": _import_dim,
    "split_at": _import_split_at,
    "concat": _import_concat,
    "add": _size_arithmetic_importer("add"),
    "mul": _size_arithmetic_importer("mul"),
    "div": _size_arithmetic_importer("div"),
    "max": _size_arithmetic_importer("max"),
    "min": _size_arithmetic_importer("min"),
    "broadcast": _import_broadcast,
    "shape_eq": _import_shape_eq,
    "is_broadcastable": _import_is_broadcastable,
    **dict.fromkeys(("any", "meet"), _import_any),
    "reduce": _import_reduce,
    "cstr_broadcastable": _import_cstr_broadcastable,
    "cstr_eq": _import_cstr_eq,
    "cstr_require": _import_cstr_require,
    "const_witness": _import_const_witness,
    "assuming": _import_assuming,
    "assuming_all": _import_alias,
}

SHAPE_DIALECT: dict[str, Importer] = {f"shape.{name}": importer for name, importer in _MEANINGS.items()}
