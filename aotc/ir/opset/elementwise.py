"""Elementwise ops: each scalar function as an op on tensors, and ops on the bits of an element."""

from __future__ import annotations

import numpy as np

from aotc.ir.opset.elementwise_scalars import SCALARS, ScalarOp, convert, exponent_bits_rounded, reduce_precision
from aotc.ir.opset.spec import (
    Arrays,
    Attrs,
    OpSpec,
    RuleError,
    Types,
    cast_array,
    declared_type,
    equal_operand_shapes,
    merge_op_tables,
    op_spec_table,
    require_rule,
    static_sizes,
)
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import COMPLEX_OF, DTYPES, from_numpy, kind_of, real_of, to_numpy


def result_dtype(scalar: ScalarOp, dtypes: tuple[str, ...], given: str | None) -> str:
    """Return the result dtype of ``scalar`` on operands of ``dtypes``."""
    match scalar.result:
        case "bool":
            return "i1"
        case "real":
            return real_of(dtypes[0])
        case "complex":
            require_rule(dtypes[0] in COMPLEX_OF, f"{scalar.name}: parts must be f32 or f64, not {dtypes[0]}")
            return COMPLEX_OF[dtypes[0]]
        case "given":
            require_rule(given is not None, f"{scalar.name}: the result type must be given")
            return given or ""
    return dtypes[-1]


def check_operand_count(scalar: ScalarOp, count: int) -> None:
    """Check that ``count`` operands are the right number for ``scalar``.

    Raises
    ------
    RuleError
        If the number is wrong.
    """
    require_rule(count == scalar.arity, f"{scalar.name}: takes {scalar.arity} operands, found {count}")


def check_operand_dtypes(scalar: ScalarOp, dtypes: tuple[str, ...]) -> None:
    """Check the operand dtypes of ``scalar``; their number must have passed :func:`check_operand_count`.

    Raises
    ------
    RuleError
        If a dtype is not valid.
    """
    checked = dtypes
    if scalar.name == "select":
        require_rule(dtypes[0] == "i1", f"select: the predicate is {dtypes[0]}, expected i1")
        checked = dtypes[1:]
    require_rule(len(set(checked)) == 1, f"{scalar.name}: operand dtypes differ: {', '.join(checked)}")
    require_rule(kind_of(checked[0]) in scalar.kinds, f"{scalar.name}: is not defined on {checked[0]}")


def _infer_scalar_op(scalar: ScalarOp, types: Types, given: Types) -> Types:
    check_operand_count(scalar, len(types))
    shape, dtypes = types[-1].shape, tuple(t.dtype for t in types)
    if any(t.shape != shape for t in types):
        raise RuleError(f"{scalar.name}: operand shapes differ: {', '.join(map(str, types))}")
    check_operand_dtypes(scalar, dtypes)
    return (TensorType(result_dtype(scalar, dtypes, given[0].dtype if given else None), shape),)


def apply_scalar_op(scalar: ScalarOp, arrays: Arrays, dtype: str) -> np.ndarray:
    """Compute ``scalar`` on arrays in the natural precision, and round the result to ``dtype``."""
    if scalar.result == "given":
        return convert(arrays[0], dtype)
    wide = [_widen_exactly(a) for a in arrays] if scalar.widens else arrays
    if scalar.counts_bits and DTYPES[dtype].bits < 8:
        return cast_array(_op_in_high_bits(scalar, wide, DTYPES[dtype].bits), dtype)
    with np.errstate(all="ignore"):
        return cast_array(np.asarray(scalar.reference(*wide)), dtype)


def _op_in_high_bits(scalar: ScalarOp, wide: Arrays, bits: int) -> np.ndarray:
    """Compute ``scalar`` on integers of ``bits`` bits, below 8, by moving operand 0 to the high bits of a byte."""
    kind = np.int8 if scalar.name == "shr_arith" else np.uint8
    high = np.left_shift(wide[0].view(np.uint8), 8 - bits).view(kind)
    result = scalar.reference(high, *[w.view(kind) for w in wide[1:]])
    match scalar.name:
        case "clz":
            result = np.minimum(result, bits)
        case "shr_logic" | "shr_arith":
            result = np.right_shift(result, 8 - bits)
    low = result.astype(np.uint8) & ((1 << bits) - 1)
    return low.astype(np.int8) - ((low >> (bits - 1)) << bits).astype(np.int8) if wide[0].dtype == np.int8 else low


def _widen_exactly(array: np.ndarray) -> np.ndarray:
    """Convert floats of up to 16 bits to f32 and integers below 8 bits to 8 bits, both without rounding."""
    array = np.asarray(array)
    if array.dtype.isbuiltin == 1 and array.dtype != np.float16:  # ml_dtypes' f8E5M2 has NumPy's kind "f"
        return array
    row = next(r for r in DTYPES.values() if to_numpy(r.name) == array.dtype)
    return array.astype({"f": np.float32, "i": np.int8, "u": np.uint8}[row.kind])


def _scalar_spec(scalar: ScalarOp) -> OpSpec:
    def infer(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
        return _infer_scalar_op(scalar, types, given)

    def reference(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
        return [apply_scalar_op(scalar, arrays, types[0].dtype)]

    # except total-order comparisons, whose order f64 keeps: ops that do not widen to f32 do not widen to f64
    of_format = not scalar.widens and not scalar.total
    return OpSpec(
        scalar.name, infer, reference, inline=True, folds=True, of_format=of_format,
        work=scalar.work, tolerance=scalar.tolerance, constraints=equal_operand_shapes,
        selects=scalar.result == "select",
    )  # fmt: skip


def _infer_bitcast(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    (source,), target = types, declared_type(given, "bitcast")
    narrow, wide = DTYPES[target.dtype].bits, DTYPES[source.dtype].bits
    complex_ = [kind_of(t.dtype) == "c" for t in (source, target)]
    require_rule(complex_[0] == complex_[1], f"bitcast: {source} to {target}: complex numbers stay complex")
    shape = source.shape
    if narrow < wide:
        shape = (*shape, wide // narrow)
    elif narrow > wide:
        require_rule(
            bool(shape) and shape[-1] == narrow // wide, f"bitcast: {source} does not hold whole {target.dtype}"
        )
        shape = shape[:-1]
    require_rule(shape == target.shape, f"bitcast: {source} to {target}: expected {TensorType(target.dtype, shape)}")
    return (target,)


def _reference_bitcast(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    source, target = np.ascontiguousarray(arrays[0]), to_numpy(types[0].dtype)
    bits = DTYPES[types[0].dtype].bits
    if bits < 8 and source.dtype.itemsize * 8 >= 8 and source.dtype != target:
        return [_unpack_bits(source, bits).astype(np.uint8).view(target).reshape(static_sizes(types[0]))]
    if source.dtype == bool and bits > 1:
        return [np.packbits(source.reshape(-1), bitorder="little").view(target).reshape(static_sizes(types[0]))]
    shape = static_sizes(types[0]) if types[0].rank != arrays[0].ndim else arrays[0].shape
    return [source.reshape(-1).view(target).reshape(shape)]


def _unpack_bits(source: np.ndarray, bits: int) -> np.ndarray:
    raw = source.reshape(-1).view(np.uint8)
    parts = [(raw >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(-1)


def _infer_same(types: Types, attrs: Attrs, regions: tuple, given: Types) -> Types:
    if kind_of(types[0].dtype) != "f":
        raise RuleError(f"reduce_precision: is not defined on {types[0].dtype}")
    return (types[0],)


def with_fewer_bits(x: np.ndarray, exponent_bits: int, mantissa_bits: int) -> np.ndarray:
    """Round ``x`` to a float with fewer exponent and mantissa bits; the result has the dtype of ``x``."""
    dtype = from_numpy(x.dtype)
    return cast_array(
        reduce_precision(_widen_exactly(x), exponent_bits, mantissa_bits, exponent_bits_rounded(dtype)), dtype
    )


def _reference_reduce_precision(arrays: Arrays, attrs: Attrs, regions: tuple, types: Types) -> list[np.ndarray]:
    return [with_fewer_bits(np.asarray(arrays[0]), attrs["exponent_bits"], attrs["mantissa_bits"])]


ELEMENTWISE = merge_op_tables(
    {s.name: _scalar_spec(s) for s in SCALARS.values() if not s.of_loops},
    op_spec_table(
        OpSpec("bitcast", _infer_bitcast, _reference_bitcast, inline=True, folds=True, of_format=True, tolerance=0),
        OpSpec(
            "reduce_precision", _infer_same, _reference_reduce_precision, ("exponent_bits", "mantissa_bits"),
            inline=True, folds=True, of_format=True, tolerance=0,
        ),
    ),
)  # fmt: skip


def scalar_work(fn: str) -> int:
    """Return the number of scalar operations that the cost model counts for function ``fn`` of the loop IR."""
    return SCALARS[fn].work if fn in SCALARS else ELEMENTWISE[fn].work
