"""Schemas of plain data, and two validators: a fast one, and one that describes all problems.

A schema is a Python type, a tuple of alternatives, ``[schema]`` for a list, ``{"key": schema}`` for a map with these
keys, or ``{str: schema}`` for a map with any keys. A key that ends in ``?`` may be missing; unknown keys are allowed,
so that later versions may add some. ``ANY`` accepts everything. Integers must not be negative.

Validation is part of the time to load a bundle: :func:`schema_acceptor` tests the fields of a map and the items of a
list together. :func:`problems` describes the problems of a value that it has refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import itemgetter
from typing import Any

ANY = object()
NONE = type(None)

Accept = Callable[[Any], bool]


def problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    """Yield one sentence for each place where ``value`` violates ``schema``; ``place`` is the name of ``value``.

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
            yield f"{place} is {_kind_of_value(value)}, which is none of the {len(schema)} allowed forms"
    elif schema is not ANY and (type(value) is not schema or (schema is int and value < 0)):
        yield f"{place} is {_kind_of_value(value)}, expected {schema.__name__}"


def _list_problems(value: Any, schema: Any, place: str) -> Iterator[str]:
    if not isinstance(value, list):
        yield f"{place} is {_kind_of_value(value)}, expected a list"
        return
    for i, item in enumerate(value):
        yield from problems(item, schema, f"{place}[{i}]")


def _map_problems(value: Any, schema: dict[Any, Any], place: str) -> Iterator[str]:
    """Yield the problems of a map: missing keys, and values that violate the schemas of their keys."""
    if not isinstance(value, dict):
        yield f"{place} is {_kind_of_value(value)}, expected a map"
        return
    if str in schema:
        for key, item in value.items():
            yield from problems(key, str, f"key of {place}")
            yield from problems(item, schema[str], f"{place}.{key}")
        return
    for name, one, needed in _schema_fields(schema):
        if name in value:
            yield from problems(value[name], one, f"{place}.{name}")
        elif needed:
            yield f"{place} has no {name!r}"


def _schema_fields(schema: dict[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the fields of a map's schema: key, schema of the value, and True if the key is required."""
    for key, one in schema.items():
        yield key.removesuffix("?"), one, key[-1] != "?"


def _kind_of_value(value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and value < 0:
        return f"negative ({value})"
    return type(value).__name__


# ---------------------------------------------------------------- the fast validator


def schema_acceptor(schema: Any) -> Accept:
    """Compile a schema to ``accepts(value)``, which returns True if a plain msgpack value matches."""
    if schema is ANY:
        return lambda value: True
    if isinstance(schema, dict):
        return _map_acceptor(schema_acceptor(schema[str])) if str in schema else _record_acceptor(schema)
    if isinstance(schema, list):
        return _list_acceptor(schema[0])
    types = _accepted_types(schema)
    if types:
        return lambda value: type(value) in types and (type(value) is not int or value >= 0)
    alternatives = [schema_acceptor(one) for one in schema]
    return lambda value: any(accepts(value) for accepts in alternatives)


def _lazy_acceptor(schema: Any) -> Accept:
    """Return an acceptor that compiles its schema on first use, because most manifests lack most optional fields."""
    built: list[Accept] = []

    def accepts(value: Any) -> bool:
        if not built:
            built.append(schema_acceptor(schema))
        return built[0](value)

    return accepts


def _accepted_types(schema: Any) -> frozenset[type]:
    """Return the Python types that a schema accepts if it has no other constraints; an empty set if it has."""
    every = schema if isinstance(schema, tuple) else (schema,)
    return frozenset(every if all(isinstance(one, type) for one in every) else ())


def _list_acceptor(schema: Any) -> Accept:
    """Return an acceptor of a list whose items match ``schema``; one set operation tests items of plain types."""
    types = frozenset({list}) if schema == [ANY] else _accepted_types(schema)
    if not types:
        accepts = schema_acceptor(schema)
        return lambda value: type(value) is list and all(map(accepts, value))

    def accepts_plain(value: Any) -> bool:
        """Return True if ``value`` is a list of allowed types without negative integers."""
        if type(value) is not list:
            return False
        found = set(map(type, value))
        if int in found and min(value if len(found) == 1 else [x for x in value if type(x) is int]) < 0:
            return False
        return found <= types

    return accepts_plain


def _map_acceptor(accepts: Accept) -> Accept:
    return lambda value: type(value) is dict and set(map(type, value)) <= {str} and all(map(accepts, value.values()))


def _record_acceptor(schema: dict[str, Any]) -> Accept:
    """Return an acceptor of a map with named fields; one operation tests all required fields of a single type."""
    rows = list(_schema_fields(schema))
    together = [row for row in rows if row[2] and isinstance(row[1], type)]
    together.sort(key=lambda row: row[1] is not int)
    names, types = [row[0] for row in together], tuple([row[1] for row in together])
    integers = types.count(int)
    look = itemgetter(*names) if len(names) > 1 else lambda value: tuple([value[name] for name in names])
    rest = [row for row in rows if row[0] not in names]
    others = [(name, schema_acceptor(one) if needed else _lazy_acceptor(one), needed) for name, one, needed in rest]

    def accepts(value: Any) -> bool:
        """Return True if ``value`` is a map that has all required fields, of the right types."""
        if type(value) is not dict:
            return False
        try:
            found = look(value)
        except KeyError:
            return False
        if tuple(map(type, found)) != types or (integers and min(found[:integers]) < 0):
            return False
        for name, accepts_field, needed in others:
            if name in value:
                if not accepts_field(value[name]):
                    return False
            elif needed:
                return False
        return True

    return accepts
