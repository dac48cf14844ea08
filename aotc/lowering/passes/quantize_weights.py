"""Store constant matrices of matmuls as integers of 8 or 4 bits, if the option ``quantize_weights`` demands it.

Before::

    %5 = matmul %x, %w : f32[1, 4096]                   // %w: constant f32[4096, 4096]
After, on a CPU::

    %2 = constant : u8[32, 1, 524800]                   // panels: the scales of 128 columns, then their 4096 terms
    %5 = packed_matmul %x, %2 {n = 4096, group = 4096, bits = 8} : f32[1, 4096]

Tiles widen such panels in registers (:mod:`aotc.ir.loop.forms.quantized` describes their layout): a matmul of few rows
takes as long as reading them. On a GPU, and for matmuls of very many rows by instructions for pairs of bf16, separate
ops convert the integers, and the scales of columns multiply the sums. For matmuls of few rows, a GPU's tiles compute
those ops themselves; the weights are then stored with contiguous terms::

    %3 = convert %2 : f32[4096, 4096]                   // %2: constant i8[4096, 4096]
    %4 = matmul %x, %3 : f32[8, 4096]
    %5 = mul %4, %scales : f32[8, 4096]

A constant left operand is swapped with the right one. Matrices are left alone if they are small, hardly shrink, or have
numbers that are not finite, and so are f64 matmuls. Other readers of a constant read the original, except that gathers
of whole rows read the panels (:mod:`.gather_panels`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from aotc.diagnostics import warn_user
from aotc.ir.dims.algebra import Dim, static
from aotc.ir.loop.forms.quantized import chunk_bytes, pack, quantize
from aotc.ir.loop.forms.tile_forms import form_of_operands
from aotc.ir.tensor.ir import Module, Op, TensorType, Value
from aotc.lowering.analysis.constant_values import constant_of
from aotc.lowering.passes.gather_panels import Panels, arrays_only_read_by_rows, gathers_rows, rows_gathered_from_panels
from aotc.lowering.passes.pack_contractions.shared_panels import widest_product_rows, with_widest_panel_rows
from aotc.lowering.passes.pack_contractions.swap_operands import transpose_batch, transposed_product
from aotc.lowering.passes.rewrite import Builder, rewrite_module
from aotc.lowering.placement.op_targets import op_targets
from aotc.lowering.plans.cpu_tiles import best_tile
from aotc.lowering.threshold import Limit
from aotc.options import Options, weight_quantization
from aotc.targets import Target
from aotc.vmfb.dtypes import to_numpy

Rounded = tuple[np.ndarray, np.ndarray, int]
_LANES = 16  # of f32 in the widest vector of a CPU
_FLOATS = frozenset({"f32", "bf16", "f16"})


@dataclass(frozen=True, slots=True)
class QuantizationReport:
    """The constant matrices that matmuls of f32, bf16 or f16 read.

    Attributes
    ----------
    quantized : int
        The number of quantized matrices.
    left : mapping of str to int
        The number of the others by reason.
    """

    quantized: int
    left: Mapping[str, int]

    def __str__(self) -> str:
        """Return ``quantized 1 of 3 matrices; left as they are: 2 of at most 64 KiB``."""
        count = self.quantized + sum(self.left.values())
        if not count:
            return "quantized nothing: no matmul of f32, bf16 or f16 has a constant operand"
        rest = ", ".join(f"{number} {reason}" for reason, number in self.left.items())
        return f"quantized {self.quantized} of {count} matrices" + (f"; left as they are: {rest}" if rest else "")


def quantize_weights(module: Module, options: Options) -> Module:
    """Return ``module`` with large constant operands of ``matmul`` quantized to the bits of the options.

    Warns
    -----
    AotcWarning
        If the options demand quantization and no matrix is quantized.
    """
    made, report = quantize_and_report(module, options)
    if report is not None and not report.quantized:
        bound = "; weights of bind= are not quantized" if options.bind else ""
        warn_user(f"quantize_weights={options.quantize_weights!r}: {report}{bound}")
    return made


def quantize_and_report(module: Module, options: Options) -> tuple[Module, QuantizationReport | None]:
    """Return the module of :func:`quantize_weights`, and a report unless the options demand no quantization."""
    bits_and_terms = weight_quantization(options)
    if bits_and_terms is None:
        return module, None
    home, _ = op_targets(module, options)
    quantizer = _WeightQuantizer(*bits_and_terms, home, widest_product_rows(module))
    module = rewrite_module(module, quantizer.quantize_matmul_rule)
    quantizer.tables = arrays_only_read_by_rows(module) if quantizer.panels else ()
    if quantizer.tables:
        module = rewrite_module(module, quantizer.gathered_table_rows, ("gather",))
    return module, quantizer.report()


QUANTIZED_BYTES = Limit(
    1 << 16,
    "bytes of a constant matrix that is not quantised",
    "it stays in a cache, where reading it takes no longer than widening quantised weights",
)
QUANTIZED_PERCENT = Limit(
    75,
    "percent of its bytes that a matrix takes when quantised, padding and scales included",
    "one that hardly shrinks would lose precision for nothing",
)
UNPAIRED_ROWS = Limit(
    1,
    "bf16 rows multiplied with quantised weights in f32; more rows are multiplied by bf16 pairs",
    "Zen 5, one core, 3 x 4096 x 4096 of int4:64, ms in f32 and by pairs: 1 row 0.96 and 1.07, 2 rows 2.15 and 1.14",
)


class _WeightQuantizer:
    """Rewrite matmuls to read quantized weights; the quantized form of a matrix is cached for its next matmul."""

    def __init__(self, bits: int, terms: int, home: Callable[[Op], Target], widest: Mapping[Value, Dim]) -> None:
        """Start without panels; ``terms`` is the number of weights that share a scale."""
        self.bits, self.terms, self.home, self.widest = bits, terms, home, widest
        self.made: dict[tuple[int, bool], tuple[np.ndarray, Rounded | str]] = {}
        self.panels: list[Panels] = []
        self.tables: Collection[int] = ()  # constants of which only rows are read

    def report(self) -> QuantizationReport:
        """Count the matrices that were quantized, and the others by reason."""
        matrices = {array: found for (array, _), (_, found) in self.made.items()}
        left = Counter(found for found in matrices.values() if isinstance(found, str))
        return QuantizationReport(len(matrices) - left.total(), left)

    def gathered_table_rows(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the rows of a table that ``op`` gathers, read from the panels of a matmul, or None."""
        table = constant_of(op.operands[0], b.definitions) if gathers_rows(op) else None
        if table is None or id(table) not in self.tables or self.home(op).kind != "cpu":
            return None
        panels = next((x for x in self.panels if x.holds_table(table)), None)
        return None if panels is None else (rows_gathered_from_panels(op, panels, b),)

    def quantize_matmul_rule(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the quantized matmul that replaces ``op``, or None."""
        if op.name != "matmul" or not {v.type.dtype for v in (*op.operands, op.result)} <= _FLOATS:
            return None
        left, right = (_is_constant_matrix(v, b) for v in op.operands)
        if left == right:
            return None
        if left:
            return self._quantized_with_swapped_operands(op, b)
        rounded = self._rounded_weights(op.operands[1], bool(op.attrs["rhs_transposed"]), b)
        if rounded is None:
            return None
        target = self.home(op)
        if target.kind == "cpu" and not _is_widening_to_bf16_worthwhile(op, target):
            return (self._matmul_with_packed_weights(op, *rounded, target, b),)
        by_terms = target.kind != "cpu" and op.result.type.shape[-2] != 1
        return (
            self._matmul_with_dequantized_weights(
                replace(op, attrs={**op.attrs, "rhs_transposed": True}) if by_terms else op, *rounded, b
            ),
        )

    def _quantized_with_swapped_operands(self, op: Op, b: Builder) -> Sequence[Value] | None:
        """Return the quantized matmul with operands swapped and its result transposed, or None."""
        transposed = self.quantize_matmul_rule(transposed_product(op, b), b)
        return None if transposed is None else (transpose_batch(transposed[0], b),)

    def _rounded_weights(self, weights: Value, transposed: bool, b: Builder) -> Rounded | None:
        """Return integers ([B,] K, N), scales ([B,] G, N) and the terms per scale; None to leave the matrix."""
        array = constant_of(weights, b.definitions)
        assert array is not None
        key = id(array), transposed
        if key not in self.made:
            self.made[key] = array, self._round_array(np.swapaxes(array, -1, -2) if transposed else array)
        found = self.made[key][1]
        return None if isinstance(found, str) else found

    def _round_array(self, array: np.ndarray) -> Rounded | str:
        """Return integers, scales and terms per scale; for a matrix that is not quantized, return the reason."""
        *lead, k, n = array.shape
        if QUANTIZED_BYTES.holds(array.nbytes):
            return f"of at most {QUANTIZED_BYTES.value >> 10} KiB"
        per = 2 if self.bits == 4 or array.dtype == to_numpy("bf16") else 1  # a pair of terms
        terms = -(-min(self.terms or k, k) // per) * per
        shrunk = prod(lead) * -(-k // terms) * chunk_bytes(-(-n // _LANES) * _LANES, self.bits, terms)
        if not QUANTIZED_PERCENT.holds(100 * shrunk // array.nbytes):
            return f"that would shrink by less than {100 - QUANTIZED_PERCENT.value} %"
        if not np.isfinite(array.astype(np.float32)).all():
            return "with infinity or NaN"
        return *quantize(array, self.bits, terms), terms

    def _matmul_with_packed_weights(
        self, op: Op, integers: np.ndarray, scales: np.ndarray, terms: int, target: Target, b: Builder
    ) -> Value:
        """Return the matmul with quantized weights packed in panels, which register tiles dequantize."""
        *_, m, n = op.result.type.shape
        k = integers.shape[-2]
        kind = "bf16" if not UNPAIRED_ROWS.holds(m) and _has_bf16_pair_operands(op, target) else "f32"
        most = with_widest_panel_rows(op, self.widest).result.type.shape[-2]
        form = form_of_operands(kind, "", self.bits)
        cols = _balanced_panel_columns(static(n), best_tile(most, n, k, form, target)[1], target)
        panels = pack(integers, scales, cols, self.bits, terms)
        weights = constant_of(op.operands[1], b.definitions)
        if weights is not None and weights.ndim == 2:
            own = weights.T if op.attrs["rhs_transposed"] else weights
            self.panels.append(Panels(own, panels, cols, self.bits, terms))
        lhs, swapped = b.convert(op.operands[0], kind), bool(op.attrs["lhs_transposed"])
        axis = lhs.type.rank - (2 if swapped else 1)
        lhs = b.pad(lhs, high={axis: scales.shape[-2] * terms - k})
        attrs = {"n": n, "group": terms, "bits": self.bits, "lhs_transposed": swapped}
        stored = b.constant(panels, TensorType("u8", panels.shape))
        result = b.make("packed_matmul", (lhs, stored), attrs, TensorType("f32", op.result.type.shape))
        return b.convert(result, op.result.type.dtype)

    def _matmul_with_dequantized_weights(
        self, op: Op, integers: np.ndarray, scales: np.ndarray, terms: int, b: Builder
    ) -> Value:
        """Return the matmul with dequantized weights; per-column scales multiply the result instead."""
        swapped, dtype = bool(op.attrs["rhs_transposed"]), op.operands[1].type.dtype
        rank = integers.ndim
        k_axis = rank - 1 if swapped else rank - 2
        weights = self._quantized_weights_as_f32(np.swapaxes(integers, -1, -2) if swapped else integers, k_axis, b)
        if scales.shape[-2] > 1:
            stored = np.ascontiguousarray(np.swapaxes(scales, -1, -2) if swapped else scales)
            factors = b.constant(stored, TensorType("f32", stored.shape))
            weights = b.make("mul", (weights, _repeat_scales(factors, k_axis, terms, integers.shape[-2], b)))
        made_type = TensorType("f32", op.result.type.shape)
        result = b.make("matmul", (op.operands[0], b.convert(weights, dtype)), op.attrs, made_type)
        if scales.shape[-2] == 1:
            of_columns = np.ascontiguousarray(scales[..., 0, :])
            factors = b.constant(of_columns, TensorType("f32", of_columns.shape))
            result = b.make("mul", (result, b.broadcast(factors, (*range(rank - 2), rank - 1), made_type.shape)))
        return b.convert(result, op.result.type.dtype)

    def _quantized_weights_as_f32(self, integers: np.ndarray, axis: int, b: Builder) -> Value:
        """Return quantized weights as f32, computed from a constant of bytes; 4-bit pairs are packed along ``axis``."""
        if self.bits == 8:
            return b.convert(b.constant(np.ascontiguousarray(integers), TensorType("i8", integers.shape)), "f32")
        k = integers.shape[axis]
        pairs = np.moveaxis(np.pad(integers, [(0, k % 2 if d == axis else 0) for d in range(integers.ndim)]), axis, 0)
        bytes_ = np.ascontiguousarray(np.moveaxis(pairs[::2] & 15 | pairs[1::2] << 4, 0, axis))
        shape = (*bytes_.shape[: axis + 1], 2, *bytes_.shape[axis + 1 :])
        dims = [d for d in range(len(shape)) if d != axis + 1]
        each = b.broadcast(b.constant(bytes_, TensorType("i8", bytes_.shape)), dims, shape)
        if axis == len(shape) - 2:  # a GPU's tiles recognise this form
            half = b.make("iota", (), {"dim": axis + 1}, TensorType("i8", shape))
            up = b.make("sub", (_filled_tensor(4, shape, b), b.make("mul", (half, _filled_tensor(4, shape, b)))))
        else:
            up = b.broadcast(b.constant(np.array([4, 0]), TensorType("i8", (2,))), (axis + 1,), shape)
        signed = b.make("shr_arith", (b.make("shl", (each, up)), _filled_tensor(4, shape, b)))
        whole = b.reshape(signed, (*shape[:axis], 2 * bytes_.shape[axis], *shape[axis + 2 :]))
        return b.convert(b.slice_dim(whole, axis, 0, k) if k % 2 else whole, "f32")


def _filled_tensor(number: int, shape: Sequence[int], b: Builder) -> Value:
    return b.broadcast(b.constant(number, TensorType("i8")), (), tuple(shape))


def _is_constant_matrix(v: Value, b: Builder) -> bool:
    """Return True if ``v`` is a constant matrix that is not a splat."""
    array = constant_of(v, b.definitions)
    return array is not None and array.ndim == v.type.rank


WIDENED_ROWS = Limit(
    384,
    "rows of a matmul by bf16 pairs whose tiles widen the quantised weights; above, all are widened first",
    "Zen 5, one core, 4096 x 4096 of i8, ms widened in tiles and first: 256 rows 20.8 and 23.3, 512 rows 41 and 42, "
    "1024 rows 88 and 85",
    unknown=True,
)


def _is_widening_to_bf16_worthwhile(op: Op, target: Target) -> bool:
    """Return True if instructions for pairs of bf16 multiply so many rows that widening all weights first pays."""
    return not WIDENED_ROWS.holds(op.result.type.shape[-2]) and _has_bf16_pair_operands(op, target)


def _has_bf16_pair_operands(op: Op, target: Target) -> bool:
    """Return True if both operands are bf16 and the target has instructions for pairs of bf16."""
    return {v.type.dtype for v in op.operands} == {"bf16"} and "bf16" in target.units


def _balanced_panel_columns(n: int, cols: int, target: Target) -> int:
    """Return the columns per panel with the least padding, for the number of panels that ``cols`` implies."""
    lanes = target.vector_bytes // 4
    return lanes * -(-n // (lanes * -(-n // cols)))


def _repeat_scales(scales: Value, axis: int, terms: int, k: int, b: Builder) -> Value:
    """Return scales, each repeated ``terms`` times along ``axis``, limited to ``k`` elements."""
    shape = (*scales.type.shape[: axis + 1], terms, *scales.type.shape[axis + 1 :])
    each = b.broadcast(scales, [d for d in range(len(shape)) if d != axis + 1], shape)
    count = static(scales.type.shape[axis]) * terms
    whole = b.reshape(each, (*shape[:axis], count, *shape[axis + 2 :]))
    return b.slice_dim(whole, axis, 0, k) if count != k else whole
