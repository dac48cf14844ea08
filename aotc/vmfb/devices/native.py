"""Shared objects out of a bundle, and the one executor with its thread pools.

Libraries are loaded from anonymous files in memory. The dynamic loader remembers a
library by its path, and ``/proc/self/fd/N`` may come again once ``N`` is closed, so
the descriptors stay open; equal contents are loaded once per process.
"""

from __future__ import annotations

import ctypes
import os
from _thread import allocate_lock
from typing import Any

from aotc.vmfb.abi import ALIGNMENT, EXECUTOR_VERSION
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.errors import BundleError
from aotc.vmfb.files import work_folder
from aotc.vmfb.pointers import aligned_bytes

_SIGNATURES = {
    "aotc_executor_version": ctypes.c_int64,
    "aotc_pool_bytes": ctypes.c_int64,
    "aotc_pool_start": ctypes.c_int64,
    "aotc_pool_stop": None,
    "aotc_run": ctypes.c_int64,
}


class _Process:
    """What this process has loaded; shared by all bundles."""

    def __init__(self) -> None:
        self.lock = allocate_lock()
        self.libraries: dict[bytes, ctypes.CDLL] = {}
        self.executor: ctypes.CDLL | None = None
        self.pools: dict[int, tuple[Any, int]] = {}  # number of workers -> memory, address


_PROCESS = _Process()


def load_library(bundle: Bundle, number: int | None, role: str, own: bool = False) -> ctypes.CDLL:
    """Load a segment as a shared object; equal contents are loaded once, unless the caller wants its own copy.

    Raises
    ------
    BundleError
        If there is no such segment or the system refuses it.
    """
    if number is None:
        raise BundleError(bundle.where, f"the variant has no {role}")
    data = bundle.checked(number)
    digest = bundle.digest(number)
    if own:
        return _open(bundle, data, role)
    with _PROCESS.lock:
        if digest not in _PROCESS.libraries:
            _PROCESS.libraries[digest] = _open(bundle, data, role)
        return _PROCESS.libraries[digest]


def _open(bundle: Bundle, data: memoryview, role: str) -> ctypes.CDLL:
    try:
        return _open_library(data)
    except OSError as error:
        raise BundleError(bundle.where, f"the system cannot load the {role}", error) from error


def _open_library(data: memoryview) -> ctypes.CDLL:
    try:
        descriptor = os.memfd_create("aotc")
    except (AttributeError, OSError):
        return _open_from_file(data)
    try:
        while data.nbytes:
            data = data[os.write(descriptor, data) :]
    except OSError:
        os.close(descriptor)
        raise
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _open_from_file(data: memoryview) -> ctypes.CDLL:
    """For systems without memfd: a private file that is gone once it is mapped."""
    with work_folder() as folder:
        path = folder / "library.so"
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def load_executor(bundle: Bundle, number: int | None) -> ctypes.CDLL:
    """Return the process's executor; the first bundle brings it.

    Raises
    ------
    BundleError
        If the bundle's executor lacks a symbol or has another version.
    """
    if _PROCESS.executor is None:
        library = load_library(bundle, number, "executor")
        for name, result in _SIGNATURES.items():
            try:
                getattr(library, name).restype = result
            except AttributeError:
                raise BundleError(bundle.where, f"the executor exports no {name!r}") from None
        version = library.aotc_executor_version()
        if version != EXECUTOR_VERSION:
            raise BundleError(
                bundle.where,
                "the executor has another version",
                version,
                f"{EXECUTOR_VERSION}, which this aotc runs",
                "compile the model again with this version of aotc",
            )
        _PROCESS.executor = library
    return _PROCESS.executor


def worker_pool(executor: ctypes.CDLL, workers: int) -> int:
    """Return the address of the process's pool of so many worker threads, starting it if needed."""
    with _PROCESS.lock:
        if workers not in _PROCESS.pools:
            memory, address = aligned_bytes(executor.aotc_pool_bytes(), ALIGNMENT)
            _start_pool(address, workers)
            # Workers look at this memory until the process is gone, after Python has freed its objects.
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
            _PROCESS.pools[workers] = memory, address
        return _PROCESS.pools[workers][1]


def _start_pool(address: int, workers: int) -> None:
    """Start worker threads; if the system grants fewer, the caller and those do the work."""
    if _PROCESS.executor is not None:
        _PROCESS.executor.aotc_pool_start(ctypes.c_void_p(address), ctypes.c_int64(workers))


def _restart_after_fork() -> None:
    """A child has none of its parent's threads: make the pools again, where they were."""
    _PROCESS.lock = allocate_lock()
    for workers, (memory, address) in _PROCESS.pools.items():
        memory[:] = 0
        _start_pool(address, workers)


os.register_at_fork(after_in_child=_restart_after_fork)
