"""Sample arguments for a signature: zeros or random values, with sizes for its symbolic dims."""

from __future__ import annotations

import ast
import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.api.choose_function import choose_function
from aotc.vmfb.assumed_sizes import assumed_sizes, check_dims
from aotc.vmfb.dtypes import DTYPES, to_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.limits import MOST_BYTES, MOST_RANK
from aotc.vmfb.module import LoadedModule

if TYPE_CHECKING:
    from aotc.vmfb.gang.gang import Gang

_OPERATORS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
}


def array_shape(sizes: Sequence[str | int], dtype: str, what: str) -> tuple[int, ...]:
    """Return the shape of an array of ``sizes``; refuse more dims or bytes than the limits."""
    digits = all(isinstance(n, int) or len(n) < 20 for n in sizes)
    shape = tuple(int(n) for n in sizes) if digits else ()
    if not digits or len(shape) > MOST_RANK or prod(max(n, 1) for n in shape) > MOST_BYTES // to_numpy(dtype).itemsize:
        hint = f"at most {MOST_RANK} dimensions and {MOST_BYTES:,} bytes"
        raise CallError("", f"{what}: no array is so large", expected=hint)
    return shape


def make_values(
    arguments: Sequence[Mapping[str, Any]], sizes: Mapping[str, int], random: bool, seed: int
) -> list[np.ndarray]:
    """Return zeros or random values for ``arguments``; ``sizes`` are the sizes of their symbolic dims."""
    generator = np.random.default_rng(seed)
    found = []
    for argument in arguments:
        shape = array_shape([dim_value(d, sizes) for d in argument["dims"]], argument["dtype"], argument["name"])
        found.append(
            _random_array(generator, shape, argument["dtype"])
            if random
            else np.zeros(shape, to_numpy(argument["dtype"]))
        )
    return found


def sample_call(
    module: LoadedModule | Gang, function: str, inputs: Sequence[Any], sizes: Mapping[str, int]
) -> tuple[str, list[Any]]:
    """Return the name of a function of a module, and its arguments: ``inputs``, completed by random values.

    Raises
    ------
    CallError
        If there is no such function.
    """
    name = choose_function(module.functions, function, module.name)
    signature = module.functions[name].signature
    rows = signature.arguments[len(inputs) :]
    check_dims(sizes, signature.arguments, name)
    known = {**sizes, **assumed_sizes(rows, signature.typical, sizes)}
    return name, [*inputs, *make_values(rows, known, True, 0)]


def _random_array(generator: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Return a random array: normally distributed floats, small non-negative integers, or booleans."""
    row = DTYPES[dtype]
    match row.kind:
        case "b":
            return generator.integers(0, 2, shape).astype(bool)
        case "i" | "u":
            return generator.integers(0, min(1 << row.bits - 1, 100), shape).astype(to_numpy(dtype))
        case "c":
            values = generator.standard_normal(shape) + 1j * generator.standard_normal(shape)
            return np.asarray(values).astype(to_numpy(dtype))
    return np.asarray(generator.standard_normal(shape)).astype(to_numpy(dtype))


def dim_value(dim: int | str, sizes: Mapping[str, int]) -> int:
    """Evaluate a dim such as ``2*n + 1`` for ``sizes``.

    Raises
    ------
    CallError
        If the expression contains anything but names of ``sizes``, integers, ``+ - * // %``, ``max`` and ``min``.
    """
    if isinstance(dim, int):
        return dim
    try:
        return int(_evaluate_dim_node(ast.parse(dim, mode="eval").body, sizes))
    except (SyntaxError, KeyError, ZeroDivisionError) as error:
        raise CallError("", f"cannot evaluate dim {dim!r}: {error}", hint="pass --input for this argument") from None


def _evaluate_dim_node(node: ast.expr, sizes: Mapping[str, int]) -> int:
    """Evaluate a node of a parsed dim expression; anything but arithmetic on names raises KeyError."""
    match node:
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return sizes[name]
        case ast.BinOp(left=a, op=op, right=b):
            return _OPERATORS[type(op)](_evaluate_dim_node(a, sizes), _evaluate_dim_node(b, sizes))
        case ast.UnaryOp(op=op, operand=a):
            return _OPERATORS[type(op)](_evaluate_dim_node(a, sizes))
        case ast.Call(func=ast.Name(id="max" | "min" as name), args=args):
            return {"max": max, "min": min}[name](_evaluate_dim_node(a, sizes) for a in args)
    raise KeyError(type(node).__name__)
