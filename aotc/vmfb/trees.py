"""Pytrees without JAX: nested containers to flat lists and back.

A node is ``{"kind": "leaf" | "unused" | "none" | "tuple" | "list" | "dict" | "namedtuple",
"keys": [...], "children": [...]}``; ``keys`` are those of a dict or the fields of a
named tuple, whose ``name`` is its type's; an ``unused`` leaf takes any value, which
the program does not get. The tree of a function's arguments is that
of ``(args, kwargs)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import count
from typing import Any

from aotc.vmfb.errors import VmError

Node = dict[str, Any]


def flatten(value: Any, node: Node, where: str, path: str = "") -> list[Any]:
    """Return the leaves of ``value``, which must have the structure of ``node``.

    Raises
    ------
    VmError
        Names the place where the structures differ.
    """
    kind, children = node["kind"], node.get("children", [])
    match kind:
        case "leaf":
            return [value]
        case "unused":
            return []
        case "none":
            if value is not None:
                raise _differs(where, path, type(value).__name__, "None")
            return []
        case "dict":
            return _flatten_dict(value, node, where, path)
        case _:
            if not isinstance(value, list if kind == "list" else tuple):
                raise _differs(where, path, f"a {type(value).__name__}", f"a {kind} of {len(children)}")
            if len(value) != len(children):
                raise _differs(where, path, f"{len(value)} items", f"{len(children)} items")
            return [x for i, (v, c) in enumerate(zip(value, children)) for x in flatten(v, c, where, f"{path}[{i}]")]


def _flatten_dict(value: Any, node: Node, where: str, path: str) -> list[Any]:
    keys = node.get("keys", [])
    if not isinstance(value, dict) or set(value) != set(keys):
        found = f"keys {sorted(map(str, value))}" if isinstance(value, dict) else f"a {type(value).__name__}"
        raise _differs(where, path, found, f"a dict with keys {keys}")
    leaves = []
    for key, child in zip(keys, node.get("children", [])):
        leaves += flatten(value[key], child, where, f"{path}[{key!r}]")
    return leaves


def _differs(where: str, path: str, found: str, expected: str) -> VmError:
    return VmError(where, f"the arguments{path} have another structure than the compiled ones", found, expected)


def unflatten(leaves: Iterator[Any], node: Node) -> Any:
    """Return the value with the structure of ``node`` and these leaves."""
    if node["kind"] == "leaf":
        return next(leaves)
    if node["kind"] == "none":
        return None
    children = [unflatten(leaves, child) for child in node.get("children", [])]
    match node["kind"]:
        case "dict":
            return dict(zip(node["keys"], children))
        case "list":
            return children
        case "namedtuple":
            from collections import namedtuple

            return namedtuple(node.get("name", "Result"), node["keys"])(*children)
    return tuple(children)


def mark_unused(node: Node, kept: Iterable[int]) -> Node:
    """Return ``node`` with the leaves whose number is not in ``kept`` marked as unused."""
    wanted, numbers = set(kept), count()

    def mark(node: Node) -> Node:
        if node["kind"] == "leaf":
            return node if next(numbers) in wanted else {**node, "kind": "unused"}
        return {**node, "children": [mark(child) for child in node.get("children", [])]}

    return mark(node)


def count_leaves(node: Node) -> int:
    """Return how many leaves a tree has.

    Raises
    ------
    ValueError
        If the node is not well formed.
    """
    if not isinstance(node, dict):
        raise ValueError(f"a pytree node is {type(node).__name__}, not a map")
    kind, children, keys = node.get("kind"), node.get("children", []), node.get("keys", [])
    if kind == "leaf":
        return 1
    if kind not in ("none", "unused", "tuple", "list", "dict", "namedtuple") or not isinstance(children, list):
        raise ValueError(f"unknown kind of pytree node {kind!r}")
    if kind in ("dict", "namedtuple") and (not isinstance(keys, list) or len(keys) != len(children)):
        raise ValueError(f"a {kind} with {len(children)} children and keys {keys!r}")
    return sum(map(count_leaves, children))
