"""What a public function says about itself: names, pytrees, donated arguments, affinities."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxlib.mlir import ir

from aotc.diagnostics import Loc
from aotc.frontend.affinity import affinity_of, stated_affinity
from aotc.frontend.argument_names import named_leaves
from aotc.frontend.mlir_types import leaf_types

_RESULT = "tf.aliasing_output"  # of a donated argument: the result that may take its memory


def entry_attrs(
    function: Any, block: Any, metadata: Mapping[str, Any], devices: Collection[str], loc: Loc
) -> dict[str, Any]:
    """Return the attributes of the public ``function`` at ``loc``, whose body is ``block``; see docs/tensor_ir.md.

    ``devices`` are those that the options name.
    """
    inputs = [leaf_types(a.type) for a in block.arguments]
    outputs = [leaf_types(t) for t in function.type.results]
    arguments = _per_leaf(dictionaries(function, "arg_attrs", len(inputs)), inputs)
    results = _per_leaf(dictionaries(function, "res_attrs", len(outputs)), outputs)
    kept = metadata.get("kept", list(range(len(arguments))))
    places, parameters = metadata.get("arg_names"), []
    if places and len(kept) == len(arguments):
        names, parameters = named_leaves(block, places, kept, metadata.get("in_tree"))
        places = [places[k] for k in kept]
    else:
        names = places = _argument_names(block)
        single = len(set(names)) == len(names) == len(block.arguments)
        parameters = names if single and not metadata.get("in_tree") else []
    trees = [_tree_of(t) for t in function.type.results if str(t) != "!stablehlo.token"]
    return {
        "arg_names": names,
        **({"arg_places": places} if places != names else {}),
        **({"parameters": parameters} if any(parameters) else {}),
        **({"doc": metadata["doc"]} if metadata.get("doc") else {}),
        "result_names": [_text(r.get("jax.result_info"), f"result{i}") for i, r in enumerate(results)],
        "in_tree": metadata.get("in_tree") or _call_tree([_tree_of(a.type) for a in block.arguments]),
        "out_tree": metadata.get("out_tree") or (trees[0] if len(trees) == 1 else _tree("tuple", trees)),
        "donated_into": {str(i): a[_RESULT].value for i, a in enumerate(arguments) if _RESULT in a},
        "donated": [i for i, a in enumerate(arguments) if _RESULT in a or "jax.buffer_donor" in a],
        "kept": kept,
        "affinity": affinities(function, devices, loc),
    }


def affinities(function: Any, devices: Collection[str], loc: Loc) -> dict[str, list[str]]:
    """Return the device that ``function`` names for each of its ``arguments`` and ``results``, or an empty string.

    An affinity of the function itself is that of all of which nothing else is said.
    """
    own = stated_affinity(function.attributes, loc)
    sides = {"arguments": ("arg_attrs", function.type.inputs), "results": ("res_attrs", function.type.results)}
    found = {}
    for side, (name, types) in sides.items():
        leaves = [leaf_types(t) for t in types]
        said = _per_leaf(dictionaries(function, name, len(leaves)), leaves)
        found[side] = [affinity_of(attributes, devices, loc) or own for attributes in said]
    return found


def _per_leaf(attributes: Sequence[dict[str, Any]], leaves: Sequence[Sequence[ir.Type]]) -> list[dict[str, Any]]:
    """Return each value's attributes once for each of its tensors."""
    return [a for a, types in zip(attributes, leaves) for _ in types]


def _call_tree(arguments: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the tree of ``(args, kwargs)`` of a call by position."""
    return _tree("tuple", [_tree("tuple", arguments), _tree("dict")])


def _tree_of(t: ir.Type) -> dict[str, Any]:
    """Return the pytree of a value of type ``t``: a tuple's, none for a token, else a leaf."""
    if isinstance(t, ir.TupleType):
        return _tree("tuple", [_tree_of(t.get_type(n)) for n in range(t.num_types)])
    return _tree("leaf" if leaf_types(t) else "none")


def _tree(kind: str, children: Sequence[Any] = ()) -> dict[str, Any]:
    return {"kind": kind, "keys": [], "children": list(children)}


def _argument_names(block: Any) -> list[str]:
    names: list[str] = []
    for i, argument in enumerate(block.arguments):
        location, count = argument.location, len(leaf_types(argument.type))
        name = location.name_str if isinstance(location, ir.NameLoc) else f"arg{i}"
        names += [f"{name}[{n}]" for n in range(count)] if isinstance(argument.type, ir.TupleType) else [name] * count
    return names


def dictionaries(function: Any, name: str, count: int) -> list[dict[str, Any]]:
    """Return the dictionary of each of ``count`` arguments (``arg_attrs``) or results (``res_attrs``)."""
    if name not in function.attributes:
        return [{} for _ in range(count)]
    return [{d[i].name: d[i].attr for i in range(len(d))} for d in function.attributes[name]]


def _text(attribute: Any, default: str) -> str:
    return attribute.value if isinstance(attribute, ir.StringAttr) and attribute.value else default
