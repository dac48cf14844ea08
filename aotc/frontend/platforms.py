"""Select the target's program in a model that JAX exported for several platforms.

The first argument of such a program, and of its functions, is the number of the platform. Branches on this number
contain the platform-specific lowerings. Replacing the argument by a constant leaves one branch of each.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

NEEDS_SHARDINGS = "shardings of arguments or results, which say what part of each array a device has"
LABEL = "jax.global_constant"
"""The attribute of an argument that has its dim's name, or marks the platform's number."""

_INDEX = "_platform_index"
_CASE = "stablehlo.case"
_LIBRARIES = {"cpu": ("lapack_",), "cuda": ("cu", "__cu", "__gpu", "triton", "mosaic_gpu"), "rocm": ("hip",)}
"""Prefixes of custom call targets, by platform."""


def is_multi_platform(data: str | bytes, metadata: Mapping[str, Any]) -> bool:
    """Return True if a model was exported for several platforms; without ``metadata``, by its MLIR ``data``."""
    has_index = _INDEX in data if isinstance(data, str) else _INDEX.encode() in data
    return has_index or len(metadata.get("platforms", ())) > 1


def fold_platform(module: ir.Module, platforms: Sequence[str], target: str) -> None:
    """Specialize ``module`` to one of the ``platforms`` for which it was exported.

    The platform is ``target``, or the first one if ``target`` is not among them: all branches compute the same. MLIR
    does not name the platforms. If ``platforms`` is empty, the libraries that the branches call determine the number.
    """
    functions = [op.operation for op in module.body.operations if op.operation.name == "func.func"]
    arguments = [(function, place) for function in functions if (place := _platform_argument(function)) is not None]
    if not arguments:
        return
    if len(platforms) > 1:
        number = platforms.index(target) if target in platforms else 0
    else:
        number = _number_by_libraries(arguments, target)
    for function, place in arguments:
        _replace_argument_by_constant(function, place, number)


def _platform_argument(function: Any) -> int | None:
    """Return the position of the platform index among the arguments of a function."""
    attributes = function.attributes
    if not function.regions[0].blocks or "arg_attrs" not in attributes:
        return None
    rows = enumerate(attributes["arg_attrs"])
    return next((n for n, row in rows if LABEL in row and row[LABEL] == ir.StringAttr.get(_INDEX, row.context)), None)


def _number_by_libraries(functions: Sequence[tuple[Any, int]], target: str) -> int:
    """Infer the platform number from the libraries that branches call.

    It is the number whose branches call the fewest libraries of other platforms, and among these the most of
    ``target``.
    """
    starts = [function.regions[0].blocks[0].arguments[place] for function, place in functions]
    cases = [use.owner for start in starts for use in start.uses if use.owner.name == _CASE]
    own = _LIBRARIES.get(target, ())
    others = tuple(name for platform, names in _LIBRARIES.items() if platform != target for name in names)

    def rank(number: int) -> tuple[int, int]:
        called = {t for start in starts for t in _called_targets(start.owner, {start: number})}
        return sum(t.startswith(others) for t in called), -sum(t.startswith(own) for t in called)

    return min(range(max((len(case.regions) for case in cases), default=1)), key=rank)


def _platform_number(context: ir.Context) -> ir.Type:
    return ir.RankedTensorType.get((), ir.IntegerType.get_signless(32, context), loc=ir.Location.unknown(context))


def _called_targets(block: Any, numbers: dict[Any, int]) -> Iterator[str]:
    """Yield the targets of custom calls in a block, skipping branches that the ``numbers`` platform numbers exclude."""
    for op in (view.operation for view in block.operations):
        if op.name == "stablehlo.custom_call":
            yield op.attributes["call_target_name"].value
        elif op.name == "stablehlo.constant" and op.results[0].type == _platform_number(op.context):
            numbers[op.results[0]] = int(np.array(ir.DenseElementsAttr(op.attributes["value"])))
        blocks = [inner for region in op.regions for inner in region.blocks]
        if op.name == _CASE and op.operands[0] in numbers:
            number = numbers[op.operands[0]]
            blocks = [blocks[number if 0 <= number < len(blocks) else -1]]
        for inner in blocks:
            yield from _called_targets(inner, numbers)
        if op.name == _CASE and len(blocks) == 1:
            returned = blocks[0].operations[len(blocks[0].operations) - 1].operation.operands
            numbers.update((result, numbers[v]) for result, v in zip(op.results, returned, strict=True) if v in numbers)


def _replace_argument_by_constant(function: Any, place: int, number: int) -> None:
    """Replace argument number ``place`` of ``function`` by the constant ``number``.

    The argument itself is removed only from a public function: callers of a private function still pass it.
    """
    attributes, block = function.attributes, function.regions[0].blocks[0]
    rows = list(attributes["arg_attrs"])
    with function.context:
        with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
            constant = stablehlo.ConstantOp(ir.DenseElementsAttr.get(np.array(number, np.int32)))
        block.arguments[place].replace_all_uses_with(constant.result)
        if "sym_visibility" in attributes and attributes["sym_visibility"].value == "private":
            return  # its calls pass the number on
        block.erase_argument(place)
        whole = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value)
        types = [t for n, t in enumerate(whole.inputs) if n != place]
        attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, whole.results))
        attributes["arg_attrs"] = ir.ArrayAttr.get(rows[:place] + rows[place + 1 :])
