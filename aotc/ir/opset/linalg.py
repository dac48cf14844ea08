"""Contractions, convolution, FFT and the dense solvers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.ir.opset import linalg_constraints as constraints
from aotc.ir.opset import linalg_lapack as lapack
from aotc.ir.opset import linalg_tridiagonal as tridiagonal
from aotc.ir.opset.dim_attributes import number_pairs_of, pairs_of
from aotc.ir.opset.linalg_lapack_reference import reference_lapack as lapack_reference
from aotc.ir.opset.reduction import window_extent
from aotc.ir.opset.shape import pad_array
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    OpSpec,
    Types,
    cast_array,
    first_in_place,
    op_spec_table,
    require_rule,
    static_sizes,
)
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import COMPLEX_OF, kind_of, real_of, to_numpy


def _infer_dot(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, rhs = types
    pairs = [*zip(attrs["lhs_batch"], attrs["rhs_batch"]), *zip(attrs["lhs_contract"], attrs["rhs_contract"])]
    for i, j in pairs:
        require_rule(lhs.shape[i] == rhs.shape[j], f"dot_general: dim {i} of {lhs} and dim {j} of {rhs} differ")
    batch = tuple(lhs.shape[i] for i in attrs["lhs_batch"])
    left = tuple(d for i, d in enumerate(lhs.shape) if i not in (*attrs["lhs_batch"], *attrs["lhs_contract"]))
    right = tuple(d for i, d in enumerate(rhs.shape) if i not in (*attrs["rhs_batch"], *attrs["rhs_contract"]))
    return (TensorType(given[0].dtype if given else lhs.dtype, (*batch, *left, *right)),)


def matmul(lhs: np.ndarray, rhs: np.ndarray, dtype: str) -> np.ndarray:
    """Return ``lhs @ rhs`` as ``dtype``, accumulated in a wider type in which each product is exact."""
    kind = {lhs.dtype.kind, rhs.dtype.kind}
    small = max(lhs.dtype.itemsize, rhs.dtype.itemsize) < 4
    if kind <= {"i", "u", "b"}:
        exact = np.float64 if small and lhs.shape[-1] < 1 << 21 else np.int64
        with np.errstate(all="ignore"):
            return cast_array(cast_integers(np.matmul(lhs.astype(exact), rhs.astype(exact))), dtype)
    if "c" not in kind and small:
        lhs, rhs = lhs.astype(np.float32), rhs.astype(np.float32)
    wide = np.result_type(lhs.dtype, rhs.dtype)
    with np.errstate(all="ignore"):
        return cast_array(np.matmul(lhs.astype(wide, copy=False), rhs.astype(wide, copy=False)), dtype)


def cast_integers(x: np.ndarray) -> np.ndarray:
    """Convert a float array of whole numbers to int64; return arrays of other dtypes unchanged."""
    return x.astype(np.int64) if x.dtype.kind == "f" else x


def _reference_dot(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    lhs, rhs = arrays
    lb, rb, lc, rc = (list(attrs[k]) for k in ("lhs_batch", "rhs_batch", "lhs_contract", "rhs_contract"))
    left = [i for i in range(lhs.ndim) if i not in lb + lc]
    right = [i for i in range(rhs.ndim) if i not in rb + rc]
    batch = [lhs.shape[i] for i in lb]
    count = int(np.prod([lhs.shape[i] for i in lc], dtype=np.int64))
    rows, columns = [lhs.shape[i] for i in left], [rhs.shape[i] for i in right]
    a = lhs.transpose(lb + left + lc).reshape([*batch, int(np.prod(rows, dtype=np.int64)), count])
    b = rhs.transpose(rb + rc + right).reshape([*batch, count, int(np.prod(columns, dtype=np.int64))])
    return [matmul(a, b, types[0].dtype).reshape([*batch, *rows, *columns])]


def _infer_convolution(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    lhs, rhs = types
    groups, batch_groups = attrs["feature_groups"], attrs["batch_groups"]
    spatial = [rhs.shape[d] for d in attrs["kernel_spatial"]]
    require_rule(lhs.shape[attrs["input_feature"]] == rhs.shape[attrs["kernel_input"]] * groups,
         f"convolution: features of {lhs} and {rhs} do not match in {groups} groups")  # fmt: skip
    shape: dict[int, object] = {attrs["output_feature"]: rhs.shape[attrs["kernel_output"]]}
    batch = lhs.shape[attrs["input_batch"]]
    shape[attrs["output_batch"]] = batch if batch_groups == 1 else batch // batch_groups
    for i, d in enumerate(attrs["output_spatial"]):
        low, high = pairs_of(attrs)[i]
        shape[d] = window_extent(
            lhs.shape[attrs["input_spatial"][i]], low, high, attrs["lhs_dilation"][i],
            spatial[i], attrs["rhs_dilation"][i], attrs["strides"][i],
        )  # fmt: skip
    return (TensorType(given[0].dtype if given else lhs.dtype, tuple(shape[i] for i in range(lhs.rank))),)  # type: ignore[misc]


def _reference_convolution(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    lhs = arrays[0].transpose([attrs["input_batch"], attrs["input_feature"], *attrs["input_spatial"]])
    rhs = arrays[1].transpose([attrs["kernel_output"], attrs["kernel_input"], *attrs["kernel_spatial"]])
    backwards = [i + 2 for i, flip in enumerate(attrs["reversal"]) if flip]
    rhs = np.flip(rhs, tuple(backwards)) if backwards else rhs
    low, high = [p[0] for p in number_pairs_of(attrs)], [p[1] for p in number_pairs_of(attrs)]
    inner = [d - 1 for d in attrs["lhs_dilation"]]
    x = pad_array(lhs, np.zeros((), lhs.dtype), (0, 0, *low), (0, 0, *high), (0, 0, *inner))
    order: list[int] = [attrs["output_batch"], attrs["output_feature"], *attrs["output_spatial"]]
    shape = [static_sizes(types[0])[d] for d in order]
    result = (
        np.zeros(shape, arrays[0].dtype) if 0 in shape else _grouped_convolution(x, rhs, attrs, shape, types[0].dtype)
    )
    return [cast_array(result, types[0].dtype).transpose(np.argsort(order))]


def _grouped_convolution(x: np.ndarray, kernel: np.ndarray, attrs: Attrs, shape: list[int], dtype: str) -> np.ndarray:
    batch_groups, groups = attrs["batch_groups"], attrs["feature_groups"]
    if batch_groups > 1:
        xs, kernels = np.split(x, batch_groups, axis=0), np.split(kernel, batch_groups, axis=0)
    else:
        xs, kernels = np.split(x, groups, axis=1), np.split(kernel, groups, axis=0)
    parts = [_patches_matmul(a, k, attrs, shape, dtype) for a, k in zip(xs, kernels)]
    return np.concatenate(parts, axis=1)


def _patches_matmul(x: np.ndarray, kernel: np.ndarray, attrs: Attrs, shape: list[int], dtype: str) -> np.ndarray:
    """Convolve by one matmul over a view of all patches (im2col)."""
    spatial, steps = x.ndim - 2, x.strides
    window = kernel.shape[2:]
    view = np.lib.stride_tricks.as_strided(
        x,
        (x.shape[0], *shape[2:], x.shape[1], *window),
        (
            steps[0],
            *(steps[i + 2] * attrs["strides"][i] for i in range(spatial)),
            steps[1],
            *(steps[i + 2] * attrs["rhs_dilation"][i] for i in range(spatial)),
        ),
        writeable=False,
    )
    rows, count = int(np.prod(view.shape[: spatial + 1])), int(np.prod(kernel.shape[1:]))
    flat = matmul(view.reshape(rows, count), kernel.reshape(kernel.shape[0], count).T, dtype)
    return np.moveaxis(flat.reshape(x.shape[0], *shape[2:], kernel.shape[0]), -1, 1)


def _infer_fft(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (x,), kind, length = types, attrs["kind"], attrs["length"]
    require_rule(kind in ("FFT", "IFFT", "RFFT", "IRFFT"), f"fft: kind {kind}")
    require_rule(0 < len(length) <= x.rank, f"fft: {len(length)} lengths for {x}")
    if kind == "RFFT":
        require_rule(x.dtype in COMPLEX_OF, f"fft: RFFT of {x.dtype}")
        return (TensorType(COMPLEX_OF[x.dtype], (*x.shape[:-1], length[-1] // 2 + 1)),)
    require_rule(kind_of(x.dtype) == "c", f"fft: {kind} of {x.dtype}")
    return (TensorType(real_of(x.dtype), (*x.shape[:-1], length[-1])),) if kind == "IRFFT" else (x,)


def _reference_fft(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    length = attrs["length"]
    axes = tuple(range(-len(length), 0))
    call: Any = {"FFT": np.fft.fftn, "IFFT": np.fft.ifftn, "RFFT": np.fft.rfftn, "IRFFT": np.fft.irfftn}[attrs["kind"]]
    if arrays[0].size == 0:
        return [np.zeros(static_sizes(types[0]), to_numpy(types[0].dtype))]
    return [cast_array(call(arrays[0], s=length, axes=axes), types[0].dtype)]


def _infer_dft(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    x, table = types
    of, length = ("f32", "f64") if attrs["real"] else ("c64", "c128"), math.prod(attrs["radices"])
    require_rule(x.dtype in of and 0 <= attrs["axis"] < x.rank, f"dft: {x} along dim {attrs['axis']}")
    points = 2 * length if attrs["real"] else length
    require_rule(x.shape[attrs["axis"]] == points, f"dft: {x} is not {points} long along dim {attrs['axis']}")
    require_rule(table.rank == 2 and table.shape[0] == 2, f"dft: the twiddles are {table}")
    if not attrs["real"]:
        return (x,)
    last = attrs["axis"] == x.rank - 1
    require_rule(
        last and not attrs["inverse"], f"dft: real signals are transformed forwards along the last dim, not {attrs}"
    )
    return (TensorType(COMPLEX_OF[x.dtype], (*x.shape[:-1], length + 1)),)


def _reference_dft(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    x, axis = arrays[0], attrs["axis"]
    if attrs["real"]:
        found = np.fft.rfft(x, axis=axis)
    else:
        found = np.fft.ifft(x, axis=axis, norm="forward") if attrs["inverse"] else np.fft.fft(x, axis=axis)
    return [cast_array(found * attrs["scale"], types[0].dtype)]


def _infer_square(name: str, x: TensorType) -> Types:
    require_rule(x.rank >= 2 and x.shape[-1] == x.shape[-2], f"{name}: {x} is not square")
    return (x,)


def _infer_cholesky(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    return _infer_square("cholesky", types[0])


def _matrix_in_64_bits(x: np.ndarray) -> np.ndarray:
    return x.astype(np.float32) if x.dtype.itemsize < 4 else x


def _reference_cholesky(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    """Compute the Cholesky factor of each matrix; one that is not positive definite gives NaN."""
    (x,), lower = arrays, attrs["lower"]
    flat = _matrix_in_64_bits(x).reshape(math.prod(x.shape[:-2]), *x.shape[-2:])
    result = np.full(flat.shape, np.nan, flat.dtype)
    for i, a in enumerate(flat):
        part = np.tril(a) if lower else np.conj(np.triu(a)).T
        hermitian = part + np.conj(np.tril(part, -1)).T
        try:
            factor = np.linalg.cholesky(hermitian)
        except np.linalg.LinAlgError:
            continue
        result[i] = factor if lower else np.conj(factor).T
    return [cast_array(result.reshape(x.shape), types[0].dtype)]


def _infer_triangular_solve(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    a, b = types
    _infer_square("triangular_solve", a)
    require_rule(a.rank == b.rank, f"triangular_solve: {a} and {b} differ in rank")
    require_rule(b.shape[-2 if attrs["left_side"] else -1] == a.shape[-1], f"triangular_solve: {b} does not fit {a}")
    return (b,)


def _reference_triangular_solve(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    a, b = (_matrix_in_64_bits(x) for x in arrays)
    a = np.tril(a) if attrs["lower"] else np.triu(a)
    if attrs["unit_diagonal"]:
        a = np.where(np.eye(a.shape[-1], dtype=bool), np.ones((), a.dtype), a)
    if attrs["transpose_a"] == "TRANSPOSE":
        a = np.swapaxes(a, -1, -2)
    elif attrs["transpose_a"] == "ADJOINT":
        a = np.conj(np.swapaxes(a, -1, -2))
    if b.size == 0:
        return [arrays[1]]
    if attrs["left_side"]:
        return [cast_array(np.linalg.solve(a, b), types[0].dtype)]
    swapped = np.linalg.solve(np.swapaxes(a, -1, -2), np.swapaxes(b, -1, -2))
    return [cast_array(np.swapaxes(swapped, -1, -2), types[0].dtype)]


def _infer_csr_dot(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    require_rule(len(types) == 4, f"csr_dot takes 4 operands, found {len(types)}")
    data, starts, columns, dense = types
    require_rule(data.rank == starts.rank == columns.rank == 1 and data.shape == columns.shape,
         f"csr_dot: values {data}, row starts {starts} and columns {columns} are no CSR matrix")  # fmt: skip
    require_rule(
        starts.dtype == columns.dtype and kind_of(starts.dtype) in "iu", f"csr_dot: indices are {starts.dtype}"
    )
    require_rule(dense.rank in (1, 2) and dense.dtype == data.dtype, f"csr_dot: {dense} cannot be multiplied by {data}")
    return (TensorType(data.dtype, (starts.shape[0] - 1, *dense.shape[1:])),)


def _reference_csr_dot(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    data, starts, columns, dense = arrays
    out = np.zeros(static_sizes(types[0]), data.dtype)
    with np.errstate(all="ignore"):
        for row in range(out.shape[0]):
            for p in range(int(starts[row]), int(starts[row + 1])):
                out[row] += data[p] * dense[columns[p]]
    return [out]


_DOT = ("lhs_batch", "rhs_batch", "lhs_contract", "rhs_contract", "precision")
_CONVOLUTION = (
    "strides", "padding", "lhs_dilation", "rhs_dilation", "reversal", "input_batch", "input_feature", "input_spatial",
    "kernel_input", "kernel_output", "kernel_spatial", "output_batch", "output_feature", "output_spatial",
    "feature_groups", "batch_groups",
)  # fmt: skip


def _dot_terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return math.prod(shapes[0][d] for d in attrs["lhs_contract"])


def _convolution_terms(attrs: Attrs, shapes: Sequence[tuple[int, ...]]) -> int:
    return math.prod(n for d, n in enumerate(shapes[1]) if d != attrs["kernel_output"])


LINALG = op_spec_table(
    OpSpec(
        "dot_general",
        _infer_dot,
        _reference_dot,
        _DOT,
        constraints=constraints.dot_constraints,
        folds=True,
        sums=True,
        tolerance=16,
        normwise=True,
        terms=_dot_terms,
        removed_by="canonicalize_dot",
    ),
    OpSpec(
        "convolution",
        _infer_convolution,
        _reference_convolution,
        _CONVOLUTION,
        constraints=constraints.convolution_constraints,
        folds=True,
        sums=True,
        tolerance=64,
        normwise=True,
        terms=_convolution_terms,
        removed_by="decompose_convolution",
    ),
    OpSpec(
        "fft",
        _infer_fft,
        _reference_fft,
        ("kind", "length"),
        tolerance=16,
        normwise=True,
        removed_by="decompose_fft",
        constraints=constraints.fft_constraints,
    ),
    OpSpec(
        "dft",
        _infer_dft,
        _reference_dft,
        ("axis", "radices", "inverse", "scale", "real"),
        tolerance=16,
        normwise=True,
        added_by="decompose_fft",
    ),
    OpSpec(
        "cholesky",
        _infer_cholesky,
        _reference_cholesky,
        ("lower",),
        tolerance=64,
        normwise=True,
        in_place=first_in_place,
        constraints=constraints.square_constraints,
    ),
    OpSpec(
        "triangular_solve",
        _infer_triangular_solve,
        _reference_triangular_solve,
        ("left_side", "lower", "unit_diagonal", "transpose_a"),
        constraints=constraints.triangular_solve_constraints,
        tolerance=256,
        normwise=True,
        in_place=lambda attrs: (1,),
    ),
    OpSpec(
        "csr_dot",
        _infer_csr_dot,
        _reference_csr_dot,
        tolerance=16,
        normwise=True,
        constraints=constraints.csr_dot_constraints,
    ),
    OpSpec(
        "tridiagonal_solve_perturbed",
        tridiagonal.infer_tridiagonal,
        tridiagonal.reference_tridiagonal,
        tolerance=64,
        normwise=True,
        constraints=constraints.tridiagonal_constraints,
    ),
    OpSpec(
        "lapack",
        lapack.infer_lapack,
        lapack_reference,
        ("routine", "options"),
        constraints=constraints.lapack_constraints,
        tolerance=256,
        normwise=True,
        in_place=lapack.lapack_in_place_operands,
    ),
)
