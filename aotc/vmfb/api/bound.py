"""Arrays that are put on a device, and functions some of whose arguments were given once.

What depends on these alone a bundle may compute by a program of its own (``prepared`` in the manifest): it runs when
they are bound, and calls read its results.

``module`` is a :class:`aotc.vmfb.module.LoadedModule` here, which imports this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.api.named_values import by_number, on_its_device
from aotc.vmfb.api.parameters import Parameters
from aotc.vmfb.api.partial_signature import without
from aotc.vmfb.api.state import KeptState
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.interop.foreign import as_array
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.mapped_file import check_of
from aotc.vmfb.memory.pointers import address_of, aligned_bytes

if TYPE_CHECKING:
    from aotc.vmfb.arguments import Signature
    from aotc.vmfb.host.mapped_file import MappedFile
    from aotc.vmfb.submit.fence import Fence
    from aotc.vmfb.trees import Flatten
    from aotc.vmfb.vm import LoadedFunction


_NO_NUMBERS = "OSUMm"  # NumPy dtype kinds that are not numeric: objects, strings, times


def put(module: Any, x: Any, where: str) -> DeviceArray:
    """Return an array on a device; see :meth:`aotc.vmfb.module.LoadedModule.put`."""
    if not isinstance(where, str):
        raise VmError(module.name, "where is no name", repr(where), "of an argument, or of a device")
    several = "main" not in module.functions and len(module.functions) != 1
    function = None if several else module.loaded(module.default_name())
    for number, argument in enumerate(function.arguments if function and where else ()):
        if function and argument.name == where:
            return on_its_device(function, number, x, module.home)
    places = _places(module)
    name = where or next((n for n, gpu in places.items() if gpu is not None), module.home)
    if name not in places:
        raise VmError(module.name, f"no argument and no device {where!r}", expected=", ".join(places))
    try:
        found = as_array(x)
    except Exception as error:  # it runs code of the array's own class
        raise VmError(module.name, f"what is put on {name} cannot be read as an array: {error}") from error
    loaded = places[name]
    if isinstance(found, DeviceArray) and found.ordinal == (-1 if loaded is None else loaded.ordinal):
        return found
    array = np.asarray(found, order="C")
    if array.dtype.kind in _NO_NUMBERS:
        raise VmError(module.name, f"what is put on {name} is no array of numbers", type(x).__name__)
    made: DeviceArray = DeviceArray(array, name) if loaded is None else loaded.put(array, name)
    return made


def _places(module: Any) -> dict[str, Any]:
    """Return what each device of a module, by its names, has loaded; None for what is in the host's memory."""
    gpus = {loaded.ordinal: loaded for loaded in module.gpus}
    rows = {**module.devices, **{place: place for place in module.devices.values()}} or {module.home: module.home}
    kinds = {name: place.partition(":") for name, place in rows.items()}
    return {name: gpus[int(n or 0)] if kind == "cuda" else None for name, (kind, _, n) in kinds.items()}


class _State(NamedTuple):
    """What the calls of a bound function read: it is replaced as a whole.

    Attributes
    ----------
    function : LoadedFunction
        What runs.
    row : list
        Its arguments, None where one is open.
    open : list of int
        The numbers of these.
    kept : BoundArrays or None
        Those that are bound, if all of them are on a GPU.
    arrays : dict of int to DeviceArray
        What was given and is read as it is.
    check : callable or None
        Checks the mapped files that some of these are in.
    """

    function: Any
    row: list[Any]
    open: list[int]
    kept: Any
    arrays: dict[int, DeviceArray]
    check: Callable[[], None] | None = None


Made = dict[tuple[Any, int], DeviceArray]
"""What was prepared, by its number in the bundle and the GPU that has it: functions read one copy."""


def bind(module: Any, values: Mapping[str | int, Any], name: str) -> Bound:
    """Return a function with arguments that are given once; see :meth:`aotc.vmfb.module.LoadedModule.bind`."""
    name = name or module.default_name()
    return bound_to(module, name, all_held(module, module.loaded(name), values), {})


def bound_to(module: Any, name: str, held: dict[int, DeviceArray], made: Made) -> Bound:
    """Return a function with arguments that are :func:`all_held`; ``made`` has what others prepared of the same."""
    return Bound(module, name, _state(module, name, held, made), frozenset(held))


def all_held(module: Any, function: LoadedFunction, values: Mapping[str | int, Any]) -> dict[int, DeviceArray]:
    """Return what is bound, each where the function reads it; refuse all that does not fit at once."""
    if not isinstance(values, Mapping):
        raise VmError(function.where, "what is bound is no mapping", type(values).__name__, "{'name': array}")
    found, problems = by_number(function.signature, values, function.where)
    held: dict[int, DeviceArray] = {}
    for number, value in found.items():
        if function.arguments[number].donated:
            what = f"{function.arguments[number].label} is donated: each call takes it"
            problems.append(str(VmError(function.where, what, hint="give it to each call")))
            continue
        try:
            held[number] = on_its_device(function, number, value, module.home)
        except VmError as error:
            problems.append(str(error))
    weights = module.prepared.get(function.name, {}).get("weights", ())
    missing = [function.arguments[n].name or str(n) for n in weights if n not in found]
    if missing and any(n in found for n in weights):
        what = "what was compiled to be bound is bound together"
        problems.append(str(VmError(function.where, what, f"nothing for {', '.join(missing)}")))
    if problems:
        raise VmError("", "\n".join(problems))
    return held


def _state(module: Any, name: str, held: Mapping[int, DeviceArray], made: Made) -> _State:
    """Return what calls read: what is prepared of the arguments, or these as they are."""
    row = module.prepared.get(name)
    if row is None or not all(n in held for n in row["weights"]):
        count = len(module.loaded(name).arguments)
        return _state_of(module, name, {n: held[n] for n in range(count) if n in held}, dict(held))
    takes = row["takes"]
    read = {n: held[n] for n in takes if n in held}
    every = read | dict(enumerate(_prepared(module, row, held, made), len(module.loaded(name).arguments)))
    bound = {place: every[n] for place, n in enumerate(takes) if n in every}
    return _state_of(module, row["call"]["name"], bound, read)


def _prepared(
    module: Any, row: Mapping[str, Any], held: Mapping[int, DeviceArray], made: Made
) -> list[DeviceArray]:
    """Return what calls read that is computed of arguments: what is ``made``, or what the program computes for all."""
    function = module.loaded(row["prepare"]["name"])
    values = [entry.get("value", (function.name, n)) for n, entry in enumerate(row["prepare"]["results"])]
    keys = list(zip(values, function.residence.result_gpus, strict=True))
    if not all(key in made for key in keys):
        made.update({**dict(zip(keys, _computed(module, row, function, held), strict=True)), **made})
    return [made[key] for key in keys]


def _computed(
    module: Any, row: Mapping[str, Any], function: LoadedFunction, held: Mapping[int, DeviceArray]
) -> list[DeviceArray]:
    """Run the program that computes what calls read of arguments, where it lies."""
    values = [held[n] if held[n].ordinal >= 0 else held[n].numpy() for n in row["weights"]]
    if any(gpu >= 0 for gpu in function.residence.result_gpus):
        found: list[DeviceArray] = function.run(values, results="device")
        return [x.wait() for x in found]
    rows = zip(row["prepare"]["results"], function.result_dtypes)
    out = [_aligned(tuple(entry["dims"]), dtype) for entry, dtype in rows]
    return [DeviceArray(x, module.home) for x in function.run(values, out)]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return new memory where vectors begin at whole lines of the cache, as constants do."""
    size = prod(shape) * dtype.itemsize
    memory, first = aligned_bytes(size, ALIGNMENT)
    begin = first - address_of(memory)
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _state_of(
    module: Any, name: str, bound: Mapping[int, DeviceArray], arrays: dict[int, DeviceArray]
) -> _State:
    function = module.loaded(name)
    count = len(function.arguments)
    row: list[Any] = [None] * count
    for number, x in bound.items():
        # On the host the plain arrays: the way of a call that is made of those alone is the quickest.
        row[number] = x if x.ordinal >= 0 else x.numpy()
    on_gpu = function.resident is not None and all(x.kind is not None for x in bound.values())
    kept = function.resident.keep(bound, count) if on_gpu else None
    return _State(function, row, [n for n in range(count) if n not in bound], kept, arrays)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


class Bound:
    """A function of a module, some of whose arguments were given once; calls give the others.

    Attributes
    ----------
    name : str
        Of the function.
    bound : frozenset of int
        The numbers of the arguments that were given.
    """

    def __init__(self, module: Any, name: str, state: _State, bound: frozenset[int]) -> None:
        self._module, self.name, self._state = module, name, state
        self.bound = bound
        self._entry = module.functions.get(name)
        self._quick = -1  # so many arguments of a call are the arrays in their order

    def state(
        self, *names: str, results: Mapping[str, str] | None = None, init: Mapping[str, Any] | None = None
    ) -> KeptState:
        """Return a state of this function, as :meth:`aotc.vmfb.module.LoadedModule.state`."""
        return KeptState(self._module, names, results, init, self)

    def take(self, other: Bound) -> None:
        """Read what another function, with the same arguments bound, reads."""
        self._state = other._state

    def watch(self, files: Sequence[MappedFile]) -> None:
        """Check these files before calls: what is bound is in them."""
        self._state = self._state._replace(check=check_of(files) if files else None)

    def filled(self, arrays: Sequence[Any]) -> tuple[LoadedFunction, list[Any]]:
        """Return what runs now, and its arguments: what is bound, and ``arrays`` for the others."""
        state = self._state
        return state.function, self._all(state, arrays)

    @property
    def arrays(self) -> dict[int, DeviceArray]:
        """Return what was given and calls read as it is, by the numbers of the arguments."""
        return dict(self._state.arrays)

    def update(self, values: Mapping[str | int, Any]) -> None:
        """Take other values for all that was bound. A call reads the old ones or the new ones, never some of both.

        Calls that have begun, and submissions that were made, read the old ones. What the program computes of the
        values is computed first: until then calls go on with what there was, and both are in memory.

        Raises
        ------
        VmError
            If these are not the arguments that were bound, or one does not fit; then nothing changes.
        """
        function = self._module.loaded(self.name)
        held = all_held(self._module, function, values)
        if held.keys() != self.bound:
            names = [", ".join(function.arguments[n].label for n in sorted(numbers)) for numbers in (held, self.bound)]
            raise VmError(function.where, "an update gives all that was bound, and nothing else", *names)
        self._state = _state(self._module, self.name, held, {})

    def _all(self, state: _State, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call that is given the rest.

        Raises
        ------
        VmError
            If these are not as many as are left.
        BundleError
            If a file that something bound is in was overwritten.
        """
        if len(arrays) != len(state.open):
            function = state.function
            names = ", ".join(str(function.arguments[n]) for n in state.open)
            raise VmError(function.where, "wrong number of arguments", len(arrays), f"{len(state.open)}: {names}")
        if state.check is not None:
            state.check()
        row = state.row.copy()
        for number, x in zip(state.open, arrays):
            row[number] = x
        return row

    def invoke(self, *arrays: Any, **options: Any) -> list[Any]:
        """Run the function on flat arrays; options as of :meth:`aotc.vmfb.module.LoadedModule.invoke`."""
        state = self._state
        if state.kept is None and not options:
            found: list[Any] = state.function.call(self._all(state, arrays))
            return found
        if state.kept is None:
            return self._module.invoke(state.function.name, *self._all(state, arrays), **options)
        return self._invoke(state, arrays, **options)

    def _invoke(
        self, state: _State, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: Any = False,
        trace: Any = "", results: str = "",
    ) -> list[Any]:  # fmt: skip
        """Run the function on the GPU, where what is bound is, with the module's checks of what is asked."""
        name, options = state.function.name, {"out": out, "donate": donate, "results": results}
        if trace:
            return list(self._module.invoke(name, *self._all(state, arrays), trace=trace, **options))
        return self._shortly(
            state, arrays, out, donate, results, lambda values: self._module.invoke(name, *values, **options)
        )

    def _shortly(
        self, state: _State, arrays: Sequence[Any], out: Sequence[Any] | None, donate: Any, results: str,
        whole: Callable[[list[Any]], list[Any]],
    ) -> list[Any]:  # fmt: skip
        """Make a call by the short way, where nothing of what is bound is looked at; else the ``whole`` one, once."""
        resident = state.function.resident
        found: list[Any] | None = resident.call(arrays, out, donate, results, state.kept)
        if found is not None:
            return found
        values = self._all(state, arrays)
        kinds = [getattr(x, "kind", None) for x in values]  # before the call, which may take donated ones
        made = whole(values)
        if None not in kinds:
            given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
            resident.bind(state.kept, kinds, given, donate, results)
        return made

    def call(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.call` does, on what is open."""
        state = self._state
        if state.kept is not None:
            return self.run(arrays)
        found: list[Any] = state.function.call(self._all(state, arrays))
        return found

    def run(
        self, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.run` does, on what is open."""
        state = self._state
        if state.kept is None:
            made: list[Any] = state.function.run(self._all(state, arrays), out, donate, results)
            return made
        return self._shortly(
            state, arrays, out, donate, results, lambda values: state.function.run(values, out, donate, results)
        )

    def submit(self, *arrays: Any, **options: Any) -> Fence:
        """Run the function later; options as of :meth:`aotc.vmfb.module.LoadedModule.submit`."""
        state = self._state
        return self._module.submit(state.function.name, *self._all(state, arrays), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it with the rest of what the function takes, by position or by name, or with flat arrays.

        It returns what :meth:`LoadedModule.__call__` does.
        """
        if kwargs or len(args) != self._quick:
            args = self._leaves(args, kwargs)
        return self._entry.rebuild(self.invoke(*args))

    @cached_property
    def signature(self) -> Signature:
        """Return what is left to give."""
        return without(self._module.loaded(self.name).signature, self.bound, ())

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.signature, self._module.loaded(self.name).where)

    @cached_property
    def _flatten(self) -> Flatten:
        return self._parameters.flattener()

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the arrays of a call: those that it gives, or the leaves of its trees."""
        known, count = self._parameters, len(self._state.open)
        if known.flat and known.quick == count:
            self._quick = count
        if not kwargs and len(args) == count and (known.flat or all(map(_is_array, args))):
            return args
        leaves: list[Any] = []
        self._flatten(known.arranged(args, kwargs), leaves)
        return tuple(leaves)

    def __reduce__(self) -> Any:
        raise TypeError("a function with bound arguments cannot be pickled: send the module, and bind it there")

    def __repr__(self) -> str:
        function = self._module.loaded(self.name)
        names = ", ".join(function.arguments[n].label for n in sorted(self.bound))
        return f"<{function.signature!r} with {names} bound>"
