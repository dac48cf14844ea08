"""Check the shapes of example arguments: each dim is a size or a symbolic dim of JAX."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping

import jax
import jax.export
import numpy as np

from aotc.diagnostics import CompileError, Loc


def require_sizes(
    function: Callable[..., object], args: Mapping[int, object], kwargs: Mapping[str, object]
) -> None:
    """Raise CompileError if a dim of an example is ``None``, text or a negative number.

    Parameters
    ----------
    function : callable
        The model, for the names of its parameters.
    args : mapping of int to pytree
        Positional examples by their numbers.
    kwargs : mapping of str to pytree
        Examples by their names.
    """
    names = _parameter_names(function)
    examples = {names[n] if n < len(names) else str(n): example for n, example in args.items()}
    for name, example in (*examples.items(), *kwargs.items()):
        for path, leaf in jax.tree_util.tree_flatten_with_path(example)[0]:
            shape = getattr(leaf, "shape", ())
            for axis, dim in enumerate(shape if isinstance(shape, tuple) else ()):
                if not _is_size(dim):
                    what = f"dim {axis} of argument {name}{jax.tree_util.keystr(path)} is {dim!r}, expected a size"
                    raise CompileError.at(Loc(), what, hint=_hint(shape))


def _hint(shape: tuple[object, ...]) -> str:
    """Return the shape with symbols for the dims that are not sizes."""
    letters = _new_symbols(shape)
    dims = ", ".join(
        str(dim) if _is_size(dim) else dim if isinstance(dim, str) and dim.isidentifier() else next(letters)
        for dim in shape
    )
    comma = "," if len(shape) == 1 else ""
    return f"a symbolic size: jax.ShapeDtypeStruct(jax.export.symbolic_shape('{dims}{comma}'), dtype)"


def _new_symbols(shape: tuple[object, ...]) -> Iterator[str]:
    """Yield names that no dim of ``shape`` has."""
    used = {str(dim) for dim in shape}
    return (name for name in (*"bnmkabcdefghij", *(f"d{n}" for n in range(len(shape)))) if name not in used)


def _is_size(dim: object) -> bool:
    return bool(jax.export.is_symbolic_dim(dim)) or (isinstance(dim, int | np.integer) and int(dim) >= 0)


def _parameter_names(function: Callable[..., object]) -> list[str]:
    """Return the names of a function's positional parameters, if Python knows them."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return []
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p.name for p in parameters if p.kind in positional]
