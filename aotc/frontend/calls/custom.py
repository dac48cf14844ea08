"""Import custom calls: the known targets, the unsupported ones, and functions that the user registers."""

from __future__ import annotations

from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from aotc.diagnostics import CompileError
from aotc.frontend.calls.callbacks import CALLBACKS, import_callback
from aotc.frontend.calls.cusolver import CUSOLVER
from aotc.frontend.calls.known_calls import KNOWN_CALLS
from aotc.frontend.calls.lapack import LAPACK
from aotc.frontend.calls.tpu_linalg import TPU_LINALG
from aotc.frontend.importers.collective import COLLECTIVE_CALLS
from aotc.frontend.importers.control import assert_test
from aotc.frontend.importers.indexing import INDEXING_CALLS
from aotc.frontend.importers.random import RANDOM_CALLS
from aotc.frontend.mlir_types import (
    array_numbers,
    attribute_value,
    config_of,
    dictionary_entries,
    integer_tuple,
    leaf_types,
)
from aotc.frontend.session import Importer, ImportState
from aotc.frontend.stated_types import check_results
from aotc.ir.dims.algebra import Expr
from aotc.ir.opset.control import REFUSED_ON_GPUS
from aotc.ir.tensor.ir import TensorType
from aotc.vmfb.custom_calls import PER_ELEMENT, PER_LAUNCH, PER_ROW, GpuFunction, registered_call

_BINARY = "its payload is code for one GPU or TPU, made by another compiler"
_LIBRARY = "its payload is a plan for a library that aotc does not use"

REFUSED: dict[str, tuple[str, str]] = {
    **dict.fromkeys(
        ("__gpu$xla.gpu.triton", "triton_kernel_call", "triton_kernel_call_ffi", "mosaic_gpu", "mosaic_gpu_v2",
         "tpu_custom_call"), (_BINARY, "write the kernel in jax.numpy, or lower with interpret=True in pallas_call"),
    ),
    **dict.fromkeys(
        ("InspectSharding", "CustomSPMDPartitioning"),
        ("it calls back into the partitioner of the process that traced the model", "export without such callbacks"),
    ),
}  # fmt: skip
"""Targets that no bundle supports: the reason, and a hint."""


def _custom_call_refusal(target: str) -> tuple[str, str] | None:
    if target.startswith(("__cudnn$", "cudnn_", "__cublas$")):
        return _LIBRARY, "lower the model for platforms=('cpu',), or write the function in jax.numpy"
    return REFUSED.get(target)


def _import_shape_assertion(state: ImportState, op: Any) -> None:
    test, *numbers = state.operands(op)
    assert_test(state, test, numbers, attribute_value(op, "error_message", "a shape assertion failed"))


def _import_csr_dot(state: ImportState, op: Any) -> None:
    state.bind(op, [state.one("csr_dot", state.data_operands(op))])


def _import_perturbed(state: ImportState, op: Any) -> None:
    state.bind(op, [state.one("tridiagonal_solve_perturbed", state.data_operands(op))])


_CUSTOM: dict[str, Importer] = {
    **INDEXING_CALLS,
    **COLLECTIVE_CALLS,
    **LAPACK,
    **CUSOLVER,
    **KNOWN_CALLS,
    **RANDOM_CALLS,
    **TPU_LINALG,
    "cpu_csr_sparse_dense_ffi": _import_csr_dot,
    "tridiagonal_solve_perturbed_ffi": _import_perturbed,
    "cu_tridiagonal_solve_perturbed": _import_perturbed,
    "hip_tridiagonal_solve_perturbed": _import_perturbed,
    "shape_assertion": _import_shape_assertion,
}


def import_custom_call(state: ImportState, op: Any) -> None:
    """Import one ``stablehlo.custom_call``."""
    target = op.attributes["call_target_name"].value
    if target in CALLBACKS:
        import_callback(state, op, _result_types(state, op))
        return
    refused = _custom_call_refusal(target)
    if refused is not None:
        state.fail(f"custom call @{target} cannot be compiled: {refused[0]}", refused[1])
    if target in _CUSTOM:
        _CUSTOM[target](state, op)
        check_results(state, op, f"custom call @{target}")
    else:
        _import_users_custom_call(state, op, target)


def _import_users_custom_call(state: ImportState, op: Any, target: str) -> None:
    """Import a call of the user's function as a ``custom_call`` op; lowering checks its registration."""
    config = config_of(op)
    attrs = {
        "target": target,
        "config": {} if config is None else _attribute_as_plain_data(config),
        "api_version": attribute_value(op, "api_version", 1),
        "has_side_effect": bool(attribute_value(op, "has_side_effect", False)),
        "aliases": _result_operand_aliases(op),
    }
    operands, types = state.data_operands(op), _result_types(state, op)
    registered = registered_call(target)
    if registered is not None and registered.gpu is not None:
        try:
            attrs["gpu"] = _gpu_launch_of_custom_call(
                state, f"custom call @{target}", registered.gpu, [v.type for v in operands], types
            )
            if attrs["aliases"] and registered.gpu.per == PER_LAUNCH:
                what = f"custom call @{target}: a kernel of the user's cannot start with an operand's values"
                state.fail(what, _ALIASES)
        except CompileError as error:  # for the lowering to GPUs: other targets call the function for the host
            attrs["gpu"] = (REFUSED_ON_GPUS, error.findings[0].message, error.findings[0].hint)
    state.bind(op, state.emit("custom_call", operands, attrs, types))


_ALIASES = "a call without output_operand_aliases, or a function per row"


def _gpu_launch_of_custom_call(
    state: ImportState, call: str, gpu: GpuFunction, operands: list[TensorType], results: list[TensorType]
) -> tuple[Any, ...]:
    """Return how a GPU runs the user's function: ``("element",)``, ``("row",)`` or ``("launch", threads, blocks)``."""
    shapes = [t.shape for t in results]
    if not shapes:
        state.fail(f"{call} has no result, which its function for GPUs could fill in", "a function without gpu=")
    if gpu.per == PER_LAUNCH:
        return (
            PER_LAUNCH,
            gpu.threads,
            _block_count_of_custom_call(state, call, gpu, [*(t.shape for t in operands), *shapes]),
        )
    if gpu.per == PER_ELEMENT:
        for t in (*results, *operands):
            if t.shape != shapes[0] and (t.shape or t in results):
                hint = "per='row' or per='launch' in register_custom_call"
                state.fail(f"{call} is computed per element, but has arrays of shapes {shapes[0]} and {t.shape}", hint)
        return (PER_ELEMENT,)
    rows = shapes[0][:-1]
    for t in (*results, *operands):
        is_row = bool(t.shape) and t.shape[:-1] == rows
        if not is_row and (t.rank > 1 or t in results):
            hint = "per='launch' in register_custom_call"
            state.fail(f"{call} is computed per row, but has arrays of shapes {shapes[0]} and {t.shape}", hint)
    return (PER_ROW,)


def _block_count_of_custom_call(state: ImportState, call: str, gpu: GpuFunction, shapes: list[Any]) -> Any:
    """Return the number of blocks for the launch of the user's kernel: a number or an expression of sizes."""
    if not callable(gpu.blocks):
        return gpu.blocks
    try:
        count = gpu.blocks(*shapes)
    except Exception as error:
        message = f"{call}: the function of its blocks failed: {type(error).__name__}: {error}"
        state.fail(message, "a function of the shapes of all operands and results")
    if not isinstance(count, int | Expr) or (isinstance(count, int) and count < 1):
        state.fail(f"{call}: the function of its blocks returned {count!r}, expected a positive integer", "")
    return count


def _result_types(state: ImportState, op: Any) -> list[TensorType]:
    """Return the types of an op's results; operands that describe result shapes give the unknown sizes."""
    if "indices_of_shape_operands" not in op.attributes:
        return [state.static_type(leaf) for r in op.results for leaf in leaf_types(r.type)]
    operands = state.operands(op)
    shapes = [operands[n] for n in integer_tuple(op.attributes["indices_of_shape_operands"])]
    dims = [state.dims_of(v, "the shape of a custom call's result") for v in shapes]
    return [state.type_with(r.type, d) for r, d in zip(op.results, dims, strict=True)]


def _result_operand_aliases(op: Any) -> tuple[tuple[int, int], ...]:
    """Return pairs of numbers (result, operand): the result's memory initially contains the operand's values."""
    aliases = []
    for attribute in op.attributes.get("output_operand_aliases", ()):
        alias = stablehlo.OutputOperandAlias(attribute)
        aliases.append((next(iter(alias.output_tuple_indices), 0), alias.operand_index))
    return tuple(aliases)


def _attribute_as_plain_data(attribute: Any) -> Any:
    """Convert an MLIR attribute to Python numbers, strings, lists and dicts; others become their text."""
    if isinstance(attribute, ir.DictAttr):
        return {name: _attribute_as_plain_data(a) for name, a in dictionary_entries(attribute).items()}
    if isinstance(attribute, ir.ArrayAttr):
        return tuple(_attribute_as_plain_data(a) for a in attribute)
    if isinstance(attribute, ir.DenseElementsAttr):
        return tuple(array_numbers(attribute).reshape(-1).tolist())
    if hasattr(attribute, "__len__"):  # array<i64: 1, 2>
        return tuple(attribute)
    if isinstance(attribute, ir.StringAttr):
        return _text_or_bytes(attribute.value_bytes)
    return attribute.value if hasattr(attribute, "value") else str(attribute)


def _text_or_bytes(data: bytes) -> str | bytes:
    """Return a configuration as text, or as bytes if it is not text: calls older than the FFI store C structs there."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data
