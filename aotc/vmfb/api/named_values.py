"""Conversion of values that users pass by argument name to values by argument number."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb import trees
from aotc.vmfb.api.parameters import pytree_nodes_of_arguments
from aotc.vmfb.arguments import Signature
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.errors import ArgumentError, CallError

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import RuntimeFunction


def merge_keyword_values(
    values: Mapping[str | int, Any], named: Mapping[str, Any], where: str
) -> Mapping[str | int, Any]:
    """Add the values of keyword arguments to the mapping ``values``.

    Raises
    ------
    ArgumentError
        If a keyword is in ``values`` too.
    """
    if not named or not isinstance(values, Mapping):  # the caller refuses values that are not a mapping
        return values
    if twice := sorted(values.keys() & named.keys()):
        raise ArgumentError(where, f"{twice[0]} is given twice", hint="pass it in the mapping or as a keyword")
    merged: dict[str | int, Any] = dict(values)
    merged.update(named)
    return merged


def arguments_by_number(
    signature: Signature, values: Mapping[str | int, Any], where: str
) -> tuple[dict[int, Any], list[str]]:
    """Convert ``values`` by name to values by argument number.

    A key is the name of an argument, its path in a call (``args[0]['w']``), its number, or the name of a pytree of
    arguments. For the last, the value is a pytree.

    Returns
    -------
    found : dict of int to object
    problems : list of str
        A message for each entry that names no argument, or an argument that another entry has named.
    """
    found: dict[int, Any] = {}
    problems, unknown = [], []
    numbers = {row["name"]: n for n, row in enumerate(signature.arguments) if row["name"]}
    count = len(signature.arguments)
    for key, value in values.items():
        number = numbers.get(key, -1) if isinstance(key, str) else key
        if isinstance(number, int) and 0 <= number < count:
            pairs = [(number, value)]
        elif (pytree := find_pytree_node(signature, key)) is None:
            unknown.append(key)
            continue
        else:
            try:
                pairs = _arguments_in_pytree(*pytree, key, value, where)
            except CallError as error:
                problems.append(str(error))
                continue
        for n, x in pairs:
            if n in found:
                problems.append(f"{signature.arguments[n]['name'] or n} is given twice")
            found[n] = x
    if unknown:
        problems.append(str(_unknown_names_error(signature, unknown, where)))
    return found, problems


def find_pytree_node(signature: Signature, name: Any) -> tuple[trees.Node, int] | None:
    """Return the pytree node whose name or path in a call is ``name``, and its first argument's number.

    None without one.
    """
    rows = list(pytree_nodes_of_arguments(signature))
    for kind in (0, 1):  # a parameter may have the name of a path
        for paths, node, first in rows:
            if paths[kind] == name:
                return node, first
    return None


def _arguments_in_pytree(node: trees.Node, first: int, key: Any, value: Any, where: str) -> list[tuple[int, Any]]:
    """Flatten ``value``, a pytree of the structure ``node``, to pairs of argument number and value.

    ``key`` is its name, for errors; ``first`` is the number of its first argument.
    """
    leaves: list[Any] = []
    trees.make_flattener(node, where, str(key))(value, leaves)
    return list(enumerate(leaves, first))


def _unknown_names_error(signature: Signature, unknown: Sequence[Any], where: str) -> ArgumentError:
    """Return the error for names that no argument has; it names the pytree whose children have all of them."""
    names = [row["name"] for row in signature.arguments if row["name"]]
    expected = ", ".join(names) or f"numbers below {len(signature.arguments)}"
    nodes = ((paths, node) for paths, node, _ in pytree_nodes_of_arguments(signature))
    around = [paths[0] for paths, node in nodes if set(unknown) <= set(node.get("keys") or ())]
    hint = f"pass the whole pytree by its name: {{{around[0]!r}: ...}}" if around else ""
    return ArgumentError(where, f"no argument {', '.join(map(repr, unknown))} to bind", expected=expected, hint=hint)


def place_argument(function: RuntimeFunction, number: int, value: Any, home: str) -> DeviceArray:
    """Convert a value to an array on the device where argument ``number`` is read; ``home`` is the default device."""
    argument, gpu = function.arguments[number], function.residence.gpus[number]
    found = argument.prepare(value, function.where, gpu)
    name = function.signature.arguments[number].get("device", home)
    if isinstance(found, DeviceArray):
        return found
    owner = function.residence.owner(number)
    made: DeviceArray = DeviceArray(found, name) if owner is None else owner.upload_array(found, name)
    return made
