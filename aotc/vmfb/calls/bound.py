"""Arrays that are put on a device, and functions some of whose arguments were given once.

``module`` is a :class:`aotc.vmfb.module.LoadedModule` here, which imports this file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.interop.foreign import as_array
from aotc.vmfb.errors import VmError

if TYPE_CHECKING:
    from aotc.vmfb.schedule.fence import Fence
    from aotc.vmfb.vm import LoadedFunction


def put(module: Any, x: Any, where: str) -> DeviceArray:
    """Return an array on a device; see :meth:`aotc.vmfb.module.LoadedModule.put`."""
    if not isinstance(where, str):
        raise VmError(module.name, "where is no name", repr(where), "of an argument, or of a device")
    several = "main" not in module.functions and len(module.functions) != 1
    function = None if several else module.loaded(module.default_name())
    for number, argument in enumerate(function.arguments if function and where else ()):
        if function and argument.name == where:
            return _held(function, number, x, module.home)
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
    made: DeviceArray = DeviceArray(array, name) if loaded is None else loaded.put(array, name)
    return made


def _places(module: Any) -> dict[str, Any]:
    """Return what each device of a module, by its names, has loaded; None for what is in the host's memory."""
    gpus = {loaded.ordinal: loaded for loaded in module.gpus}
    rows = {**module.devices, **{place: place for place in module.devices.values()}} or {module.home: module.home}
    kinds = {name: place.partition(":") for name, place in rows.items()}
    return {name: gpus[int(n or 0)] if kind == "cuda" else None for name, (kind, _, n) in kinds.items()}


def _held(function: LoadedFunction, number: int, value: Any, home: str) -> DeviceArray:
    """Return a value as an array for an argument, on the argument's device."""
    argument, gpu = function.arguments[number], function.residence.gpus[number]
    found = argument.prepare(value, function.where, gpu)
    name = function.signature.arguments[number].get("device", home)
    if isinstance(found, DeviceArray):
        return found
    owner = function.residence.owner(number)
    made: DeviceArray = DeviceArray(found, name) if owner is None else owner.put(found, name)
    return made


def bind(module: Any, values: Mapping[str | int, Any], name: str) -> Bound:
    """Return a function with arguments that are given once; see :meth:`aotc.vmfb.module.LoadedModule.bind`."""
    name = name or module.default_name()
    function = module.loaded(name)
    if not isinstance(values, Mapping):
        raise VmError(function.where, "what is bound is no mapping", type(values).__name__, "{'name': array}")
    numbers = {argument.name: number for number, argument in enumerate(function.arguments) if argument.name}
    kept: dict[int, DeviceArray] = {}
    for key, value in values.items():
        number = numbers.get(key, -1) if isinstance(key, str) else key
        if not isinstance(number, int) or not 0 <= number < len(function.arguments):
            expected = ", ".join(numbers) or f"numbers below {len(function.arguments)}"
            raise VmError(function.where, f"no argument {key!r} to bind", expected=expected)
        if function.arguments[number].donated:
            what = f"{function.arguments[number].label} is donated: each call takes it"
            raise VmError(function.where, what, hint="give it to each call")
        kept[number] = _held(function, number, value, module.home)
    return Bound(module, name, kept, len(function.arguments))


class Bound:
    """A function of a module, some of whose arguments were given once; the others are given in their order.

    Attributes
    ----------
    arrays : dict of int to DeviceArray
        What was given, by the numbers of the arguments.
    """

    def __init__(self, module: Any, name: str, arrays: Mapping[int, DeviceArray], count: int) -> None:
        self._module, self._name, self.arrays = module, name, dict(arrays)
        # On the host the plain arrays: the way of a call that is made of those alone is the quickest.
        self._row: list[Any] = [None] * count
        for number, x in arrays.items():
            self._row[number] = x if x.ordinal >= 0 else x.numpy()
        self._open = [number for number in range(count) if number not in self.arrays]
        self._resident = module.loaded(name).resident
        on_gpu = self._resident is not None and all(x.kind is not None for x in arrays.values())
        self._kept = self._resident.keep(arrays, count) if on_gpu else None

    def all_arguments(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the arguments of a call that is given the rest.

        Raises
        ------
        VmError
            If these are not as many as are left.
        """
        if len(arrays) != len(self._open):
            function = self._module.loaded(self._name)
            names = ", ".join(str(function.arguments[n]) for n in self._open)
            raise VmError(function.where, "wrong number of arguments", len(arrays), f"{len(self._open)}: {names}")
        row = self._row.copy()
        for number, x in zip(self._open, arrays):
            row[number] = x
        return row

    def invoke(self, *arrays: Any, **options: Any) -> list[Any]:
        """Run the function on flat arrays; options as of :meth:`aotc.vmfb.module.LoadedModule.invoke`."""
        if self._kept is None:
            return self._module.invoke(self._name, *self.all_arguments(arrays), **options)
        return self._invoke(arrays, **options)

    def _invoke(
        self, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: Any = False, trace: Any = "",
        results: str = "",
    ) -> list[Any]:  # fmt: skip
        """Run the function on the GPU, where what is bound is: nothing of that is looked at in each call."""
        if not trace:
            found: list[Any] | None = self._resident.call(arrays, out, donate, results, self._kept)
            if found is not None:
                return found
        values = self.all_arguments(arrays)
        kinds = [getattr(x, "kind", None) for x in values]  # before the call, which may take donated ones
        made = self._module.invoke(self._name, *values, out=out, donate=donate, trace=trace, results=results)
        if None not in kinds:
            given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
            self._resident.bind(self._kept, kinds, given, donate, results)
        return made

    def submit(self, *arrays: Any, **options: Any) -> Fence:
        """Run the function later; options as of :meth:`aotc.vmfb.module.LoadedModule.submit`."""
        return self._module.submit(self._name, *self.all_arguments(arrays), **options)

    def __call__(self, *arrays: Any) -> Any:
        """Run the function on flat arrays; return what :meth:`LoadedModule.__call__` does."""
        return self._module.functions[self._name].rebuild(self.invoke(*arrays))

    def __repr__(self) -> str:
        function = self._module.loaded(self._name)
        return f"<{function.signature!r} with {', '.join(function.arguments[n].label for n in self.arrays)} bound>"
