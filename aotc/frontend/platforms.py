"""Programs that were exported for several platforms: the one of a target is chosen before import.

Such a program takes the number of the platform that runs it as its first argument, and so do its functions; branches
on that number hold what JAX lowers differently. With a constant in its place the importer sees one branch of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

ONE_DEVICE = "a bundle runs on one device: trace it without in_shardings and out_shardings, or on a mesh of one device"
LABEL = "jax.global_constant"
"""The attribute of an argument that names the dim that it is, or says that it is the platform's number."""

_INDEX = "_platform_index"


def fold_platform(module: ir.Module, platforms: Sequence[str], wanted: str) -> None:
    """Make ``module`` the program of one of the ``platforms`` for which it was exported.

    That is ``wanted``, or the first where it was not exported for that: what the branches compute is the same.
    """
    if len(platforms) < 2:
        return
    number = platforms.index(wanted) if wanted in platforms else 0
    for op in module.body.operations:
        function = op.operation
        if function.name == "func.func" and function.regions[0].blocks:
            _fold_argument(function, number)


def _fold_argument(function: Any, number: int) -> None:
    attributes, block = function.attributes, function.regions[0].blocks[0]
    rows = list(attributes["arg_attrs"]) if "arg_attrs" in attributes else []
    place = next((n for n, row in enumerate(rows) if LABEL in row and row[LABEL].value == _INDEX), None)
    if place is None:
        return
    with function.context:
        with ir.InsertionPoint.at_block_begin(block), ir.Location.unknown():
            constant = stablehlo.ConstantOp(ir.DenseElementsAttr.get(np.array(number, np.int32)))
        block.arguments[place].replace_all_uses_with(constant.result)
        if "sym_visibility" in attributes and attributes["sym_visibility"].value == "private":
            return  # its calls hand the number on
        block.erase_argument(place)
        whole = ir.FunctionType(ir.TypeAttr(attributes["function_type"]).value)
        types = [t for n, t in enumerate(whole.inputs) if n != place]
        attributes["function_type"] = ir.TypeAttr.get(ir.FunctionType.get(types, whole.results))
        attributes["arg_attrs"] = ir.ArrayAttr.get(rows[:place] + rows[place + 1 :])
