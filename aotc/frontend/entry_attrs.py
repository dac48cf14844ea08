"""Attributes of a public function: names, pytrees, donated arguments, affinities.

A *place* is the path of a leaf in the call's pytree: ``args[0]['w']``. The leaf's *name* begins with the name of the
Python parameter instead: ``params['w']``. JAX stores names in the locations of arguments, which exports, blobs and
portable artifacts contain. In a model without locations, the places are used as names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import Loc
from aotc.frontend.affinity import affinity_of, stated_affinity
from aotc.frontend.mlir_types import discardable_integer, is_token, leaf_types
from aotc.vmfb.ranks.layout import layout_of, mesh_of

_HEAD = re.compile(r"args\[(\d+)\]|kwargs\['\w+'\]")
_WRAPPED = "_wrapped_jax_export_main"  # jax.export's name of a function with symbolic dims, which runs after its checks
_RESULT = "tf.aliasing_output"  # of a donated argument: the result that may reuse its memory


def entry_attrs(
    function: Any, block: Any, metadata: Mapping[str, Any], devices: Collection[str], loc: Loc
) -> dict[str, Any]:
    """Return the attributes of the public ``function`` at ``loc``, with the body ``block``; see docs/tensor_ir.md.

    ``devices`` are the option's device names.
    """
    inputs = [leaf_types(a.type) for a in block.arguments]
    outputs = [leaf_types(t) for t in function.type.results]
    arguments = _attributes_per_leaf(attribute_dictionaries(function, "arg_attrs", len(inputs)), inputs)
    results = _attributes_per_leaf(attribute_dictionaries(function, "res_attrs", len(outputs)), outputs)
    leaf_numbers = metadata.get("kept", list(range(len(arguments))))
    places = metadata.get("arg_names")
    parameters: list[str] = []
    if places and len(leaf_numbers) == len(arguments):
        pairs = zip(argument_locations(function, block), inputs, strict=True)
        locations = [location for location, leaves in pairs for _ in leaves]  # a token has none
        names, parameters = _argument_and_parameter_names(locations, places, leaf_numbers, metadata.get("in_tree"))
        places = [places[k] for k in leaf_numbers]
    else:
        names = places = _argument_names(block)
        single = len(set(names)) == len(names) == sum(not is_token(t) for t in function.type.inputs)
        parameters = names if single and not metadata.get("in_tree") else []
    in_trees, trees = (
        [_pytree_of_type(t) for t in types if not is_token(t)]
        for types in (function.type.inputs, function.type.results)
    )
    return {
        "arg_names": names,
        **({"arg_places": places} if places != names else {}),
        **({"parameters": parameters} if any(parameters) else {}),
        **({"doc": metadata["doc"]} if metadata.get("doc") else {}),
        **({"ranks": ranks_attr(metadata["ranks"])} if metadata.get("ranks") else {}),
        **({"bucket": metadata["bucket"]} if metadata.get("bucket") else {}),
        "result_names": [_string_attribute(r.get("jax.result_info"), f"result{i}") for i, r in enumerate(results)],
        "in_tree": metadata.get("in_tree") or _call_tree(in_trees),
        "out_tree": metadata.get("out_tree") or (trees[0] if len(trees) == 1 else _pytree_node("tuple", trees)),
        "donated_into": {
            str(i): discardable_integer(a, _RESULT, 0, loc) for i, a in enumerate(arguments) if _RESULT in a
        },
        "donated": [i for i, a in enumerate(arguments) if _RESULT in a or "jax.buffer_donor" in a],
        "kept": leaf_numbers,
        "affinity": argument_affinities(function, devices, loc),
    }


def ranks_attr(entry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attribute ``ranks`` of a function: the mesh, and the layout of each argument and result."""
    layouts = {key: tuple(layout_of(row) for row in entry[key]) for key in ("arguments", "results")}
    return {"mesh": mesh_of(entry["mesh"]).entry(), **layouts}


def _argument_and_parameter_names(
    locations: Sequence[Any], places: Sequence[str], leaf_numbers: Sequence[int], in_tree: Mapping[str, Any] | None
) -> tuple[list[str], list[str]]:
    """Return the names of all array arguments, and of the positional Python parameters.

    ``locations`` are MLIR's for the arguments. ``places`` has the place of each leaf of the call, and ``leaf_numbers``
    the numbers of the leaves that are arguments. The place replaces an unknown name.
    """
    names = [_leaf_name_in_location(location, places[k]) for location, k in zip(locations, leaf_numbers, strict=True)]
    if len(set(names)) < len(names):
        names = [places[k] for k in leaf_numbers]
    children = in_tree["children"][0]["children"] if in_tree else ()
    parameters = [""] * len(children)
    for name, k in zip(names, leaf_numbers):
        head = _HEAD.match(places[k])
        if head and head[1] and name != places[k]:
            parameters[int(head[1])] = name[: len(name) - len(places[k]) + head.end()]
    return names, parameters


def _leaf_name_in_location(location: Any, place: str) -> str:
    """Return the name of a leaf from its MLIR location, or its ``place`` if the location has no such name.

    The name must continue like ``place`` after the parameter.
    """
    head = _HEAD.match(place)
    if head is None or not isinstance(location, ir.NameLoc):
        return place
    name, rest = location.name_str, place[head.end() :]
    return name if name.endswith(rest) and len(name) > len(rest) else place


def argument_locations(function: Any, block: Any) -> list[Any]:
    """Return the MLIR locations of a function's arguments.

    A wrapper that only calls the exported function has none; then the locations of the exported function count.
    """
    locations = [argument.location for argument in block.arguments]
    callees = [op.attributes["callee"].value for op in block.operations if op.operation.name == "func.call"]
    wrapped = [callee for callee in callees if callee.endswith(_WRAPPED)]
    if not wrapped or any(isinstance(location, ir.NameLoc) for location in locations):
        return locations
    every = function.operation.parent.regions[0].blocks[0].operations
    own = next(op for op in every if op.operation.attributes["sym_name"].value == wrapped[0])
    inner = [argument.location for argument in own.regions[0].blocks[0].arguments]
    return inner[len(inner) - len(locations) :] if len(inner) >= len(locations) else locations


def argument_affinities(function: Any, devices: Collection[str], loc: Loc) -> dict[str, list[str]]:
    """Return the device names of the ``arguments`` and ``results`` of ``function``, with "" for no affinity.

    An affinity of the function itself is the default.
    """
    own = stated_affinity(function.attributes, loc)
    sides = {"arguments": ("arg_attrs", function.type.inputs), "results": ("res_attrs", function.type.results)}
    affinities = {}
    for side, (name, types) in sides.items():
        leaves = [leaf_types(t) for t in types]
        per_leaf = _attributes_per_leaf(attribute_dictionaries(function, name, len(leaves)), leaves)
        affinities[side] = [affinity_of(attributes, devices, loc) or own for attributes in per_leaf]
    return affinities


def _attributes_per_leaf(
    attributes: Sequence[dict[str, Any]], leaves: Sequence[Sequence[ir.Type]]
) -> list[dict[str, Any]]:
    """Repeat the attributes of each MLIR value for each tensor in it: a tuple has several."""
    return [a for a, types in zip(attributes, leaves) for _ in types]


def _call_tree(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the pytree of ``(args, kwargs)`` for a call with positional arguments only."""
    return _pytree_node("tuple", [_pytree_node("tuple", arguments), _pytree_node("dict")])


def _pytree_of_type(t: ir.Type) -> dict[str, Any]:
    """Return the pytree of a value of type ``t``: a tuple's children, None for a token, else a leaf."""
    if isinstance(t, ir.TupleType):
        return _pytree_node("tuple", [_pytree_of_type(t.get_type(n)) for n in range(t.num_types)])
    return _pytree_node("leaf" if leaf_types(t) else "none")


def _pytree_node(kind: str, children: Sequence[Any] = ()) -> dict[str, Any]:
    return {"kind": kind, "keys": [], "children": list(children)}


def _argument_names(block: Any) -> list[str]:
    """Return a name for each leaf of the arguments, from their locations where these have one."""
    names: list[str] = []
    for i, argument in enumerate(block.arguments):
        location, count = argument.location, len(leaf_types(argument.type))
        name = location.name_str if isinstance(location, ir.NameLoc) else f"arg{i}"
        names += [f"{name}[{n}]" for n in range(count)] if isinstance(argument.type, ir.TupleType) else [name] * count
    return names


def attribute_dictionaries(function: Any, name: str, count: int) -> list[dict[str, Any]]:
    """Return the attributes of each of ``count`` arguments (``name`` is ``arg_attrs``) or results (``res_attrs``)."""
    if name not in function.attributes:
        return [{} for _ in range(count)]
    return [{d[i].name: d[i].attr for i in range(len(d))} for d in function.attributes[name]]


def _string_attribute(attribute: Any, default: str) -> str:
    return attribute.value if isinstance(attribute, ir.StringAttr) and attribute.value else default
