"""Prepare matmuls and convolutions for register tiles: choose a tile form and pack the right operand into panels.

Before::

    %3 = matmul %x, %w : f32[128, 3072]                 // %w: f32[768, 3072]
After::

    %2 = ... pad, reshape, transpose of %w : f32[96, 768, 32]
    %3 = packed_matmul %x, %2 {n = 3072, group = 1} : f32[128, 3072]

The ops that pack ``%w`` are folded if ``%w`` is constant, and run once before calls if it is bound.

:mod:`aotc.lowering.plans.matmul` decides:

- A ``matmul`` whose right operand is to be read in place gets the width of its tiles, ``cols``.
- A ``matmul`` without ``cols``, or a ``conv``, is lowered as plain loops.
- A matmul of few rows whose right operand is stored by columns becomes dot products: a multiplication and a
  reduction. So does a matmul whose right operand has rows too short to fill vectors and would be packed in each call.
- A matmul of one column gets its operands swapped, so that it has one row; most columns of a tile would be padding. So
  does a matmul of few columns with many rows or a constant left operand: its transpose is folded, while panels would
  consist mostly of padding and be packed in each call.

A matmul of complex matrices becomes a matmul of real matrices, for which tiles exist. The real and imaginary parts of
the left operand are rows of one real matmul, those of the right operand its columns. The result consists of sums and
differences of the four quarters of its result::

    [re(a)]                     [re(a) re(b)   re(a) im(b)]
    [im(a)] @ [re(b)  im(b)]  = [im(a) re(b)   im(a) im(b)]

Where the number of columns is symbolic, the real and the imaginary part of a column are neighbours, as in memory: no
loop then changes at an index that only a call knows.

Matmuls on GPUs are prepared by :mod:`aotc.lowering.passes.pack_contractions.tensor_core_matmul` and
:mod:`~aotc.lowering.passes.pack_contractions.tensor_core_conv`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from aotc.ir.dims.algebra import Dim, product, static
from aotc.ir.loop.forms.tile_forms import (
    BF16_PAIRS,
    F32,
    F64,
    I8_QUADS,
    I32,
    I64,
    TileForm,
    find_form,
    form_of_operands,
)
from aotc.ir.opset import PRODUCTS
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.passes.pack_contractions.pixel_columns import with_pixels_as_columns
from aotc.lowering.passes.pack_contractions.shared_panels import widest_product_rows, with_widest_panel_rows
from aotc.lowering.passes.pack_contractions.signed_bytes import add_byte_offset, needs_byte_offset, subtract_byte_offset
from aotc.lowering.passes.pack_contractions.swap_operands import (
    swap_permutation,
    swaps_matrix,
    transpose_batch,
    transposed_product,
)
from aotc.lowering.passes.pack_contractions.tensor_core_conv import prepare_tensor_core_conv
from aotc.lowering.passes.pack_contractions.tensor_core_matmul import prepare_tensor_core_matmul
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.cpu_tiles import best_tile, in_place_cols
from aotc.lowering.plans.matmul import conv_strategy, is_matmul_transposed, is_tiny_matmul, matmul_strategy
from aotc.options import Options
from aotc.targets import Target
from aotc.vmfb.dtypes import kind_of, real_of, size_of
from aotc.vmfb.float_formats import SMALL_FLOATS

_WIDENED = frozenset({"f16", "bf16", "f32", *SMALL_FLOATS})
_INTEGERS = frozenset({"i8", "u8", "i16", "u16", "i32", "u32", "i64", "u64"})


def tile_form_of_dtypes(lhs: str, rhs: str, result: str, target: Target) -> TileForm | None:
    """Return the tile form for the dtypes of operands and result, or None.

    bf16 is converted to f32 on a CPU without an instruction for pairs of it, and where tiles read the operand in place;
    :func:`_widening_tile_form` decides whether the tiles do the conversion. Integers are multiplied and added in
    32 bits, or in 64 if the result has 64: sums modulo such a power of two give the right result in fewer bits, too.
    """
    if result == "f64" and {lhs, rhs} <= _WIDENED:
        return F64
    if lhs == rhs and (lhs in ("f32", "f64") or (lhs == "bf16" and lhs in target.units)):
        return find_form(lhs, rhs)
    if result in _INTEGERS:
        quads = lhs in ("i8", "u8") and rhs == "i8" and size_of(result) <= size_of("i32")
        return I8_QUADS if quads else I64 if size_of(result) > size_of("i32") else I32
    return F32 if {lhs, rhs} <= _WIDENED else None


def _widening_tile_form(form: TileForm, rhs: str, target: Target) -> TileForm:
    """Return the form of tiles that convert a 16-bit right operand themselves if there is one, else ``form``."""
    narrow = form == F32 and rhs in ("bf16", "f16") and rhs not in target.lacks
    return form_of_operands(form.left, rhs) if narrow else form


def pack_contractions(module: Module, options: Options) -> Module:
    """Rewrite every ``matmul`` and ``conv`` for the target of its device, else for the first one of ``options``."""
    home, _ = op_targets(module, options)
    widest = widest_product_rows(module)
    rule = lambda op, b: _pack_contraction_rule(op, b, home(op), options.memory_limit, widest)
    return rewrite_module(module, rule, PRODUCTS)


def _pack_contraction_rule(
    op: Op, b: Builder, target: Target, memory_limit: int, widest: Mapping[Value, Dim]
) -> Sequence[Value] | None:
    """Return the values that replace a ``matmul`` or ``conv`` prepared for ``target``, or None to leave the op.

    ``widest`` has the largest number of rows for each result whose right operand several matmuls share.
    """
    if target.kind != "cpu":
        prepare = {"matmul": prepare_tensor_core_matmul, "conv": prepare_tensor_core_conv}.get(op.name)
        return None if prepare is None else prepare(op, b, target)
    match op.name:
        case "matmul":
            return _pack_matmul(op, b, target, memory_limit, widest)
        case "conv":
            return _pack_conv(op, b, target, widest)
    return None


def _append_contraction(
    op: Op, name: str, operands: tuple[Value, ...], dtype: str, attrs: Mapping[str, Any], b: Builder
) -> Sequence[Value]:
    """Append the op ``name`` in ``dtype``; return its result, converted to the result dtype of ``op``."""
    result = op.result.type
    if result.dtype == dtype:
        return b.append(replace(op, name=name, operands=operands, attrs=attrs))
    return (b.convert(b.make(name, operands, attrs, TensorType(dtype, result.shape)), result.dtype),)


def _operands_in_tile_dtypes(op: Op, form: TileForm, b: Builder) -> tuple[Value, Value]:
    """Return the operands in the dtypes that tiles read; a left operand of 8-bit integers is not converted."""
    lhs, rhs = op.operands
    return lhs if form == I8_QUADS else b.convert(lhs, form.left), b.convert(rhs, form.right)


# --- matmul --------------------------------------------------------------------


def _pack_matmul(op: Op, b: Builder, target: Target, memory_limit: int, widest: Mapping[Value, Dim]) -> Sequence[Value]:
    """Append a ``matmul`` for a CPU: as dot products, or as tiles over plain, copied or packed operands."""
    op = _matmul_of_stored_operands(op, b)
    if kind_of(op.result.type.dtype) == "c":
        return _complex_matmul(op, b, target, memory_limit)
    lhs, rhs = op.operands
    form = tile_form_of_dtypes(lhs.type.dtype, rhs.type.dtype, op.result.type.dtype, target)
    constant = b.is_precomputable(rhs)
    if is_matmul_transposed(op, form, target, constant and not b.is_precomputable(lhs)):
        return _matmul_with_swapped_operands(op, b, target, memory_limit)
    wide = F32 if form == BF16_PAIRS else form
    m, n = op.result.type.shape[-2:]
    k = lhs.type.shape[-2 if op.attrs["lhs_transposed"] else -1]
    # Panels that several matmuls share are laid out for the matmul with most rows.
    model = with_widest_panel_rows(op, widest) if constant else op
    strategy = matmul_strategy(model, form, constant, target, memory_limit)
    if form is None or wide is None:
        return b.append(op)
    match strategy:
        case "dots" | "sums" as order:
            return _dot_products(op, wide.left, k, order == "sums", b)
        case "in_place":
            attrs = {**op.attrs, "cols": in_place_cols(m, static(n), k, wide, target)}
            form = _widening_tile_form(wide, rhs.type.dtype, target)
            return _append_contraction(op, "matmul", _operands_in_tile_dtypes(op, form, b), form.out, attrs, b)
        case "copied":
            return _matmul_with_copied_panels(op, _widening_tile_form(form, rhs.type.dtype, target), n, k, target, b)
        case "packed":
            form = _widening_tile_form(form, rhs.type.dtype, target)
            cols = _choose_panel_columns(model.result.type.shape[-2], n, k, form, constant, target)
            if not needs_byte_offset(op, form, k, constant, target):
                return _packed_matmul(op, form, cols, n, k, b)
            (out,) = _packed_matmul(add_byte_offset(op, b), form, cols, n, k, b)
            return (subtract_byte_offset(out, rhs, (rhs.type.rank - (1 if op.attrs["rhs_transposed"] else 2),), b),)
    return b.append(op)


def _complex_matmul(op: Op, b: Builder, target: Target, memory_limit: int) -> Sequence[Value]:
    """Append a complex matmul: one row as dot products, several rows as a matmul of real and imaginary parts."""
    k = op.operands[0].type.shape[-2 if op.attrs["lhs_transposed"] else -1]
    m, n = op.result.type.shape[-2:]
    if is_tiny_matmul((m, n), k):
        return b.append(op)
    if m == 1:
        return _dot_products(op, op.result.type.dtype, k, not op.attrs["rhs_transposed"], b)
    if n == 1:
        return _matmul_with_swapped_operands(op, b, target, memory_limit)
    (quarters,) = _pack_matmul(_real_matmul_of_complex(op, b), b, target, memory_limit, {})
    return (_complex_result_of_real_matmul(quarters, b),)


def _real_matmul_of_complex(op: Op, b: Builder) -> Op:
    """Return the real ``matmul`` of real and imaginary parts for a complex one; append its operands only."""
    rank, flags = op.result.type.rank, (bool(op.attrs["lhs_transposed"]), bool(op.attrs["rhs_transposed"]))
    rows, columns = (rank - 1 if flags[0] else rank - 2), (rank - 2 if flags[1] else rank - 1)
    dtype = op.result.type.dtype
    *batch, m, n = op.result.type.shape
    split_columns = _real_then_imaginary_parts if isinstance(n, int) else _interleave_real_imaginary
    lhs, rhs = (b.convert(x, dtype) for x in op.operands)
    operands = [_real_then_imaginary_parts(lhs, rows, b), split_columns(rhs, columns, b)]
    return b.op("matmul", operands, op.attrs, (TensorType(real_of(dtype), (*batch, 2 * m, 2 * n)),))


def _complex_result_of_real_matmul(quarters: Value, b: Builder) -> Value:
    """Return the result of a complex matmul from the result of the real matmul of its parts."""
    rows, columns = quarters.type.rank - 2, quarters.type.rank - 1
    m, n = (d // 2 for d in quarters.type.shape[-2:])
    halves = [b.slice_dim(quarters, rows, low, low + m) for low in (0, m)]
    if isinstance(n, int):
        (real, cross), (other, both) = ([b.slice_dim(x, columns, low, low + n) for low in (0, n)] for x in halves)
    else:
        (real, cross), (other, both) = (_even_and_odd_elements(x, columns, b) for x in halves)
    return b.make("complex", (b.make("sub", (real, both)), b.make("add", (cross, other))))


def _real_then_imaginary_parts(x: Value, axis: int, b: Builder) -> Value:
    """Return the real parts of ``x`` followed by its imaginary parts along ``axis``."""
    return b.make("concatenate", (b.make("real", (x,)), b.make("imag", (x,))), {"dim": axis})


def _interleave_real_imaginary(x: Value, axis: int, b: Builder) -> Value:
    """Return the real part of each element along ``axis`` followed by its imaginary part."""
    before, after = x.type.shape[:axis], x.type.shape[axis + 1 :]
    n = x.type.shape[axis]
    real, imag = (b.reshape(part, (*before, n, 1, *after)) for part in (b.make("real", (x,)), b.make("imag", (x,))))
    return b.reshape(b.make("concatenate", (real, imag), {"dim": axis + 1}), (*before, 2 * n, *after))


def _even_and_odd_elements(x: Value, axis: int, b: Builder) -> list[Value]:
    """Return the elements of ``x`` at even indices along its last axis, and those at odd ones."""
    *lead, count = x.type.shape
    shape = (*lead, count // 2)
    pairs = b.reshape(x, (*shape, 2))
    return [b.reshape(b.slice_dim(pairs, axis + 1, low, low + 1), shape) for low in (0, 1)]


def _matmul_of_stored_operands(op: Op, b: Builder) -> Op:
    """Return the matmul ``op`` reading operands as stored in memory, with transposes folded into its attributes.

    A transpose of a bound argument is left alone, as it runs once before calls; that of a constant is folded.
    """
    operands = list(op.operands)
    flags = {name: bool(op.attrs[name]) for name in ("lhs_transposed", "rhs_transposed")}
    for n, name in enumerate(flags):
        definition = b.definitions.get(operands[n])
        if definition is not None and swaps_matrix(definition) and operands[n] not in b.weights:
            operands[n], flags[name] = definition.operands[0], not flags[name]
    return replace(op, operands=tuple(operands), attrs={**op.attrs, **flags})


def _matmul_with_swapped_operands(op: Op, b: Builder, target: Target, memory_limit: int) -> Sequence[Value]:
    """Return a matmul with few columns, computed with swapped operands as a matmul with few rows."""
    (out,) = _pack_matmul(transposed_product(op, b), b, target, memory_limit, {})
    return (transpose_batch(out, b),)


def _choose_panel_columns(m: Dim, n: Dim, k: Dim, form: TileForm, constant: bool, target: Target) -> int:
    """Return the columns of a panel. For bf16 packed in each call they divide ``n``, so that nothing is padded."""
    lanes = target.vector_bytes // size_of(form.out)
    if form == BF16_PAIRS and isinstance(n, int) and n % lanes == 0 and not constant:
        return in_place_cols(m, n, k, form, target)
    return best_tile(m, n, k, form, target)[1]


def _matmul_with_copied_panels(op: Op, form: TileForm, n: Dim, k: Dim, target: Target, b: Builder) -> Sequence[Value]:
    """Append the matmul ``op`` whose tiles copy panels of the right operand themselves, ``cols`` columns wide."""
    lhs, rhs, lhs_transposed = _operands_for_term_groups(op, form, b)
    m, lanes = op.result.type.shape[-2], target.vector_bytes // size_of(form.out)
    if form.group > 1:
        cols = 2 * lanes
    elif isinstance(n, int) and n % lanes == 0:
        cols = in_place_cols(m, n, k, form, target)
    else:
        _, cols = best_tile(m, n, k, form, target)
    attrs = {**op.attrs, "lhs_transposed": lhs_transposed, "cols": cols}
    return _append_contraction(op, "matmul", (lhs, rhs), form.out, attrs, b)


def _operands_for_term_groups(op: Op, form: TileForm, b: Builder) -> tuple[Value, Value, bool]:
    """Return the operands that tiles read, and True if the left one is transposed.

    Tiles that read groups of terms need a left operand that is not transposed.
    """
    lhs, rhs = _operands_in_tile_dtypes(op, form, b)
    lhs_transposed = bool(op.attrs["lhs_transposed"])
    if form.group > 1 and lhs_transposed:
        return b.transpose(lhs, swap_permutation(lhs.type.rank)), rhs, False
    return lhs, rhs, lhs_transposed


def _packed_matmul(op: Op, form: TileForm, cols: int, n: Dim, k: Dim, b: Builder) -> Sequence[Value]:
    """Append a ``packed_matmul`` of ``op``, and the ops that pack its right operand into panels of ``cols`` columns."""
    group = form.group
    lhs, rhs, lhs_transposed = _operands_for_term_groups(op, form, b)
    lhs = _pad_axis_to(lhs, lhs.type.rank - (2 if lhs_transposed else 1), (k + (group - 1)) // group * group, b)
    panels = pack_panels(rhs, cols, group, bool(op.attrs["rhs_transposed"]), b)
    attrs = {"n": n, "group": group, "lhs_transposed": lhs_transposed}
    return _append_contraction(op, "packed_matmul", (lhs, panels), form.out, attrs, b)


def pack_panels(rhs: Value, cols: int, group: int, transposed: bool, b: Builder) -> Value:
    """Return ``rhs`` ([B,] K, N) as panels ([B,] P, K/group, cols*group), zero padded."""
    batch = rhs.type.rank - 2
    lead = rhs.type.shape[:batch]
    k_axis, n_axis = (batch + 1, batch) if transposed else (batch, batch + 1)
    k, n = rhs.type.shape[k_axis], rhs.type.shape[n_axis]
    steps, count = (k + (group - 1)) // group, (n + (cols - 1)) // cols
    rhs = _pad_axis_to(_pad_axis_to(rhs, k_axis, steps * group, b), n_axis, count * cols, b)
    ids = tuple(range(batch))
    if transposed:
        split = b.reshape(rhs, (*lead, count, cols, steps, group))
        perm = (*ids, batch, batch + 2, batch + 1, batch + 3)
    else:
        split = b.reshape(rhs, (*lead, steps, group, count, cols))
        perm = (*ids, batch + 2, batch, batch + 3, batch + 1)
    return b.reshape(b.transpose(split, perm), (*lead, count, steps, cols * group))


def _pad_axis_to(x: Value, axis: int, extent: Dim, b: Builder) -> Value:
    """Return ``x`` with zeros after its end along ``axis`` up to ``extent``."""
    return b.pad(x, high={axis: extent - x.type.shape[axis]})


def _dot_products(op: Op, dtype: str, k: Dim, by_rows: bool, b: Builder) -> Sequence[Value]:
    """Return ``sum_k lhs[m, k] * rhs[n, k]`` (``rhs[k, n]`` if ``by_rows``) as a multiplication and a reduction."""
    lhs, rhs = op.operands
    if op.attrs["lhs_transposed"]:
        lhs = b.transpose(lhs, swap_permutation(lhs.type.rank))
    *lead, m, n = op.result.type.shape
    shape = (*lead, m, k, n) if by_rows else (*lead, m, n, k)
    row = len(lead)
    batch, summed, last = tuple(range(row)), row + (1 if by_rows else 2), row + 2
    rows = b.broadcast(b.convert(lhs, dtype), (*batch, row, summed), shape)
    columns = b.convert(b.broadcast(rhs, (*batch, row + 1, last), shape), dtype)  # no wider copy is stored
    terms = b.make("mul", (rows, columns))
    total = b.reduce(terms, b.constant(0, TensorType(dtype)), (summed,), b.combiner("add", dtype))
    return (b.convert(total, op.result.type.dtype),)


# --- conv ----------------------------------------------------------------------


def _pack_conv(op: Op, b: Builder, target: Target, widest: Mapping[Value, Dim]) -> Sequence[Value]:
    """Append a ``conv`` for a CPU as tiles over packed weights, or as plain loops."""
    lhs, rhs = op.operands
    form = tile_form_of_dtypes(lhs.type.dtype, rhs.type.dtype, op.result.type.dtype, target)
    *kernel, c, n = rhs.type.shape
    if form == BF16_PAIRS and (conv_strategy(op, form) == "loops" or c % form.group != 0):
        form = F32
    if form is None or conv_strategy(op, form) == "loops":
        return _plain_conv(op, form, b)
    if (narrow := with_pixels_as_columns(op, form, target, b)) is not None:
        return (narrow,)
    if needs_byte_offset(op, form, product((*kernel, c)), b.is_precomputable(rhs), target):
        (out,) = _pack_conv(add_byte_offset(op, b), b, target, widest)
        return (subtract_byte_offset(out, rhs, range(rhs.type.rank - 1), b),)
    form = _widening_tile_form(form, rhs.type.dtype, target)
    group, groups = form.group, op.attrs["feature_groups"]
    lhs, rhs = _operands_in_tile_dtypes(op, form, b)
    missing = -c % group
    lhs, rhs = _pad_channels_of_groups(lhs, groups, missing, b), b.pad(rhs, high={rhs.type.rank - 2: missing})
    k = product((*kernel, c + missing))
    _, cols = best_tile(with_widest_panel_rows(op, widest).result.type.shape[-2], n // groups, k, form, target)
    panels = _pack_grouped_conv_weights(b.reshape(rhs, (k, n)), groups, cols, group, b)
    attrs = {"kernel": tuple(kernel), "strides": op.attrs["strides"], "rhs_dilation": op.attrs["rhs_dilation"], "n": n}
    attrs |= {"group": group} if group > 1 else {}
    attrs |= {"feature_groups": groups} if groups > 1 else {}
    return _append_contraction(op, "packed_conv", (lhs, panels), form.out, attrs, b)


def _pad_channels_of_groups(x: Value, groups: int, missing: Dim, b: Builder) -> Value:
    """Return the input of a convolution with ``missing`` channels of zeros after those of each group."""
    if groups == 1 or not missing:
        return b.pad(x, high={x.type.rank - 1: missing})
    *lead, channels = x.type.shape
    each = channels // groups
    padded = b.pad(b.reshape(x, (*lead, groups, each)), high={len(lead) + 1: missing})
    return b.reshape(padded, (*lead, groups * (each + missing)))


def _pack_grouped_conv_weights(rhs: Value, groups: int, cols: int, group: int, b: Builder) -> Value:
    """Return the panels of a grouped convolution's weights, one group after the other; each group has ``K`` terms."""
    if groups == 1:
        return pack_panels(rhs, cols, group, False, b)
    k, n = rhs.type.shape
    grouped = b.transpose(b.reshape(rhs, (k, groups, n // groups)), (1, 0, 2))
    panels = pack_panels(grouped, cols, group, False, b)
    _, count, steps, wide = panels.type.shape
    return b.reshape(panels, (groups * count, steps, wide))


def _plain_conv(op: Op, form: TileForm | None, b: Builder) -> Sequence[Value]:
    """Return a convolution by plain loops; 16-bit floats accumulate in f32, as in XLA."""
    if form != F32:
        return b.append(op)
    lhs, rhs = (b.convert(v, F32.left) for v in op.operands)
    return _append_contraction(op, "conv", (lhs, rhs), F32.out, op.attrs, b)
