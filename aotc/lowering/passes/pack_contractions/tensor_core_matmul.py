"""Prepare matmuls for a GPU's tensor cores, which read operands in place.

Before::

    %2 = convert %x : f32[128, 768]                        // %x: bf16[128, 768]
    %3 = convert %w : f32[3072, 768]                       // %w: bf16[3072, 768]
    %4 = transpose %3 {perm = (1, 0)} : f32[768, 3072]
    %5 = matmul %2, %4 : f32[128, 3072]
After::

    %5 = matmul %x, %w {rhs_transposed = True} : f32[128, 3072]

Tensor cores multiply 16-bit floats exactly and add in f32; f64 products are added with one rounding, as by ``fma``.
Hopper's require contiguous terms for i8 operands, and for one of two TF32 operands. So constants are transposed at
compile time, and operands that are read often before the matmul. A matmul with few results and long sums is split
(split-K); partial sums are added in order. In a large matmul, unaligned rows are copied to rows of a multiple of 16
bytes. A matmul with a vector becomes a multiplication and a reduction, which takes as long as reading the matrix once.
"""

from __future__ import annotations

from dataclasses import replace

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.tiling import FP8, FP8_PAIRS
from aotc.ir.tensor.ir import Op, TensorType, Value
from aotc.lowering.passes.pack_contractions.swap_operands import swap_permutation, swaps_matrix
from aotc.lowering.passes.rewrite import Builder
from aotc.lowering.plans.gpu_conv import sum_dtype_of
from aotc.lowering.plans.gpu_matmul_tiles import is_for_tensor_cores, is_worth_transposing, split_k_parts
from aotc.lowering.plans.operand_views import is_widened_in_tiles
from aotc.lowering.threshold import Limit
from aotc.targets import Target
from aotc.vmfb.dtypes import size_of

_FLAGS = ("lhs_transposed", "rhs_transposed")
_SHORT = frozenset({"bf16", "f16"})
_WIDE = frozenset({"bf16", "f16", "f32"})
_SUMS = {"bf16": "f32", "f16": "f32", "f32": "f32", "f64": "f64"}  # of a product with a vector, by its result
_TAKEN = {"bf16": "bf16", "f16": "f16", "f32": "tf32", "f64": "f64", **{pair: pair for pair in FP8_PAIRS}}


def prepare_tensor_core_matmul(op: Op, b: Builder, target: Target) -> tuple[Value, ...]:
    """Append a ``matmul`` in the form for tensor cores, and return its result."""
    op = _matmul_of_operands_as_stored(
        widen_fp8_matmul(narrow_matmul(_matmul_of_operands_as_stored(op, b), b, target), b, target), b
    )
    *batch, m, n = op.result.type.shape
    k = op.operands[0].type.shape[-2 if op.attrs[_FLAGS[0]] else -1]
    if (m == 1) is not (n == 1) and is_for_tensor_cores(batch, m, n, k) and _SUMS.get(op.result.type.dtype):
        return (_matrix_vector_as_sum(op, b),)
    exact = op.attrs.get("precision", "DEFAULT") != "DEFAULT"
    if not target.has_ampere or not is_for_tensor_cores(batch, m, n, k) or exact:
        return b.append(op)
    if target.cpu == "sm_90a" and all(v.type.dtype in ("f32", "i8", *FP8) for v in op.operands):
        op = _matmul_with_contiguous_terms(op, b)
    if target.cpu == "sm_90a" and sum_dtype_of(op) is not None:
        op = _matmul_with_aligned_rows(op, k, b)
    operands = tensor_core_dtype(op)
    k = op.operands[0].type.shape[-2 if op.attrs[_FLAGS[0]] else -1]
    by_warps = is_widened_in_tiles(op.operands[1], m, b.definitions)
    transposed = None if by_warps else _lacks_contiguous_right_terms(op)
    parts = (
        split_k_parts(op.result.type.shape, k, operands, transposed=transposed, by_warps=by_warps) if operands else 1
    )
    return b.append(op) if parts == 1 else (_split_matmul_terms(op, k, parts, b),)


def tensor_core_dtype(op: Op) -> str | None:
    """Return the dtype in which tensor cores multiply the operands, or None if sums cannot be split into parts."""
    lhs, rhs, result = (v.type.dtype for v in (*op.operands, op.result))
    if lhs in FP8 and rhs in FP8:
        lhs = f"{FP8[lhs]}.{FP8[rhs]}"
    return _TAKEN.get(lhs) if result in _TAKEN else None


def _lacks_contiguous_right_terms(op: Op) -> bool | None:
    """Return True if only the right one of two f32 operands lacks contiguous terms, False if the left one does.

    Return None if both have contiguous terms, and for other dtypes: the size of the matmul decides.

    None if both have contiguous terms, and for other dtypes: the size of the matmul decides.
    """
    by_terms = not op.attrs[_FLAGS[0]], op.attrs[_FLAGS[1]]
    if op.operands[0].type.dtype == "f32" and by_terms != (True, True):
        return by_terms == (True, False)
    return None


def _matrix_vector_as_sum(op: Op, b: Builder) -> Value:
    """Rewrite a matrix-vector product as a multiplication and a reduction."""
    dtype, shape = _SUMS[op.result.type.dtype], op.result.type.shape
    right = shape[-2] == 1  # is the matrix the right operand?
    vector, matrix = op.operands if right else op.operands[::-1]
    by_terms = bool(op.attrs[_FLAGS[1]]) if right else not op.attrs[_FLAGS[0]]
    batch = tuple(range(len(shape) - 2))
    axis = len(batch) + int(by_terms)
    terms = matrix.type.shape[axis]
    each = b.broadcast(b.reshape(vector, (*shape[:-2], terms)), (*batch, axis), matrix.type.shape)
    products = b.make("mul", (b.convert(each, dtype), b.convert(matrix, dtype)))
    total = b.reduce(products, b.constant(0, TensorType(dtype)), (axis,), b.combiner("add", dtype))
    return b.reshape(b.convert(total, op.result.type.dtype), shape)


def _defining_op_of(v: Value, b: Builder) -> Op | None:
    return b.definitions.get(v)


def narrow_matmul(op: Op, b: Builder, target: Target) -> Op:
    """Return the matmul of the operands before conversions to f32, or from 8-bit to 16-bit floats."""
    sources, wide = [], set()
    for v in op.operands:
        definition = _defining_op_of(v, b)
        if definition is None or definition.name != "convert":
            return op
        sources.append(definition.operands[0])
        wide.add(definition.result.type.dtype)
    kinds = {v.type.dtype for v in sources}
    short = wide == {"f32"} and len(kinds) == 1 and kinds <= _SHORT
    if not short and not (kinds <= FP8.keys() and len(wide) == 1 and wide <= _WIDE and takes_fp8(op, target)):
        return op
    return replace(op, operands=tuple(sources))


def takes_fp8(op: Op, target: Target) -> bool:
    """Return True if tensor cores of ``target`` multiply 8-bit floats as exactly as ``op`` demands."""
    return target.has_fp8 and op.attrs.get("precision", "DEFAULT") == "DEFAULT"


def widen_fp8_matmul(op: Op, b: Builder, target: Target) -> Op:
    """Return a matmul of 8-bit floats as one of f16, which represents them exactly, if ``target`` lacks them."""
    if not {v.type.dtype for v in op.operands} <= FP8.keys() or takes_fp8(op, target):
        return op
    return replace(op, operands=tuple(b.convert(v, "f16") for v in op.operands))


def _matmul_of_operands_as_stored(op: Op, b: Builder) -> Op:
    """Return the matmul ``op`` on operands as stored, without transposes before it."""
    operands = list(op.operands)
    flags = {name: bool(op.attrs[name]) for name in _FLAGS}
    for n, name in enumerate(flags):
        definition = _defining_op_of(operands[n], b)
        if definition is not None and swaps_matrix(definition):
            operands[n], flags[name] = definition.operands[0], not flags[name]
    return replace(op, operands=tuple(operands), attrs={**op.attrs, **flags})


def _matmul_with_contiguous_terms(op: Op, b: Builder) -> Op:
    """Return the matmul with constant or often read operands laid out contiguously along k.

    One of two f32 operands may have the other order: if both do, the smaller one is transposed.
    """
    operands, flags = list(op.operands), dict(op.attrs)
    m, n = op.result.type.shape[-2:]
    ways = [bool(flags[name]) is not preferred for name, preferred in zip(_FLAGS, (False, True), strict=True)]
    if operands[0].type.dtype == "f32":
        constants = [b.is_precomputable(v) for v in operands]
        sizes = [product(v.type.shape) for v in operands]
        static_sizes = all(isinstance(size, int) for size in sizes)
        second = all(ways) and static_sizes and static(sizes[1]) < static(sizes[0])
        ways = [way and (constant or (all(ways) and second == bool(number)))
                for number, (way, constant) in enumerate(zip(ways, constants, strict=True))]  # fmt: skip
    for number, (name, preferred, times) in enumerate(zip(_FLAGS, (False, True), (n, m), strict=True)):
        v = operands[number]
        if ways[number] and (b.is_precomputable(v) or is_worth_transposing(v.type, times)):
            operands[number] = _transposed_matrix(v, b)
            flags[name] = preferred
    return replace(op, operands=tuple(operands), attrs=flags)


def _transposed_matrix(v: Value, b: Builder) -> Value:
    """Return a matrix transposed; a conversion of it moves behind the transpose, so that fewer bytes are moved."""
    definition = b.definitions.get(v)
    if definition is not None and definition.name == "convert":
        return b.convert(b.transpose(definition.operands[0], swap_permutation(v.type.rank)), v.type.dtype)
    return b.transpose(v, swap_permutation(v.type.rank))


SHORT_EXTENT = Limit(
    255,
    "rows, columns or terms of a matmul whose operands are not copied to aligned rows",
    "NVIDIA H200: 1000 x 1001 x 999 takes 45 us by warps that read single elements",
    benchmark="python -m benchmarks gpu products",
)


def _matmul_with_aligned_rows(op: Op, k: Dim, b: Builder) -> Op:
    """Return a large matmul with unaligned operands copied to rows of a multiple of 16 bytes."""
    extents = (*op.result.type.shape[-2:], k)
    count = 16 // size_of(op.operands[0].type.dtype)
    if not all(isinstance(d, int) and not SHORT_EXTENT.holds(d) for d in extents):
        return op
    rest = -static(k) % count
    operands = []
    for v, transposed in zip(op.operands, (op.attrs[_FLAGS[0]], not op.attrs[_FLAGS[1]]), strict=True):
        rank, cols = v.type.rank, static(v.type.shape[-1])
        terms = rank - 2 if transposed else rank - 1
        more = {terms: rest} | ({rank - 1: -cols % count} if transposed else {})
        wide = b.pad(v, None, {}, more)
        if transposed and cols % count:
            wide = b.slice(wide, (0,) * rank, (*wide.type.shape[:-1], cols))
        operands.append(wide)
    return replace(op, operands=tuple(operands))


def _split_matmul_terms(op: Op, k: Dim, parts: int, b: Builder) -> Value:
    """Return the matmul split along its terms: the sum of a batch of matmuls over ``parts`` pieces."""
    assert isinstance(k, int)
    lhs = _matrix_split_along_axis(op.operands[0], 0 if op.attrs[_FLAGS[0]] else 1, parts, b)
    rhs = _matrix_split_along_axis(op.operands[1], 1 if op.attrs[_FLAGS[1]] else 0, parts, b)
    shape = op.result.type.shape
    dtype = "f64" if op.operands[0].type.dtype == "f64" else "f32"
    each = b.make("matmul", (lhs, rhs), op.attrs, TensorType(dtype, (parts, *shape)))
    total = b.reduce(each, b.constant(0, TensorType(dtype)), (0,), b.combiner("add", dtype))
    return b.convert(total, op.result.type.dtype)


def _matrix_split_along_axis(x: Value, axis: int, parts: int, b: Builder) -> Value:
    """Return a matrix with its ``axis`` split into ``parts``, which become the first dim."""
    shape = list(x.type.shape)
    depth = shape[axis]
    assert isinstance(depth, int)
    shape[axis : axis + 1] = [parts, depth // parts]
    split = b.reshape(x, tuple(shape))
    return split if axis == 0 else b.transpose(split, (1, 0, 2))
