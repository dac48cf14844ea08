"""Parameters of a function: matching of positional and keyword arguments with the compiled order."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from aotc.vmfb import trees
from aotc.vmfb.arguments import Signature
from aotc.vmfb.errors import ArgumentError, CallError

_LEAF: trees.Node = {"kind": "leaf"}


_CALL_OPTIONS = {
    "timeout": "aotc.load(..., timeout=1), or module.main.options(deadline=1)(...)",
    **{name: f"module.main.options({name}=...)(...)" for name in ("deadline", "wait", "donate", "results")},
}
"""Options of a call that users pass as arguments, and where each belongs."""


class Parameters:
    """The parameters of a function, positional ones first, then keyword-only ones.

    Attributes
    ----------
    names : list of str
        The name of each; a path (``args[0]``) if the name is unknown.
    nodes : list of dict
        The pytree of each.
    flat : bool
        True if each is an array.
    quick : int
        Number of positional arguments, without keywords, that need no rearrangement; -1 if there is no such number.
    """

    __slots__ = ("_by_name", "_positional", "_where", "flat", "names", "nodes", "quick")

    def __init__(self, signature: Signature, where: str) -> None:
        self._where = where
        tree = signature.in_tree
        keywords: list[Any] = []
        if tree is None:
            self.nodes = [_LEAF] * len(signature.arguments)
            self.names = [row["name"] or f"args[{n}]" for n, row in enumerate(signature.arguments)]
        else:
            positional, by_key = tree["children"]
            keywords = by_key.get("keys", [])
            self.nodes = [*positional.get("children", []), *by_key.get("children", [])]
            known = signature.parameters
            count = len(self.nodes) - len(keywords)
            self.names = [known[n] if n < len(known) and known[n] else f"args[{n}]" for n in range(count)]
            self.names += map(str, keywords)
        self._positional = len(self.nodes) - len(keywords)
        self._by_name = {name: n for n, name in reversed(list(enumerate(self.names)))}
        self.flat = all(node["kind"] == "leaf" for node in self.nodes)
        self.quick = -1 if keywords else len(self.nodes)

    def order_arguments(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Sequence[Any]:
        """Return the arguments of a call in the order of the compiled function's parameters.

        Raises
        ------
        CallError
            Its message lists missing, unknown and duplicate arguments.
        """
        if len(args) == self.quick and not kwargs:
            return args
        found = dict(enumerate(args[: self._positional]))
        problems = [f"there is no argument {name!r}" for name in kwargs if name not in self._by_name]
        for name, value in kwargs.items():
            number = self._by_name.get(name)
            if number in found:
                problems.append(f"argument {name!r} is given twice")
            elif number is not None:
                found[number] = value
        if len(args) > self._positional:
            are = "argument is" if self._positional == 1 else "arguments are"
            problems.append(f"{self._positional} {are} positional, not {len(args)}")
        problems += [f"argument {self.names[n]!r} is missing" for n in range(len(self.names)) if n not in found]
        if problems:
            raise self._wrong_arguments_error(problems, len(args), kwargs)
        return [found[n] for n in range(len(self.names))]

    def _wrong_arguments_error(self, problems: Sequence[str], count: int, kwargs: Mapping[str, Any]) -> CallError:
        more = max(count - self._positional, 0)
        given = [*self.names[: min(count, self._positional)], *[f"{more} more"] * (more > 0), *kwargs]
        description = f"{count + len(kwargs)}: {', '.join(given)}" if given else "none"
        expected = f"{len(self.names)}: {', '.join(self.names)}" if self.names else "none"
        options = [name for name in kwargs if name in _CALL_OPTIONS and name not in self._by_name]
        hint = _CALL_OPTIONS[options[0]] if options else ""
        return ArgumentError(self._where, "wrong arguments: " + ", ".join(problems), description, expected, hint)

    def flattener(self) -> trees.Flatten:
        """Return ``f(values, leaves)``, which appends the leaves of all arguments, in order, to a list."""
        inner = [trees.make_flattener(node, self._where, name) for node, name in zip(self.nodes, self.names)]

        def flatten(values: Sequence[Any], leaves: list[Any]) -> None:
            for part, value in zip(inner, values):
                part(value, leaves)

        return flatten

    def signature(self) -> inspect.Signature:
        """Return the Python signature of these parameters, for ``inspect`` and ``help``."""
        kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
        rows = []
        for n, name in enumerate(self.names):
            by_name = name.isidentifier()
            kind = kinds[n >= self._positional] if by_name else inspect.Parameter.POSITIONAL_ONLY
            rows.append(inspect.Parameter(name if by_name else f"arg{n}", kind))
        rows.sort(key=lambda row: row.kind)
        return inspect.Signature(rows)


def pytree_nodes_of_arguments(signature: Signature) -> Iterator[tuple[tuple[str, str], trees.Node, int]]:
    """Yield each node of the pytree of a function's arguments.

    Yields
    ------
    names : tuple of (str, str)
        The node's name, ``params['w']``, and its path in a call, ``args[0]['w']``.
    node : dict
    first : int
        Number of the first argument in the node.
    """
    if signature.in_tree is None:
        return
    names = Parameters(signature, "").names
    stack: list[tuple[tuple[str, str], trees.Node]] = []
    for side, node in zip(("args", "kwargs"), signature.in_tree["children"]):
        keys = node.get("keys") or range(len(node.get("children", [])))
        places = [f"{side}[{key!r}]" for key in keys]
        stack += zip(zip(names[len(stack) :], places), node.get("children", []))
    stack.reverse()
    first = 0
    while stack:
        paths, node = stack.pop()
        yield paths, node, first
        first += node["kind"] == "leaf"
        form = "[{!r}]" if node["kind"] == "dict" else ".{}" if node.get("keys") else "[{}]"
        children = node.get("children", [])
        inner = [form.format(key) for key in node.get("keys") or range(len(children))]
        stack += [((paths[0] + key, paths[1] + key), child) for key, child in zip(inner, children)][::-1]
