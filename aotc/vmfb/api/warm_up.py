"""Warm-up: calls with zeros when a module is loaded, so that the first call of a user is as fast as later ones."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.arguments import type_text
from aotc.vmfb.assumed_sizes import dim_names
from aotc.vmfb.dtypes import to_numpy
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError
from aotc.vmfb.profile.trace import evaluate_dim

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeModule

_EXAMPLE = "True, or sizes of the symbolic dims: [{'b': 1}, {'b': 8}]"


def warm_up(module: RuntimeModule, warm: Any) -> None:
    """Call each function with zeros for each entry of ``warm`` that has the sizes of all its symbolic dims.

    A check of the program itself may refuse zeros: that is not an error here.

    Raises
    ------
    ArgumentError, ArgumentValueError
        If ``warm`` is not a mapping of sizes, or no function takes these sizes.
    """
    rows: Sequence[Any] = [{}] if warm is True else [warm] if isinstance(warm, Mapping) else warm
    if not isinstance(rows, list | tuple) or not all(_are_warm_up_sizes(row) for row in rows):
        raise ArgumentError(module.name, "warm is not a list of sizes", repr(warm)[:80], _EXAMPLE)
    for sizes in rows:
        called = [
            _call_with_zeros(module, name, sizes)
            for name in module.functions
            if _argument_symbols(module, name) <= sizes.keys()
        ]
        if not called:
            wanted = sorted({symbol for name in module.functions for symbol in _argument_symbols(module, name)})
            what = "warm has no sizes for any function"
            raise ArgumentValueError(module.name, what, repr(sizes)[:80], f"sizes of {', '.join(wanted)}")


def _are_warm_up_sizes(row: Any) -> bool:
    return isinstance(row, Mapping) and all(
        isinstance(name, str) and isinstance(size, int | np.integer) and not isinstance(size, bool) and size >= 0
        for name, size in row.items()
    )


def _argument_symbols(module: RuntimeModule, name: str) -> set[str]:
    """Return the symbols in the dims of a function's arguments."""
    return set(dim_names(module.get_function(name).signature.arguments))


def _call_with_zeros(module: RuntimeModule, name: str, sizes: Mapping[str, int]) -> str:
    """Call a function with zeros of these sizes; return its name."""
    arrays = []
    for row in module.get_function(name).signature.arguments:
        dims = [d if isinstance(d, int) else evaluate_dim(ast.parse(d, mode="eval").body, sizes) for d in row["dims"]]
        if min(dims, default=0) < 0:
            what = f"warm gives argument {row['name']!r} of {name} a negative size"
            raise ArgumentValueError(module.name, what, repr(dict(sizes))[:80], type_text(row["dtype"], row["dims"]))
        arrays.append(np.zeros(dims, to_numpy(row["dtype"])))
    try:
        module.get_function(name).run(arrays)
    except CallError as error:
        if type(error) is not CallError:
            raise
    return name
