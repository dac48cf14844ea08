"""What a caller gives for arguments by name: the number of each argument, and its array."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from aotc.vmfb import trees
from aotc.vmfb.arguments import Signature
from aotc.vmfb.errors import VmError

_SIDES = ("args", "kwargs")


def by_number(signature: Signature, values: Mapping[str | int, Any], where: str) -> tuple[dict[int, Any], list[str]]:
    """Return the values of ``values`` by the numbers of arguments, and what is wrong with the rest.

    A key is the name of an argument, its number, or the name of a tree of them, whose value is a pytree.
    """
    found: dict[int, Any] = {}
    problems = []
    numbers = {row["name"]: n for n, row in enumerate(signature.arguments) if row["name"]}
    count = len(signature.arguments)
    for key, value in values.items():
        number = numbers.get(key, -1) if isinstance(key, str) else key
        if isinstance(number, int) and 0 <= number < count:
            pairs = [(number, value)]
        else:
            try:
                pairs = _leaves(signature, key, value, where)
            except VmError as error:
                problems.append(str(error))
                continue
        for n, x in pairs:
            if n in found:
                problems.append(f"{signature.arguments[n]['name'] or n} is given twice")
            found[n] = x
    return found, problems


def _leaves(signature: Signature, key: Any, value: Any, where: str) -> list[tuple[int, Any]]:
    """Return what a pytree gives for the arguments of a tree."""
    for path, node, first in _nodes(signature.in_tree):
        if path == key and node["kind"] != "leaf":
            leaves: list[Any] = []
            trees.flattener(node, where, f" {key}")(value, leaves)
            return list(enumerate(leaves, first))
    names = [row["name"] for row in signature.arguments if row["name"]]
    expected = ", ".join(names) or f"numbers below {len(signature.arguments)}"
    raise VmError(where, f"no argument {key!r} to bind", expected=expected)


def _nodes(tree: dict[str, Any] | None) -> Iterator[tuple[str, dict[str, Any], int]]:
    """Yield each node of the tree of a call: its name, itself, the number of its first argument."""
    if tree is None:
        return
    stack = [(side, node) for side, node in zip(_SIDES, tree.get("children", []))]
    stack.reverse()
    first = 0
    while stack:
        path, node = stack.pop()
        yield path, node, first
        first += node["kind"] == "leaf"
        form = "[{!r}]" if node["kind"] == "dict" else ".{}" if node.get("keys") else "[{}]"
        children = node.get("children", [])
        keys = node.get("keys") or range(len(children))
        stack += [(path + form.format(key), child) for key, child in zip(keys, children)][::-1]
