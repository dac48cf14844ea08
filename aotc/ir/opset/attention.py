"""Attention: the softmax of products of queries and keys, times values, as one op.

Its index space is ``(*batch, row, term, depth, column)``. Heads are batch axes, and so are the groups of heads that
share keys: an operand that does not vary along an axis has -1 in the place of its dim.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from aotc.ir.dims import Dim
from aotc.ir.opset.spec import Arrays, Attrs, OpSpec, RegionCall, Types, cast, need, table
from aotc.ir.tensor_ir import Region, TensorType
from aotc.vmfb.dtypes import kind_of

ABSENT = -1
_OPERANDS = ("q_dims", "k_dims", "v_dims", "bias_dims", "mask_dims")


def operand_dims(attrs: Attrs) -> list[tuple[int, ...]]:
    """Return, for each operand, its dim of each axis: ``batch..., row or term, depth, column or term``."""
    return [tuple(attrs[key]) for key in _OPERANDS if attrs[key]]


def axes(types: Types, attrs: Attrs) -> tuple[tuple[Dim, ...], Dim, Dim, Dim, Dim]:
    """Return the sizes of the batch axes, and of row, term, depth and column."""
    q, k, v = types[:3]
    *batch, row, depth = (q.shape[d] for d in attrs["q_dims"])
    return tuple(batch), row, k.shape[attrs["k_dims"][-2]], depth, v.shape[attrs["v_dims"][-1]]


def _infer(types: Types, attrs: Attrs, regions: tuple[Region, ...], given: Types) -> Types:
    places = operand_dims(attrs)
    need(len(types) == len(places) >= 3, f"attention: {len(types)} operands, and dims of {len(places)}")
    for t, dims in zip(types, places):
        need(len(dims) == len(places[0]), f"attention: dims {dims} and {places[0]} differ in length")
        present = sorted(d for d in dims if d != ABSENT)
        need(present == list(range(t.rank)), f"attention: {dims} are not the dims of {t}")
    need(ABSENT not in places[0] and all(ABSENT not in dims[-2:] for dims in places[:3]), "attention: a dim is absent")
    for t in (*types[:3], *types[3 : 3 + bool(attrs["bias_dims"])]):
        need(kind_of(t.dtype) == "f", f"attention: an operand is {t}, expected floats")
    if attrs["mask_dims"]:
        need(types[-1].dtype == "i1", f"attention: the mask is {types[-1]}, expected i1")
    need(len(attrs["causal"]) <= 1, f"attention: causal = {attrs['causal']}")
    batch, row, term, depth, column = axes(types, attrs)
    wanted = [(*batch, row, depth), (*batch, term, depth), (*batch, term, column), *[(*batch, row, term)] * 2]
    for t, dims, shape in zip(types, places, wanted):
        for d, size in zip(dims, shape):
            need(d == ABSENT or t.shape[d] == size, f"attention: dim {d} of {t}, expected {size}")
    out = attrs["out_dims"]
    need(sorted(out) == list(range(len(batch) + 2)), f"attention: out_dims = {out}")
    order = dict(zip(out, (*batch, row, column)))
    dtype = given[0].dtype if given else types[0].dtype
    result = TensorType(dtype, tuple(order[d] for d in range(len(out))))
    number = TensorType("f64" if types[0].dtype == "f64" else "f32", (*batch, row))
    return (result, number, number) if len(given) == 3 else (result,)


def _reference(arrays: Arrays, attrs: Attrs, regions: tuple[RegionCall, ...], types: Types) -> list[np.ndarray]:
    wide = np.float64 if arrays[0].dtype == np.float64 else np.float32
    q, k, v, *more = (_arranged(a, dims) for a, dims in zip(arrays, operand_dims(attrs)))
    q, k, v = (x.astype(wide) for x in (q, k, v))
    with np.errstate(all="ignore"):
        scores = np.matmul(q, np.swapaxes(k, -1, -2)) * wide(attrs["scale"])
        if attrs["bias_dims"]:
            scores = scores + more[0].astype(wide)
        allowed = more[-1] if attrs["mask_dims"] else np.True_
        if attrs["causal"]:
            rows, terms = np.arange(scores.shape[-2]), np.arange(scores.shape[-1])
            allowed = allowed & (terms <= rows[:, None] + attrs["causal"][0])
        scores = np.where(allowed, scores, wide(attrs["fill"]))
        top = scores.max(-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - (top if len(types) == 1 else np.where(top == -np.inf, wide(0), top)))
        total = weights.sum(-1, keepdims=True)
        result = np.matmul(weights / total, v)
    numbers = [x[..., 0].astype(wide) for x in (top, total)] if len(types) == 3 else []
    return [cast(result, types[0].dtype).transpose(np.argsort(attrs["out_dims"])), *numbers]


def _arranged(x: np.ndarray, dims: Sequence[int]) -> np.ndarray:
    """Return ``x`` with its dims in the order of the axes, those it does not vary along of size 1."""
    there = x.transpose([d for d in dims if d != ABSENT])
    return there.reshape([x.shape[d] if d != ABSENT else 1 for d in dims])


def _terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return shapes[1][attrs["k_dims"][-2]] + shapes[0][attrs["q_dims"][-1]]


ATTENTION = table(
    OpSpec(
        "attention",
        _infer,
        _reference,
        ("q_dims", "k_dims", "v_dims", "bias_dims", "mask_dims", "out_dims", "scale", "fill", "causal"),
        names_kernel=True,
        views=True,
        tolerance=64,
        normwise=True,
        terms=_terms,
        made_by="fuse_attention",
    ),
)
