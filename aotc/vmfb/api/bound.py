"""Arrays on devices, and functions with bound arguments.

A bundle may have a separate program for computations that depend on bound arguments only (``prepared`` in the
manifest): it runs at binding time, and calls read its results. ``module`` is a :class:`aotc.vmfb.module.LoadedModule`;
that module imports this one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, cast

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
    from aotc.vmfb.devices.cuda.array import CudaArray
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.devices.cuda.resident_calls import BoundArrays, ResidentCalls
    from aotc.vmfb.host.mapped_file import MappedFile
    from aotc.vmfb.interfaces import FunctionEntry, FunctionTable, RuntimeFunction, RuntimeModule
    from aotc.vmfb.submit.fence import Fence
    from aotc.vmfb.trees import Flatten


_NO_NUMBERS = "OSUMm"  # NumPy dtype kinds that are not numeric: objects, strings, times


def put(module: RuntimeModule, x: Any, where: str) -> DeviceArray:
    """Place an array on a device; see :meth:`aotc.vmfb.module.LoadedModule.put`."""
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
    except Exception as error:  # it runs code of the array's class
        raise VmError(module.name, f"what is put on {name} cannot be read as an array: {error}") from error
    loaded = places[name]
    if isinstance(found, DeviceArray) and found.ordinal == (-1 if loaded is None else loaded.ordinal):
        return found
    array = np.asarray(found, order="C")
    if array.dtype.kind in _NO_NUMBERS:
        raise VmError(module.name, f"what is put on {name} is no array of numbers", type(x).__name__)
    made: DeviceArray = DeviceArray(array, name) if loaded is None else loaded.put(array, name)
    return made


def _places(module: RuntimeModule) -> dict[str, LoadedGpu | None]:
    """Return the loaded module of each device by device name; None for devices with host memory."""
    gpus = {loaded.ordinal: loaded for loaded in module.gpus}
    rows = {**module.devices, **{place: place for place in module.devices.values()}} or {module.home: module.home}
    kinds = {name: place.partition(":") for name, place in rows.items()}
    return {name: gpus[int(n or 0)] if kind == "cuda" else None for name, (kind, _, n) in kinds.items()}


class _State(NamedTuple):
    """The arguments that calls of a bound function read; replaced as a whole.

    Attributes
    ----------
    function : RuntimeFunction
        The function to run.
    row : list
        Its arguments, None for open ones.
    open : list of int
        The numbers of the open arguments.
    fast : (ResidentCalls, BoundArrays) or None
        The fast paths of the function and the bound arguments, if all of them are on a GPU.
    arrays : dict of int to DeviceArray
        Bound arrays that calls read directly.
    check : callable or None
        Checks the mapped files that contain some of these.
    """

    function: RuntimeFunction
    row: list[Any]
    open: list[int]
    fast: tuple[ResidentCalls, BoundArrays] | None
    arrays: dict[int, DeviceArray]
    check: Callable[[], None] | None = None


Made = dict[tuple[Any, int], DeviceArray]
"""Prepared values by number in the bundle and GPU: functions share one copy."""


def bind(module: RuntimeModule, values: Mapping[str | int, Any], name: str) -> Bound:
    """Bind arguments of a function; see :meth:`aotc.vmfb.module.LoadedModule.bind`."""
    name = name or module.default_name()
    return bound_to(module, name, all_held(module, module.loaded(name), values), {})


def bound_to(module: FunctionTable, name: str, held: dict[int, DeviceArray], made: Made) -> Bound:
    """Bind arguments that :func:`all_held` has placed; ``made`` has values prepared for other functions."""
    return Bound(module, name, _state(module, name, held, made), frozenset(held))


def all_held(
    module: FunctionTable, function: RuntimeFunction, values: Mapping[str | int, Any]
) -> dict[int, DeviceArray]:
    """Place bound values on the devices where the function reads them; raise one error for all that do not fit."""
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


def _state(module: FunctionTable, name: str, held: Mapping[int, DeviceArray], made: Made) -> _State:
    """Return the state of a bound function: values prepared from the arguments, or the arguments themselves."""
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
    module: FunctionTable, row: Mapping[str, Any], held: Mapping[int, DeviceArray], made: Made
) -> list[DeviceArray]:
    """Return the prepared values that calls read: from ``made``, or computed by the bundle's program."""
    function = module.loaded(row["prepare"]["name"])
    values = [entry.get("value", (function.name, n)) for n, entry in enumerate(row["prepare"]["results"])]
    keys = list(zip(values, function.residence.result_gpus, strict=True))
    if not all(key in made for key in keys):
        made.update({**dict(zip(keys, _computed(module, row, function, held), strict=True)), **made})
    return [made[key] for key in keys]


def _computed(
    module: FunctionTable, row: Mapping[str, Any], function: RuntimeFunction, held: Mapping[int, DeviceArray]
) -> list[DeviceArray]:
    """Run the program that computes prepared values, on the device where they are read."""
    values = [held[n] if held[n].ordinal >= 0 else held[n].numpy() for n in row["weights"]]
    if any(gpu >= 0 for gpu in function.residence.result_gpus):
        found: list[DeviceArray] = function.run(values, results="device")
        return [x.wait() for x in found]
    rows = zip(row["prepare"]["results"], function.result_dtypes)
    out = [_aligned(tuple(entry["dims"]), dtype) for entry, dtype in rows]
    return [DeviceArray(x, module.home) for x in function.run(values, out)]


def _aligned(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate memory aligned to cache lines, like constants."""
    size = prod(shape) * dtype.itemsize
    memory, first = aligned_bytes(size, ALIGNMENT)
    begin = first - address_of(memory)
    return memory[begin : begin + size].view(dtype).reshape(shape)


def _state_of(
    module: FunctionTable, name: str, bound: Mapping[int, DeviceArray], arrays: dict[int, DeviceArray]
) -> _State:
    function = module.loaded(name)
    count = len(function.arguments)
    row: list[Any] = [None] * count
    for number, x in bound.items():
        # Plain arrays on the host: calls with only those take the fast path.
        row[number] = x if x.ordinal >= 0 else x.numpy()
    resident, on_gpu = function.resident, all(x.kind is not None for x in bound.values())
    fast = None
    if resident is not None and on_gpu:
        fast = resident, resident.keep(cast("Mapping[int, CudaArray]", bound), count)
    return _State(function, row, [n for n in range(count) if n not in bound], fast, arrays)


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") or isinstance(x, int | float | complex)


class Bound:
    """A function of a module with bound arguments; calls pass the others.

    Attributes
    ----------
    name : str
        The name of the function.
    bound : frozenset of int
        The numbers of the bound arguments.
    """

    def __init__(self, module: FunctionTable, name: str, state: _State, bound: frozenset[int]) -> None:
        self._module = cast("RuntimeModule", module)  # functions with weights call none of its methods
        self.name, self._state = name, state
        self.bound = bound
        self._entry = cast("FunctionEntry", module.functions.get(name))  # None for internal programs
        self._quick = -1  # number of arguments of calls that pass flat arrays

    def state(
        self, *names: str, results: Mapping[str, str] | None = None, init: Mapping[str, Any] | None = None
    ) -> KeptState:
        """Return a state of this function, as in :meth:`aotc.vmfb.module.LoadedModule.state`."""
        return KeptState(self._module, names, results, init, self)

    def take(self, other: Bound) -> None:
        """Switch to the arguments of another function with the same arguments bound."""
        self._state = other._state

    def watch(self, files: Sequence[MappedFile]) -> None:
        """Check these files before calls: bound arrays are in them."""
        self._state = self._state._replace(check=check_of(files) if files else None)

    def filled(self, arrays: Sequence[Any]) -> tuple[RuntimeFunction, list[Any]]:
        """Return the current function and its arguments: the bound ones, and ``arrays`` for the others."""
        state = self._state
        return state.function, self._all(state, arrays)

    @property
    def arrays(self) -> dict[int, DeviceArray]:
        """The bound arrays that calls read directly, by argument number."""
        return dict(self._state.arrays)

    def update(self, values: Mapping[str | int, Any]) -> None:
        """Replace all bound values. A call reads either the old or the new ones, never a mixture.

        Running calls and existing submissions read the old values. Prepared values are computed first: until then calls
        continue with the old ones, and both are in memory.

        Raises
        ------
        VmError
            If these are not exactly the bound arguments, or one does not fit; then nothing changes.
        """
        function = self._module.loaded(self.name)
        held = all_held(self._module, function, values)
        if held.keys() != self.bound:
            names = [", ".join(function.arguments[n].label for n in sorted(numbers)) for numbers in (held, self.bound)]
            raise VmError(function.where, "an update gives all that was bound, and nothing else", *names)
        self._state = _state(self._module, self.name, held, {})

    def _all(self, state: _State, arrays: Sequence[Any]) -> list[Any]:
        """Return all arguments of a call, given the open ones.

        Raises
        ------
        VmError
            If the number of arguments is wrong.
        BundleError
            If a file that contains bound arrays has been overwritten.
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
        """Run the function on flat arrays; options as in :meth:`aotc.vmfb.module.LoadedModule.invoke`."""
        state = self._state
        if state.fast is None and not options:
            found: list[Any] = state.function.call(self._all(state, arrays))
            return found
        if state.fast is None:
            return self._module.invoke(state.function.name, *self._all(state, arrays), **options)
        return self._invoke(state, arrays, **options)

    def _invoke(
        self, state: _State, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: Any = False,
        trace: Any = "", results: str = "",
    ) -> list[Any]:  # fmt: skip
        """Run the function with bound arrays on the GPU, with the module's checks of the options."""
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
        """Run a call on the fast path, which does not examine the bound arrays; else, once, by ``whole``."""
        assert state.fast is not None
        resident, kept = state.fast
        found = resident.call(arrays, out, donate, results, kept)
        if found is not None:
            return found
        values = self._all(state, arrays)
        # Before the call, which may invalidate donated ones.
        kinds: list[Any] = [getattr(x, "kind", None) for x in values]
        made = whole(values)
        if None not in kinds:
            given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
            resident.bind(kept, kinds, given, donate, results)
        return made

    def call(self, arrays: Sequence[Any]) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.call` does, on the open arguments."""
        state = self._state
        if state.fast is not None:
            return self.run(arrays)
        found: list[Any] = state.function.call(self._all(state, arrays))
        return found

    def run(
        self, arrays: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.run` does, on the open arguments."""
        state = self._state
        if state.fast is None:
            made: list[Any] = state.function.run(self._all(state, arrays), out, donate, results)
            return made
        return self._shortly(
            state, arrays, out, donate, results, lambda values: state.function.run(values, out, donate, results)
        )

    def submit(self, *arrays: Any, **options: Any) -> Fence:
        """Submit the function; options as in :meth:`aotc.vmfb.module.LoadedModule.submit`."""
        state = self._state
        return self._module.submit(state.function.name, *self._all(state, arrays), **options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function with its other parameters, by position or by name, or with flat arrays.

        It returns the results in the form of :meth:`LoadedModule.__call__`.
        """
        if kwargs or len(args) != self._quick:
            args = self._leaves(args, kwargs)
        return self._entry.rebuild(self.invoke(*args))

    @cached_property
    def signature(self) -> Signature:
        """The signature of the open arguments."""
        return without(self._module.loaded(self.name).signature, self.bound, ())

    @cached_property
    def _parameters(self) -> Parameters:
        return Parameters(self.signature, self._module.loaded(self.name).where)

    @cached_property
    def _flatten(self) -> Flatten:
        return self._parameters.flattener()

    def _leaves(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the flat arrays of a call: its arguments, or the leaves of its pytrees."""
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
