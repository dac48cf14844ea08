"""Match names of results with names of arguments: result ``result['cache']['k']`` becomes argument ``cache['k']``."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from aotc.vmfb.errors import ArgumentValueError

_FIELD = re.compile(r"result(?:\['(\w+)'\]|\.(\w+))")
_KEY = re.compile(r"\[(?:\"([^\"']*)\"|([A-Za-z_]\w*))\]")
_PART = re.compile(r"\[(?:'([^']*)'|\"([^\"]*)\"|(\d+))\]|\.(\w+)")


def strip_result_prefix(name: str) -> str:
    """Remove the prefix ``result`` from a result's path: ``cache['k']`` for ``result['cache']['k']``."""
    found = _FIELD.match(name)
    return (found[1] or found[2]) + name[found.end() :] if found else name or "result"


def is_leaf_of_pytree(name: str, whole: str) -> bool:
    """Return True if ``name`` is the path ``whole`` or below: ``cache['k']`` is a leaf of ``cache``."""
    return name == whole or name.startswith((f"{whole}[", f"{whole}."))


def path_below_result(name: str, out: str, argument: str, arguments: Collection[str]) -> str | None:
    """Return the part of a result's path below the path ``out``; None if the result is not in that pytree.

    ``result`` also means the whole tree of results, whose leaves correspond to those of ``argument`` in ``arguments``.
    """
    plain, whole = strip_result_prefix(name), strip_result_prefix(out)
    if is_leaf_of_pytree(plain, whole):
        return plain[len(whole) :]
    if out == "result" and is_leaf_of_pytree(name, out) and argument + name[len(out) :] in arguments:
        return name[len(out) :]
    return None


def name_of_next_argument(name: str, pairs: Mapping[str, str], arguments: Collection[str]) -> str:
    """Return the argument of the next call that a result becomes: by ``pairs``, else the argument of that name."""
    for out, argument in pairs.items():
        path = path_below_result(name, out, argument, arguments)
        if path is not None:
            return argument + path
    return strip_result_prefix(name)


def parse_state_pairs(option: Any) -> dict[str, str]:
    """Parse the option ``state``: a mapping of results to arguments, or strings such as ``result[0]=cache``.

    A string without ``=`` names a result and the argument of the same name. Paths are normalised to JAX's spelling:
    ``result["p"]`` becomes ``result['p']``.

    Raises
    ------
    CallError
        If ``option`` has another form.
    """
    rows: Sequence[Any] = list(option.items()) if isinstance(option, Mapping) else option
    if isinstance(rows, str) or not isinstance(rows, Sequence):
        raise ArgumentValueError("", f"state is {option!r}", expected="results and arguments: {'result[0]': 'cache'}")
    pairs = {}
    for row in rows:
        pair = row.partition("=") if isinstance(row, str) else (*row, "") if isinstance(row, tuple) else ("", "", "")
        out, argument = pair[0], pair[2] if isinstance(row, str) else pair[1]
        if not isinstance(out, str) or not isinstance(argument, str) or not out:
            raise ArgumentValueError("", f"state has {row!r}", expected="a result and an argument: 'result[0]=cache'")
        out, argument = (_KEY.sub(r"['\1\2']", name.strip()) for name in (out, argument))
        pairs[out] = argument or out
    return pairs


def slash_separated_path(name: str) -> str:
    """Convert a pytree path to slashes: ``params/layers_0/kernel`` for ``params['layers_0']['kernel']``."""
    head = re.match(r"[^\[.]*", name)
    assert head is not None
    parts = [next(part for part in found.groups() if part is not None) for found in _PART.finditer(name, head.end())]
    return "/".join([head[0], *parts])
