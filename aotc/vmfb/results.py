"""Memory space of a function's arguments and results (host or a GPU), and allocation of the results."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from aotc.vmfb.abi import Slots
from aotc.vmfb.arguments import check_output_buffer, type_text
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
    """Return the fast paths for calls whose arrays are all on the GPU; None unless one GPU has all memory."""
    if not getattr(executable, "is_one_gpu", False):
        return None
    from aotc.vmfb.devices.cuda.resident_calls import ResidentCalls  # only for GPUs

    return ResidentCalls(cast("PlacedExecutable", executable))


class Residence:
    """The memory space (host or a GPU) of each argument and result of a function.

    Attributes
    ----------
    layout : Slots
        The function's pointer table.
    memory : ResultMemory
        Allocator of results in host memory.
    constants : tuple of int
        Bytes of the constants in each memory space.
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
        placed = cast("PlacedExecutable", executable) if hasattr(executable, "gpu_of_slot") else None
        self.layout = placed.layout(entry) if placed else Slots(len(arguments), len(results))
        slots = range(self.layout.arena)
        owners: list[Any] = [placed.gpu_of_slot(self.layout, slot) for slot in slots] if placed else [None] * len(slots)
        ordinals = [-1 if owner is None else owner.ordinal for owner in owners]
        self.gpus, self.result_gpus = tuple(ordinals[: len(arguments)]), tuple(ordinals[len(arguments) :])
        self._givers, self._owners = owners[: len(arguments)], owners[len(arguments) :]
        self._rows = results
        self.named = tuple([bool(owner and row.get("device")) for owner, row in zip(self._owners, results)])

    def owner(self, number: int) -> LoadedGpu | None:
        """Return the GPU module that allocates the memory of argument ``number``; None for host memory."""
        return self._givers[number]

    def results_on_gpu(self, option: str, out: Sequence[Any]) -> list[bool]:
        """Return, for each result, True if the caller gets it on a GPU.

        Parameters
        ----------
        option : str
            The option ``results`` of the call: ``numpy``, ``device`` or empty.
        out : sequence
            The ``out=`` buffer of each result, None without one; its memory decides.
        """
        every = {NUMPY: [False] * len(self.named), DEVICE: [bool(o) for o in self._owners]}.get(option, self.named)
        return [stays if given is None else not isinstance(given, np.ndarray) for stays, given in zip(every, out)]

    def allocate_results(
        self, plan: Plan, arrays: list[Any], out: Sequence[Any], stays: Sequence[bool], where: str
    ) -> list[Any]:
        """Return an array for each result of a plan: new, an ``out=`` buffer, or the memory of a donated argument.

        ``stays`` is the result of :meth:`results_on_gpu`. Host arrays in ``arrays`` whose memory would become a result
        on a GPU are replaced by copies there.
        """
        taken = dict(plan.taken)
        results: list[Any] = []
        for number, (shape, dtype) in enumerate(plan.results):
            owner, argument = self._owners[number], taken.get(number, -1)
            if argument >= 0 and stays[number] and out[number] is None and isinstance(arrays[argument], np.ndarray):
                arrays[argument] = owner.upload_array(arrays[argument], self._name(number))
            if argument >= 0:
                results.append(_donated_memory(out[number], arrays, argument, number, where))
            elif stays[number] and out[number] is None:
                results.append(owner.empty_array(shape, dtype, self._name(number)))
            else:
                results.append(self.output_buffer_or_new_array(out[number], dtype, shape, number, where))
        return results

    def output_buffer_or_new_array(
        self, buffer: Any, dtype: np.dtype, shape: tuple[int, ...], number: int, where: str
    ) -> Any:
        """Return the array for a result: ``buffer``, its ``out=`` buffer, after checks; a new array if that is None."""
        if buffer is None:
            try:
                return self.memory.empty(shape, dtype)
            except (MemoryError, ValueError):
                text = type_text(from_numpy(dtype), shape)
                raise CallError(where, f"the system has no memory for result {number}, {text}") from None
        check_output_buffer(buffer, dtype, shape, number, where)
        return buffer

    def move_results(self, results: list[Any], stays: Sequence[bool]) -> list[Any]:
        """Copy the results of a call to GPU or host memory as ``stays``, from :meth:`results_on_gpu`, requires."""
        for number, stay in enumerate(stays):
            if isinstance(results[number], np.ndarray) == stay:
                owner, name = self._owners[number], self._name(number)
                results[number] = owner.upload_array(results[number], name) if stay else results[number].numpy()
        return results

    def _name(self, number: int) -> str:
        return self._rows[number].get("device") or f"cuda:{self._owners[number].ordinal}"


def wrap_host_results(
    results: list[Any], rows: Sequence[Mapping[str, Any]], out: Sequence[Any] | None, home: str
) -> list[Any]:
    """Wrap the host results of a call as :class:`DeviceArray`, except those in ``out=`` buffers.

    ``rows`` are the results' entries in the manifest, ``home`` is the device of results without one.
    """
    found = []
    for x, row, given in zip(results, rows, out or [None] * len(results)):
        wrapped = given is not None or isinstance(x, DeviceArray)
        found.append(x if wrapped else DeviceArray(x, row.get("device", home)))
    return found


def _donated_memory(buffer: Any, arrays: list[Any], argument: int, number: int, where: str) -> Any:
    """Return the array of donated argument ``argument`` as the memory of result ``number``.

    If the result has an ``out=`` buffer, ``buffer``, the argument is copied there and replaced by the buffer.
    """
    if buffer is not None:
        check_output_buffer(buffer, arrays[argument].dtype, arrays[argument].shape, number, where)
        copy_to_output_buffer(buffer, arrays[argument])
        arrays[argument] = buffer
    return arrays[argument]


def copy_to_output_buffer(buffer: Any, array: Any) -> None:
    """Copy an array into an ``out=`` buffer."""
    if isinstance(buffer, DeviceArray):
        buffer.assign(array)
    else:
        buffer[...] = array
