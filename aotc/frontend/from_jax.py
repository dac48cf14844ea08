"""What only JAX knows: exporting functions, reading blobs, pytrees and argument names."""

from __future__ import annotations

import importlib.util
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np

from aotc.diagnostics import CompileError, Loc

_NOT_THE_USERS = ("<", *map(str, (Path(__file__).parents[1], Path(jax.__file__).parents[1], Path(os.__file__).parent)))
REGISTER = "make the function an op of its own: jax.ffi.ffi_call and aotc.register_custom_call"


def export(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> jax.export.Exported:
    """Return ``function`` exported for CPU on the shapes of the examples.

    Arrays are taken by shape and dtype; ``jax.ShapeDtypeStruct`` may have symbolic dims.

    Raises
    ------
    CompileError
        If the function raises or JAX cannot export it, with the line of the function's own source; the exception is
        the cause.
    """
    try:
        jitted = function if hasattr(function, "lower") else jax.jit(function)
        specs, keywords = jax.tree.map(_spec, (tuple(args), dict(kwargs)))
        exported = _export(jitted, specs, keywords)
        if len(exported.module_kept_var_idx) != len(exported.in_avals):  # the bundle takes what the function takes
            positional = jitted.lower(*specs, **keywords).args_info[0]
            donated = [n for n, a in enumerate(positional) if all(i.donated for i in jax.tree.leaves(a))]
            donated = [n for n in donated if jax.tree.leaves(specs[n])]
            whole = jax.jit(function, keep_unused=True, donate_argnums=donated)
            exported = _export(whole, specs, keywords)
        return exported
    except (CompileError, MemoryError):
        raise
    except Exception as error:
        reason = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
        hint = f"a bundle cannot call back into the process that traced it; {REGISTER}" if "callback" in reason else ""
        message = f"jax.export cannot export the function: {reason}"
        raise CompileError.at(_own_line(error), message, hint=hint) from error


def _own_line(error: Exception) -> Loc:
    """Return the last line of the user's own that ``error`` went through."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if f.lineno and not f.filename.startswith(_NOT_THE_USERS)]
    return Loc(own[-1].filename, own[-1].lineno or 0) if own else Loc()


def _export(jitted: Any, specs: Sequence[Any], keywords: Mapping[str, Any]) -> jax.export.Exported:
    """Export for CPU; custom calls that JAX does not promise to keep are the importer's to accept or refuse."""
    try:
        return jax.export.export(jitted, platforms=("cpu",))(*specs, **keywords)
    except ValueError as error:
        if "custom calls" not in str(error):
            raise
    text = jitted.trace(*specs, **keywords).lower(lowering_platforms=("cpu",)).as_text()
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in set(re.findall(r"@([\w.$]+)\(", text))]
    return jax.export.export(jitted, platforms=("cpu",), disabled_checks=checks)(*specs, **keywords)


def _spec(leaf: Any) -> jax.ShapeDtypeStruct:
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return leaf
    try:
        value = leaf if hasattr(leaf, "shape") and hasattr(leaf, "dtype") else np.asarray(jax.numpy.asarray(leaf))
    except (TypeError, ValueError, OverflowError) as error:
        what = f"an example argument is a {type(leaf).__name__}, expected an array, a number or a ShapeDtypeStruct"
        hint = "fix what is no array beforehand: functools.partial(f, mode='abc')"
        raise CompileError.at(Loc(), what, hint=hint) from error
    if _is_key(value):
        return jax.ShapeDtypeStruct(value.shape, value.dtype)
    return jax.ShapeDtypeStruct(value.shape, jax.dtypes.canonicalize_dtype(value.dtype))


def _is_key(value: Any) -> bool:
    """Tell whether ``value`` is a typed random key, which the bundle takes as the integers that it holds."""
    return bool(jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key))


def deserialize(data: bytes) -> jax.export.Exported | None:
    """Return the ``Exported`` in ``data``, or None if it is no such blob."""
    if importlib.util.find_spec("flatbuffers") is None:
        raise CompileError.at(Loc(), "to read a jax.export blob JAX needs flatbuffers", hint="pip install flatbuffers")
    try:
        return jax.export.deserialize(bytearray(data))
    except Exception:  # the flatbuffer reader fails in many ways on foreign bytes
        return None


def metadata(exported: jax.export.Exported) -> dict[str, Any]:
    """Return pytrees, flat argument names, the kept argument numbers and the platforms of ``exported``."""
    leaves, tree = jax.tree.flatten(jax.tree.unflatten(exported.in_tree, list(range(len(exported.in_avals)))))
    paths = jax.tree_util.tree_flatten_with_path(jax.tree.unflatten(tree, leaves))[0]
    return {
        "in_tree": tree_data(exported.in_tree),
        "out_tree": tree_data(exported.out_tree),
        "arg_names": [_path_name(path) for path, _ in paths],
        "kept": list(exported.module_kept_var_idx),
        "platforms": list(exported.platforms),
    }


def _path_name(path: Sequence[Any]) -> str:
    """Return ``args[0]['w']`` for the key path of a leaf of ``(args, kwargs)``."""
    where = "args" if getattr(path[0], "idx", 0) == 0 else "kwargs"
    return where + "".join(str(key) for key in path[1:])


def tree_data(tree: Any) -> dict[str, Any]:
    """Return a pytree definition as nested JSON data."""
    node = tree.node_data()
    children = [tree_data(child) for child in tree.children()]
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
    return _registered(tree, kind.__name__, children)


def _registered(tree: Any, name: str, children: list[Any]) -> dict[str, Any]:
    """Return a node of a class that is registered with JAX: by its attributes or keys if it names them."""
    try:
        whole = jax.tree.unflatten(tree, [0] * tree.num_leaves)
        paths = jax.tree_util.tree_flatten_with_path(whole, is_leaf=lambda x: x is not whole)[0]
    except Exception:  # the class does not take numbers for arrays
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
