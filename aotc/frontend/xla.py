"""Run a model by XLA on the CPU through jax: a reference that shares only the model's text with aotc."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax._src.interpreters import mlir as jax_mlir
from jaxlib._jax import mlir as jaxlib_mlir
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.mlir import read_source
from aotc.frontend.mlir_types import DYNAMIC, dictionary_entries, inner_operations


def run_xla(raw: Any, arrays: Sequence[np.ndarray], function: str = "main") -> list[np.ndarray]:
    """Return the results of ``function`` of a fetched model (``mlir.RawModel``), computed by XLA.

    Raises
    ------
    CompileError
        If XLA cannot run the model.
    """
    read = read_source(raw, legalize=False)
    device = jax.devices("cpu")[0]
    try:
        with read.context, ir.Location.unknown():
            module = read.module
            _keep_only_function(module, function)
            _drop_foreign_attributes(module)
            if "?" in str(module.operation.get_asm(large_elements_limit=4)):
                module = ir.Module.parse(_refined_for_shapes(module, arrays))
            text = jax_mlir.module_to_bytecode(module)
        with jax.enable_x64(True):
            device_arrays = [jax.device_put(a, device) for a in arrays]
            return [np.asarray(r) for r in device.client.compile_and_load(text, [device]).execute(device_arrays)]
    except Exception as error:  # exceptions of XLA and MLIR have no common base class
        message = f"XLA cannot run the model: {str(error).splitlines()[0] if str(error) else type(error).__name__}"
        raise CompileError.at(Loc(read.path), message, hint="--oracle=reference needs nothing of XLA") from None


def _keep_only_function(module: ir.Module, function: str) -> None:
    """Make ``function`` the only public function of ``module``, with the name ``main`` as XLA expects."""
    for op in module.body.operations:
        operation = op.operation
        if operation.name == "func.func" and operation.attributes["sym_name"].value == function:
            operation.attributes["sym_name"] = ir.StringAttr.get("main")
        elif operation.name == "func.func":
            operation.attributes["sym_visibility"] = ir.StringAttr.get("private")


def _drop_foreign_attributes(module: ir.Module) -> None:
    """Remove attributes of dialects that XLA does not register, as its reader rejects modules with them.

    Such attributes are annotations without effect on results. The configuration of a custom call is not removed.
    """
    stack = [module.operation]
    while stack:
        op = stack.pop()
        for name, attribute in [(a.name, a.attr) for a in (op.attributes[n] for n in range(len(op.attributes)))]:
            if name.endswith("backend_config"):
                continue
            remaining = _without_foreign_entries(attribute)
            if remaining is None:
                del op.attributes[name]
            elif remaining != attribute:
                op.attributes[name] = remaining
        stack += inner_operations(op)


def _without_foreign_entries(attribute: Any) -> Any:
    """Return ``attribute`` without foreign entries of its dictionaries, or None if it is foreign itself."""
    match attribute:
        case ir.OpaqueAttr():
            return None
        case ir.TypeAttr():
            return None if isinstance(attribute.value, ir.OpaqueType) else attribute
        case ir.DictAttr():
            cleaned = {name: _without_foreign_entries(a) for name, a in dictionary_entries(attribute).items()}
            return ir.DictAttr.get({name: a for name, a in cleaned.items() if a is not None})
        case ir.ArrayAttr():
            elements = [_without_foreign_entries(a) for a in attribute]
            return None if any(a is None for a in elements) else ir.ArrayAttr.get(elements)
    return attribute


def _refined_for_shapes(module: ir.Module, arrays: Sequence[np.ndarray]) -> bytes:
    """Return the bytecode of ``module`` for arguments of the shapes of ``arrays``."""
    main = next(op for op in module.body.operations if op.operation.attributes["sym_name"].value == "main")
    types = []
    for argument, array in zip(main.operation.regions[0].blocks[0].arguments, arrays, strict=True):
        tensor = ir.RankedTensorType(argument.type)
        shape = [n if size == DYNAMIC else size for size, n in zip(tensor.shape, array.shape, strict=True)]
        types.append(str(ir.RankedTensorType.get(shape, tensor.element_type)))
    passes = f"builtin.module(stablehlo-refine-arguments{{types={','.join(types)}}})"
    PassManager.parse(passes).run(module.operation)
    return jaxlib_mlir.refine_polymorphic_shapes(
        jax_mlir.module_to_bytecode(module), enable_shape_assertions=True, validate_static_shapes=True
    )
