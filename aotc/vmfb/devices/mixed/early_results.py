"""Early results of calls with GPU memory: marks that GPUs store, and copies of complete results to the host.

A GPU stores a mark in page-locked memory behind the last work that writes a result: a node of its graph, or work of its
stream. Results that stay on the GPU are read there. Other results are in working memory, which belongs to the call
until it ends. The first reader copies such a result to the host; otherwise the call copies it at its end.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from aotc.vmfb.devices.cuda import driver as cuda_driver
from aotc.vmfb.devices.cuda.array import memory_keeper
from aotc.vmfb.devices.cuda.driver import Gpu
from aotc.vmfb.devices.cuda.staging import download
from aotc.vmfb.devices.early import MARK_BYTES, Marks
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import after_fork, new_recursive_lock
from aotc.vmfb.host.release import Release
from aotc.vmfb.memory.pointers import address_of

_IDLE: dict[int, list[int]] = {}  # by size in bytes: unused tables of marks in page-locked memory
after_fork(_IDLE.clear)  # not valid in a child


class LockedMarks:
    """A table of completion marks in page-locked memory, for one call at a time.

    Freeing it returns the memory for reuse.

    Attributes
    ----------
    table : Marks
    """

    def __init__(self, results: int, gpu: Gpu) -> None:
        size = 1 << (MARK_BYTES * (1 + results) - 1).bit_length()
        idle = _IDLE.setdefault(size, [])
        try:
            address = idle.pop()
        except IndexError:
            gpu.make_context_current()
            address = cuda_driver.allocate_page_locked(size)
        self.table: Marks = (ctypes.c_int64 * (1 + results)).from_address(address)
        self._release = Release(idle.append, address)

    def set_all(self, value: int) -> None:
        """Set all marks to ``value``: 0 clears them."""
        for number in range(1, len(self.table)):
            self.table[number] = value


class Download(NamedTuple):
    """A result in a GPU's working memory, and the host array that it is copied to."""

    gpu: Gpu
    address: int
    array: np.ndarray


class Downloads:
    """The results of a call that are copied to the host, each exactly once.

    Parameters
    ----------
    rows : dict of int to Download
        By number of the result.
    """

    def __init__(self, rows: dict[int, Download]) -> None:
        self._rows = rows
        self._error: CallError | None = None
        self._lock = new_recursive_lock()

    def copy_result(self, number: int) -> None:
        """Copy result ``number``, which the GPU has completed, while the call runs.

        Raises
        ------
        CallError
            If the result could not be copied before its memory was reused.
        """
        with self._lock:
            row = self._rows.get(number)
            if row is None:
                return
            if self._error is not None:
                raise self._error
            memory_keeper(row.gpu.ordinal).download_elements(row.array, row.address)
            del self._rows[number]

    def copy_remaining(self, gpu: Gpu) -> None:
        """Copy the remaining results of a GPU that has completed its work."""
        with self._lock:
            self._copy([number for number, row in self._rows.items() if row.gpu is gpu])

    def close(self, is_ready: Callable[[int], bool]) -> None:
        """Copy the results that are ready, because the call has failed and their memory will be reused."""
        with self._lock:
            try:
                for number in [number for number in self._rows if is_ready(number)]:
                    self._copy([number])
            except CallError as error:
                self._error = error
            else:
                self._rows.clear()

    def _copy(self, numbers: list[int]) -> None:
        """Copy these results to their host arrays, GPU by GPU, and wait."""
        gpus = {id(self._rows[number].gpu): self._rows[number].gpu for number in numbers}
        for number in numbers:
            gpu, address, array = self._rows[number]
            gpu.make_context_current()
            download(gpu, address_of(array), address, array.nbytes)
        for gpu in gpus.values():
            gpu.make_context_current()
            gpu.wait()
        for number in numbers:
            del self._rows[number]
