"""Information that only JAX has: types of examples, blobs, pytrees and argument names."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from aotc.diagnostics import CompileError, Loc
from aotc.frontend.filtered import FixedLeaf
from aotc.vmfb.host.install import install_command

NOT_THE_USERS = ("<", *map(str, (Path(__file__).parents[1], Path(jax.__file__).parents[1], Path(os.__file__).parent)))


def tracing_spec(leaf: Any) -> Any:
    """Return the ``ShapeDtypeStruct`` of an example argument; a Python number is returned unchanged, without a dtype.

    An array on several devices keeps its sharding.

    Raises
    ------
    CompileError
        If ``leaf`` is not an array, number or ``jax.ShapeDtypeStruct``.
    """
    if isinstance(leaf, jax.ShapeDtypeStruct | bool | int | float | complex):
        return leaf
    try:
        value = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(jax.numpy.asarray(leaf))
    except (TypeError, ValueError, OverflowError) as error:
        what = f"an example argument is a {type(leaf).__name__}, expected an array, a number or a ShapeDtypeStruct"
        hint = "make it static: functools.partial(f, mode='abc'), or jax.jit(f, static_argnames='mode')"
        raise CompileError.at(Loc(), what, hint=hint) from error
    if _is_key(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    weak = bool(getattr(value, "weak_type", False))
    placed = getattr(value, "sharding", None)
    sharding = placed if isinstance(placed, jax.sharding.NamedSharding) and placed.num_devices > 1 else None
    dtype = jax.dtypes.canonicalize_dtype(value.dtype)
    return jax.ShapeDtypeStruct(value.shape, dtype, weak_type=weak, sharding=sharding)


def _is_key(value: Any) -> bool:
    """Return True if ``value`` is a typed random key, which a bundle's function receives as integers."""
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def deserialize_exported(data: bytes) -> jax.export.Exported | None:
    """Deserialize a ``jax.export`` blob; return None if ``data`` is not one."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise CompileError.at(Loc(), "to read a jax.export blob JAX needs flatbuffers", hint=install_command("compile"))
    try:
        return jax.export.deserialize(bytearray(data))
    except Exception:  # the flatbuffer reader raises many types on other bytes
        return None


def export_metadata(exported: jax.export.Exported) -> dict[str, Any]:
    """Return pytrees, argument names, the numbers of the used arguments, and the platforms of ``exported``."""
    return {
        **pytree_metadata(exported.in_tree, exported.out_tree, len(exported.in_avals)),
        "kept": list(exported.module_kept_var_idx),
        "platforms": list(exported.platforms),
    }


def pytree_metadata(in_tree: Any, out_tree: Any, count: int) -> dict[str, Any]:
    """Return the input and output pytrees of a function as JSON data, and the names of its ``count`` arguments."""
    leaves, tree = jax.tree.flatten(jax.tree.unflatten(in_tree, list(range(count))))
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, leaves))[0]
    return {
        "in_tree": pytree_as_json(in_tree),
        "out_tree": pytree_as_json(out_tree),
        "arg_names": [_path_name(path) for path, _ in paths],
    }


def _path_name(path: Sequence[Any]) -> str:
    """Format the key path of a leaf of ``(args, kwargs)`` as ``args[0]['w']``."""
    where = "args" if getattr(path[0], "idx", 0) == 0 else "kwargs"
    return where + "".join(str(key) for key in path[1:])


def pytree_as_json(tree: Any) -> dict[str, Any]:
    """Return a JAX pytree definition as nested JSON data."""
    node = tree.node_data()
    children = [pytree_as_json(child) for child in tree.children()]
    if node is None:
        return {"kind": "none" if tree.num_leaves == 0 else "leaf", "keys": [], "children": []}
    kind, data = node
    if kind is dict:
        return {"kind": "dict", "keys": [k if isinstance(k, int) else str(k) for k in data], "children": children}
    if kind in (tuple, list):
        return {"kind": kind.__name__, "keys": [], "children": children}
    if hasattr(kind, "_fields"):
        return {"kind": "namedtuple", "name": kind.__name__, "keys": list(kind._fields), "children": children}
    if kind is type(None):
        return {"kind": "none", "keys": [], "children": []}
    if kind is FixedLeaf:
        plain = data.value is None or isinstance(data.value, bool | int | float | str)
        return {"kind": "fixed", "value": data.value} if plain else {"kind": "unused"}
    return _registered_class_node(tree, kind.__name__, children)


def _registered_class_node(tree: Any, name: str, children: list[Any]) -> dict[str, Any]:
    """Return the JSON node of an object whose class is registered with JAX as a pytree.

    The node has the object's attribute names or keys, if JAX knows them.
    """
    try:
        whole = jax.tree.unflatten(tree, [0] * tree.num_leaves)
        paths = jax.tree_util.tree_flatten_with_path(whole, is_leaf=lambda x: x is not whole)[0]
    except Exception:  # the class rejects numbers in place of arrays
        paths = []
    entries = [path[0] for path, _ in paths if len(path) == 1]
    if children and len(entries) == len(children):
        names = [getattr(entry, "name", None) for entry in entries]
        if all(isinstance(n, str) and n.isidentifier() for n in names) and name.isidentifier():
            return {"kind": "object", "name": name, "keys": names, "children": children}
        keys = [entry.key if isinstance(entry, jax.tree_util.DictKey) else None for entry in entries]
        if all(isinstance(key, str | int) for key in keys):
            return {"kind": "dict", "keys": keys, "children": children}
    return {"kind": "tuple", "keys": [], "children": children}
