"""Arguments with leaves that are not arrays: their values become part of the program, as in equinox's filters.

A fixed leaf keeps its position in the pytree of the arguments. A call may pass a number, a text or None there only if
it equals the compiled one; other objects, such as functions, are ignored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np


@jax.tree_util.register_pytree_node_class
class FixedLeaf:
    """Argument that is not an array; its value is compiled into the program.

    For JAX it is a pytree node without children, so JAX does not trace it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], FixedLeaf]:
        """Flatten the node for JAX: no children; the node itself is the auxiliary data."""
        return (), self

    @classmethod
    def tree_unflatten(cls, leaf: FixedLeaf, _: Any) -> FixedLeaf:
        """Return the node that :meth:`tree_flatten` stored as auxiliary data."""
        return leaf


def is_filtered(function: Any) -> bool:
    """Return True if ``function`` is the result of ``equinox.filter_jit``."""
    return type(function).__module__.partition(".")[0] == "equinox" and hasattr(function, "donate_first")


def split_function(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Convert an ``equinox.filter_jit`` function: return a jitted function, args and kwargs with fixed leaves.

    Leaves that are not arrays become :class:`FixedLeaf`.
    """
    donated = [n for n in range(len(args)) if (function.donate_rest if n else function.donate_first)]
    jitted = jax.jit(_unwrapping_function(function.__wrapped__), donate_argnums=donated, keep_unused=True)
    return jitted, *_fix_call_leaves((tuple(args), dict(kwargs)), _is_array)


def without_fixed_attributes(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, Sequence[Any], Mapping[str, Any]]:
    """Jit a plain function: return it with its args and kwargs, whose fixed attributes are `FixedLeaf`.

    Fixed attributes are those of objects in the arguments that are not arrays.
    """
    paths = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    fixed = {id(leaf) for path, leaf in paths if _is_attribute(path) and not (_is_array(leaf) or _is_number(leaf))}
    if not fixed:
        return jax.jit(function if _is_hashable(function) else _hashable_function(function)), args, kwargs
    return jax.jit(_unwrapping_function(function)), *_fix_call_leaves(
        (tuple(args), dict(kwargs)), lambda leaf: id(leaf) not in fixed
    )


def _fix_call_leaves(call: Any, varies: Callable[[Any], bool]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Wrap the leaves of ``(args, kwargs)`` for which ``varies`` is false as :class:`FixedLeaf`."""
    args, kwargs = jax.tree.map(lambda leaf: leaf if varies(leaf) else FixedLeaf(leaf), call)
    return args, kwargs


def _unwrapping_function(function: Any) -> Callable[..., Any]:
    """Wrap ``function`` so that it accepts :class:`FixedLeaf` leaves and returns None for other results than arrays."""

    def is_fixed(node: Any) -> bool:
        return isinstance(node, FixedLeaf)

    @functools.wraps(function, updated=())
    def unwrapped(*args: Any, **kwargs: Any) -> Any:
        call = jax.tree.map(lambda leaf: leaf.value if is_fixed(leaf) else leaf, (args, kwargs), is_leaf=is_fixed)
        result = function(*call[0], **call[1])
        return jax.tree.map(lambda leaf: leaf if _is_array(leaf) or _is_number(leaf) else None, result)

    del unwrapped.__wrapped__  # its signature may not fit these arguments
    return unwrapped


def _hashable_function(function: Any) -> Callable[..., Any]:
    """Wrap a callable that is not hashable in a plain Python function, as JAX caches traces by function."""

    @functools.wraps(function, updated=())
    def plain(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    return plain


def _is_hashable(function: Any) -> bool:
    try:
        hash(function)
    except TypeError:
        return False
    return True


def _is_attribute(path: Sequence[Any]) -> bool:
    return any(isinstance(key, jax.tree_util.GetAttrKey) for key in path)


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct | np.ndarray | np.generic)


def _is_number(leaf: Any) -> bool:
    return isinstance(leaf, bool | int | float | complex)
