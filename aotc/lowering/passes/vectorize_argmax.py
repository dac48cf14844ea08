"""On CPUs, compute argmax and argmin as two reductions, each of which is vectorized: the value, then its index.

Before, one reduction of pairs, each step of which depends on the previous one::

    %m, %i = reduce %x, (iota 1), -inf, 0 {dims = (1,)} (the larger value; of equal ones the lower place)
After::

    %m = reduce %x, -inf {dims = (1,)} (max)
    %i = reduce (select (%x == %m or %x != %x), (iota 1), 2147483647), 2147483647 {dims = (1,)} (min)

A combiner is recognised by its results on values in every order and on NaN, which counts as the extreme. So models may
write it in any form. GPUs reduce pairs as fast as they read memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from aotc.ir.opset import COMPARISONS, OPS
from aotc.ir.tensor.ir import Module, Op, Region, TensorType, Value
from aotc.lowering.analysis.constant_values import iota_dim, splat_of
from aotc.lowering.analysis.prefix_scans import neutral_value
from aotc.lowering.passes.rewrite import Builder, rewrite_for_target_kind
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import DTYPES, kind_of, limits, to_numpy


def vectorize_argmax(module: Module, options: Options) -> Module:
    """Rewrite argmax and argmin on CPUs as two vectorizable reductions: the extreme, then its first index."""
    if options.opt_level < 2:
        return module
    return rewrite_for_target_kind("cpu", module, options, _vectorize_argmax_rule, ("reduce",))


def _vectorize_argmax_rule(op: Op, b: Builder, _: Target) -> Sequence[Value] | None:
    """Return the two reductions that replace an argmax or argmin of rows, or None for other ops."""
    if op.name != "reduce" or len(op.results) != 2:
        return None
    x, places, first, start = op.operands
    row = x.type.rank - 1
    combiner = argmax_or_argmin_of(op.regions[0])
    has_elements = isinstance(x.type.shape[row], int) and x.type.shape[row] != 0
    if op.attrs["dims"] != (row,) or not has_elements or not combiner or iota_dim(places, b.definitions) != row:
        return None
    begin, zero = splat_of(first, b.definitions), splat_of(start, b.definitions)
    if zero is None or zero != 0 or begin is None or begin != neutral_value(combiner, x.type.dtype):
        return None
    return _two_reductions_for_argmax(op, combiner, b)


def _two_reductions_for_argmax(op: Op, combiner: str, b: Builder) -> Sequence[Value]:
    """Append the reduction of the values, then that of the smallest index with the extreme value or NaN."""
    x, places, *_ = op.operands
    shape, row, place = x.type.shape, x.type.rank - 1, op.results[1].type
    short = kind_of(x.type.dtype) == "f" and DTYPES[x.type.dtype].bits < 32
    wide = b.convert(x, "f32") if short else x
    scalar = TensorType(wide.type.dtype)
    most = b.constant(limits(scalar.dtype)[combiner == "min"], scalar)
    extreme = b.reduce(wide, most, (row,), b.combiner(combiner, scalar.dtype))
    met = b.make("eq", (wide, b.broadcast(extreme, tuple(range(row)), shape)))
    if kind_of(scalar.dtype) == "f":
        met = b.make("or", (met, b.make("ne", (wide, wide))))
    last = b.constant(limits(place.dtype)[1], TensorType(place.dtype))
    nowhere = b.broadcast(last, (), shape)
    at = b.reduce(b.make("select", (met, places, nowhere)), last, (row,), b.combiner("min", place.dtype))
    return b.convert(extreme, op.results[0].type.dtype), at


def argmax_or_argmin_of(region: Region) -> str:
    """Return ``max`` or ``min`` if a combiner of (value, index) pairs selects the first extreme, else ""."""
    types = [v.type.dtype for v in region.params]
    value, place = types[0], types[1] if len(types) == 4 else ""
    if types != [value, place] * 2 or kind_of(value) not in "iuf" or kind_of(place) not in "iu":
        return ""
    if not all(op.name in COMPARISONS or op.name == "select" or op.results[0].type.dtype == "i1" for op in region.ops):
        return ""
    a, b = (
        np.array(column, to_numpy(value))
        for column in zip(*product(_combiner_test_values(value), repeat=2), strict=True)
    )
    first, second = (np.full(a.shape, n, to_numpy(place)) for n in (0, 1))
    selected = _evaluate_scalar_region(region, [a, first, b, second])
    if selected is None:
        return ""
    p, q = a.astype("f8"), b.astype("f8")
    for name, beats in (("max", p >= q), ("min", p <= q)):
        stays = beats | (a != a)
        if np.array_equal(selected[1], np.where(stays, first, second)) and _equal_with_nan(
            selected[0], np.where(stays, a, b)
        ):
            return name
    return ""


def _combiner_test_values(dtype: str) -> tuple[float, ...]:
    """Return test values of a dtype, NaN included: combiners are tried on all pairs of these."""
    if kind_of(dtype) == "f":
        return (-1.0, -0.0, 0.0, 1.0, float("nan"))
    return (0, 1, 2)


def _equal_with_nan(a: np.ndarray, b: np.ndarray) -> bool:
    """Return True if the arrays are equal, with NaN at the same positions."""
    return bool(((a == b) | ((a != a) & (b != b))).all())


def _evaluate_scalar_region(region: Region, arrays: Sequence[np.ndarray]) -> list[np.ndarray] | None:
    """Return the results of a scalar region on arrays of operands, or None if it also reads outer values."""
    values = dict(zip(region.params, arrays, strict=True))
    for op in region.ops:
        if op.name == "constant":
            values[op.result] = np.broadcast_to(op.attrs["value"], arrays[0].shape)
        elif all(v in values for v in op.operands) and not op.regions:
            types = tuple(TensorType(v.type.dtype, arrays[0].shape) for v in op.results)
            (values[op.result],) = OPS[op.name].reference([values[v] for v in op.operands], op.attrs, (), types)
        else:
            return None
    return [values[v] for v in region.results] if all(v in values for v in region.results) else None
