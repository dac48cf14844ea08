"""Attention as one op: the softmax of queries times keys, times values.

The op's index space is ``(*batch, row, term, depth, column)``. A row is a query, and a term is a key. ``depth`` counts
the elements of a key, ``column`` those of a value. Heads are batch axes, and so are groups of heads that share keys.
For each operand an attribute (``q_dims``...) maps each axis to a dim of the operand, or to -1 if the operand does not
vary along the axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from aotc.ir.dims.algebra import Dim, ceildiv
from aotc.ir.opset.dim_attributes import dims_of, numbers_of
from aotc.ir.opset.spec import Arrays, Attrs, OpSpec, RegionCall, Types, cast_array, op_spec_table, require_rule
from aotc.ir.tensor.ir import Region, TensorType
from aotc.vmfb.dtypes import kind_of

ABSENT = -1
_OPERANDS = ("q_dims", "k_dims", "v_dims", "bias_dims", "mask_dims", "k_scale_dims", "v_scale_dims")


def attention_operand_dims(attrs: Attrs) -> list[tuple[int, ...]]:
    """Return each operand's map from axes to dims: one dim for each batch axis and for the two axes of its matrix.

    A dim of -1 means that the operand does not vary along the axis.
    """
    return [tuple(attrs[key]) for key in _OPERANDS if attrs.get(key)]


def attention_axis_sizes(types: Types, attrs: Attrs) -> tuple[tuple[Dim, ...], Dim, Dim, Dim, Dim]:
    """Return the sizes of the batch axes, and the sizes of the axes row, term, depth and column."""
    q, k, v = types[:3]
    *batch, row, depth = (q.shape[d] for d in attrs["q_dims"])
    return tuple(batch), row, k.shape[attrs["k_dims"][-2]], depth, v.shape[attrs["v_dims"][-1]]


def _infer_attention(types: Types, attrs: Attrs, regions: tuple[Region, ...], given: Types) -> Types:
    """Return the result types of ``attention``, which has one of three forms.

    Plain: the weighted means of the values, in the order ``out_dims``. With the attribute ``part``: the f32 means of
    each range of ``part`` keys, and the logarithms of the sums of weights. With ``split``: the means, maxima and sums
    of weights of ``split`` ranges of keys (split-KV), in the order of the axes.

    Raises
    ------
    RuleError
        If shapes, dtypes or attributes do not match.
    """
    places = attention_operand_dims(attrs)
    require_rule(len(types) == len(places) >= 3, f"attention: {len(types)} operands, and dims of {len(places)}")
    for t, dims in zip(types, places):
        require_rule(len(dims) == len(places[0]), f"attention: dims {dims} and {places[0]} differ in length")
        present = sorted(d for d in dims if d != ABSENT)
        require_rule(present == list(range(t.rank)), f"attention: {dims} are not the dims of {t}")
    require_rule(
        ABSENT not in places[0] and all(ABSENT not in dims[-2:] for dims in places[:3]), "attention: a dim is absent"
    )
    named = dict(zip((key for key in _OPERANDS if attrs.get(key)), types))
    for key, t in named.items():
        kinds = "b" if key == "mask_dims" else "fi" if key in ("k_dims", "v_dims") else "f"
        require_rule(kind_of(t.dtype) in kinds, f"attention: {key[:-5]} is {t}")
    causal = dims_of(attrs, "causal")
    require_rule(len(causal) <= 1, f"attention: causal = {causal}")
    batch, row, term, depth, column = attention_axis_sizes(types, attrs)
    wanted = [(*batch, row, depth), (*batch, term, depth), (*batch, term, column), *[(*batch, row, term)] * 4]
    for t, dims, shape in zip(types, places, wanted):
        for d, size in zip(dims, shape):
            require_rule(d == ABSENT or t.shape[d] == size, f"attention: dim {d} of {t}, expected {size}")
    out = attrs["out_dims"]
    require_rule(sorted(out) == list(range(len(batch) + 2)), f"attention: out_dims = {out}")
    order = dict(zip(out, (*batch, row, column)))
    dtype = given[0].dtype if given else types[0].dtype
    shape = tuple(order[d] for d in range(len(out)))
    if "part" in attrs:
        rows = tuple(size for d, size in enumerate(shape) if d != out[-1])
        parts = ceildiv(term, attrs["part"])
        return TensorType("f32", (parts, *shape)), TensorType("f32", (*rows, parts))
    if "split" not in attrs:
        return (TensorType(dtype, shape),)
    require_rule(tuple(out) == tuple(range(len(out))), f"attention in parts: out_dims = {out}")
    wide, inner = "f64" if types[0].dtype == "f64" else "f32", (*batch, attrs["split"], row)
    return TensorType(wide, (*inner, column)), TensorType(wide, inner), TensorType(wide, inner)


def _reference_attention(
    arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types
) -> list[np.ndarray]:
    """Compute attention in f32 or wider; the results have one of the three forms of :func:`_infer_attention`."""
    wide = np.float64 if arrays[0].dtype == np.float64 else np.float32
    keys = [key for key in _OPERANDS if attrs.get(key)]
    given = {key: _dims_in_axis_order(a, attrs[key]) for key, a in zip(keys, arrays)}
    q, k, v = (given[key].astype(wide) for key in _OPERANDS[:3])
    if "v_scale_dims" in given:
        v = v * np.swapaxes(given["v_scale_dims"].astype(wide), -1, -2)
    scores = _attention_scores(q, k, given, attrs)
    with np.errstate(all="ignore"):
        if "part" in attrs:
            return _means_of_key_ranges(scores, v, attrs)
        if "split" in attrs:
            return _split_kv_results(scores, v, attrs["split"], types)
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - top)
        result = np.matmul(weights / weights.sum(-1, keepdims=True), v)
    return [cast_array(result, types[0].dtype).transpose(np.argsort(attrs["out_dims"]))]


def _attention_scores(q: np.ndarray, k: np.ndarray, given: Mapping[str, np.ndarray], attrs: Attrs) -> np.ndarray:
    """Compute the attention scores: dot products of queries and keys, scaled, biased and masked."""
    with np.errstate(all="ignore"):
        scores = np.matmul(q, np.swapaxes(k, -1, -2)) * q.dtype.type(attrs["scale"])
        if "k_scale_dims" in given:
            scores = scores * given["k_scale_dims"].astype(q.dtype)
        if "bias_dims" in given:
            scores = scores + given["bias_dims"].astype(q.dtype)
    allowed = given.get("mask_dims", np.True_)
    for offset in numbers_of(attrs, "causal"):
        rows, terms = np.arange(scores.shape[-2]), np.arange(scores.shape[-1])
        allowed = allowed & (terms <= rows[:, None] + offset)
    return np.where(allowed, scores, q.dtype.type(attrs["fill"]))


def _split_kv_results(scores: np.ndarray, v: np.ndarray, parts: int, types: Types) -> list[np.ndarray]:
    """Compute attention for each of ``parts`` ranges of keys (split-KV).

    Return the results, and for each query the maximum score and the sum of the weights in each range.
    """
    size = -(-scores.shape[-1] // parts)
    found: list[list[np.ndarray]] = [[], [], []]
    for first in range(0, size * parts, size):
        own = scores[..., first : first + size]
        top = own.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(own - np.where(np.isneginf(top), 0, top))
        total = weights.sum(-1, keepdims=True)
        result = np.matmul(weights / total, v[..., first : first + size, :])
        for place, x in zip(found, (result, top[..., 0], total[..., 0])):
            place.append(x)
    means, *numbers = (np.stack(x, axis) for x, axis in zip(found, (-3, -2, -2)))
    return [cast_array(x, t.dtype) for x, t in zip((means, *numbers), types)]


def _means_of_key_ranges(scores: np.ndarray, v: np.ndarray, attrs: Attrs) -> list[np.ndarray]:
    """Compute attention for each range of ``part`` keys; return results and log-sum-exp of the scores, in f32."""
    size, out = attrs["part"], attrs["out_dims"]
    means, weights = [], []
    for first in range(0, scores.shape[-1], size):
        own = scores[..., first : first + size]
        top = own.max(-1, keepdims=True)
        each = np.exp(own - np.where(np.isneginf(top), 0, top))
        whole = each.sum(-1, keepdims=True)
        means.append(np.matmul(each / whole, v[..., first : first + size, :]).transpose(np.argsort(out)))
        weights.append((top + np.log(whole)).transpose(np.argsort(out)).squeeze(out[-1]))
    return [np.stack(means).astype(np.float32), np.stack(weights, -1).astype(np.float32)]


def _dims_in_axis_order(x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Transpose ``x`` to the order of the axes; an axis along which it does not vary gets size 1."""
    there = x.transpose([d for d in dims if d != ABSENT])
    return there.reshape([x.shape[d] if d != ABSENT else 1 for d in dims])


def _attention_terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return shapes[1][attrs["k_dims"][-2]] + shapes[0][attrs["q_dims"][-1]]


ATTENTION = op_spec_table(
    OpSpec(
        "attention",
        _infer_attention,
        _reference_attention,
        ("q_dims", "k_dims", "v_dims", "bias_dims", "mask_dims", "out_dims", "scale", "fill", "causal"),
        names_kernel=True,
        views=True,
        tolerance=64,
        normwise=True,
        terms=_attention_terms,
        added_by="fuse_attention",
    ),
)
