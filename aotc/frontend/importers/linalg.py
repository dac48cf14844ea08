"""Import of contractions, convolution, FFT, dense solvers, random bits."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir.dialects import stablehlo

from aotc.frontend.importers.reduction import padding_pairs
from aotc.frontend.mlir_types import attribute_value, integer_attribute_tuple, integer_tuple
from aotc.frontend.session import Importer, ImportState
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.dtypes import kind_of

_FLOATS_OF_8 = {"f8E4M3FN", "f8E5M2"}


def _matmul_precision(op: Any) -> str:
    """Return the precision attribute of a matmul: full precision unless its ``algorithm`` rounds to a shorter float."""
    if "algorithm" in op.attributes:
        algorithm = stablehlo.DotAlgorithm(op.attributes["algorithm"])
        taken = {str(algorithm.lhs_precision_type), str(algorithm.rhs_precision_type)}
        short = {"tf32", "bf16", "f16"} | (_FLOATS_OF_8 if algorithm.allow_imprecise_accumulation else set())
        return "DEFAULT" if taken & short and algorithm.num_primitive_operations == 1 else "HIGHEST"
    if "precision_config" not in op.attributes:
        return "DEFAULT"
    precisions = [stablehlo.PrecisionAttr(a).value for a in op.attributes["precision_config"]]
    return max(precisions, key=("DEFAULT", "HIGH", "HIGHEST").index, default="DEFAULT")


def _import_dot_general(state: ImportState, op: Any) -> None:
    """Import ``dot_general`` with its batch and contracted dims."""
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    attrs = {
        "lhs_batch": tuple(numbers.lhs_batching_dimensions),
        "rhs_batch": tuple(numbers.rhs_batching_dimensions),
        "lhs_contract": tuple(numbers.lhs_contracting_dimensions),
        "rhs_contract": tuple(numbers.rhs_contracting_dimensions),
        "precision": _matmul_precision(op),
    }
    _emit_dot(state, op, attrs)


def _import_dot(state: ImportState, op: Any) -> None:
    """Import ``dot``: the last dim of the left operand with the first of the right one."""
    rank = state.value(op.operands[0]).type.rank
    attrs = {
        "lhs_batch": (),
        "rhs_batch": (),
        "lhs_contract": (rank - 1,),
        "rhs_contract": (0,),
        "precision": _matmul_precision(op),
    }
    _emit_dot(state, op, attrs)


def _emit_dot(state: ImportState, op: Any, attrs: dict[str, Any]) -> None:
    lhs, rhs = state.operands(op)
    result_types = [TensorType(state.dtype(op.results[0].type))]
    state.bind(op, [state.one("dot_general", [lhs, rhs], attrs, result_types)])


_CONVOLUTION_DIMS = {
    "input_batch": "input_batch_dimension", "input_feature": "input_feature_dimension",
    "kernel_input": "kernel_input_feature_dimension", "kernel_output": "kernel_output_feature_dimension",
    "output_batch": "output_batch_dimension", "output_feature": "output_feature_dimension",
}  # fmt: skip
_CONVOLUTION_SPATIAL = {
    "input_spatial": "input_spatial_dimensions", "kernel_spatial": "kernel_spatial_dimensions",
    "output_spatial": "output_spatial_dimensions",
}  # fmt: skip


def _import_convolution(state: ImportState, op: Any) -> None:
    """Import ``convolution`` or ``dynamic_conv``, whose padding is an operand."""
    lhs, rhs, *widths = state.operands(op)
    numbers = stablehlo.ConvDimensionNumbers(op.attributes["dimension_numbers"])
    rank = lhs.type.rank - 2
    ones = (1,) * rank
    padding: tuple = padding_pairs(op.attributes["padding"], rank) if "padding" in op.attributes else ((0, 0),) * rank
    if widths:
        flat = state.dims_of(widths[0], "the padding of dynamic_conv")
        padding = tuple(zip(flat[::2], flat[1::2]))
    attrs = {
        "strides": integer_attribute_tuple(op, "window_strides", ones),
        "padding": padding,
        "lhs_dilation": integer_attribute_tuple(op, "lhs_dilation", ones),
        "rhs_dilation": integer_attribute_tuple(op, "rhs_dilation", ones),
        "reversal": tuple(bool(x) for x in integer_attribute_tuple(op, "window_reversal", (0,) * rank)),
        **{k: getattr(numbers, n) for k, n in _CONVOLUTION_DIMS.items()},
        **{k: tuple(getattr(numbers, n)) for k, n in _CONVOLUTION_SPATIAL.items()},
        "feature_groups": op.attributes["feature_group_count"].value,
        "batch_groups": op.attributes["batch_group_count"].value,
        "precision": _matmul_precision(op),
    }
    result_types = [TensorType(state.dtype(op.results[0].type))]
    state.bind(op, [state.one("convolution", [lhs, rhs], attrs, result_types)])


def _import_fft(state: ImportState, op: Any) -> None:
    kind = stablehlo.FftTypeAttr(op.attributes["fft_type"]).value
    attrs = {"kind": kind, "length": integer_tuple(op.attributes["fft_length"])}
    state.bind(op, [state.one("fft", state.operands(op), attrs)])


def _emit_solver_in_f32(state: ImportState, op: Any, name: str, attrs: dict[str, Any]) -> None:
    """Emit a dense solver in f32 or wider; shorter floats are converted and rounded once, as in XLA."""
    operands = state.operands(op)
    own = operands[0].type.dtype
    if kind_of(own) != "f" or own in ("f32", "f64"):
        state.bind(op, [state.one(name, operands, attrs)])
        return
    result = state.one(name, [state.convert(v, "f32") for v in operands], attrs)
    state.bind(op, [state.convert(result, own)])


def _import_cholesky(state: ImportState, op: Any) -> None:
    _emit_solver_in_f32(state, op, "cholesky", {"lower": bool(attribute_value(op, "lower", False))})


def _import_triangular_solve(state: ImportState, op: Any) -> None:
    attrs = {k: bool(op.attributes[k].value) for k in ("left_side", "lower", "unit_diagonal")}
    transpose = stablehlo.TransposeAttr(op.attributes["transpose_a"]).value
    _emit_solver_in_f32(state, op, "triangular_solve", {**attrs, "transpose_a": transpose})


LINALG: dict[str, Importer] = {
    "stablehlo.dot_general": _import_dot_general,
    "stablehlo.dot": _import_dot,
    "stablehlo.convolution": _import_convolution,
    "stablehlo.dynamic_conv": _import_convolution,
    "stablehlo.fft": _import_fft,
    "stablehlo.cholesky": _import_cholesky,
    "stablehlo.triangular_solve": _import_triangular_solve,
}
