"""Compute the index in the array at which an element of a scatter's updates is written."""

from __future__ import annotations

from aotc.ir.dims.algebra import Dim, sym
from aotc.ir.loop.ir import Apply, Const, Load, Scalar, Store
from aotc.ir.loop.ir import Index as IndexScalar
from aotc.ir.opset import ACCUMULATED
from aotc.ir.tensor.ir import Op
from aotc.lowering.analysis.index_maps import Index
from aotc.lowering.analysis.prefix_scans import combiner_op_name
from aotc.lowering.elements.builder import RegionBuilder, store_combined
from aotc.lowering.elements.elements import Elements


def place_of_update(e: Elements, op: Op, at: list[Dim]) -> tuple[Index, list[Scalar]]:
    """Return the index that update element ``at`` is written to, and the tests that its whole window is inside."""
    a = op.attrs
    indices, update, *_ = op.operands[len(op.inputs) :]
    target_shape = op.operands[0].type.shape
    window = a["update_window_dims"]
    batch = [i for d, i in enumerate(at) if d not in window]
    skipped = {*a["inserted_window_dims"], *a["input_batching_dims"]}
    offsets = iter([at[d] for d in window])
    sizes = iter([update.type.shape[d] for d in window])
    where: list[Dim] = [0 if d in skipped else next(offsets) for d in range(len(target_shape))]
    extent: list[Dim] = [1 if d in skipped else next(sizes) for d in range(len(target_shape))]
    tests: list[Scalar] = []
    vector = a["index_vector_dim"]
    for k, d in enumerate(a["scatter_dims_to_operand_dims"]):
        place = list(batch)
        # If ``index_vector_dim`` is the rank of the indices, each index is a scalar.
        if vector < indices.type.rank:
            place.insert(vector, k)
        raw = e.at(indices, tuple(place))
        wide = e.bind(raw if raw.dtype == "i64" else Apply("convert", (raw,), "i64"), "s")
        room = target_shape[d] - extent[d]
        tests += [
            Apply("ge", (wide, Const(0, "i64")), "i1"),
            Apply("le", (wide, IndexScalar(room)), "i1"),
        ]
        where[d] = where[d] + sym(wide.name, 0, room + 1)
    for d, k in zip(a["input_batching_dims"], a["scatter_indices_batching_dims"], strict=True):
        where[d] = batch[k if k < vector else k - 1]
    return tuple(where), tests


def combine_updates_into(b: RegionBuilder, e: Elements, op: Op, where: Index, updates: list[Scalar]) -> None:
    """Append the stores of the combiner's results for ``updates`` and the elements at ``where``."""
    name = combiner_op_name(op)
    if name in ACCUMULATED:
        (new,) = updates
        e.block.append(Store(b.outputs[0], where, Apply(name, (Load(b.outputs[0], where), new), new.dtype)))
    else:
        store_combined(b, e, op, b.outputs, updates, [], where)
