"""Values that stay on their device from call to call: caches, states of optimisers.

A *leaf* of a state is an argument of a function, and the result that takes its place for the next call: one of the same
name, or one that ``state`` named when the model was compiled. Functions of a module share a state by these names.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aotc.vmfb import trees
from aotc.vmfb.arguments import Argument, type_text
from aotc.vmfb.calls.given import node_called, on_its_device
from aotc.vmfb.calls.result_names import is_part, path_of
from aotc.vmfb.calls.state_call import StateCall, leaves_of
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.errors import DeadlineExceeded, FenceCancelled, VmError
from aotc.vmfb.process.locks import new_lock
from aotc.vmfb.weights.tensors import checked_tensors, read_tensors, write_tensors


class KeptState:
    """Arguments of functions whose values are the results of the call before; see ``docs/state.md``.

    ``state(x)`` calls the default function with its other arguments, ``state.decode(x)`` another one; what is returned
    is what the function gives besides the state. One call at a time: another one meanwhile is an error.

    Parameters
    ----------
    module : LoadedModule
    names : sequence of str
        Arguments, or trees of them.
    results : mapping of str to str
        The argument that a result becomes, besides what the bundle says and equal names.
    init : mapping of str to pytree
        What the state begins with, by its names; zeros where nothing is given.
    bound : Bound, optional
        A function with weights that are given already, in place of the module's.
    """

    def __init__(
        self, module: Any, names: Sequence[str], results: Mapping[str, str], init: Mapping[str, Any],
        bound: Any = None,
    ) -> None:  # fmt: skip
        self._module, self._names = module, tuple(names)
        self._lock = new_lock()
        self._lost: BaseException | None = None
        chosen = [bound.name] if bound is not None else list(module.functions)
        found = {name: leaves_of(module.functions[name].signature, names, results) for name in chosen}
        self._homes = _homes(module, names, {name: takes for name, (takes, _) in found.items()})
        self.types = _agreed(module, names, found)
        self._calls = {
            name: StateCall(self, module.loaded(name), takes, gives, bound)
            for name, (takes, gives) in found.items()
            if takes or gives
        }
        self.default = bound.name if bound is not None else ""
        self.values: dict[str, Any] = {}
        self._init: dict[str, np.ndarray] = {}
        for name, tree in init.items():
            self._init |= {key: np.array(x) for key, x in self._taken_apart(name, tree).items()}

    # ------------------------------------------------------------ calls

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
            raise VmError(self._module.name, what, expected=", ".join(self._calls))
        return self._calls[name]

    def begin(self, where: str) -> None:
        """Begin a call.

        Raises
        ------
        VmError
            If another one is under way, or the last one that failed had begun to overwrite the values.
        """
        if not self._lock.acquire(blocking=False):
            hint = "wait for it; a state for each sequence: module.state(...)"
            raise VmError(where, "another call of the same state is under way", hint=hint)
        if self._lost is not None:
            self._lock.release()
            first = str(self._lost).partition("\n")[0]
            what = f"the state is lost: a call that overwrites it failed ({type(self._lost).__name__}: {first})"
            raise VmError(where, what, hint="state.reset(), or state.load(path)")

    def end(self, made: Mapping[str, Any], error: BaseException | None, overwrites: bool) -> None:
        """End a call: with new values, or with what it failed with, if it ``overwrites`` the old ones."""
        if error is None:
            self.values |= made
        else:
            stopped = not isinstance(error, VmError) or isinstance(error, FenceCancelled | DeadlineExceeded)
            gone = any(isinstance(x, DeviceArray) and x.donated for x in self.values.values())
            self._lost = error if gone or (overwrites and stopped) else None
        self._lock.release()

    def value(self, key: str, argument: Argument, where: str) -> Any:
        """Return the value of a leaf for an argument; what it begins with if there was no call."""
        found = self.values.get(key)
        if found is None:
            found = self.values[key] = self._first(key, argument, where)
        return found

    def _first(self, key: str, argument: Argument, where: str) -> Any:
        given = self._init.get(key)
        if given is not None:
            return self._placed(key, given.copy())
        if not argument.static:
            expected = f"state[{key!r}] = ..., or a call that gives it"
            what = f"the state has no {key} yet, and its size is not known: {argument}"
            raise VmError(where, what, expected=expected)
        return self._placed(key, np.zeros([int(d) for d in argument.dims], argument.dtype))

    def _placed(self, key: str, array: np.ndarray) -> Any:
        """Return an array where the function that takes it reads it; plain arrays on the host."""
        function, number = self._homes[key]
        found = on_its_device(function, number, array, self._module.home)
        return found if found.ordinal >= 0 else found.numpy()

    # ------------------------------------------------------------ values

    def _exclusively(self, work: Callable[[], Any], lost: bool = False) -> Any:
        if lost:
            self._lost = None
        self.begin(self._module.name)
        try:
            return work()
        finally:
            self._lock.release()

    def reset(self) -> None:
        """Begin again: with what was given as ``init``, else with zeros."""
        self._exclusively(self.values.clear, lost=True)

    def __getitem__(self, name: str) -> Any:
        """Return a copy of the values of a name, a pytree as the function takes it."""
        known = next((f for f, _ in self._homes.values() if node_called(f.signature, name)), None)
        if known is not None:
            node, first = node_called(known.signature, name) or ({}, 0)
            count = trees.count_leaves(node)
            keys = [row["name"] for row in known.signature.arguments[first : first + count]]
        else:
            node, keys = {"kind": "leaf"}, [name]
        if any(key not in self.types for key in keys):
            raise VmError(self._module.name, f"the state has no {name!r}", expected=", ".join(self.types))
        arrays = self._exclusively(lambda: [self._copy(key) for key in keys])
        return trees.unflattener(node)(iter(arrays))

    def _copy(self, key: str) -> np.ndarray:
        function, number = self._homes[key]
        found = self.value(key, function.arguments[number], function.where)
        return found.numpy().copy() if isinstance(found, DeviceArray) else np.array(found)

    def __setitem__(self, name: str, tree: Any) -> None:
        """Set the values of a name, a pytree as the function takes it; they are copied."""
        arrays = self._taken_apart(name, tree)
        self._exclusively(lambda: self.values.update({k: self._placed(k, np.array(x)) for k, x in arrays.items()}))

    def _taken_apart(self, name: str, tree: Any) -> dict[str, np.ndarray]:
        """Return the arrays of a pytree by their leaves, checked."""
        for function in dict.fromkeys(f for f, _ in self._homes.values()):
            known = node_called(function.signature, name)
            rows = {a.name: n for n, a in enumerate(function.arguments)}
            leaves: list[Any] = []
            if known is not None:
                trees.flattener(known[0], function.where, name)(tree, leaves)
                numbers = range(known[1], known[1] + len(leaves))
            elif name in rows:
                leaves, numbers = [tree], range(rows[name], rows[name] + 1)
            else:
                continue
            found = {function.arguments[n].name: function.arguments[n].prepare(x, function.where)
                     for n, x in zip(numbers, leaves)}  # fmt: skip
            if all(key in self.types for key in found):
                return found
        raise VmError(self._module.name, f"the state has no {name!r}", expected=", ".join(self.types))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all values to a file of safetensors, by their paths: ``cache/k`` for ``cache['k']``."""
        write_tensors(path, self._exclusively(lambda: {path_of(key): self._copy(key) for key in self.types}))

    def load(self, path: str | os.PathLike[str]) -> None:
        """Read all values from a file that :meth:`save` wrote.

        Raises
        ------
        BundleError
            If it holds others: all that differs is listed, and nothing is changed.
        """
        stored = read_tensors(path, copy=True)
        types: dict[str, tuple[str, list[int]]] = {}
        for key, (dtype, dims) in self.types.items():
            shape = stored.rows.get(path_of(key), {}).get("shape", dims)
            known = [n if isinstance(d, str) else d for d, n in zip(dims, shape)]
            types[path_of(key)] = dtype, known if len(shape) == len(dims) else [0] * len(dims)
        arrays = checked_tensors(stored, types, os.fspath(path))
        made = {key: self._placed(key, np.array(arrays[path_of(key)])) for key in self.types}
        self._exclusively(lambda: self.values.update(made), lost=True)

    def __repr__(self) -> str:
        rows = ", ".join(f"{key}: {type_text(*row)}" for key, row in self.types.items())
        return f"<state of {self._module.name!r}: {rows}>"


def _homes(module: Any, names: Sequence[str], takes: Mapping[str, Mapping[int, str]]) -> dict[str, tuple[Any, int]]:
    """Return for each leaf a function that takes it, and the argument's number."""
    homes = {key: (module.loaded(f), n) for f, rows in takes.items() for n, key in rows.items()}
    for name in names:
        if not any(is_part(key, name) for key in homes):
            known = {a["name"]: 0 for f in takes for a in module.functions[f].signature.arguments}
            raise VmError(module.name, f"no argument is called {name!r}", expected=", ".join(known))
    if not names:
        raise VmError(module.name, "a state without names", expected="those of arguments: module.state('cache')")
    return homes


def _agreed(
    module: Any, names: Sequence[str], found: Mapping[str, tuple[Mapping[int, str], Mapping[int, str]]]
) -> dict[str, tuple[str, tuple[int | str, ...]]]:
    """Return dtype and dims of each leaf, which functions agree on, and refuse those that no function gives."""
    types: dict[str, tuple[str, tuple[int | str, ...]]] = {}
    problems = []
    given = {key for _, gives in found.values() for key in gives.values()}
    for f, (takes, gives) in found.items():
        signature = module.functions[f].signature
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
        results = {r["name"]: 0 for f in found for r in module.functions[f].signature.results}
        pair = {next(iter(results), "result[0]"): names[0]}
        hint = f"state={pair} when compiling, or results={pair} here"
        raise VmError(module.name, "this is no state: " + "; ".join(problems), ", ".join(results), hint=hint)
    return types
