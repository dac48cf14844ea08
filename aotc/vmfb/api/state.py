"""States: values that stay on their device between calls, such as caches and optimizer states.

A *leaf* of a state is an argument of a function together with the result that replaces it in the next call. That is the
result of the same name, or the result that the option ``state`` of the compiler named. Functions of a module share a
state by the names of leaves.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb import trees
from aotc.vmfb.api.named_values import find_pytree_node
from aotc.vmfb.api.state_call import StateCall, state_leaves
from aotc.vmfb.api.state_values import StateValues
from aotc.vmfb.arguments import type_text
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError
from aotc.vmfb.public_names import public_names
from aotc.vmfb.result_names import is_leaf_of_pytree, slash_separated_path
from aotc.vmfb.weights.tensors import read_tensors, require_tensor_types, write_tensors

if TYPE_CHECKING:
    from aotc.vmfb.api.partial import OpenFunction
    from aotc.vmfb.interfaces import RuntimeFunction, RuntimeModule

_FORMS = {"results": "{'result[0]': 'cache'}", "init": "{'cache': tree}"}


@public_names("default", "load", "reset", "save", "types", "values")
class KeptState:
    """Arguments of functions whose values are results of the previous call; see ``docs/state.md``.

    ``state(x)`` calls the default function with its other arguments, ``state.decode(x)`` another one; the call returns
    the results that are not part of the state. Concurrent calls of a state are an error.

    Parameters
    ----------
    module : LoadedModule
    names : sequence of str
        Arguments, or pytrees of them.
    results : mapping of str to str
        The argument that a result becomes, in addition to pairs in the bundle and equal names.
    init : mapping of str to pytree
        Initial values by name; zeros where there are none.
    bound : OpenFunction, optional
        A function with bound arguments, in place of the module's functions.
    """

    def __init__(
        self, module: RuntimeModule, names: Sequence[str], results: Mapping[str, str] | None,
        init: Mapping[str, Any] | None, bound: OpenFunction | None = None,
    ) -> None:  # fmt: skip
        results, init = ({} if given is None else given for given in (results, init))
        for given, what in ((results, "results"), (init, "init")):
            if not isinstance(given, Mapping):
                raise ArgumentError(module.name, f"{what} of a state is not a mapping", repr(given)[:80], _FORMS[what])
        self._module, self._names = module, tuple(names)
        functions: dict[str, RuntimeFunction] = {name: module.get_function(name) for name in module.functions}
        if bound is not None:
            functions = {bound.name: bound}
        found = {name: state_leaves(function.signature, names, results) for name, function in functions.items()}
        homes = _readers_of_state_leaves(
            module.name, functions, names, {name: takes for name, (takes, _) in found.items()}
        )
        self._held = StateValues(module.name, module.home, homes)
        self.types = _agreed_leaf_types(module.name, functions, names, found)
        self._calls = {
            name: StateCall(self._held, functions[name], takes, gives)
            for name, (takes, gives) in found.items()
            if takes or gives
        }
        self.default = bound.name if bound is not None else ""
        module.dependents.add(self)
        for name, tree in init.items():
            self._held.init |= {key: np.array(x) for key, x in self._leaves_by_name(name, tree).items()}

    # ------------------------------------------------------------ calls

    def close(self) -> None:
        """Close the state with its module: later calls fail."""
        for call in self._calls.values():
            call.close()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.default or self._module.default_name())(*args, **kwargs)

    def __getattr__(self, name: str) -> StateCall:
        calls = self.__dict__.get("_calls", {})
        if name in calls:
            return calls[name]
        raise AttributeError(f"no function {name!r} works on this state; {', '.join(calls) or 'none'} does")

    def _call(self, name: str) -> StateCall:
        if name not in self._calls:
            what = f"function {name!r} has nothing of the state"
            raise CallError(self._module.name, what, expected=", ".join(self._calls))
        return self._calls[name]

    # ------------------------------------------------------------ values

    @property
    def values(self) -> dict[str, Any]:
        """Return the state's current arrays by leaf name; the next call may overwrite them."""
        return self._held.values

    def reset(self) -> None:
        """Restore the initial values: ``init``, else zeros."""
        self._held.run_exclusively(self._held.values.clear, replaces_values=True)

    def __getitem__(self, name: str) -> Any:
        """Return a copy of the values of an argument or pytree of arguments, as a pytree."""
        known = next((f for f, _ in self._held.homes.values() if find_pytree_node(f.signature, name)), None)
        if known is not None:
            node, first = find_pytree_node(known.signature, name) or ({}, 0)
            count = trees.count_leaves(node)
            keys = [row["name"] for row in known.signature.arguments[first : first + count]]
        else:
            node, keys = {"kind": "leaf"}, [name]
        if any(key not in self.types for key in keys):
            raise CallError(self._module.name, f"the state has no {name!r}", expected=", ".join(self.types))
        arrays = self._held.run_exclusively(lambda: [self._held.copy_value(key) for key in keys])
        return trees.make_unflattener(node)(iter(arrays))

    def __setitem__(self, name: str, tree: Any) -> None:
        """Set the values of an argument or pytree of arguments from a pytree, which is copied."""
        arrays = self._leaves_by_name(name, tree)
        made = {key: self._held.place_leaf(key, np.array(x)) for key, x in arrays.items()}
        self._held.run_exclusively(lambda: self._held.values.update(made))

    def _leaves_by_name(self, name: str, tree: Any) -> dict[str, np.ndarray]:
        """Flatten a pytree that a user assigns to the state's pytree ``name``.

        Return the leaves by their full names.
        """
        for function in dict.fromkeys(f for f, _ in self._held.homes.values()):
            known = find_pytree_node(function.signature, name)
            rows = {a.name: n for n, a in enumerate(function.arguments)}
            leaves: list[Any] = []
            if known is not None:
                trees.make_flattener(known[0], function.where, name)(tree, leaves)
                numbers = range(known[1], known[1] + len(leaves))
            elif name in rows:
                leaves, numbers = [tree], range(rows[name], rows[name] + 1)
            else:
                continue
            found = {function.arguments[n].name: function.arguments[n].prepare(x, function.where)
                     for n, x in zip(numbers, leaves)}  # fmt: skip
            if all(key in self.types for key in found):
                return found
        raise CallError(self._module.name, f"the state has no {name!r}", expected=", ".join(self.types))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all values to a safetensors file, by path: ``cache/k`` for ``cache['k']``."""
        held, paths = self._held, {key: slash_separated_path(key) for key in self.types}
        write_tensors(path, held.run_exclusively(lambda: {paths[key]: held.copy_value(key) for key in paths}))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read all values from a file that :meth:`save` has written.

        Raises
        ------
        BundleError
            If the file has other values (the message lists all differences); then nothing changes.
        """
        stored = read_tensors(path, copy=True)
        types: dict[str, tuple[str, list[int]]] = {}
        for key, (dtype, dims) in self.types.items():
            shape = stored.rows.get(slash_separated_path(key), {}).get("shape", dims)
            known = [n if isinstance(d, str) else d for d, n in zip(dims, shape)]
            types[slash_separated_path(key)] = dtype, known if len(shape) == len(dims) else [0] * len(dims)
        arrays = require_tensor_types(stored, types, os.fspath(path))
        made = {key: self._held.place_leaf(key, np.array(arrays[slash_separated_path(key)])) for key in self.types}
        self._held.run_exclusively(lambda: self._held.values.update(made), replaces_values=True)

    def __repr__(self) -> str:
        rows = ", ".join(f"{key}: {type_text(*row)}" for key, row in self.types.items())
        return f"<state of {self._module.name!r}: {rows}>"


def _readers_of_state_leaves(
    where: str, functions: Mapping[str, RuntimeFunction], names: Sequence[str], takes: Mapping[str, Mapping[int, str]]
) -> dict[str, tuple[RuntimeFunction, int]]:
    """Return, for each state leaf, a function that reads it and the leaf's argument number in that function.

    Parameters
    ----------
    where : str
    functions : dict of str to RuntimeFunction
    names : sequence of str
        The arguments, or pytrees of arguments, that the user chose as the state.
    takes : dict of str to dict of int to str
        For each function the leaves that it reads, by argument number.
    """
    homes = {key: (functions[f], n) for f, rows in takes.items() for n, key in rows.items()}
    for name in names:
        if not any(is_leaf_of_pytree(key, name) for key in homes):
            known = {a["name"]: 0 for f in takes for a in functions[f].signature.arguments}
            raise ArgumentValueError(where, f"no argument is called {name!r}", expected=", ".join(known))
    if not names:
        raise ArgumentError(where, "a state without names", expected="those of arguments: module.state('cache')")
    return homes


def _agreed_leaf_types(
    where: str, functions: Mapping[str, RuntimeFunction], names: Sequence[str],
    found: Mapping[str, tuple[Mapping[int, str], Mapping[int, str]]],
) -> dict[str, tuple[str, tuple[int | str, ...]]]:  # fmt: skip
    """Return dtype and dims of each state leaf.

    Raises
    ------
    ArgumentValueError
        If functions disagree about a leaf's type, or no result replaces a leaf.
    """
    types: dict[str, tuple[str, tuple[int | str, ...]]] = {}
    problems = []
    given = {key for _, gives in found.values() for key in gives.values()}
    for f, (takes, gives) in found.items():
        signature = functions[f].signature
        problems += [f"several results of {f!r} become {key}" for key, n in Counter(gives.values()).items() if n > 1]
        rows = [(key, signature.arguments[n]) for n, key in takes.items()]
        rows += [(key, signature.results[n]) for n, key in gives.items()]
        for key, row in rows:
            own = row["dtype"], tuple(row["dims"])
            first = types.setdefault(key, own)
            if own[0] != first[0] or len(own[1]) != len(first[1]) or any(
                a != b for a, b in zip(own[1], first[1]) if isinstance(a, int) and isinstance(b, int)
            ):  # fmt: skip
                problems.append(f"{key} is {type_text(*own)} in {f!r}, and {type_text(*first)} elsewhere")
    problems += [f"no result becomes {key}" for key in types if key not in given]
    taken = {key for takes, _ in found.values() for key in takes.values()}
    problems += [f"{key} is a result, and no argument" for key in types if key not in taken]
    if problems:
        results = {r["name"]: 0 for f in found for r in functions[f].signature.results}
        pair = {next(iter(results), "result[0]"): names[0]}
        hint = f"state={pair} when compiling, or results={pair} here"
        raise CallError(where, "this is not a state: " + "; ".join(problems), ", ".join(results), hint=hint)
    return types
