"""Bring every ``convolution`` into one form: ``conv`` of a padded [N, spatial, C] and a [spatial, C, O].

Padding and input dilation become ``pad``, other layouts ``transpose``, reversal ``reverse``, and batch groups feature
groups. A convolution with a 1x1 kernel becomes a ``matmul``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from aotc.ir.dims.algebra import Dim, maximum, product, static
from aotc.ir.dims.compare import is_provable_relation
from aotc.ir.opset.dim_attributes import pairs_of
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.passes.pack_contractions.conv_phases import (
    PhasedConvolution,
    convolve_by_phases,
    has_phases,
    phase_runs,
)
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.options import Options
from aotc.targets import Target


def decompose_convolution(module: Module, options: Options) -> Module:
    """Return ``module`` with every ``convolution`` as a ``conv`` or ``matmul`` with movement around it."""
    home, _ = op_targets(module, options)
    return rewrite_module(module, lambda op, b: _decompose_convolution_rule(op, b, home), ("convolution",))


def _decompose_convolution_rule(op: Op, b: Builder, home: Callable[[Op], Target]) -> Sequence[Value] | None:
    """Return the result of a ``convolution`` by a ``conv`` or ``matmul`` in canonical layout; None for other ops."""
    if op.name != "convolution":
        return None
    a = op.attrs
    lhs = b.transpose(op.operands[0], (a["input_batch"], *a["input_spatial"], a["input_feature"]))
    rhs = b.transpose(op.operands[1], (*a["kernel_spatial"], a["kernel_input"], a["kernel_output"]))
    backwards = tuple(i for i, flip in enumerate(a["reversal"]) if flip and rhs.type.shape[i] != 1)
    if backwards:
        rhs = b.make("reverse", (rhs,), {"dims": backwards})
    order = (a["output_batch"], *a["output_spatial"], a["output_feature"])
    type_ = TensorType(op.result.type.dtype, tuple(op.result.type.shape[d] for d in order))
    result = (_convolve_in_phases if home(op).kind == "cpu" and has_phases(op) else _convolve_at_once)(
        lhs, rhs, a, type_, b
    )
    back = tuple(order.index(d) for d in range(len(order)))
    return (b.transpose(result, back),)


def _convolve_at_once(lhs: Value, rhs: Value, attrs: Mapping[str, Any], type_: TensorType, b: Builder) -> Value:
    """Append the convolution as one ``conv``, with padding and input dilation as a ``pad`` before it."""
    groups = attrs["feature_groups"]
    lhs = _pad_convolution_input(lhs, pairs_of(attrs), attrs["lhs_dilation"], b)
    if attrs["batch_groups"] > 1:
        groups = attrs["batch_groups"]
        lhs = _batch_to_features(lhs, groups, b)
    return _convolution_as_matmul(lhs, rhs, attrs, groups, type_, b)


def _convolve_in_phases(lhs: Value, rhs: Value, attrs: Mapping[str, Any], type_: TensorType, b: Builder) -> Value:
    """Append the convolution of a dilated input by phases, which skip the zeros between pixels."""
    groups, gaps = attrs["feature_groups"], tuple(attrs["lhs_dilation"])
    outputs = tuple(static(n) for n in type_.shape[1:-1])
    lows, sizes = (low for low, _ in pairs_of(attrs)), (lhs.type.shape[1:], rhs.type.shape)
    runs = tuple(phase_runs(*map(static, place)) for place in zip(gaps, lows, outputs, *sizes))

    def convolve(x: Value, kernel: Value, sizes: tuple[int, ...]) -> Value:
        own = TensorType(type_.dtype, (type_.shape[0], *sizes, kernel.type.shape[-1]))
        return _convolution_as_matmul(x, kernel, attrs, groups, own, b)

    return convolve_by_phases(PhasedConvolution(lhs, rhs, gaps, runs, outputs, groups), convolve, b)


def _pad_convolution_input(x: Value, padding: Sequence[tuple[Dim, Dim]], dilation: Sequence[int], b: Builder) -> Value:
    """Return the convolution input [N, spatial, C] padded and dilated in its spatial dims."""
    low = {d: before for d, (before, _) in enumerate(padding, start=1)}
    high = {
        d: _limited_high_padding(x.type.shape[d], before, after, gap)
        for d, ((before, after), gap) in enumerate(zip(padding, dilation), start=1)
    }
    return b.pad(x, None, low, high, {d: n - 1 for d, n in enumerate(dilation, start=1)})


def _limited_high_padding(size: Dim, low: Dim, high: Dim, dilation: int) -> Dim:
    """Return the high padding, limited so that negative padding removes at most all elements."""
    grown = size if dilation == 1 else maximum((size - 1) * dilation + 1, 0)
    return high if is_provable_relation("ge", low + grown + high, 0) else maximum(high, -low - grown)


def _batch_to_features(x: Value, groups: int, b: Builder) -> Value:
    """Return [G*n, spatial, C] as [n, spatial, G*C]: group g of the batch becomes feature group g."""
    batch, *spatial, features = x.type.shape
    split = b.reshape(x, (groups, batch // groups, *spatial, features))
    rank = split.type.rank
    moved = b.transpose(split, (*range(1, rank - 1), 0, rank - 1))
    return b.reshape(moved, (batch // groups, *spatial, groups * features))


def _convolution_as_matmul(
    lhs: Value, rhs: Value, attrs: Mapping[str, Any], groups: int, type_: TensorType, b: Builder
) -> Value:
    """Append a convolution in canonical layout: a ``matmul`` for kernels of one tap, else a ``conv``."""
    *kernel, features, outputs = rhs.type.shape
    exact = {} if attrs.get("precision") in (None, "DEFAULT") else {"precision": attrs["precision"]}
    if groups == 1 and all(k == 1 for k in kernel) and all(s == 1 for s in attrs["strides"]):
        rows = product(lhs.type.shape[:-1])
        flat = b.reshape(lhs, (rows, features)), b.reshape(rhs, (features, outputs))
        plain = {"lhs_transposed": False, "rhs_transposed": False, **exact}
        return b.reshape(b.make("matmul", flat, plain, TensorType(type_.dtype, (rows, outputs))), type_.shape)
    own = {"strides": tuple(attrs["strides"]), "rhs_dilation": tuple(attrs["rhs_dilation"]), "feature_groups": groups}
    return b.make("conv", (lhs, rhs), {**own, **exact}, type_)
