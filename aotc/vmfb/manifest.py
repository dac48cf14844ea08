"""The shape of a bundle's manifest, as data, and the function that checks one against it.

A schema is a Python type, a tuple of alternatives, ``[schema]`` for a list,
``{"key": schema}`` for a map with these keys (a key that ends in ``?`` may be
missing; unknown keys are allowed, so that later versions may add facts), or
``{str: schema}`` for a map of any keys. ``ANY`` accepts everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

ANY = object()
NONE = type(None)

_VALUE = {"name": str, "dtype": str, "dims": [(int, str)], "device?": str}

_EXTERNAL = {
    "file": str,
    "size": int,
    "tensors": [{"name": str, "dtype": str, "shape": [int], "offset": int, "size": int, "sha256": (bytes, str)}],
}

_VARIANT = {
    "target": str,
    "kind": str,
    "features": [str],
    "commands_version": int,
    "executor_version?": int,
    "executor?": (int, NONE),
    "library?": (int, NONE),
    "imports?": {str: [str]},
    "custom_calls?": [
        {"symbol": str, "name": str, "operands": [[ANY]], "results": [[ANY]], "attributes": {str: ANY}}
    ],
    "cubin?": int,
    "kernels": [
        {
            "name": str,
            "scratch": int,
            "inputs": int,
            "dims": int,
            "grid": (int, list),
            "extents": [(int, list)],
            "aliases": [int],
            "symbol?": str,
            "image?": [int],
            "threads?": int,
            "items?": int,
        }
    ],
    "command_buffers": [{"code": int, "states": int, "parameters": int}],
    "functions": {str: {"registers": int, "code": [[ANY]]}},
    "devices?": {str: str},
    "transfers?": [{"function": str, "from": str, "to": str, "type": str, "reason": str, "loc": str}],
    "arena_peak?": (int, NONE),
    "constants?": ({"segment?": int, "external?": _EXTERNAL}, NONE),
}

SCHEMA: dict[Any, Any] = {
    "format": int,
    "producer": str,
    "name": str,
    "functions": {
        str: {
            "arguments": [{**_VALUE, "donated": bool}],
            "results": [_VALUE],
            "in_tree?": (dict, NONE),
            "out_tree?": (dict, NONE),
        }
    },
    "symbols": [str],
    "variants": [_VARIANT],
    "segments": [{"name": str, "offset": int, "size": int, "sha256": bytes}],
    "debug?": (dict, NONE),
    "source?": ({"segment": int, "bytes": int, "weights": (int, NONE)}, NONE),
}


def problems(value: Any, schema: Any = SCHEMA, place: str = "manifest") -> Iterator[str]:
    """Return one sentence for each place where ``value`` breaks ``schema``.

    The depth of the recursion is that of the schema, not of the value.
    """
    if isinstance(schema, dict):
        return _map_problems(value, schema, place)
    if isinstance(schema, list):
        return _list_problems(value, schema[0], place)
    return _plain_problems(value, schema, place)


def _plain_problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    if isinstance(schema, tuple):
        if all(any(True for _ in problems(value, one, place)) for one in schema):
            yield f"{place} is {_kind(value)}, which is none of the {len(schema)} allowed forms"
    elif not _fits(value, schema):
        yield f"{place} is {_kind(value)}, expected {schema.__name__}"


def _list_problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{place} is {_kind(value)}, expected a list"
        return
    for i, item in enumerate(value):
        if not _fits(item, schema):
            yield from problems(item, schema, f"{place}[{i}]")


def _map_problems(value: Any, schema: dict[Any, Any], place: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield f"{place} is {_kind(value)}, expected a map"
        return
    if str in schema:
        for key, item in value.items():
            if not _fits(key, str):
                yield from problems(key, str, f"key of {place}")
            if not _fits(item, schema[str]):
                yield from problems(item, schema[str], f"{place}.{key}")
        return
    for key, one in schema.items():
        optional = key[-1] == "?"
        name = key[:-1] if optional else key
        if name in value:
            if not _fits(value[name], one):
                yield from problems(value[name], one, f"{place}.{name}")
        elif not optional:
            yield f"{place} has no {name!r}"


def _fits(value: Any, schema: Any) -> bool:
    """Is ``value`` of a plain type that ``schema`` names? Asked first: nearly all are, and it is quick."""
    kind = type(value)
    named = kind in schema if isinstance(schema, tuple) else kind is schema
    return schema is ANY or (named and (kind is not int or value >= 0))


def _kind(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return f"negative ({value})"
    return type(value).__name__
