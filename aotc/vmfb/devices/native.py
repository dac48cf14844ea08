"""Shared objects out of a bundle, and the executors, one of each version and signer, with their thread pools.

Libraries are loaded from anonymous files in memory. The dynamic loader remembers a
library by its path, and ``/proc/self/fd/N`` may come again once ``N`` is closed, so
the descriptors stay open; equal contents are loaded once per process.
"""

from __future__ import annotations

import ctypes
import os
from _thread import allocate_lock
from typing import Any

from aotc.vmfb.abi import ALIGNMENT
from aotc.vmfb.bundle import Bundle
from aotc.vmfb.errors import BundleError
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
        self.libraries: dict[tuple[bytes, bytes], ctypes.CDLL] = {}  # by signer and sha256
        self.executors: dict[tuple[int, bytes], Executor] = {}  # by version and signer


class Executor:
    """An executor and its pools of worker threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.pools: dict[int, tuple[Any, int]] = {}  # number of workers -> memory, address

    def pool(self, workers: int) -> int:
        """Return the address of the pool of so many worker threads, starting it if needed."""
        with _PROCESS.lock:
            if workers not in self.pools:
                memory, address = aligned_bytes(self.library.aotc_pool_bytes(), ALIGNMENT)
                self._start(address, workers)
                # Workers look at this memory until the process is gone, after Python has freed its objects.
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
                self.pools[workers] = memory, address
            return self.pools[workers][1]

    def restart(self) -> None:
        """Make the pools again, where they were: this process has none of its parent's threads."""
        for workers, (memory, address) in self.pools.items():
            memory[:] = 0
            self._start(address, workers)

    def _start(self, address: int, workers: int) -> None:
        """Start worker threads; if the system grants fewer, the caller and those do the work."""
        self.library.aotc_pool_start(ctypes.c_void_p(address), ctypes.c_int64(workers))


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
    digest = bundle.signer, bundle.digest(number)
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
    _write_all(descriptor, data)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _open_from_file(data: memoryview) -> ctypes.CDLL:
    """For systems without memfd: a private file that is gone once it is mapped."""
    from tempfile import mkstemp

    descriptor, path = mkstemp(prefix="aotc-", suffix=".so")
    try:
        _write_all(descriptor, data)
        os.close(descriptor)
        return ctypes.CDLL(path)
    finally:
        os.unlink(path)


def _write_all(descriptor: int, data: memoryview) -> None:
    while data.nbytes:
        data = data[os.write(descriptor, data) :]


def load_executor(bundle: Bundle, number: int | None, wanted: int) -> Executor:
    """Return the process's executor of version ``wanted``; the first bundle of that version and signer brings it.

    Raises
    ------
    BundleError
        If the bundle's executor lacks a symbol or has another version than its manifest says.
    """
    with _PROCESS.lock:
        found = _PROCESS.executors.get((wanted, bundle.signer))
    if found is not None:
        return found
    library = load_library(bundle, number, "executor")
    for name, result in _SIGNATURES.items():
        try:
            getattr(library, name).restype = result
        except AttributeError:
            raise BundleError(bundle.where, f"the executor exports no {name!r}") from None
    version = library.aotc_executor_version()
    if version != wanted:
        what = "the executor has another version than the manifest says"
        raise BundleError(bundle.where, what, version, wanted, "compile the model again")
    with _PROCESS.lock:
        return _PROCESS.executors.setdefault((wanted, bundle.signer), Executor(library))


def _restart_after_fork() -> None:
    """A child has none of its parent's threads."""
    _PROCESS.lock = allocate_lock()
    for executor in _PROCESS.executors.values():
        executor.restart()


os.register_at_fork(after_in_child=_restart_after_fork)
