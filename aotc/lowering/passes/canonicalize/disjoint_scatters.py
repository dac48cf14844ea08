"""Simplify scatters in which each update has its own row: ``x.at[iota, y].set(u)`` and ``jnp.take_along_axis``.

No two updates write the same element, so their order does not matter. If ``x`` is filled with one number, the scatter
becomes a comparison, which is computed where it is read::

    %x = scatter %zeros, %y, %u (add) : f32[32, 10]     one update for each of 32 rows
    ->
    %x = select(iota(1) == %y, 0 + %u, 0)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

from aotc.ir.dims.algebra import Dim
from aotc.ir.opset import SCALARS
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import dtype_represents_indices, iota_dim, splat_of
from aotc.lowering.analysis.parallel_scatters import has_disjoint_updates
from aotc.lowering.passes.rewrite import Builder, lift_region


def disjoint_scatters(op: Op, b: Builder) -> Sequence[Value] | None:
    """Return the values that replace the results of the ``scatter`` ``op``, or None."""
    positions = _scatter_positions(op, b)
    if positions is None:
        return None
    if (compared := _scatter_as_select(op, positions, b)) is not None:
        return (compared,)
    if has_disjoint_updates(op):
        return None
    types = tuple(v.type for v in op.results)
    return b.append(b.op("scatter", op.operands, {**op.attrs, "unique_indices": True}, types, regions=op.regions))


@dataclass(frozen=True, slots=True)
class _ScatterPositions:
    """Positions in the array that the updates of a scatter write.

    Attributes
    ----------
    own : mapping
        For each dim of the indices longer than 1 (except the dim of their components): the dim of the array along which
            the position of an update is its number.
    columns : mapping
        For each other indexed dim of the array: the number of the component of the indices.
    """

    own: Mapping[int, int]
    columns: Mapping[int, int]


def _scatter_positions(op: Op, b: Builder) -> _ScatterPositions | None:
    """Return the positions that a scatter's updates write, or None if two updates may write one row."""
    a, n = op.attrs, op.attrs["inputs"]
    indices, vector = op.operands[n].type, a["index_vector_dim"]
    dims = [d for d in range(indices.rank) if d != vector]
    own = {dims.index(k): d for d, k in zip(a["input_batching_dims"], a["scatter_indices_batching_dims"], strict=True)}
    columns = {}
    for k, d in enumerate(a["scatter_dims_to_operand_dims"]):
        counted = _counting_index_dim(op.operands[n], vector, k, b)
        if counted is None or dims.index(counted) in own or d not in a["inserted_window_dims"]:
            columns[d] = k
        else:
            own[dims.index(counted)] = d
    if any(indices.shape[d] != 1 and number not in own for number, d in enumerate(dims)):
        return None
    return _ScatterPositions(own, columns)


def _counting_index_dim(indices: Value, vector: int, component: int, b: Builder) -> int | None:
    """Return the dim of scatter indices along which one component is 0, 1, 2...; None if there is none."""
    op = b.definitions.get(indices)
    if vector == indices.type.rank:
        return iota_dim(indices, b.definitions)
    if indices.type.shape[vector] == 1:
        return _dim_unless_vector(vector, iota_dim(indices, b.definitions))
    if op is None or op.name != "concatenate" or op.attrs["dim"] != vector:
        return None
    if any(part.type.shape[vector] != 1 for part in op.operands):
        return None
    return _dim_unless_vector(vector, iota_dim(op.operands[component], b.definitions))


def _dim_unless_vector(vector: int, dim: int | None) -> int | None:
    """Return ``dim``, or None if it is the dim ``vector`` of the components."""
    return None if dim == vector else dim


def _scatter_as_select(op: Op, places: _ScatterPositions, b: Builder) -> Value | None:
    """Rewrite a scatter into an array filled with one number as a select by position; None if not possible."""
    x, indices, *updates = op.operands
    fill = splat_of(x, b.definitions)
    if fill is None or len(updates) != 1 or not _updates_cover_all_rows(op, places):
        return None
    region = op.regions[0]
    if not all(inner.name in SCALARS or inner.name == "constant" for inner in region.ops):
        return None
    (update,) = updates
    shape = x.type.shape
    batch = [d for d in range(update.type.rank) if d not in op.attrs["update_window_dims"]]
    target = dict(zip(op.attrs["update_window_dims"], _window_dims_of_update(op), strict=True))
    target.update({batch[number]: d for number, d in places.own.items()})
    combined = lift_region(region, [b.constant(fill, update.type), update], b)[0]
    new = _broadcast_dims_to(combined, target, x.type, b)
    tests = []
    for d, component in places.columns.items():
        column = _scatter_index_component(indices, op.attrs["index_vector_dim"], component, shape[d], b)
        index = _broadcast_dims_to(column, places.own, TensorType(column.type.dtype, shape), b)
        tests.append(b.make("eq", (b.make("iota", (), {"dim": d}, index.type), index)))
    if not tests:
        return new
    filled = b.constant(fill, x.type)
    return b.make("select", (reduce(lambda p, q: b.make("and", (p, q)), tests), new, filled))


def _updates_cover_all_rows(op: Op, places: _ScatterPositions) -> bool:
    """Return True if updates cover all rows, and whole dims except those that components of indices select."""
    a, n = op.attrs, op.attrs["inputs"]
    x, indices, update = op.operands[0].type, op.operands[n].type, op.operands[n + 1].type
    dims = [d for d in range(indices.rank) if d != a["index_vector_dim"]]
    pairs = [(d, indices.shape[dims[number]]) for number, d in places.own.items()]
    pairs += zip(_window_dims_of_update(op), (update.shape[u] for u in a["update_window_dims"]), strict=True)
    placed = {d for d, _ in pairs} | set(places.columns)
    pairs += [(d, 1) for d in range(x.rank) if d not in placed]
    return all(x.shape[d] == size for d, size in pairs) and all(d in a["inserted_window_dims"] for d in places.columns)


def _window_dims_of_update(op: Op) -> list[int]:
    """Return the dims of the array along which an update's window extends, in order."""
    skipped = {*op.attrs["inserted_window_dims"], *op.attrs["input_batching_dims"]}
    return [d for d in range(op.operands[0].type.rank) if d not in skipped]


def _scatter_index_component(indices: Value, vector: int, component: int, size: Dim, b: Builder) -> Value:
    """Return one component of all indices, in a dtype that represents every position along a dim of ``size``."""
    column = indices
    if vector < indices.type.rank:
        column = b.slice_dim(indices, vector, component, component + 1)
        column = b.reshape(column, tuple(s for n, s in enumerate(indices.type.shape) if n != vector))
    return column if dtype_represents_indices(column.type.dtype, size) else b.convert(column, "i64")


def _broadcast_dims_to(v: Value, target: Mapping[int, int], type_: TensorType, b: Builder) -> Value:
    """Return ``v`` with dim ``d`` as dim ``target[d]`` of a shape; the other dims have size 1."""
    dims = [d for d in range(v.type.rank) if d in target]
    v = b.reshape(v, tuple(v.type.shape[d] for d in dims))
    return b.broadcast(v, tuple(target[d] for d in dims), type_.shape)

