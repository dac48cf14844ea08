"""Matching of result names to argument names: ``cache['k']`` for the result that JAX calls ``result['cache']['k']``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aotc.vmfb.errors import ArgumentValueError

_FIELD = re.compile(r"result(?:\['(\w+)'\]|\.(\w+))")
_KEY = re.compile(r"\[(?:\"([^\"']*)\"|([A-Za-z_]\w*))\]")
_PART = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]|\.(\w+)")


def plain_name(name: str) -> str:
    """Strip ``result`` from a result's name if it is a key or field of the results."""
    found = _FIELD.match(name)
    return (found[1] or found[2]) + name[found.end() :] if found else name or "result"


def is_part(name: str, whole: str) -> bool:
    """Return True if ``name`` is the pytree ``whole`` or a leaf in it."""
    return name == whole or name.startswith((f"{whole}[", f"{whole}."))


def path_below(name: str, out: str, argument: str, arguments: Collection[str]) -> str | None:
    """Return the path of a result below the pytree of results ``out``; None if it is elsewhere.

    ``result`` also means the whole tree of results, whose leaves correspond to those of ``argument`` in ``arguments``.
    """
    plain, whole = plain_name(name), plain_name(out)
    if is_part(plain, whole):
        return plain[len(whole) :]
    if out == "result" and is_part(name, out) and argument + name[len(out) :] in arguments:
        return name[len(out) :]
    return None


def fed_name(name: str, pairs: Mapping[str, str], arguments: Collection[str]) -> str:
    """Return the name of the argument that a result becomes in the next call: by ``pairs``, else by equal names."""
    for out, argument in pairs.items():
        path = path_below(name, out, argument, arguments)
        if path is not None:
            return argument + path
    return plain_name(name)


def pairs_of(said: Any) -> dict[str, str]:
    """Parse ``state`` options: a mapping of results to arguments, or strings such as ``result[0]=cache`` and ``cache``.

    Paths are normalised to JAX's spelling: ``result["p"]`` becomes ``result['p']``.

    Raises
    ------
    CallError
        If ``said`` has another form.
    """
    rows: Sequence[Any] = list(said.items()) if isinstance(said, Mapping) else said
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise ArgumentValueError("", f"state is {said!r}", expected="results and arguments: {'result[0]': 'cache'}")
    pairs = {}
    for row in rows:
        pair = row.partition("=") if isinstance(row, str) else (*row, "") if isinstance(row, tuple) else ("", "", "")
        out, argument = pair[0], pair[2] if isinstance(row, str) else pair[1]
        if not isinstance(out, str) or not isinstance(argument, str) or not out:
            raise ArgumentValueError("", f"state has {row!r}", expected="a result and an argument: 'result[0]=cache'")
        out, argument = (_KEY.sub(r"['\1\2']", name.strip()) for name in (out, argument))
        pairs[out] = argument or out
    return pairs


def path_of(name: str) -> str:
    """Return the path of an argument name: ``params/layers_0/kernel`` for ``params['layers_0']['kernel']``."""
    head = re.match(r"[^\[.]*", name)
    assert head is not None
    parts = [next(part for part in found.groups() if part is not None) for found in _PART.finditer(name, head.end())]
    return "/".join([head[0], *parts])
