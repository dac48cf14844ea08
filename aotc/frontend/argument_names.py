"""What a function calls its arguments: the names that JAX writes into their locations.

A *place* is where a leaf stands in the call's pytree, ``args[0]['w']``; its name has the parameter's own in place of
``args[0]``, as ``params['w']``. Exports, blobs and portable artifacts keep locations; a model without them has places.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

_HEAD = re.compile(r"args\[(\d+)\]|kwargs\['\w+'\]")


def named_leaves(
    block: Any, places: Sequence[str], kept: Sequence[int], in_tree: Mapping[str, Any] | None
) -> tuple[list[str], list[str]]:
    """Return the names of the arguments of ``block``, and of the positional parameters, as far as they are known.

    ``places`` are those of all leaves of the call, of which the arguments are ``kept``.
    """
    names = [_name_of(argument, places[k]) for argument, k in zip(block.arguments, kept, strict=True)]
    if len(set(names)) < len(names):
        names = [places[k] for k in kept]
    children = in_tree["children"][0]["children"] if in_tree else ()
    parameters = [""] * len(children)
    for name, k in zip(names, kept):
        head = _HEAD.match(places[k])
        if head and head[1] and name != places[k]:
            parameters[int(head[1])] = name[: len(name) - len(places[k]) + head.end()]
    return names, parameters


def _name_of(argument: Any, place: str) -> str:
    """Return the name in an argument's location if it is one of ``place``: the same path below another parameter."""
    location, head = argument.location, _HEAD.match(place)
    if head is None or not isinstance(location, ir.NameLoc):
        return place
    name, rest = location.name_str, place[head.end() :]
    return name if name.endswith(rest) and len(name) > len(rest) else place
