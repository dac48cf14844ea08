"""Contractions created by passes: ``matmul`` and ``conv``, and both with a packed right operand.

Panels have the shape ``([B,] P, K/group, cols*group)``: element ``(p, s, c*group + g)`` is
``rhs[s*group + g, p*cols + c]``, zero in the padding of K and N. A ``matmul`` with the attribute ``cols`` is computed
in tiles of that many columns. A ``packed_conv`` with ``feature_groups`` has the panels of each group, one group after
the other. Panels of a ``packed_matmul`` with the attribute ``bits`` have quantized weights
(:mod:`aotc.ir.loop.forms.quantized`), with a scale for each ``group`` of terms.

A ``conv`` on a GPU may have three more attributes: ``padding`` is zero padding at both ends of its spatial dims.
``rhs_transposed``: its kernel is [spatial but the last, O, the last, C]. ``parts``: the taps and channels of its window
are split, in order, into that many runs (split-K); it returns the sum of each, in a new first dim.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from aotc.ir.dims.algebra import static
from aotc.ir.loop.forms.quantized import chunk_bytes, unpack
from aotc.ir.opset.dim_attributes import dim_of, dims_of, numbers_of, padding_of
from aotc.ir.opset.linalg import LINALG, matmul
from aotc.ir.opset.reduction import window_extent
from aotc.ir.opset.spec import Arrays, Attrs, OpSpec, Types, op_spec_table, require_rule, same_shape
from aotc.ir.tensor.ir import TensorType


def _infer_matmul(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, rhs = types
    require_rule(lhs.rank == rhs.rank and lhs.rank in (2, 3), f"matmul: {lhs} and {rhs} are not (batched) matrices")
    *batch, rows, count = _swapped_last_dims(lhs.shape, attrs["lhs_transposed"])
    *other, depth, columns = _swapped_last_dims(rhs.shape, attrs["rhs_transposed"])
    require_rule(same_shape(batch, other) and count == depth, f"matmul: {lhs} and {rhs} do not fit")
    return (TensorType(given[0].dtype if given else lhs.dtype, (*batch, rows, columns)),)


def _swapped_last_dims(shape: tuple, swap: bool) -> tuple:
    return (*shape[:-2], shape[-1], shape[-2]) if swap else shape


def _reference_matmul(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    flags = attrs["lhs_transposed"], attrs["rhs_transposed"]
    lhs, rhs = (np.swapaxes(a, -1, -2) if swap else a for a, swap in zip(arrays, flags))
    return [matmul(lhs, rhs, types[0].dtype)]


def _infer_conv(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, rhs = types
    require_rule(lhs.rank == rhs.rank >= 2, f"conv: {lhs} and {rhs} differ in rank")
    *window, features, outputs = rhs.shape
    if attrs.get("rhs_transposed", False):
        *window, outputs, last, features = rhs.shape
        window.append(last)
    groups = attrs["feature_groups"]
    require_rule(
        lhs.shape[-1] == features * groups, f"conv: features of {lhs} and {rhs} do not match in {groups} groups"
    )
    padding = padding_of(attrs, len(window))
    steps = zip(lhs.shape[1:-1], padding, window, attrs["rhs_dilation"], attrs["strides"])
    spatial = tuple(window_extent(d, low, high, 1, w, gap, stride) for d, (low, high), w, gap, stride in steps)
    parts = (attrs["parts"],) if "parts" in attrs else ()
    return (TensorType(given[0].dtype if given else lhs.dtype, (*parts, lhs.shape[0], *spatial, outputs)),)


def _reference_conv(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    spatial = arrays[0].ndim - 2
    middle = tuple(range(1, spatial + 1))
    if attrs.get("rhs_transposed"):
        arrays = [arrays[0], np.moveaxis(arrays[1], -3, -1)]
    if "parts" in attrs:
        each = (TensorType(types[0].dtype, types[0].shape[1:]),)
        return [
            np.stack(
                [
                    _reference_conv([arrays[0], w], _without_split(attrs), regions, each)[0]
                    for w in _split_kernels(arrays[1], attrs)
                ]
            )
        ]
    full = {
        "padding": ((0, 0),) * spatial, **attrs, "lhs_dilation": (1,) * spatial, "reversal": (False,) * spatial,
        "input_batch": 0, "input_feature": spatial + 1, "input_spatial": middle, "output_batch": 0,
        "output_feature": spatial + 1, "output_spatial": middle, "kernel_input": spatial,
        "kernel_output": spatial + 1, "kernel_spatial": tuple(range(spatial)), "batch_groups": 1,
    }  # fmt: skip
    return LINALG["convolution"].reference(arrays, full, (), types)


def _without_split(attrs: Attrs) -> Attrs:
    return {name: value for name, value in attrs.items() if name not in ("parts", "rhs_transposed")}


def _split_kernels(kernel: np.ndarray, attrs: Attrs) -> Iterator[np.ndarray]:
    """Yield the convolution kernel once for each part of a split-K ``conv``, with zeros outside of the part."""
    flat = kernel.reshape(-1, kernel.shape[-1])
    each = len(flat) // attrs["parts"]
    for begin in range(0, len(flat), each):
        own = np.zeros_like(flat)
        own[begin : begin + each] = flat[begin : begin + each]
        yield own.reshape(kernel.shape)


def _unpacked_panels(panels: np.ndarray, group: int, n: int) -> np.ndarray:
    """Unpack panels to the right operand of a matmul, of shape ``([B,] K, n)``."""
    *batch, count, steps, wide = panels.shape
    axes = len(batch)
    split = panels.reshape(*batch, count, steps, wide // group, group)
    order = (*range(axes), axes + 1, axes + 3, axes, axes + 2)
    return split.transpose(order).reshape(*batch, steps * group, count * (wide // group))[..., :n]


def _infer_packed_matmul(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, panels = types
    require_rule(
        panels.rank == lhs.rank + 1 and lhs.rank in (2, 3), f"packed_matmul: {lhs} and panels {panels} do not fit"
    )
    *batch, rows, depth = _swapped_last_dims(lhs.shape, attrs["lhs_transposed"])
    require_rule(
        panels.shape[-2] * attrs["group"] == depth, f"packed_matmul: {lhs} and panels {panels} differ in depth"
    )
    return (TensorType(given[0].dtype if given else lhs.dtype, (*batch, rows, dim_of(attrs, "n"))),)


def panel_cols(panels: TensorType, attrs: Attrs) -> int:
    """Return the number of columns of a panel of a ``packed_matmul``."""
    wide, group, bits = static(panels.shape[-1]), attrs["group"], attrs.get("bits", 0)
    return wide // chunk_bytes(1, bits, group) if bits else wide // group


def _reference_packed_matmul(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    lhs, panels = arrays
    lhs = np.swapaxes(lhs, -1, -2) if attrs["lhs_transposed"] else lhs
    group, n, bits = attrs["group"], static(dim_of(attrs, "n")), attrs.get("bits", 0)
    if bits:
        rhs = unpack(panels, panel_cols(TensorType("u8", panels.shape), attrs), bits)[..., :n]
    else:
        rhs = _unpacked_panels(panels, group, n)
    return [matmul(lhs, rhs, types[0].dtype)]


def _infer_packed_conv(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, panels = types
    groups = attrs.get("feature_groups", 1)
    rhs = TensorType(panels.dtype, (*dims_of(attrs, "kernel"), lhs.shape[-1] // groups, dim_of(attrs, "n")))
    return _infer_conv((lhs, rhs), {**attrs, "feature_groups": groups}, regions, given)


def _reference_packed_conv(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    lhs, panels = arrays
    groups, n = attrs.get("feature_groups", 1), static(dim_of(attrs, "n"))
    each = panels.reshape(groups, -1, *panels.shape[1:])
    rhs = np.moveaxis(_unpacked_panels(each, attrs.get("group", 1), n // groups), 0, 1)
    rhs = rhs.reshape(*numbers_of(attrs, "kernel"), lhs.shape[-1] // groups, n)
    return _reference_conv([lhs, rhs], {**attrs, "feature_groups": groups}, regions, types)


CONTRACT = op_spec_table(
    OpSpec(
        "matmul",
        _infer_matmul,
        _reference_matmul,
        ("lhs_transposed", "rhs_transposed"),
        folds=True,
        sums=True,
        names_kernel=True,
        tolerance=16,
        normwise=True,
        takes_cols=True,
        added_by="canonicalize_dot",
    ),
    OpSpec(
        "conv",
        _infer_conv,
        _reference_conv,
        ("strides", "rhs_dilation", "feature_groups"),
        folds=True,
        sums=True,
        names_kernel=True,
        tolerance=64,
        normwise=True,
        takes_cols=True,
        added_by="decompose_convolution",
    ),
    OpSpec(
        "packed_matmul",
        _infer_packed_matmul,
        _reference_packed_matmul,
        ("n", "group", "lhs_transposed"),
        sums=True,
        names_kernel=True,
        tolerance=16,
        normwise=True,
        added_by="pack_contractions",
    ),
    OpSpec(
        "packed_conv",
        _infer_packed_conv,
        _reference_packed_conv,
        ("kernel", "strides", "rhs_dilation", "n"),
        sums=True,
        names_kernel=True,
        tolerance=64,
        normwise=True,
        added_by="pack_contractions",
    ),
)
