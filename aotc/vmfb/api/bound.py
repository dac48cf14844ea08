"""Arrays that users place on devices, and functions with bound arguments that are called with pytrees."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aotc.vmfb.api.buckets import bound_with_buckets
from aotc.vmfb.api.entry import ClosedModule
from aotc.vmfb.api.named_values import merge_keyword_values, place_argument
from aotc.vmfb.api.parameters import Parameters
from aotc.vmfb.api.partial import OpenFunction, place_bound_values
from aotc.vmfb.api.state import KeptState
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.cuda.foreign import as_device_or_host_array
from aotc.vmfb.errors import ArgumentError, ArgumentValueError, CallError
from aotc.vmfb.public_names import public_names

if TYPE_CHECKING:
    from aotc.vmfb.arguments import Signature
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.interfaces import FunctionEntry, RuntimeModule
    from aotc.vmfb.submit.fence import Fence
    from aotc.vmfb.trees import Flatten


_NO_NUMBERS = "OSUMm"  # NumPy dtype kinds that are not numeric: objects, strings, times


def put_on_device(module: RuntimeModule, x: Any, where: str) -> DeviceArray:
    """Place an array on a device; see :meth:`aotc.vmfb.module.LoadedModule.put`."""
    if not isinstance(where, str):
        raise ArgumentError(module.name, "where is not a name", repr(where), "of an argument, or of a device")
    several = "main" not in module.functions and len(module.functions) != 1
    function = None if several else module.get_function(module.default_name())
    for number, argument in enumerate(function.arguments if function and where else ()):
        if function and argument.name == where:
            return place_argument(function, number, x, module.home)
    places = _modules_by_device(module)
    name = where or next((n for n, gpu in places.items() if gpu is not None), module.home)
    if name not in places:
        raise ArgumentValueError(module.name, f"no argument and no device {where!r}", expected=", ".join(places))
    try:
        found = as_device_or_host_array(x)
    except Exception as error:  # it runs code of the array's class
        raise ArgumentError(module.name, f"what is put on {name} cannot be read as an array: {error}") from error
    loaded = places[name]
    if isinstance(found, DeviceArray) and found.ordinal == (-1 if loaded is None else loaded.ordinal):
        return found
    array = np.asarray(found, order="C")
    if array.dtype.kind in _NO_NUMBERS:
        raise ArgumentError(module.name, f"the value for {name} is not an array of numbers", type(x).__name__)
    made: DeviceArray = DeviceArray(array, name) if loaded is None else loaded.upload_array(array, name)
    return made


def _modules_by_device(module: RuntimeModule) -> dict[str, LoadedGpu | None]:
    """Return the loaded GPU module of each device by name; None for devices that use host memory."""
    gpus = {loaded.ordinal: loaded for loaded in module.gpus}
    rows = {**module.devices, **{place: place for place in module.devices.values()}} or {module.home: module.home}
    kinds = {name: place.partition(":") for name, place in rows.items()}
    return {name: gpus[int(n or 0)] if kind == "cuda" else None for name, (kind, _, n) in kinds.items()}


def bind_arguments(
    module: RuntimeModule, values: Mapping[str | int, Any], named: Mapping[str, Any], name: str
) -> Bound:
    """Bind arguments of a function; see :meth:`aotc.vmfb.module.LoadedModule.bind`."""
    name = name or module.default_name()
    function = module.get_function(name)
    held = place_bound_values(module, function, merge_keyword_values(values, named, function.where))
    return Bound(module, OpenFunction(function, held, bound_with_buckets(module, name, held, {})))


def _is_array(x: Any) -> bool:
    names = ("shape", "__array__", "__dlpack__", "add_done_callback")  # the last one: a fence with a single result
    return isinstance(x, int | float | complex) or any(hasattr(x, name) for name in names)


@public_names("arrays", "async_", "bound", "invoke", "name", "signature", "state", "submit", "update")
class Bound:
    """A function of a module with bound arguments; calls pass the others, the *open* arguments.

    Attributes
    ----------
    name : str
        The name of the function.
    function : OpenFunction
        The function for flat arrays.
    """

    def __init__(self, module: RuntimeModule, function: OpenFunction) -> None:
        self._module, self.function, self.name = module, function, function.name
        self._entry = cast("FunctionEntry", module.functions.get(self.name))  # None for internal programs
        self._quick = -1  # number of arguments of calls that pass flat arrays
        module.dependents.add(self)

    def close(self) -> None:
        """Close the function with its module: later calls fail."""
        self.function = cast("OpenFunction", ClosedModule(self.function.where))

    def state(
        self, *names: str, results: Mapping[str, str] | None = None, init: Mapping[str, Any] | None = None
    ) -> KeptState:
        """Return a state of this function, as in :meth:`aotc.vmfb.module.LoadedModule.state`."""
        return KeptState(self._module, names, results, init, self.function)

    def update(self, values: Mapping[str | int, Any] = MappingProxyType({}), **named: Any) -> None:
        """Replace all bound values. A call reads either the old or the new values, never a mixture.

        Running calls and existing submissions read the old values. Prepared values are computed first: until then calls
        continue with the old ones, and both are in memory. Values and keywords are those of
        :meth:`aotc.vmfb.module.LoadedModule.bind`.

        Raises
        ------
        CallError
            If ``values`` are not exactly the bound arguments, or one does not fit; then nothing changes.
        """
        function, bound = self._module.get_function(self.name), self.function.bound
        held = place_bound_values(self._module, function, merge_keyword_values(values, named, function.where))
        if held.keys() != bound:
            names = [", ".join(function.arguments[n].label for n in sorted(numbers)) for numbers in (held, bound)]
            raise CallError(function.where, "an update needs exactly the arguments that were bound", *names)
        self.function.replace_bound_values(bound_with_buckets(self._module, self.name, held, {}))

    def invoke(self, *arrays: Any, **options: Any) -> list[Any]:
        """Run the function on flat arrays; options as in :meth:`aotc.vmfb.module.LoadedModule.invoke`."""
        return self._invoke(arrays, **options) if options else self.function.partial.call(arrays)

    def _invoke(
        self, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: Any = False,
        trace: str | os.PathLike[str] = "", results: str = "",
    ) -> list[Any]:  # fmt: skip
        """Run the function on flat, open arguments; the options have been checked by the module."""
        partial = self.function.partial
        invoke, name = self._module.invoke, partial.function.name
        if trace:
            values = partial.complete_arguments(arrays)
            return invoke(name, *values, out=out, donate=donate, trace=trace, results=results)

        def whole(values: list[Any], out: Sequence[Any] | None, donate: Any, results: str) -> list[Any]:
            return invoke(name, *values, out=out, donate=donate, results=results)

        return partial.run_fast_or_by(whole, arrays, out, donate, results)

    def submit(self, *args: Any, **options: Any) -> Fence:
        """Submit a call with the open arguments; options as in :meth:`LoadedModule.submit`.

        The fence's result is what a call returns.
        """
        partial = self.function.partial
        values = partial.complete_arguments(self._flatten_arguments(args, {}))
        fence = self._module.submit(partial.function.name, *values, **options)
        fence.restore = self._entry.rebuild if self._entry is not None else None
        return fence

    async def async_(self, *args: Any) -> Any:
        """Call the function without blocking the event loop; cancelling the task cancels the call."""
        return await self.submit(*args)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its open arguments, by position or by name, or with flat arrays.

        It returns the results in the form of :meth:`LoadedModule.__call__`.
        """
        if kwargs or len(args) != self._quick:
            args = self._flatten_arguments(args, kwargs)
        return self._entry.rebuild(self.function.partial.call(args))

    @property
    def bound(self) -> frozenset[int]:
        """Return the numbers of the bound arguments."""
        return self.function.bound

    @property
    def arrays(self) -> dict[int, DeviceArray]:
        """Return the bound arrays that calls read directly, by argument number."""
        return dict(self.function.partial.arrays)

    @property
    def signature(self) -> Signature:
        """Return the signature of the unbound arguments."""
        return self.function.signature

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.signature, self.function.where)

    @cached_property
    def _flatten(self) -> Flatten:
        return self._parameters.flattener()

    def _flatten_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the flat open arguments of a call, whose arguments are flat arrays already, or pytrees."""
        known, count = self._parameters, len(self.function.arguments)
        if known.flat and known.quick == count:
            self._quick = count
        if not kwargs and len(args) == count and (known.flat or all(map(_is_array, args))):
            return args
        leaves: list[Any] = []
        self._flatten(known.order_arguments(args, kwargs), leaves)
        return tuple(leaves)

    def __reduce__(self) -> Any:
        raise TypeError("a function with bound arguments cannot be pickled: send the module, and bind it there")

    def __repr__(self) -> str:
        if isinstance(self.function, ClosedModule):
            return f"<{self.name} of a closed module>"
        return f"<{self._module.get_function(self.name).signature!r} with {self.function.bound_names} bound>"
