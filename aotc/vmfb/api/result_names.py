"""What results are called beside arguments: ``cache['k']`` for what JAX calls ``result['cache']['k']``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aotc.vmfb.errors import VmError

_FIELD = re.compile(r"result(?:\['(\w+)'\]|\.(\w+))")
_KEY = re.compile(r"\[(?:\"([^\"']*)\"|([A-Za-z_]\w*))\]")
_PART = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]|\.(\w+)")


def plain_name(name: str) -> str:
    """Return the name of a result without the whole that it is part of, if it has a name in that."""
    found = _FIELD.match(name)
    return (found[1] or found[2]) + name[found.end() :] if found else name or "result"


def is_part(name: str, whole: str) -> bool:
    """Is ``name`` that of a tree, or of a leaf in it?"""
    return name == whole or name.startswith((f"{whole}[", f"{whole}."))


def path_below(name: str, out: str, argument: str, arguments: Collection[str]) -> str | None:
    """Return the path of the result ``name`` below what ``out`` names, or None if it is not below it.

    ``result`` also names the whole tree of results, whose leaves are those of ``argument`` among ``arguments``.
    """
    plain, whole = plain_name(name), plain_name(out)
    if is_part(plain, whole):
        return plain[len(whole) :]
    if out == "result" and is_part(name, out) and argument + name[len(out) :] in arguments:
        return name[len(out) :]
    return None


def fed_name(name: str, pairs: Mapping[str, str], arguments: Collection[str]) -> str:
    """Return the name of the argument that a result becomes: of its own name, unless ``pairs`` say another."""
    for out, argument in pairs.items():
        path = path_below(name, out, argument, arguments)
        if path is not None:
            return argument + path
    return plain_name(name)


def pairs_of(said: Any) -> dict[str, str]:
    """Return the argument for each result of a ``state``: a mapping, or texts as ``result[0]=cache`` and ``cache``.

    Paths are spelled as JAX does: ``result["p"]`` is ``result['p']``.

    Raises
    ------
    VmError
        If it is neither.
    """
    rows: Sequence[Any] = list(said.items()) if isinstance(said, Mapping) else said
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise VmError("", f"state is {said!r}", expected="results and arguments: {'result[0]': 'cache'}")
    pairs = {}
    for row in rows:
        pair = row.partition("=") if isinstance(row, str) else (*row, "") if isinstance(row, tuple) else ("", "", "")
        out, argument = pair[0], pair[2] if isinstance(row, str) else pair[1]
        if not isinstance(out, str) or not isinstance(argument, str) or not out:
            raise VmError("", f"state has {row!r}", expected="a result and an argument: 'result[0]=cache'")
        out, argument = (_KEY.sub(r"['\1\2']", name.strip()) for name in (out, argument))
        pairs[out] = argument or out
    return pairs


def path_of(name: str) -> str:
    """Return the name of an argument as a path, ``params/layers_0/kernel`` for ``params['layers_0']['kernel']``."""
    head = re.match(r"[^\[.]*", name)
    assert head is not None
    parts = [next(part for part in found.groups() if part is not None) for found in _PART.finditer(name, head.end())]
    return "/".join([head[0], *parts])
