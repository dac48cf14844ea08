"""Rewrite ops that have no importer by jaxlib's passes: CHLO, MHLO, and old ops of StableHLO."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import mhlo
from jaxlib.mlir.passmanager import PassManager

from aotc.diagnostics import CompileError
from aotc.frontend.calls.known_calls import FUNCTIONS
from aotc.frontend.hidden_ops import operations_of, replace_op, reveal_hidden_op
from aotc.frontend.importers.elementwise import is_complex_only
from aotc.frontend.importers.elementwise_math import OF_CHLO
from aotc.frontend.importers.shape_broadcasting import PREFIX, check_decomposable, rewrite_broadcasting
from aotc.frontend.locations import loc_from_mlir
from aotc.frontend.op_importers import IMPORTERS

mhlo.register_mhlo_passes()


def legalize_module(module: ir.Module, path: str) -> None:
    """Run jaxlib's passes on ops that have no importer, if there are any.

    The passes expand every CHLO op. Those with an importer are hidden from them: their expansions are slower and less
    accurate, and the import of an op must not depend on its neighbours.

    Raises
    ------
    ir.MLIRError
        If a pass fails.
    """
    pass_names: set[str] = set()
    imported = []
    for operation in _operations_without_broadcasts(module, path):
        name = operation.name
        if name in IMPORTERS and not is_complex_only(operation, name):
            if name.startswith(_DIALECT) and not operation.regions:
                imported.append(operation)
        elif needed := _passes_of(name):
            check_decomposable(operation, path)
            pass_names.update(needed)
    if not pass_names:
        return
    for operation in imported:
        _renamed_op(operation, _HIDDEN + operation.name)
    passes = ",".join(p for p in _PASS_ORDER if p in pass_names)
    PassManager.parse(f"builtin.module(func.func({passes}))").run(module.operation)
    for operation in (
        [o for o in _operations_without_broadcasts(module, path) if o.name.startswith(_HIDDEN)] if imported else ()
    ):
        _renamed_op(operation, operation.name.removeprefix(_HIDDEN))


def convert_mhlo(module: ir.Module, path: str) -> None:
    """Convert ops, types and attributes of MHLO to StableHLO by jaxlib's pass.

    A module without MHLO is unchanged. Before the pass, ops that only group or order values are removed.

    Raises
    ------
    CompileError
        If StableHLO has no equivalent of an op.
    ir.MLIRError
        If the pass fails for another reason.
    """
    if not any(op.name.startswith(_MHLO) for op in operations_of(module)):
        return
    replaced = [op for op in operations_of(module) if op.name in (*_IDENTITIES, _FUSION)]
    for op in replaced:  # not the terminators of fusions, which are removed with them
        if op.name == _FUSION:
            _inline_region(op)
        else:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    for op in operations_of(module):
        _check_types(op, path)
    try:
        PassManager.parse("builtin.module(hlo-legalize-to-stablehlo)").run(module.operation)
    except ir.MLIRError as error:
        problems = {str(d.location): d.message for d in error.error_diagnostics}
        for op in operations_of(module):
            problem = problems.get(str(op.location))
            if problem and op.name in _NOT_CONVERTED.findall(problem):
                types = ", ".join(str(v.type) for v in op.operands)
                message, hint = f"{op.name} on ({types}) is not supported", "StableHLO has no such op: use others"
                raise _refused_op_error(op, path, message, hint) from None
            if problem and op.name.startswith((_MHLO, "stablehlo.")):  # converted, and then rejected by MLIR
                raise _refused_op_error(op, path, f"{op.name}: {problem}", "operands and attributes that fit") from None
        raise


def _check_types(op: Any, path: str) -> None:
    """Reject an op outside of MHLO whose values have MHLO types: jaxlib's pass does not convert these."""
    if op.name.startswith((_MHLO, "func.")):
        return
    inner = (a for region in op.regions for block in region.blocks for a in block.arguments)
    for v in (*op.results, *inner):
        if "mhlo." in str(v.type):
            hint = "write #stablehlo.bounds and !stablehlo.token"
            raise _refused_op_error(op, path, f"{op.name} makes a value of MHLO's type {v.type}", hint)


def _refused_op_error(op: Any, path: str, message: str, hint: str) -> CompileError:
    snippet = op.get_asm(large_elements_limit=8).splitlines()[0]
    return CompileError.at(loc_from_mlir(op.location, path), message, hint=hint, snippet=snippet)


def _inline_region(op: Any) -> None:
    """Replace an op by the ops of its region."""
    block = op.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, op.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *body, end = (view.operation for view in block.operations)
    for inner in body:
        inner.move_before(op)
    for result, value in zip(op.results, end.operands, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def _operations_without_broadcasts(module: ir.Module, path: str) -> Iterator[Any]:
    """Yield the ops of a module, including those in regions, and rewrite broadcasting ops first."""
    stack = [module.operation]
    while stack:
        op = stack.pop()
        for block in (block for region in op.regions for block in region.blocks):
            for inner in list(block.operations):
                operation = inner.operation
                if operation.name.startswith(PREFIX):
                    operation = rewrite_broadcasting(operation, path)
                elif operation.name in _MATH and isinstance(operation.results[0].type, ir.RankedTensorType):
                    operation = _renamed_op(operation, operation.name.replace("math.", _DIALECT), attributes=False)
                elif operation.name == "stablehlo.custom_call":
                    operation = _chlo_op_of_call(reveal_hidden_op(operation))
                if operation.regions:
                    stack.append(operation)
                yield operation


def _chlo_op_of_call(op: Any) -> Any:
    """Replace a custom call named after an MHLO op by the CHLO op, and return that; return other ops unchanged.

    StableHLO writes ops that it lacks as such calls.
    """
    if op.name != "stablehlo.custom_call":
        return op
    name = op.attributes["call_target_name"].value
    if name not in FUNCTIONS:
        return op
    if len(op.operands) != 1 or len(op.results) != 1 or op.operands[0].type != op.results[0].type:
        return op
    return _renamed_op(op, _DIALECT + name.removeprefix(_MHLO), attributes=False)


def _renamed_op(op: Any, name: str, attributes: bool = True) -> Any:
    """Replace an op without regions by the op ``name``, with or without its ``attributes``; return the new op."""
    own = {a.name: a.attr for a in (op.attributes[n] for n in range(len(op.attributes)))} if attributes else {}
    return replace_op(op, name, own)


def _passes_of(name: str) -> tuple[str, ...]:
    """Return the names of jaxlib's passes for an op without an importer."""
    return _PASSES.get(name, ()) or (_PASSES["chlo"] if name.startswith(_DIALECT) else ())


_DIALECT, _MHLO, _HIDDEN = "chlo.", "mhlo.", "aotc.hidden."
_FUSION = "mhlo.fusion"
_IDENTITIES = frozenset({"mhlo.copy", "mhlo.domain", "mhlo.add_dependency"})
_MATH = frozenset(f"math.{name}" for name in OF_CHLO)
_NOT_CONVERTED = re.compile(r"failed to legalize operation '(mhlo\.[\w.-]+)'")
_CHLO, _DEPRECATED = "chlo-legalize-to-stablehlo", "stablehlo-legalize-deprecated-ops"
_PASS_ORDER = (_DEPRECATED, _CHLO)
_PASSES = {
    "chlo": (_CHLO,),
    **{f"stablehlo.{name}": (_DEPRECATED,) for name in ("cross-replica-sum",)},
}
