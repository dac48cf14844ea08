"""Signatures without some of their arguments and results: without bound arguments, or without a state."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import count

from aotc.vmfb import trees
from aotc.vmfb.arguments import Signature


def signature_without(signature: Signature, arguments: Collection[int], results: Collection[int]) -> Signature:
    """Return a signature without the arguments and results of these numbers, also in its pytrees."""
    in_tree, out_tree, parameters = signature.in_tree, signature.out_tree, signature.parameters
    if in_tree is not None:
        numbers = count()
        sides = [_pruned_children(side, numbers, arguments) for side in in_tree["children"]]
        kept = [n for n, child in enumerate(sides[0]) if child is not None]
        parameters = [parameters[n] if n < len(parameters) and parameters[n] else f"args[{n}]" for n in kept]
        whole = [_node_with_children(side, children) for side, children in zip(in_tree["children"], sides)]
        in_tree = {**in_tree, "children": whole}
    if out_tree is not None:
        out_tree = _pruned_node(out_tree, count(), results) or {"kind": "none"}
    rows = [
        [row for n, row in enumerate(every) if n not in removed]
        for every, removed in ((signature.arguments, arguments), (signature.results, results))
    ]
    entry = {"arguments": rows[0], "results": rows[1], "in_tree": in_tree, "out_tree": out_tree}
    return Signature(signature.name, {**entry, "parameters": parameters, "doc": signature.doc})


def _pruned_node(node: trees.Node, numbers: Iterator[int], removed: Collection[int]) -> trees.Node | None:
    """Return a pytree node without the leaves numbered ``removed``; None if no leaf remains.

    ``numbers`` counts the leaves over the whole tree.
    """
    if node["kind"] == "leaf":
        return None if next(numbers) in removed else node
    children = _pruned_children(node, numbers, removed)
    left = any(child is not None for child in children)
    return _node_with_children(node, children) if left or not children else None


def _pruned_children(node: trees.Node, numbers: Iterator[int], removed: Collection[int]) -> list[trees.Node | None]:
    return [_pruned_node(child, numbers, removed) for child in node.get("children", [])]


def _node_with_children(node: trees.Node, children: Sequence[trees.Node | None]) -> trees.Node:
    keys = node.get("keys") or [None] * len(children)
    rows = [(key, child) for key, child in zip(keys, children) if child is not None]
    named = {"keys": [key for key, _ in rows]} if node.get("keys") else {}
    return {**node, **named, "children": [child for _, child in rows]}
