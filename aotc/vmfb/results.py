"""Placement of a function's arguments and results, and allocation of its results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.arguments import check_out, type_text
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.dtypes import from_numpy
from aotc.vmfb.errors import CallError
from aotc.vmfb.memory.arena import ARENAS

if TYPE_CHECKING:
    from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
    from aotc.vmfb.devices.cuda.resident_calls import ResidentCalls
    from aotc.vmfb.devices.mixed.executable import PlacedExecutable
    from aotc.vmfb.interfaces import Executable
    from aotc.vmfb.plan import Plan

NUMPY, DEVICE = "numpy", "device"  # values of the option ``results``


def resident_calls(executable: Executable) -> ResidentCalls | None:
    """Return the fast paths of a function for arrays on a GPU; None if the executable uses other memory too."""
    if not getattr(executable, "is_one_gpu", False):
        return None
    from aotc.vmfb.devices.cuda.resident_calls import ResidentCalls  # only for GPUs

    return ResidentCalls(cast("PlacedExecutable", executable))


class Residence:
    """The memory of each argument and result of a function.

    Attributes
    ----------
    layout : Slots
        The function's pointer table.
    memory : ResultMemory
        Allocator of results in host memory.
    constants : tuple of int
        Bytes of the constants in each memory.
    gpus, result_gpus : tuple of int
        For each argument and result the number of its GPU, or -1.
    named : tuple of bool
        For each result, True if the signature places it on a GPU.
    """

    __slots__ = ("_givers", "_owners", "_rows", "constants", "gpus", "layout", "memory", "named", "result_gpus")

    def __init__(self, executable: Executable, entry: Mapping[str, Any]) -> None:
        arguments, results = entry["arguments"], entry["results"]
        self.memory = getattr(executable, "arenas", ARENAS).results
        self.constants = getattr(executable, "constant_sizes", (executable.constants_bytes,))
        placed = cast("PlacedExecutable", executable) if hasattr(executable, "loaded") else None
        self.layout = placed.layout(entry) if placed else Slots(len(arguments), len(results))
        slots = range(self.layout.arena)
        owners: list[Any] = [placed.loaded(self.layout, slot) for slot in slots] if placed else [None] * len(slots)
        ordinals = [-1 if owner is None else owner.ordinal for owner in owners]
        self.gpus, self.result_gpus = tuple(ordinals[: len(arguments)]), tuple(ordinals[len(arguments) :])
        self._givers, self._owners = owners[: len(arguments)], owners[len(arguments) :]
        self._rows = results
        self.named = tuple([bool(owner and row.get("device")) for owner, row in zip(self._owners, results)])

    def owner(self, number: int) -> LoadedGpu | None:
        """Return the allocator of an argument's memory, or None for host memory."""
        return self._givers[number]

    def stays(self, wanted: str, out: Sequence[Any]) -> list[bool]:
        """Return, for each result, True if it stays on a GPU, by ``wanted`` or by its ``out=`` buffer."""
        every = {NUMPY: [False] * len(self.named), DEVICE: [bool(o) for o in self._owners]}.get(wanted, self.named)
        return [stays if given is None else not isinstance(given, np.ndarray) for stays, given in zip(every, out)]

    def results(
        self, plan: Plan, arrays: list[Any], out: Sequence[Any], stays: Sequence[bool], where: str
    ) -> list[Any]:
        """Return the array for each result.

        Arguments whose memory becomes a result are replaced in ``arrays`` by GPU copies if the result stays there.
        """
        taken = dict(plan.taken)
        made: list[Any] = []
        for number, (shape, dtype) in enumerate(plan.results):
            owner, argument = self._owners[number], taken.get(number, -1)
            if argument >= 0 and stays[number] and out[number] is None and isinstance(arrays[argument], np.ndarray):
                arrays[argument] = owner.put(arrays[argument], self._name(number))
            if argument >= 0:
                made.append(_donated_memory(out[number], arrays, argument, number, where))
            elif stays[number] and out[number] is None:
                made.append(owner.empty(shape, dtype, self._name(number)))
            else:
                made.append(self.new_result(out[number], dtype, shape, number, where))
        return made

    def new_result(self, given: Any, dtype: np.dtype, shape: tuple[int, ...], number: int, where: str) -> Any:
        """Return the memory for a result: its ``out=`` buffer, validated, or else a new array."""
        if given is None:
            try:
                return self.memory.empty(shape, dtype)
            except (MemoryError, ValueError):
                text = type_text(from_numpy(dtype), shape)
                raise CallError(where, f"the system has no memory for result {number}, {text}") from None
        check_out(given, dtype, shape, number, where)
        return given

    def moved(self, made: list[Any], stays: Sequence[bool]) -> list[Any]:
        """Move the results of a call to GPU or host memory, as ``stays`` says for each."""
        for number, stay in enumerate(stays):
            if isinstance(made[number], np.ndarray) == stay:
                owner, name = self._owners[number], self._name(number)
                made[number] = owner.put(made[number], name) if stay else made[number].numpy()
        return made

    def _name(self, number: int) -> str:
        return self._rows[number].get("device") or f"cuda:{self._owners[number].ordinal}"


def on_devices(made: list[Any], rows: Sequence[Mapping[str, Any]], out: Sequence[Any] | None, home: str) -> list[Any]:
    """Wrap the host results of a call as device arrays, except those in ``out=`` buffers."""
    found = []
    for x, row, given in zip(made, rows, out or [None] * len(made)):
        wrapped = given is not None or isinstance(x, DeviceArray)
        found.append(x if wrapped else DeviceArray(x, row.get("device", home)))
    return found


def _donated_memory(given: Any, arrays: list[Any], argument: int, number: int, where: str) -> Any:
    """Return a donated argument's memory for a result.

    If the result has an ``out=`` buffer, the argument is copied there and replaced by the buffer.
    """
    if given is not None:
        check_out(given, arrays[argument].dtype, arrays[argument].shape, number, where)
        fill_out(given, arrays[argument])
        arrays[argument] = given
    return arrays[argument]


def fill_out(given: Any, found: Any) -> None:
    """Copy an array into an ``out=`` buffer."""
    if isinstance(given, DeviceArray):
        given.assign(found)
    else:
        given[...] = found
