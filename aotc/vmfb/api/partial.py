"""Functions with some arguments bound.

A bundle may have a separate program that precomputes values from bound arguments (``prepared`` in the manifest). That
program runs once, when the arguments are bound; calls read its results.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.api.named_values import arguments_by_number, place_argument
from aotc.vmfb.api.partial_signature import signature_without
from aotc.vmfb.arguments import Argument, Signature, refuse_whole_array
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.errors import ArgumentError, CallError
from aotc.vmfb.memory.pointers import address_of, aligned_bytes

if TYPE_CHECKING:
    from aotc.vmfb.devices.cuda.array import CudaArray
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.devices.cuda.resident_calls import BoundArrays, ResidentCalls
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.interfaces import FunctionResidence, FunctionTable, RuntimeFunction
    from aotc.vmfb.profile.trace import Stepper


class PartialFunction:
    """A function with values for some of its arguments; calls pass the others, the *open* arguments.

    New values replace the whole object, so that a call reads either the old or the new ones.

    Attributes
    ----------
    function : RuntimeFunction
        The function that calls run.
    row : list
        Its arguments, None for open ones.
    open : list of int
        The numbers of the open arguments.
    arrays : dict of int to DeviceArray
        Bound arrays that calls read directly.
    check : callable or None
        Checks that mapped files which contain bound arrays are unchanged.
    """

    __slots__ = ("_fast", "arrays", "check", "function", "open", "row")

    def __init__(
        self, function: RuntimeFunction, row: list[Any], opened: list[int],
        arrays: Mapping[int, DeviceArray] = MappingProxyType({}),
    ) -> None:  # fmt: skip
        self.function, self.row, self.open, self.arrays = function, row, opened, arrays
        self.check: Callable[[], None] | None = None
        self._fast: tuple[ResidentCalls, BoundArrays] | None = None

    def use_fast_path(self, values: Mapping[int, CudaArray]) -> None:
        """Enable the GPU's fast path, which does not examine bound arrays.

        All of them must be on the function's GPU.
        """
        resident = self.function.resident
        if resident is not None:
            self._fast = resident, resident.bound_arrays(values, len(self.row))

    @property
    def has_fast_path(self) -> bool:
        """Return True if calls use the fast path of :meth:`use_fast_path`."""
        return self._fast is not None

    def complete_arguments(self, values: Sequence[Any]) -> list[Any]:
        """Return all arguments of a call: the open ones from ``values``, the others as bound.

        Raises
        ------
        CallError
            If the number of arguments is wrong.
        BundleError
            If a file that contains bound arrays has been overwritten.
        """
        if len(values) != len(self.open):
            function = self.function
            names = ", ".join(str(function.arguments[n]) for n in self.open)
            raise ArgumentError(function.where, "wrong number of arguments", len(values), f"{len(self.open)}: {names}")
        if self.check is not None:
            self.check()
        row = self.row.copy()
        for number, x in zip(self.open, values):
            row[number] = x
        return row

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.call` does, on the open arguments."""
        if self._fast is not None:
            return self.run(values)
        return self.function.call(self.complete_arguments(values))

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.run` does, on the open arguments."""
        return self.run_fast_or_by(self.function.run, values, out, donate, results)

    def run_fast_or_by(
        self, whole: Callable[..., list[Any]], values: Sequence[Any], out: Sequence[Any] | None, donate: Any,
        results: str,
    ) -> list[Any]:  # fmt: skip
        """Run a call on the GPU's fast path.

        Without one, by ``whole``, a function with the parameters of :meth:`run`.
        """
        if self._fast is None:
            return whole(self.complete_arguments(values), out, donate, results)
        resident, own_buffers = self._fast
        found = resident.run_fast_path(values, out, donate, results, own_buffers)
        if found is not None:
            return found
        row = self.complete_arguments(values)
        kinds: list[Any] = [getattr(x, "kind", None) for x in row]  # now: the call may invalidate donated ones
        made = whole(row, out, donate, results)
        if None not in kinds:
            given = None if out is None else tuple([getattr(x, "kind", None) for x in out])
            resident.create_bound_fast_path(own_buffers, kinds, given, donate, results)
        return made


class WrappedFunction:
    """Base class of functions that wrap another one, with the interface of :class:`aotc.vmfb.vm.LoadedFunction`."""

    resident: ResidentCalls | None = None  # fast paths on a GPU are those of the wrapped function

    def __init__(self, whole: RuntimeFunction) -> None:
        self._whole = whole
        self.name, self.where, self.executable = whole.name, whole.where, whole.executable
        self.signature, self.arguments, self.result_dtypes = whole.signature, whole.arguments, whole.result_dtypes
        self.residence: FunctionResidence = whole.residence

    @property
    def recordings(self) -> int:
        """Return the number of times that the wrapped function's host program was recorded as a plan."""
        return self._whole.recordings

    def check_ahead(self) -> None:
        """Verify the wrapped function's program before its first call, if its shapes are static."""
        self._whole.check_ahead()


class _OpenResidence:
    """Memory space of the open arguments, and of the results, of a function."""

    def __init__(self, residence: FunctionResidence, numbers: Sequence[int]) -> None:
        self._residence, self._numbers = residence, numbers
        self.gpus = tuple([residence.gpus[n] for n in numbers])
        self.result_gpus, self.named = residence.result_gpus, residence.named

    def owner(self, number: int) -> LoadedGpu | None:
        """Return the GPU module that allocates the memory of an open argument; None for host memory."""
        return self._residence.owner(self._numbers[number])


class OpenFunction(WrappedFunction):
    """Function of the open arguments of a partial function, with the interface of :class:`aotc.vmfb.vm.LoadedFunction`.

    Attributes
    ----------
    bound : frozenset of int
        The numbers of the bound arguments.
    """

    def __init__(self, whole: RuntimeFunction, bound: Collection[int], partial: PartialFunction) -> None:
        super().__init__(whole)
        self.bound = frozenset(bound)
        self._current = [partial]  # shared with the direct function
        self._is_direct = False
        numbers = [n for n in range(len(whole.arguments)) if n not in self.bound]
        self.signature: Signature = signature_without(whole.signature, self.bound, ())
        self.arguments = [Argument(n, row) for n, row in enumerate(self.signature.arguments)]
        self.residence = _OpenResidence(whole.residence, numbers)

    @property
    def partial(self) -> PartialFunction:
        """Return the function and the values of its bound arguments."""
        return self._current[0]

    def replace_bound_values(self, partial: PartialFunction) -> None:
        """Let later calls use other values of the bound arguments."""
        self._current[0] = partial

    @property
    def bound_names(self) -> str:
        """The names of the bound arguments, for messages."""
        return ", ".join(self._whole.arguments[n].label for n in sorted(self.bound))

    def _complete_arguments(self, values: Sequence[Any]) -> tuple[RuntimeFunction, list[Any]]:
        partial = self._current[0]
        return (partial.function.direct if self._is_direct else partial.function), partial.complete_arguments(values)

    @property
    def direct(self) -> RuntimeFunction:
        """Return the function that submissions run: without limits on calls."""
        made = copy(self)
        made._is_direct = True
        return made

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run the function on flat open arguments, without options."""
        if not self._is_direct:
            return self._current[0].call(values)
        function, row = self._complete_arguments(values)
        return function.call(row)

    @property
    def has_early_results(self) -> bool:
        """Return True if results can be read before the call ends."""
        return self._is_direct and self._whole.has_early_results

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function on its open arguments; see :meth:`aotc.vmfb.vm.LoadedFunction.run`."""
        if not self._is_direct:
            return self._current[0].run(values, out, donate, results)
        function, row = self._complete_arguments(values)
        return function.run(row, out, donate, results)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """Run the function on its open arguments; ``early`` receives results before the call ends."""
        function, row = self._complete_arguments(values)
        if not function.has_early_results:
            return function.run(row, out, donate, results)
        return function.run_early(row, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """Run the function and write inputs and outputs of each dispatch to ``folder``."""
        function, row = self._complete_arguments(values)
        return function.trace(row, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """Run the function with a stepper that runs its commands one by one."""
        function, row = self._complete_arguments(values)
        return function.step(row, make)


Made = dict[tuple[Any, int], DeviceArray]
"""Prepared values by number in the bundle and GPU: functions share one copy."""


def place_bound_values(
    module: FunctionTable, function: RuntimeFunction, values: Mapping[str | int, Any]
) -> dict[int, DeviceArray]:
    """Place values by name on the devices where the function reads them, and return the arrays by argument number.

    One error lists all values that do not fit.
    """
    if not isinstance(values, Mapping):
        what = "the bound values are not a mapping"
        raise ArgumentError(function.where, what, type(values).__name__, "{'name': array}")
    found, problems = arguments_by_number(function.signature, values, function.where)
    placed: dict[int, DeviceArray] = {}
    for number, value in found.items():
        if function.arguments[number].donated:
            what = f"{function.arguments[number].label} is donated: each call takes it"
            problems.append(str(CallError(function.where, what, hint="give it to each call")))
            continue
        try:
            label = function.arguments[number].label
            refuse_whole_array(function.signature.arguments[number], label, value, function.where)
            placed[number] = place_argument(function, number, value, module.home)
        except CallError as error:
            problems.append(str(error))
    weights = module.prepared.get(function.name, {}).get("weights", ())
    missing = [function.arguments[n].name or str(n) for n in weights if n not in found]
    if missing and any(n in found for n in weights):
        what = "what was compiled to be bound is bound together"
        problems.append(str(CallError(function.where, what, f"nothing for {', '.join(missing)}")))
    if problems:
        raise ArgumentError("", "\n".join(problems))
    return placed


def bind_placed_arguments(
    module: FunctionTable, name: str, bound_arrays: Mapping[int, DeviceArray], cache: Made
) -> PartialFunction:
    """Bind arguments of function ``name``: those that calls read, and the values precomputed from the others.

    Parameters
    ----------
    module : FunctionTable
    name : str
    bound_arrays : dict of int to DeviceArray
        Arrays by argument number, from :func:`place_bound_values`.
    cache : dict
        Prepared values that several functions share.
    """
    row = module.prepared.get(name)
    count = len(module.get_function(name).arguments)
    if row is None or not all(n in bound_arrays for n in row["weights"]):
        return _partial_function(module.get_function(name), bound_arrays, bound_arrays)
    takes = row["takes"]
    read = {n: bound_arrays[n] for n in takes if n in bound_arrays}
    every = read | dict(enumerate(_prepared_values_of(module, row, bound_arrays, cache), count))
    bound = {place: every[n] for place, n in enumerate(takes) if n in every}
    return _partial_function(module.get_function(row["call"]["name"]), bound, read)


def _partial_function(
    function: RuntimeFunction, values: Mapping[int, DeviceArray], arrays: Mapping[int, DeviceArray]
) -> PartialFunction:
    """Return a function with ``values`` bound by argument number; ``arrays`` are the user's arrays that calls read."""
    count = len(function.arguments)
    row: list[Any] = [None] * count
    for number, x in values.items():
        # Plain arrays on the host: calls with only those take the fast path.
        row[number] = x if x.ordinal >= 0 else x.numpy()
    partial = PartialFunction(function, row, [n for n in range(count) if n not in values], arrays)
    if all(x.kind is not None for x in values.values()):
        partial.use_fast_path(cast("Mapping[int, CudaArray]", values))
    return partial


def _prepared_values_of(
    module: FunctionTable, row: Mapping[str, Any], bound_arrays: Mapping[int, DeviceArray], cache: Made
) -> list[DeviceArray]:
    """Return the prepared values of a function; run its ``prepare`` program unless all are in ``cache``."""
    function = module.get_function(row["prepare"]["name"])
    values = [entry.get("value", (function.name, n)) for n, entry in enumerate(row["prepare"]["results"])]
    keys = list(zip(values, function.residence.result_gpus, strict=True))
    if not all(key in cache for key in keys):
        computed = _compute_prepared_values(module, row, function, bound_arrays)
        cache.update({**dict(zip(keys, computed, strict=True)), **cache})
    return [cache[key] for key in keys]


def _compute_prepared_values(
    module: FunctionTable, row: Mapping[str, Any], function: RuntimeFunction, bound_arrays: Mapping[int, DeviceArray]
) -> list[DeviceArray]:
    """Run the program ``prepare`` on bound arrays; its results are on the devices where calls read them."""
    values = [bound_arrays[n] if bound_arrays[n].ordinal >= 0 else bound_arrays[n].numpy() for n in row["weights"]]
    if any(gpu >= 0 for gpu in function.residence.result_gpus):
        found: list[DeviceArray] = function.run(values, results="device")
        return [x.wait() for x in found]
    rows = zip(row["prepare"]["results"], function.result_dtypes)
    out = [_aligned_array(tuple(entry["dims"]), dtype) for entry, dtype in rows]
    return [DeviceArray(x, module.home) for x in function.run(values, out)]


def _aligned_array(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Allocate an array whose start is aligned to a cache line, as constants are."""
    size = prod(shape) * dtype.itemsize
    memory, first = aligned_bytes(size, ALIGNMENT)
    begin = first - address_of(memory)
    return memory[begin : begin + size].view(dtype).reshape(shape)
