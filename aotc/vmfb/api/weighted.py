"""Functions of a module with weights of its own: calls pass only the other arguments."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from aotc.vmfb.api.bound import Bound, Made, all_held, bound_to
from aotc.vmfb.api.entry import Entry
from aotc.vmfb.api.partial_signature import without
from aotc.vmfb.arguments import Argument, Signature
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.host.locks import new_lock
from aotc.vmfb.host.mapped_file import check_of
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.weights.own import WeightPlaces, checked_weights, own_weights, places_of
from aotc.vmfb.weights.tensors import checked_tensors, read_tensors

if TYPE_CHECKING:
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.host.mapped_file import MappedFile
    from aotc.vmfb.interfaces import FunctionResidence, RuntimeFunction
    from aotc.vmfb.profile.trace import Stepper


class _Whole(NamedTuple):
    """The module's functions before its weights were bound."""

    name: str
    home: str
    prepared: Mapping[str, Any]
    functions: Mapping[str, Entry]
    every: Mapping[str, RuntimeFunction]

    def loaded(self, name: str) -> RuntimeFunction:
        """Return a function with all its arguments."""
        return self.every[name]


class _OpenResidence:
    """Placement of the open arguments, and of the results, of a function."""

    def __init__(self, residence: FunctionResidence, numbers: Sequence[int]) -> None:
        self._residence, self._numbers = residence, numbers
        self.gpus = tuple([residence.gpus[n] for n in numbers])
        self.result_gpus, self.named = residence.result_gpus, residence.named

    def owner(self, number: int) -> LoadedGpu | None:
        """Return the allocator of an argument's memory, or None for host memory."""
        return self._residence.owner(self._numbers[number])


class WeightedFunction:
    """A function with bound weights, with the interface of :class:`aotc.vmfb.vm.LoadedFunction` for other arguments."""

    resident = None  # its fast paths on a GPU are those of the bound arrays

    def __init__(self, function: RuntimeFunction, bound: Bound, direct: bool = False) -> None:
        self._whole, self._bound, self._is_direct = function, bound, direct
        numbers = [n for n in range(len(function.arguments)) if n not in bound.bound]
        self.name, self.where, self.executable = function.name, function.where, function.executable
        self.signature: Signature = without(function.signature, bound.bound, ())
        self.arguments = [Argument(n, row) for n, row in enumerate(self.signature.arguments)]
        self.result_dtypes = function.result_dtypes
        self.residence = _OpenResidence(function.residence, numbers)

    def _filled(self, values: Sequence[Any]) -> tuple[RuntimeFunction, list[Any]]:
        function, row = self._bound.filled(values)
        return (function.direct if self._is_direct else function), row

    @property
    def direct(self) -> WeightedFunction:
        """The function that submissions run."""
        return WeightedFunction(self._whole, self._bound, direct=True)

    @property
    def recordings(self) -> int:
        """Number of times that the program of the whole function was recorded."""
        return self._whole.recordings

    def call(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.call`."""
        if not self._is_direct:
            return self._bound.call(values)
        function, row = self._filled(values)
        return function.call(row)

    @property
    def has_early_results(self) -> bool:
        """See :attr:`aotc.vmfb.vm.LoadedFunction.has_early_results`."""
        return self._is_direct and self._whole.has_early_results

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run`."""
        if not self._is_direct:
            return self._bound.run(values, out, donate, results)
        function, row = self._filled(values)
        return function.run(row, out, donate, results)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run_early`."""
        function, row = self._filled(values)
        if not function.has_early_results:
            return function.run(row, out, donate, results)
        return function.run_early(row, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.trace`."""
        function, row = self._filled(values)
        return function.trace(row, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.step`."""
        function, row = self._filled(values)
        return function.step(row, make)

    def prove(self) -> None:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.prove`."""
        self._whole.prove()


class OwnWeights:
    """The weights of a module, and their replacement."""

    def __init__(
        self, whole: _Whole, places: WeightPlaces, arrays: dict[str, np.ndarray], file: MappedFile | None
    ) -> None:
        self._whole, self.places, self._arrays = whole, places, arrays
        self._files: dict[str, MappedFile | None] = dict.fromkeys(arrays, file)  # the file that each array is in
        self._lock = new_lock()
        self.bounds = self._bound_with(arrays)

    def update(self, values: Any) -> None:
        """Replace some weights; all functions read the new ones from the next call on."""
        file = None
        if isinstance(values, str | os.PathLike):
            values = read_tensors(values)
            file = values.file
        found = _unshared(checked_weights(values, self.places, self._whole.name, whole=False))
        with self._lock:  # concurrent updates must not undo each other
            check_of([x for x in {f for path, f in self._files.items() if path not in found} if x is not None])()
            arrays = {**self._arrays, **found}
            self._files.update(dict.fromkeys(found, file))
            for name, bound in self._bound_with(arrays).items():
                self.bounds[name].take(bound)
            self._arrays = arrays

    def _bound_with(self, arrays: Mapping[str, np.ndarray]) -> dict[str, Bound]:
        """Return each function with these weights bound, sharing one copy of values that several functions read."""
        placed: dict[str, Any] = dict(arrays)
        made: Made = {}
        bounds = {}
        for name, own in self.places.functions.items():
            held = all_held(self._whole, self._whole.loaded(name), {n: placed[path] for path, n in own.items()})
            placed.update((path, held[n]) for path, n in own.items())
            bounds[name] = bound_to(self._whole, name, held, made)
        self._watch(arrays, bounds)
        return bounds

    def _watch(self, arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bound]) -> None:
        """Let calls check the mapped files that they read; release pages that only an update reads."""
        for name, bound in bounds.items():
            read = {address_of(x.numpy()) for x in bound.arrays.values() if x.ordinal < 0}
            files = {self._files[path] for path in self.places.functions[name] if address_of(arrays[path]) in read}
            bound.watch([file for file in files if file is not None and file.is_mapped])
        self._forget_unread(arrays, bounds)

    def _forget_unread(self, arrays: Mapping[str, np.ndarray], bounds: Mapping[str, Bound]) -> None:
        """Release pages of files that only an update reads."""
        held = [x for bound in bounds.values() for x in bound.arrays.values()]
        read = {address_of(x.numpy()) for x in held if x.ordinal < 0}
        for path, x in arrays.items():
            file = self._files[path]
            if file is not None and address_of(x) not in read:
                file.forget(address_of(x), x.nbytes)


def _unshared(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return arrays that no caller can change: copies of writable ones."""
    return {path: x.copy() if x.flags.writeable else x for path, x in arrays.items()}


def give_weights(module: Any, bundle: OpenedBundle, variant: Mapping[str, Any], given: Any, verify: bool) -> OwnWeights:
    """Bind the weights of a module's functions: ``given`` ones, or the bundle's own.

    Raises
    ------
    BundleError
        If there are none, they are not the bundle's own, or the bundle was compiled without bound arguments.
    VmError
        If ``given`` weights do not fit.
    """
    places = places_of(bundle.manifest, variant, bundle.where)
    if isinstance(given, str | os.PathLike):
        tensors = read_tensors(given)
        arrays, file = checked_tensors(tensors, places.types, os.fspath(given)), tensors.file
    elif given is not None:
        arrays, file = _unshared(checked_weights(given, places, bundle.where)), None
    else:
        arrays, file = own_weights(bundle, places.types, verify)
    functions = module.every_function
    whole = _Whole(module.name, module.home, module.prepared, dict(module.functions), dict(functions))
    own = OwnWeights(whole, places, arrays, file)
    for name, bound in own.bounds.items():
        halves = whole.prepared.get(name, {})
        for row in (halves[key] for key in ("prepare", "call") if key in halves):
            for half in (functions[row["name"]], functions[row["name"]].direct):
                half.where = functions[name].where  # errors have the name of the called function
        functions[name] = WeightedFunction(whole.every[name], bound)
        module.functions[name] = Entry(functions[name], module.home)
    module.prepared = {}
    return own
