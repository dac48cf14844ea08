"""Pytrees without JAX: conversion of nested containers to flat lists and back.

A node is ``{"kind": "leaf" | "unused" | "fixed" | "none" | "tuple" | "list" | "dict" | "namedtuple" | "object",
"keys": [...], "children": [...]}``. ``keys`` are the keys of a dict, the fields of a named tuple or the attributes of
an object, whose ``name`` is the name of its type. An ``unused`` leaf accepts any value, which is not passed to the
program. A ``fixed`` leaf accepts only its ``value``, a number, a string or None that is part of the program. The tree
of a function's arguments is that of ``(args, kwargs)``.

An object is an instance of a class registered with JAX, such as a dataclass of weights. The class need not exist where
the bundle runs: any value with these attributes is accepted, and so is a tuple or a dict of them. As a result it is a
named tuple.

Trees are converted to functions once, because a call takes only microseconds.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import count
from typing import Any

from aotc.vmfb.errors import ArgumentError, CallError

Node = dict[str, Any]
Flatten = Callable[[Any, list[Any]], None]
Unflatten = Callable[[Iterator[Any]], Any]

_NAMED = ("dict", "namedtuple", "object")
_INNER = ("none", "unused", "fixed", "tuple", "list", *_NAMED)


def make_flattener(node: Node, where: str, path: str) -> Flatten:
    """Return ``f(value, leaves)``, which appends the leaves of the pytree ``value`` to the list ``leaves``.

    ``f`` raises a CallError that names the place where ``value`` and ``node`` differ in structure. ``path`` is the name
    of the argument.
    """
    children = node.get("children", [])
    match node["kind"]:
        case "leaf":
            return lambda value, leaves: leaves.append(value)
        case "unused":
            return lambda value, leaves: None
        case "none":
            return _flatten_fixed(None, where, path)
        case "fixed":
            return _flatten_fixed(node.get("value"), where, path)
        case "dict":
            return _flatten_mapping(_leaf_flatteners(node, where, path, "[{!r}]"), where, path, "[{!r}]")
        case "object":
            return _flatten_object(node, where, path)
        case kind:
            fields = node.get("keys") if kind == "namedtuple" else None
            paths = [f"{path}.{key}" for key in fields] if fields else [f"{path}[{i}]" for i in range(len(children))]
            inner = [make_flattener(child, where, name) for child, name in zip(children, paths)]
            whole = all(child["kind"] == "leaf" for child in children)
            return _flatten_sequence(kind, inner, whole, where, path)


def _leaf_flatteners(node: Node, where: str, path: str, form: str) -> dict[Any, Flatten]:
    pairs = zip(node.get("keys", []), node.get("children", []))
    return {key: make_flattener(child, where, path + form.format(key)) for key, child in pairs}


def _flatten_fixed(expected: Any, where: str, path: str) -> Flatten:
    """Return a flatten function that accepts only the value ``expected``, and appends nothing."""

    def flatten(value: Any, leaves: list[Any]) -> None:
        if type(value) is not type(expected) or repr(value) != repr(expected):  # repr, because nan != nan
            found = repr(value) if isinstance(value, bool | int | float | str) else type(value).__name__
            raise _structure_error(where, path, found, repr(expected))

    return flatten


def _flatten_sequence(kind: str, inner: list[Flatten], whole: bool, where: str, path: str) -> Flatten:
    """Return a flatten function for a tuple, list or named tuple.

    Parameters
    ----------
    kind : str
    inner : list of callable
        The flatten functions of the items.
    whole : bool
        True if all items are leaves.
    where, path : str
        Function and place in the argument, for messages.
    """
    container = list if kind == "list" else tuple
    size = len(inner)

    def flatten(value: Any, leaves: list[Any]) -> None:
        if not isinstance(value, container):
            raise _structure_error(where, path, f"a {type(value).__name__}", f"a {kind} of {size}")
        if len(value) != size:
            raise _structure_error(where, path, f"{len(value)} items", f"{size} items")
        if whole:
            leaves += value
            return
        for part, v in zip(inner, value):
            part(v, leaves)

    return flatten


# Missing or unknown keys of a pytree that an error lists: what fits on a screen.
KEYS_SHOWN = 10


def _flatten_mapping(parts: dict[Any, Flatten], where: str, path: str, form: str) -> Flatten:
    """Return a flatten function for a dict, given those of its values; ``form`` formats a key as part of a path."""

    def flatten(value: Any, leaves: list[Any]) -> None:
        if not isinstance(value, Mapping):
            raise _structure_error(where, path, f"a {type(value).__name__}", f"a dict with keys {list(parts)}")
        if len(value) != len(parts) or any(key not in value for key in parts):
            missing = [f"{path + form.format(key)} is missing" for key in parts if key not in value]
            extra = [f"there is no {path + form.format(key)}" for key in value if key not in parts]
            found, expected = f"keys {sorted(map(str, value))}", f"a dict with keys {list(parts)}"
            raise _structure_error(where, path, found, expected, ": " + ", ".join((missing + extra)[:KEYS_SHOWN]))
        for key, part in parts.items():
            part(value[key], leaves)

    return flatten


def _flatten_object(node: Node, where: str, path: str) -> Flatten:
    """Return a flatten function for an object with attributes, or for a tuple or dict in place of the object."""
    parts = _leaf_flatteners(node, where, path, ".{}")
    inner = list(parts.values())
    by_place, by_key = (
        _flatten_sequence("tuple", inner, False, where, path),
        _flatten_mapping(parts, where, path, ".{}"),
    )
    expected = f"a {node.get('name', 'object')} with {', '.join(parts)}, or a tuple or a dict of them"

    def flatten(value: Any, leaves: list[Any]) -> None:
        if isinstance(value, tuple):
            return by_place(value, leaves)
        if isinstance(value, dict):
            return by_key(value, leaves)
        missing = [key for key in parts if not hasattr(value, key)]
        if missing:
            found = f"a {type(value).__name__} without {', '.join(missing)}"
            raise _structure_error(where, path, found, expected)
        for key, part in parts.items():
            part(getattr(value, key), leaves)
        return None

    return flatten


def _structure_error(where: str, path: str, found: str, expected: str, more: str = "") -> CallError:
    return ArgumentError(where, f"argument {path} has another structure than the compiled one{more}", found, expected)


def make_unflattener(node: Node) -> Unflatten:
    """Return ``f(leaves)``, which builds a pytree of structure ``node`` from an iterator over its leaves."""
    if node["kind"] == "leaf":
        return next
    keys, parts = node.get("keys", []), [make_unflattener(child) for child in node.get("children", [])]
    match node["kind"]:
        case "none":
            return lambda leaves: None
        case "dict":
            return lambda leaves: {key: part(leaves) for key, part in zip(keys, parts)}
        case "list":
            return lambda leaves: [part(leaves) for part in parts]
        case "namedtuple" | "object":
            make = namedtuple(node.get("name", "Result"), keys, rename=True)  # type: ignore[misc]
            return lambda leaves: make(*[part(leaves) for part in parts])
        case _:
            return lambda leaves: tuple([part(leaves) for part in parts])


def mark_unused_leaves(node: Node, used: Iterable[int]) -> Node:
    """Return ``node`` with all leaves marked as unused except those numbered ``used``."""
    used_numbers, numbers = set(used), count()

    def mark(node: Node) -> Node:
        if node["kind"] == "leaf":
            return node if next(numbers) in used_numbers else {**node, "kind": "unused"}
        return {**node, "children": [mark(child) for child in node.get("children", [])]}

    return mark(node)


def count_leaves(node: Node) -> int:
    """Validate a pytree node, and return its number of leaves.

    Raises
    ------
    ValueError
        If the node is malformed.
    """
    if not isinstance(node, dict):
        raise ValueError(f"a pytree node is {type(node).__name__}, not a map")
    kind = node.get("kind")
    if kind == "leaf":
        return 1
    children, keys = node.get("children", []), node.get("keys", [])
    if kind == "fixed" and not isinstance(node.get("value"), bool | int | float | str | None):
        raise ValueError(f"a fixed leaf holds a {type(node['value']).__name__}")
    if kind not in _INNER or not isinstance(children, list):
        raise ValueError(f"unknown kind of pytree node {kind!r}")
    if not isinstance(keys, list) or any(isinstance(k, list | dict) for k in keys):
        raise ValueError(f"a {kind} with keys {keys!r}")
    if kind in _NAMED and len(keys) != len(children):
        raise ValueError(f"a {kind} with {len(children)} children and keys {keys!r}")
    if kind != "dict" and kind in _NAMED and not all(isinstance(k, str) and k.isidentifier() for k in keys):
        raise ValueError(f"a {kind} with keys {keys!r}")
    if "name" in node and not (isinstance(node["name"], str) and node["name"].isidentifier()):
        raise ValueError(f"a pytree node named {node['name']!r}")
    if keys and len(set(map(repr, keys))) != len(keys):
        raise ValueError(f"a {kind} with keys {keys!r}")
    return sum(map(count_leaves, children))
