"""Import of data movement, static and dynamic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.frontend.mlir_types import DYNAMIC, integer_attribute_tuple, integer_tuple, stablehlo_bounds
from aotc.frontend.requirements import require_stated_sizes
from aotc.frontend.session import Importer, ImportState
from aotc.ir.dims.algebra import Dim, Sym, floordiv, lone_atom, product
from aotc.ir.dims.compare import decide_relation
from aotc.ir.dims.symbols import symbols
from aotc.ir.tensor.ir import TensorType, Value
from aotc.vmfb.dtypes import to_numpy


def _import_iota(state: ImportState, op: Any) -> None:
    attrs = {"dim": op.attributes["iota_dimension"].value}
    state.bind(op, [state.one("iota", (), attrs, [state.static_type(op.results[0].type)])])


def _import_dynamic_iota(state: ImportState, op: Any) -> None:
    (shape,) = state.operands(op)
    t = state.type_with(op.results[0].type, state.dims_of(shape, "the shape of dynamic_iota"))
    state.bind(op, [state.one("iota", (), {"dim": op.attributes["iota_dimension"].value}, [t])])


def _import_broadcast_in_dim(state: ImportState, op: Any) -> None:
    """Import a broadcast; the operand provides the sizes that the result type leaves unknown."""
    (x,) = state.operands(op)
    t, dims = op.results[0].type, integer_tuple(op.attributes["broadcast_dimensions"])
    sizes = dict(zip(dims, x.type.shape))
    _, shape = state.session.parts(t)
    if any(n == DYNAMIC and sizes.get(d, 1) == 1 for d, n in enumerate(shape)):
        state.fail(f"{op.name} of {x.type}: nothing states a size of {t}", "write stablehlo.dynamic_broadcast_in_dim")
    state.bind(
        op, [broadcast_to_type(state, x, dims, state.type_with(t, [sizes.get(d, 1) for d in range(len(shape))]))]
    )


def _import_dynamic_broadcast_in_dim(state: ImportState, op: Any) -> None:
    x, shape = state.operands(op)
    t = state.type_with(op.results[0].type, state.dims_of(shape, "the shape of dynamic_broadcast_in_dim"))
    nonexpanding = integer_attribute_tuple(op, "known_nonexpanding_dimensions", ())
    state.bind(op, [broadcast_to_type(state, x, integer_tuple(op.attributes["broadcast_dimensions"]), t, nonexpanding)])


def broadcast_to_type(
    state: ImportState, x: Value, dims: Sequence[int], t: TensorType, equal_dims: Sequence[int] = ()
) -> Value:
    """Return ``x`` broadcast to ``t``.

    An unknown size of ``x`` may be 1 at run time, unless its dim is in ``equal_dims``.

    If both sizes are sizes of arguments, they are required to be equal: kernels then need no index computation.
    """
    for k, d in enumerate(dims):
        size, target = x.type.shape[k], t.shape[d]
        equal = k in equal_dims or (_is_argument_size(state, size) and _is_argument_size(state, target))
        if not isinstance(size, int) and not equal and decide_relation("eq", size, target) is None:
            x = _broadcast_dim(state, x, k, target)
    if x.type == t and tuple(dims) == tuple(range(t.rank)):
        return x
    return state.one("broadcast", [x], {"dims": tuple(dims)}, [t])


def _is_argument_size(state: ImportState, d: Dim) -> bool:
    """Return True if ``d`` is a symbol that is exactly the size of an argument."""
    symbol = lone_atom(d)
    return isinstance(symbol, Sym) and symbol.name not in (*state.session.sizes, *state.session.bound)


def _broadcast_dim(state: ImportState, x: Value, k: int, size: Dim) -> Value:
    """Return ``x`` with dim ``k`` broadcast to ``size``, by a gather of the elements ``x[min(i, last)]``.

    The dim of ``x`` may be 1 or ``size`` at run time.
    """
    shape, own = x.type.shape, x.type.shape[k]
    state.require("eq", (own - 1) * (own - size), 0, "broadcast of size {0} to size {1}", (own, size))
    places = state.one("iota", (), {"dim": 0}, [TensorType("i64", (size,))])
    attrs = {
        "offset_dims": tuple(d for d in range(len(shape)) if d != k),
        "collapsed_slice_dims": (k,),
        "operand_batching_dims": (),
        "start_indices_batching_dims": (),
        "start_index_map": (k,),
        "index_vector_dim": 1,
        "slice_sizes": tuple(1 if d == k else n for d, n in enumerate(shape)),
    }
    (stretched,) = state.append("gather", [x, places], attrs)  # an empty operand: the result is empty, too
    return stretched


def _import_broadcast(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    sizes = integer_tuple(op.attributes["broadcast_sizes"])
    dims = tuple(range(len(sizes), len(sizes) + x.type.rank))
    state.bind(op, [state.one("broadcast", [x], {"dims": dims}, [TensorType(x.type.dtype, (*sizes, *x.type.shape))])])


def _import_reshape(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    t = _reshape_type(state, op, x)
    state.bind(op, [x if x.type == t else state.one("reshape", [x], {}, [t])])


def _reshape_type(state: ImportState, op: Any, x: Value) -> TensorType:
    """Return the result type of a reshape; its only unknown size follows from the number of elements."""
    t = op.results[0].type
    dtype, shape = state.session.parts(t)
    fixed = [n for n in shape if n != DYNAMIC]
    if len(fixed) == len(shape):
        return TensorType(dtype, shape)
    if len(fixed) < len(shape) - 1 or 0 in fixed:
        state.fail(f"{op.name} to {t}: its sizes do not follow from the elements", "write stablehlo.dynamic_reshape")
    total = product(x.type.shape)
    size = floordiv(total, product(fixed))
    state.require("eq", size * product(fixed), total, "reshape of {1} elements to rows of {0}", (product(fixed), total))
    return state.type_with(t, [size] * len(shape))


def _import_dynamic_reshape(state: ImportState, op: Any) -> None:
    x, shape = state.operands(op)
    t = state.type_with(op.results[0].type, state.dims_of(shape, "the shape of dynamic_reshape"))
    state.bind(op, [x if x.type == t else state.one("reshape", [x], {}, [t])])


def _import_transpose(state: ImportState, op: Any) -> None:
    state.bind(op, [state.one("transpose", state.operands(op), {"perm": integer_tuple(op.attributes["permutation"])})])


def _import_reverse(state: ImportState, op: Any) -> None:
    state.bind(op, [state.one("reverse", state.operands(op), {"dims": integer_tuple(op.attributes["dimensions"])})])


def _import_slice(state: ImportState, op: Any) -> None:
    """Import a slice; a dim that is dynamic in the result is not cut: its limit is the dim's bound."""
    (x,) = state.operands(op)
    start, limit, stride = (integer_tuple(op.attributes[n]) for n in ("start_indices", "limit_indices", "strides"))
    _, shape = state.session.parts(op.results[0].type)
    bounds = stablehlo_bounds(op.operands[0].type)
    ends: list[Dim] = list(limit)
    for d, n in enumerate(shape):
        if n == DYNAMIC and bounds and bounds[d] == limit[d] and (start[d], stride[d]) == (0, 1):
            ends[d] = x.type.shape[d]
    state.bind(op, [state.one("slice", [x], {"start": start, "limit": tuple(ends), "stride": stride})])


def _dynamic_slice_sizes(state: ImportState, op: Any) -> tuple[Dim, ...] | None:
    """Return the sizes of a dynamic slice with limit ``start + sizes`` and strides of 1; None for other slices.

    JAX writes slices in this form if their starts depend on data and their sizes on shapes.
    """
    start, limit, stride = list(op.operands)[1:]
    maker = getattr(limit.owner, "opview", None)
    if maker is None or maker.operation.name != "stablehlo.add" or not _is_all_ones(state, state.value(stride)):
        return None
    others = [v for v in maker.operation.operands if v != start]
    sizes = state.value(others[0]) if len(others) == 1 else None
    return None if sizes is None else state.known.get(sizes)


def _is_all_ones(state: ImportState, v: Value | None) -> bool:
    return v is not None and set(state.known.get(v, (0,))) == {1}


def _vector_element(state: ImportState, vector: Value, n: int) -> Value:
    one = state.one("slice", [vector], {"start": (n,), "limit": (n + 1,), "stride": (1,)})
    return state.one("reshape", [one], {}, [TensorType(vector.type.dtype)])


_BOUNDS = ("start", "limit", "stride")


def _import_real_dynamic_slice(state: ImportState, op: Any) -> None:
    """Import a slice with dynamic bounds: as ``slice`` of symbolic bounds if they are shape values.

    Bounds that depend on data become the starts of a ``dynamic_slice``.
    """
    x, *bounds = state.operands(op)
    _, shape = state.session.parts(op.results[0].type)
    sizes = _dynamic_slice_sizes(state, op)
    if bounds[0] not in state.known and DYNAMIC not in shape and bounds[2] in state.known:
        sizes = _slice_reach(shape, state.dims_of(bounds[2], "the stride of real_dynamic_slice"))
    if sizes is None and any(v not in state.known or dims_depend_on_values(state, state.known[v]) for v in bounds):
        first, last, _ = (state.dims_of(v, f"the {w} of real_dynamic_slice") for v, w in zip(bounds, _BOUNDS))
        sizes = tuple(b - a for a, b in zip(first, last))
    if sizes is not None and (
        bounds[0] not in state.known or any(dims_depend_on_values(state, state.known[v]) for v in bounds)
    ):
        starts = [_vector_element(state, bounds[0], n) for n in range(len(sizes))]
        window = state.one("dynamic_slice", [x, *starts], {"sizes": sizes})
        if sizes != shape and bounds[2] in state.known:
            attrs = {"start": (0,) * len(sizes), "limit": sizes, "stride": state.known[bounds[2]]}
            window = state.one("slice", [window], attrs)
        state.bind(op, [window])
        return
    attrs = {w: state.known[v] for v, w in zip(bounds, _BOUNDS)}
    results = [state.one("slice", [x], attrs)]
    require_stated_sizes(state, results, [shape])  # MLIR's verifier does not compare constant bounds with the type
    state.bind(op, results)


def dims_depend_on_values(state: ImportState, dims: Sequence[Dim]) -> bool:
    """Return True if ``dims`` depend on data, and not only on sizes: such bounds may be out of range."""
    values = {*state.session.sizes, *state.session.bound}
    return any(s.name in values for d in dims for s in symbols(d))


def _slice_reach(shape: Sequence[int], strides: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return for each dim the distance from the first element of a strided slice to the end of its last element."""
    return tuple(0 if n == 0 else (n - 1) * stride + 1 for n, stride in zip(shape, strides))


def _import_pad(state: ImportState, op: Any) -> None:
    names = {"low": "edge_padding_low", "high": "edge_padding_high", "interior": "interior_padding"}
    state.bind(
        op, [state.one("pad", state.operands(op), {k: integer_tuple(op.attributes[n]) for k, n in names.items()})]
    )


def _import_dynamic_pad(state: ImportState, op: Any) -> None:
    x, value, *widths = state.operands(op)
    low, high, interior = (state.dims_of(v, "the widths of dynamic_pad") for v in widths)
    state.bind(op, [state.one("pad", [x, value], {"low": low, "high": high, "interior": interior})])


def _import_concatenate(state: ImportState, op: Any) -> None:
    attrs = {"dim": op.attributes["dimension"].value}
    operands = state.operands(op)
    state.bind(op, operands if len(operands) == 1 else [state.one("concatenate", operands, attrs)])


def _import_get_dimension_size(state: ImportState, op: Any) -> None:
    (x,) = state.operands(op)
    size = x.type.shape[op.attributes["dimension"].value]
    state.bind(op, [state.one("dim", (), {"expr": size}, [TensorType("i32")])])


def _import_set_dimension_size(state: ImportState, op: Any) -> None:
    """Import a change of a dynamic size: a dim is cut to its first elements, or filled with zeros.

    A bounded dim can grow up to its bound. The new elements are undefined in StableHLO; here they are zeros.
    """
    x, operand = state.operands(op)
    dim = op.attributes["dimension"].value
    size, whole = state.dims_of(operand, "the size of set_dimension_size")[0], x.type.shape[dim]
    if size == whole:
        state.bind(op, [x])
        return
    most = _dim_bound(op.operands[0].type, dim, whole)
    stated = state.session.parts(op.results[0].type)[1][dim]
    if not stablehlo_bounds(op.results[0].type) and stated != size:
        hint = "state its bound in the type of the result: #stablehlo.bounds"
        state.fail(f"set_dimension_size of {whole} elements to {size} is not supported without a bound", hint)
    if decide_relation("le", size, most) is False:
        state.fail(f"set_dimension_size of {most} elements to {size}", "pad the operand with stablehlo.pad first")
    if most != whole and decide_relation("le", size, whole) is not True:
        state.require("le", whole, most, "a size of {0} of an operand, of which the type allows {1}")
        zero = state.constant(np.zeros((), to_numpy(x.type.dtype)), TensorType(x.type.dtype))
        none, high = (0,) * x.type.rank, tuple(most - whole if d == dim else 0 for d in range(x.type.rank))
        x = state.one("pad", [x, zero], {"low": none, "high": high, "interior": none})
    sizes = tuple(size if d == dim else n for d, n in enumerate(x.type.shape))
    start = state.constant(np.array(0, np.int32), TensorType("i32"))
    state.bind(op, [state.one("dynamic_slice", [x, *[start] * len(sizes)], {"sizes": sizes})])


def _dim_bound(t: Any, dim: int, size: Dim) -> Dim:
    """Return the bound of dim number ``dim`` in type ``t``, or ``size`` without a bound."""
    bounds = stablehlo_bounds(t)
    return bounds[dim] if bounds and bounds[dim] != DYNAMIC else size


SHAPE: dict[str, Importer] = {
    "stablehlo.iota": _import_iota,
    "stablehlo.dynamic_iota": _import_dynamic_iota,
    "stablehlo.broadcast_in_dim": _import_broadcast_in_dim,
    "stablehlo.dynamic_broadcast_in_dim": _import_dynamic_broadcast_in_dim,
    "stablehlo.broadcast": _import_broadcast,
    "stablehlo.reshape": _import_reshape,
    "stablehlo.dynamic_reshape": _import_dynamic_reshape,
    "stablehlo.transpose": _import_transpose,
    "stablehlo.reverse": _import_reverse,
    "stablehlo.slice": _import_slice,
    "stablehlo.real_dynamic_slice": _import_real_dynamic_slice,
    "stablehlo.pad": _import_pad,
    "stablehlo.dynamic_pad": _import_dynamic_pad,
    "stablehlo.concatenate": _import_concatenate,
    "stablehlo.get_dimension_size": _import_get_dimension_size,
    "stablehlo.set_dimension_size": _import_set_dimension_size,
}
