"""Simplify movement ops that move nothing, follow one another, or move a uniform array.

Each rule returns the value that replaces the result of the op, or None.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from aotc.ir.dims.algebra import is_static, product, static
from aotc.ir.opset import MOVES
from aotc.ir.opset.dim_attributes import dims_of, numbers_of, pairs_of
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.analysis.constant_values import constant_of, integer_of, splat_of
from aotc.lowering.analysis.prefix_scans import combiner_op_name, neutral_value, scan_of
from aotc.lowering.passes.rewrite import Builder
from aotc.vmfb.dtypes import kind_of


def simplify_shape(op: Op, b: Builder) -> Value | None:
    """Return a simpler value equal to the result of the movement ``op``, or None."""
    rule = _RULES.get(op.name)
    if rule is None:
        return None
    if op.name in MOVES:
        value = constant_of(op.operands[0], b.definitions)
        if value is not None and value.ndim == 0:
            return b.constant(value, op.result.type)
    return rule(op, op.operands[0], b)


def _definition_named(x: Value, name: str, b: Builder) -> Op | None:
    """Return the op that computes ``x`` if it has the given name, else None."""
    op = b.definitions.get(x)
    return op if op is not None and op.name == name else None


def _simplify_reshape(op: Op, x: Value, b: Builder) -> Value | None:
    """Remove a reshape to the same shape, merge it with one before it, or broadcast a scalar to its shape."""
    if x.type == op.result.type:
        return x
    inner = _definition_named(x, "reshape", b)
    if inner is not None:
        return b.reshape(inner.operands[0], op.result.type.shape)
    spread = _definition_named(x, "broadcast", b)
    if spread is not None and spread.operands[0].type.rank == 0:
        return b.broadcast(spread.operands[0], (), op.result.type.shape)
    return None


def _simplify_transpose(op: Op, x: Value, b: Builder) -> Value | None:
    """Remove an identity transpose, merge it with the movement op before it, or turn it into a reshape."""
    perm = tuple(op.attrs["perm"])
    if perm == tuple(range(len(perm))):
        return x
    inner = _definition_named(x, "transpose", b)
    if inner is not None:
        return b.transpose(inner.operands[0], [inner.attrs["perm"][p] for p in perm])
    large = [p for p in perm if x.type.shape[p] != 1]
    if large == sorted(large):
        return b.reshape(x, op.result.type.shape)
    spread = _definition_named(x, "broadcast", b)
    if spread is not None:
        dims = tuple(perm.index(d) for d in spread.attrs["dims"])
        return b.broadcast(spread.operands[0], dims, op.result.type.shape)
    return None


def _simplify_broadcast(op: Op, x: Value, b: Builder) -> Value | None:
    """Remove an identity broadcast, merge it with the movement op before it, or turn it into a reshape."""
    dims, shape = tuple(op.attrs["dims"]), op.result.type.shape
    if x.type == op.result.type and dims == tuple(range(len(dims))):
        return x
    inner = _definition_named(x, "broadcast", b)
    if inner is not None:
        composed = tuple(dims[d] for d in inner.attrs["dims"])
        return b.broadcast(inner.operands[0], composed, shape)
    iota = _definition_named(x, "iota", b)
    if iota is not None and x.type.shape[iota.attrs["dim"]] == shape[dims[iota.attrs["dim"]]]:
        return b.make("iota", (), {"dim": dims[iota.attrs["dim"]]}, op.result.type)
    if x.type.rank and list(dims) == sorted(dims) and product(x.type.shape) == product(shape):
        in_order = all(x.type.shape[i] == shape[d] for i, d in enumerate(dims))
        return b.reshape(x, shape) if in_order else None
    return None


def _simplify_slice(op: Op, x: Value, b: Builder) -> Value | None:
    """Remove a slice of everything, or merge it with the slice or concatenation before it."""
    start, limit, stride = dims_of(op.attrs, "start"), dims_of(op.attrs, "limit"), dims_of(op.attrs, "stride")
    if all(s == 0 for s in start) and all(s == 1 for s in stride) and tuple(limit) == x.type.shape:
        return x
    if not is_static((*start, *limit, *stride, *x.type.shape, *op.result.type.shape)):
        return None
    inner = _definition_named(x, "slice", b)
    if inner is not None:
        sizes = [dims_of(inner.attrs, "start"), dims_of(inner.attrs, "stride"), inner.operands[0].type.shape]
        if all(map(is_static, sizes)):
            return _slice_of_slice(op, inner, b)
    joined = _definition_named(x, "concatenate", b)
    return _slice_of_concatenate(op, joined, b) if joined is not None else None


def _slice_of_slice(op: Op, inner: Op, b: Builder) -> Value:
    """Return two slices as one slice."""
    start, limit, stride = [], [], []
    first = zip(numbers_of(inner.attrs, "start"), numbers_of(inner.attrs, "stride"))
    second = zip(numbers_of(op.attrs, "start"), numbers_of(op.attrs, "stride"), map(static, op.result.type.shape))
    for (s, t), (s2, t2, n) in zip(first, second):
        start.append(s + s2 * t if n else s)  # nothing may begin in the part that the inner slice removes
        stride.append(t * t2)
        limit.append(start[-1] + (n - 1) * t * t2 + 1 if n else start[-1])
    return b.slice(inner.operands[0], start, limit, stride)


def _slice_of_concatenate(op: Op, joined: Op, b: Builder) -> Value | None:
    """Slice the one operand of the concatenation that contains the whole slice."""
    dim, begin = joined.attrs["dim"], 0
    low, high = numbers_of(op.attrs, "start")[dim], numbers_of(op.attrs, "limit")[dim]
    for part in joined.operands:
        extent = part.type.shape[dim]
        if begin <= low < high <= begin + extent:
            start, limit = list(dims_of(op.attrs, "start")), list(dims_of(op.attrs, "limit"))
            start[dim], limit[dim] = low - begin, high - begin
            return b.slice(part, start, limit, numbers_of(op.attrs, "stride"))
        begin = begin + extent
    return None


def _simplify_pad(op: Op, x: Value, b: Builder) -> Value | None:
    return None if any((*dims_of(op.attrs, "low"), *dims_of(op.attrs, "high"), *dims_of(op.attrs, "interior"))) else x


def _simplify_reverse(op: Op, x: Value, b: Builder) -> Value | None:
    return x if all(x.type.shape[d] == 1 for d in op.attrs["dims"]) else None


def _simplify_concatenate(op: Op, x: Value, b: Builder) -> Value | None:
    """Remove empty operands; a single operand replaces the concatenation."""
    dim = op.attrs["dim"]
    parts = tuple(v for v in op.operands if v.type.shape[dim] != 0) or op.operands[:1]
    if len(parts) == 1:
        return parts[0]
    return b.make("concatenate", parts, {"dim": dim}) if len(parts) < len(op.operands) else None


def _simplify_dynamic_slice(op: Op, x: Value, b: Builder) -> Value | None:
    """Replace a dynamic slice with constant start indices by a static slice."""
    sizes = dims_of(op.attrs, "sizes")
    if sizes == x.type.shape:
        return x
    starts = [integer_of(v, b.definitions) for v in op.operands[1:]]
    if not is_static((*sizes, *x.type.shape)):
        return None
    begin = []
    for s, n, extent in zip(starts, map(static, sizes), map(static, x.type.shape)):
        if s is None and n != extent:
            return None
        begin.append(min(max(s or 0, 0), extent - n))
    return b.slice(x, begin, [s + n for s, n in zip(begin, sizes)])


def _simplify_gather(op: Op, x: Value, b: Builder) -> Value | None:
    """Replace a gather of one slice at a constant index by a slice; JAX emits it for ``jnp.take(x, 0, axis)``."""
    a, indices = op.attrs, op.operands[1]
    others = [d for d in range(op.result.type.rank) if d not in a["offset_dims"]]
    begin = _constant_start_indices(op, op.result, indices, a["start_index_map"], others, b)
    if begin is None or a["operand_batching_dims"]:
        return None
    sizes = numbers_of(a, "slice_sizes")
    begin = [min(max(s, 0), static(d) - n) for s, d, n in zip(begin, x.type.shape, sizes, strict=True)]
    cut = b.slice(x, begin, [s + n for s, n in zip(begin, sizes, strict=True)])
    return b.reshape(cut, op.result.type.shape)


def _simplify_single_scatter(op: Op, x: Value, b: Builder) -> Value | None:
    """Replace a scatter of one update at a constant index to a uniform array, as in the gradient of ``jnp.take``.

    The array is combined with the padded update.
    """
    a, name = op.attrs, combiner_op_name(op)
    neutral = None if name is None else neutral_value(name, x.type.dtype)
    if name is None or neutral is None or len(op.operands) != 3 or splat_of(x, b.definitions) is None:
        return None
    _, indices, update = op.operands
    others = [d for d in range(update.type.rank) if d not in a["update_window_dims"]]
    begin = _constant_start_indices(op, update, indices, a["scatter_dims_to_operand_dims"], others, b)
    if begin is None or a["input_batching_dims"]:
        return None
    window = iter([static(update.type.shape[d]) for d in a["update_window_dims"]])
    sizes = [1 if d in a["inserted_window_dims"] else next(window) for d in range(x.type.rank)]
    ends = [static(d) - s - n for s, n, d in zip(begin, sizes, x.type.shape, strict=True)]
    if min((*begin, *ends), default=0) < 0:
        return x
    if not neutral and kind_of(x.type.dtype) in "fc":
        neutral = -neutral  # -0.0 + 0.0 is 0.0
    fill = b.constant(neutral, TensorType(x.type.dtype))
    part = b.pad(b.reshape(update, sizes), fill, dict(enumerate(begin)), dict(enumerate(ends)))
    return b.make(name, (x, part), {}, x.type)


def _constant_start_indices(
    op: Op, part: Value, indices: Value, dims: Sequence[int], others: Sequence[int], b: Builder
) -> list[int] | None:
    """Return the constant start indices of a gather or scatter with one slice, or None if not constant."""
    shapes = (*op.operands[0].type.shape, *indices.type.shape, *part.type.shape)
    places = constant_of(indices, b.definitions)
    if places is None or not is_static(shapes) or any(part.type.shape[d] != 1 for d in others):
        return None
    starts = np.broadcast_to(places, [static(d) for d in indices.type.shape]).reshape(-1).tolist()
    start_of_dim = dict(zip(dims, starts, strict=True))
    return [int(start_of_dim.get(d, 0)) for d in range(op.operands[0].type.rank)]


def _pad_to_window_padding(op: Op, x: Value, b: Builder) -> Value | None:
    """Turn a pad with the neutral initial value into padding of the windows, as in gradients of average pooling."""
    a, pad, name = op.attrs, _definition_named(x, "pad", b), combiner_op_name(op)
    neutral = None if name is None else neutral_value(name, x.type.dtype)
    if pad is None or scan_of(op) is not None:
        return None  # with the padding, windows of a scan would not reach from end to end
    if neutral is None or len(op.operands) != 2 or any(d != 1 for d in a["base_dilations"]):
        return None
    filled = [splat_of(v, b.definitions) for v in (pad.operands[1], op.operands[1])]
    if not is_static(x.type.shape) or any(v is None or v != neutral for v in filled):
        return None
    added = [dims_of(pad.attrs, name) for name in ("low", "high", "interior")]
    if not all(map(is_static, added)):
        return None
    low, high, interior = ([static(n) for n in of_each] for of_each in added)
    if min((*low, *high)) < 0:
        return None
    widths = zip(pairs_of(a), low, high, strict=True)
    padding = tuple((before + n, after + m) for (before, after), n, m in widths)
    attrs = {**a, "padding": padding, "base_dilations": tuple(n + 1 for n in interior)}
    return b.make("reduce_window", (pad.operands[0], op.operands[1]), attrs, op.result.type, regions=op.regions)


def _simplify_dynamic_update_slice(op: Op, x: Value, b: Builder) -> Value | None:
    update = op.operands[1]
    return update if update.type == x.type else None


_RULES: dict[str, Callable[[Op, Value, Builder], Value | None]] = {
    "reshape": _simplify_reshape,
    "transpose": _simplify_transpose,
    "broadcast": _simplify_broadcast,
    "slice": _simplify_slice,
    "pad": _simplify_pad,
    "reverse": _simplify_reverse,
    "concatenate": _simplify_concatenate,
    "dynamic_slice": _simplify_dynamic_slice,
    "dynamic_update_slice": _simplify_dynamic_update_slice,
    "gather": _simplify_gather,
    "scatter": _simplify_single_scatter,
    "reduce_window": _pad_to_window_padding,
}
