"""Import of MLIR's ``tensor`` ops, by which producers other than JAX compute sizes and move data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.frontend.importers.shape import dims_depend_on_values
from aotc.frontend.importers.shape_arith import bitcast
from aotc.frontend.limits import SIZE_ELEMENTS
from aotc.frontend.mlir_types import DYNAMIC, integer_tuple
from aotc.frontend.requirements import require_shape
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim, product
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import kind_of, to_numpy


def _constant_integer(state: ImportState, v: Value, what: str) -> int:
    """Return the integer ``v``, which must be a compile-time constant; ``what`` names it in the error."""
    (index,) = state.known.get(v, (None,))
    if not isinstance(index, int):
        state.fail(f"{what} is not a constant", "index with arith.constant")
    return index


def _import_dim(state: ImportState, op: Any) -> None:
    x, where = state.operands(op)
    state.bind(op, [import_dimension_size(state, op, x, where)])


def import_dimension_size(state: ImportState, op: Any, x: Value, where: Value) -> Value:
    """Return the size of ``x`` in the dim ``where``, which must be a constant."""
    index = _constant_integer(state, where, f"the dimension of {op.name}")
    if not 0 <= index < x.type.rank:
        state.fail(f"{op.name} {index} of {x.type}", f"an index below {x.type.rank}")
    return state.one("dim", (), {"expr": x.type.shape[index]}, [TensorType("i64")])


def _import_from_elements(state: ImportState, op: Any) -> None:
    state.bind(op, [tensor_of_scalars(state, state.operands(op), state.static_type(op.results[0].type))])


def _import_extract(state: ImportState, op: Any) -> None:
    """Import ``tensor.extract``: a slice for constant indices, else a gather."""
    x, *where = state.operands(op)
    if not where:
        state.bind(op, [x])
        return
    elements = [state.known.get(v, (None,))[0] for v in where]
    indices = [n for n in elements if isinstance(n, int)]
    if len(indices) < len(where):
        state.bind(op, [_tensor_element(state, x, where)])
        return
    for index, size in zip(indices, x.type.shape, strict=True):
        if index < 0 or (isinstance(size, int) and index >= size):
            state.fail(f"tensor.extract of element {index} of {x.type}", "an index within the tensor")
        state.require("le", index + 1, size, "tensor.extract of element {0} of {1}", (index, size))
    attrs = {"start": tuple(indices), "limit": tuple(n + 1 for n in indices), "stride": (1,) * len(indices)}
    state.bind(op, [_reshaped_tensor(state, state.one("slice", [x], attrs), ())])


def _tensor_element(state: ImportState, x: Value, where: Sequence[Value]) -> Value:
    """Return the element of ``x`` at the scalar indices ``where``; index tensors select a tensor of elements."""
    shape = max((v.type.shape for v in where), key=len)
    if not shape:
        return _reshaped_tensor(state, state.one("dynamic_slice", [x, *where], {"sizes": (1,) * x.type.rank}), ())
    wide = [_reshaped_tensor(state, state.broadcast_scalar(v, shape), (*shape, 1)) for v in where]
    places = wide[0] if len(wide) == 1 else state.one("concatenate", wide, {"dim": len(shape)})
    axes = tuple(range(x.type.rank))
    attrs = _gather_attrs((), axes, axes, len(shape), (1,) * x.type.rank)
    return state.one("gather", [x, places], attrs)


def _gather_attrs(
    offsets: Sequence[int], collapsed: Sequence[int], axes: Sequence[int], vector: int, sizes: Sequence[Dim]
) -> dict[str, Any]:
    """Return the attributes of a ``gather`` without batch dims; ``vector`` is the dim of the index vectors."""
    return {
        "offset_dims": tuple(offsets),
        "collapsed_slice_dims": tuple(collapsed),
        "operand_batching_dims": (),
        "start_indices_batching_dims": (),
        "start_index_map": tuple(axes),
        "index_vector_dim": vector,
        "slice_sizes": tuple(sizes),
    }


def _reshaped_tensor(state: ImportState, v: Value, shape: Sequence[Dim]) -> Value:
    if v.type.shape == tuple(shape):
        return v
    return state.one("reshape", [v], {}, [TensorType(v.type.dtype, tuple(shape))])


def _import_cast(state: ImportState, op: Any) -> None:
    """Import ``tensor.cast``: bind the operand, and check it against the sizes in the result type."""
    (x,) = state.operands(op)
    _, shape = state.session.parts(op.results[0].type)
    if len(shape) != x.type.rank:
        state.fail(f"tensor.cast of {x.type} to rank {len(shape)}", "keep the rank")
    sizes = tuple(own if n == DYNAMIC else n for n, own in zip(shape, x.type.shape))
    state.bind(op, [require_shape(state, x, sizes)])


def _result_sizes(
    state: ImportState, op: Any, values: Sequence[Value], static: Sequence[int] | None = None
) -> tuple[Dim, ...]:
    """Return the sizes of a result: the known ones of its type (or of ``static``), ``values`` for the others."""
    shape = state.session.parts(op.results[0].type)[1] if static is None else static
    rest = iter(values)
    what = f"a size of {op.name}"
    return tuple(state.dims_of(next(rest), what)[0] if n == DYNAMIC else n for n in shape)


def _import_splat(state: ImportState, op: Any) -> None:
    x, *values = state.operands(op)
    state.bind(op, [state.broadcast_scalar(x, _result_sizes(state, op, values))])


def _import_empty(state: ImportState, op: Any) -> None:
    """Import an uninitialized tensor as zeros."""
    dtype = state.dtype(op.results[0].type)
    zero = state.constant(np.zeros((), to_numpy(dtype)), TensorType(dtype))
    state.bind(op, [state.broadcast_scalar(zero, _result_sizes(state, op, state.operands(op)))])


def _import_generate(state: ImportState, op: Any) -> None:
    """Import ``tensor.generate``: its region on index tensors, or per element if the result may be a shape."""
    shape, block = _result_sizes(state, op, state.operands(op)), op.regions[0].blocks[0]
    dtype = state.dtype(op.results[0].type)
    if len(shape) == 1 and isinstance(shape[0], int) and kind_of(dtype) in "iu" and shape[0] <= SIZE_ELEMENTS:
        elements = [_import_generator_body(state, block, [index_constant(state, n)]) for n in range(shape[0])]
        state.bind(op, [tensor_of_scalars(state, elements, TensorType(dtype, shape))])
        return
    t = TensorType("i64", shape)
    state.by_element += 1
    try:
        element = _import_generator_body(
            state, block, [state.one("iota", (), {"dim": d}, [t]) for d in range(len(shape))]
        )
        state.bind(op, [state.broadcast_scalar(element, shape)])
    finally:
        state.by_element -= 1


def _import_generator_body(state: ImportState, block: Any, params: Sequence[Value]) -> Value:
    state.bind_values(block.arguments, params)
    (element,) = state.session.import_block(state, block)
    return element


def index_constant(state: ImportState, n: int) -> Value:
    """Return an index as an i64 scalar."""
    return state.constant(np.array(n, np.int64), TensorType("i64"))


def tensor_of_scalars(state: ImportState, elements: Sequence[Value], t: TensorType) -> Value:
    """Return the tensor of type ``t`` with the scalars ``elements`` in row-major order."""
    if not elements:
        return state.constant(np.zeros((), to_numpy(t.dtype)), t)
    rows = [_reshaped_tensor(state, v, (1,)) for v in elements]
    flat = rows[0] if len(rows) == 1 else state.one("concatenate", rows, {"dim": 0})
    return _reshaped_tensor(state, flat, t.shape)


def _import_collapse_shape(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    groups = [integer_tuple(group) for group in op.attributes["reassociation"]]
    state.bind(op, [_reshaped_tensor(state, x, [product([x.type.shape[d] for d in group]) for group in groups])])


def _import_expand_shape(state: ImportState, op: Any) -> None:
    """Import ``expand_shape`` as a reshape; each size must be the product of the sizes of its group."""
    x, *values = state.operands(op)
    shape = _result_sizes(state, op, values, integer_tuple(op.attributes["static_output_shape"]))
    for own, group in zip(x.type.shape, op.attributes["reassociation"], strict=True):
        total = product([shape[d] for d in integer_tuple(group)])
        state.require("eq", own, total, "tensor.expand_shape of size {0} to {1} elements")
    state.bind(op, [_reshaped_tensor(state, x, shape)])


def _static_and_dynamic_values(state: ImportState, op: Any, first: int, names: Sequence[str]) -> list[list[Value]]:
    """Return the entries of each attribute in ``names`` as scalars; operands replace dynamic entries.

    The operands are used in order, from number ``first`` on.
    """
    rest = iter(state.operands(op)[first:])
    return [
        [next(rest) if n == DYNAMIC else index_constant(state, n) for n in integer_tuple(op.attributes[name])]
        for name in names
    ]


def _slice_operands(state: ImportState, op: Any, first: int) -> tuple[list[Value], tuple[Dim, ...], tuple[Dim, ...]]:
    """Return offsets (scalars), sizes and strides (dims) of a slice op whose dynamic operands begin at ``first``."""
    offsets, sizes, strides = _static_and_dynamic_values(
        state, op, first, ("static_offsets", "static_sizes", "static_strides")
    )
    dims = [tuple(state.dims_of(v, f"a size of {op.name}")[0] for v in part) for part in (sizes, strides)]
    return offsets, dims[0], dims[1]


def _drop_unit_sizes(state: ImportState, op: Any, sizes: Sequence[Dim]) -> tuple[Dim, ...]:
    """Drop the sizes of 1 that the result type of a slice lacks; in case of ambiguity, the first ones."""
    shape = state.session.parts(op.results[0].type)[1]
    remaining: list[Dim] = []
    for stated, size in zip(integer_tuple(op.attributes["static_sizes"]), sizes, strict=True):
        if len(remaining) < len(shape) and stated == shape[len(remaining)]:
            remaining.append(size)
        elif stated != 1:
            state.fail(f"{op.name}: the sizes of {op.results[0].type} do not match", "leave out sizes of 1 only")
    return tuple(remaining)


def _import_extract_slice(state: ImportState, op: Any) -> None:
    """Import a strided slice: ``slice`` for known offsets, else ``dynamic_slice``."""
    x = state.value(op.operands[0])
    offsets, sizes, strides = _slice_operands(state, op, 1)
    values = [state.known.get(v) for v in offsets]
    if all(k is not None and not dims_depend_on_values(state, k) for k in values):
        starts = [k[0] for k in values if k is not None]
        limits = [a + _strided_reach(n, s) for a, n, s in zip(starts, sizes, strides)]
        taken = state.one("slice", [x], {"start": tuple(starts), "limit": tuple(limits), "stride": strides})
    else:
        reach = tuple(_strided_reach(n, s) for n, s in zip(sizes, strides))
        taken = state.one("dynamic_slice", [x, *offsets], {"sizes": reach})
        if any(s != 1 for s in strides):
            taken = state.one("slice", [taken], {"start": (0,) * len(reach), "limit": reach, "stride": strides})
    state.bind(op, [_reshaped_tensor(state, taken, _drop_unit_sizes(state, op, sizes))])


def _strided_reach(size: Dim, stride: Dim) -> Dim:
    """Return the distance from the first of ``size`` elements with this ``stride`` to the end of the last."""
    return 0 if isinstance(size, int) and size == 0 else (size - 1) * stride + 1


def _import_insert_slice(state: ImportState, op: Any) -> None:
    """Import ``insert_slice``: an update of a slice with strides of 1."""
    source, x = state.operands(op)[:2]
    offsets, sizes, strides = _slice_operands(state, op, 2)
    if any(s != 1 != n for n, s in zip(sizes, strides)):
        state.fail(f"{op.name} with strides {list(strides)} is not supported", "write stablehlo.scatter")
    state.bind(op, [state.one("dynamic_update_slice", [x, _reshaped_tensor(state, source, sizes), *offsets])])


def _import_insert(state: ImportState, op: Any) -> None:
    scalar, x, *where = state.operands(op)
    state.bind(
        op, [state.one("dynamic_update_slice", [x, _reshaped_tensor(state, scalar, (1,) * x.type.rank), *where])]
    )


def _import_pad(state: ImportState, op: Any) -> None:
    """Import a padding by one value; the value must not depend on the index."""
    block = op.regions[0].blocks[0]
    if any(list(argument.uses) for argument in block.arguments):
        state.fail("tensor.pad with a value that depends on the index is not supported", "write stablehlo.select")
    x = state.value(op.operands[0])
    widths = _static_and_dynamic_values(state, op, 1, ("static_low", "static_high"))
    low, high = (tuple(state.dims_of(v, "a width of tensor.pad")[0] for v in part) for part in widths)
    value = _import_generator_body(state, block, [index_constant(state, 0)] * x.type.rank)
    attrs = {"low": low, "high": high, "interior": (0,) * x.type.rank}
    state.bind(op, [state.one("pad", [x, value], attrs)])


def _import_rank(state: ImportState, op: Any) -> None:
    state.bind(op, [index_constant(state, state.value(op.operands[0]).type.rank)])


def _import_reshape(state: ImportState, op: Any) -> None:
    x, shape = state.operands(op)
    t = state.type_with(op.results[0].type, state.dims_of(shape, "the shape of tensor.reshape"))
    state.bind(op, [_reshaped_tensor(state, x, t.shape)])


def _import_concat(state: ImportState, op: Any) -> None:
    operands = state.operands(op)
    dim = {"dim": op.attributes["dim"].value}
    state.bind(op, operands if len(operands) == 1 else [state.one("concatenate", operands, dim)])


def _import_gather(state: ImportState, op: Any) -> None:
    """Import ``tensor.gather``: slices of size 1 along the indexed dims, which the result may omit."""
    x, places = state.operands(op)
    axes = integer_tuple(op.attributes["gather_dims"])
    sizes = tuple(1 if d in axes else n for d, n in enumerate(x.type.shape))
    batch = places.type.shape[:-1]
    rest = tuple(n for d, n in enumerate(sizes) if d not in axes)
    offsets = range(len(batch), len(batch) + len(rest))
    gathered = state.one("gather", [x, places], _gather_attrs(offsets, axes, axes, len(batch), sizes))
    rank = len(state.session.parts(op.results[0].type)[1])
    state.bind(op, [_reshaped_tensor(state, gathered, (*batch, *(rest if rank == len(batch) + len(rest) else sizes)))])


SHAPE_TENSOR: dict[str, Importer] = {
    "tensor.dim": _import_dim,
    "tensor.rank": _import_rank,
    "tensor.from_elements": _import_from_elements,
    "tensor.generate": _import_generate,
    "tensor.empty": _import_empty,
    "tensor.splat": _import_splat,
    "tensor.extract": _import_extract,
    "tensor.insert": _import_insert,
    "tensor.extract_slice": _import_extract_slice,
    "tensor.insert_slice": _import_insert_slice,
    "tensor.cast": _import_cast,
    "tensor.bitcast": bitcast,
    "tensor.collapse_shape": _import_collapse_shape,
    "tensor.expand_shape": _import_expand_shape,
    "tensor.reshape": _import_reshape,
    "tensor.concat": _import_concat,
    "tensor.pad": _import_pad,
    "tensor.gather": _import_gather,
}
