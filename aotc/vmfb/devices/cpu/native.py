"""Shared objects that are loaded from a bundle, and executors with their thread pools.

Libraries are loaded from anonymous memory files. The dynamic loader identifies a library by its path, and
``/proc/self/fd/N`` is reused once ``N`` is closed. So the descriptor stays open until the library is unloaded, with the
last executable that references it. Equal contents are loaded once per process. A process has one executor for each
version and signer.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable
from contextlib import suppress
from time import monotonic, sleep
from typing import Any
from weakref import WeakValueDictionary

from aotc.vmfb import abi
from aotc.vmfb.bundle import OpenedBundle
from aotc.vmfb.errors import BundleError, CallError
from aotc.vmfb.host.digests import remember_digest
from aotc.vmfb.host.interruption import is_module_in_native_call, register_check_request
from aotc.vmfb.host.locks import after_fork, new_recursive_lock
from aotc.vmfb.host.machine import shuffle_seed, thread_count
from aotc.vmfb.host.release import Release, keep_alive_forever
from aotc.vmfb.limits import EXIT_SECONDS
from aotc.vmfb.memory.pointers import WORDS, aligned_bytes
from aotc.vmfb.verify.elf import elf_problem

_SIGNATURES = {
    "aotc_executor_version": ctypes.c_int64,
    "aotc_pool_bytes": ctypes.c_int64,
    "aotc_run": ctypes.c_int64,
}
# CPython functions by which the executor releases the GIL; they are part of the stable ABI.
_HOST = {
    abi.POOL_RELEASE: "PyEval_SaveThread",
    abi.POOL_REGAIN: "PyEval_RestoreThread",
    abi.POOL_NOTICE: "PyObject_CallNoArgs",
    abi.POOL_DROP: "Py_DecRef",
}


_DLCLOSE = ctypes.CDLL(None).dlclose  # not from ctypes, whose module for it is private


class SharedObject:
    """A shared object loaded from memory, unloaded with the last reference to it."""

    def __init__(self, data: memoryview) -> None:
        try:
            descriptor = os.memfd_create("aotc")
        except (AttributeError, OSError):
            descriptor = -1
        try:
            self.library = _open_from_file(data) if descriptor < 0 else _open_from_memory(data, descriptor)
        except BaseException:
            _close_descriptor(descriptor)
            raise
        self._release = Release(_unload_library, self.library._handle, descriptor)


def _open_from_memory(data: memoryview, descriptor: int) -> ctypes.CDLL:
    with open(descriptor, "wb", closefd=False) as file:
        file.write(data)
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}")


def _unload_library(handle: int, descriptor: int) -> None:
    _DLCLOSE(ctypes.c_void_p(handle))
    _close_descriptor(descriptor)


def _close_descriptor(descriptor: int) -> None:
    if descriptor >= 0:
        os.close(descriptor)


_CALLERS = "aotc.vmfb.devices.cpu.device"


class _Process:
    """Libraries and executors of this process, which all bundles share."""

    def __init__(self) -> None:
        self.lock = new_recursive_lock()
        self.libraries: WeakValueDictionary[tuple[bytes, bytes], SharedObject] = WeakValueDictionary()
        self.executors: dict[tuple[int, bytes], Executor] = {}
        self.trial = 0  # address of the active trial's words, or 0


class Executor:
    """An executor and its worker threads; a process has one for each version and signer.

    Attributes
    ----------
    run : callable
        ``run(block) -> int`` runs the command buffer of a call block, a ``c_void_p``; 1 if it was stopped without an
        exception. It is called and returns with the GIL held and releases it in between. It raises exceptions of
        :func:`aotc.vmfb.host.interruption.raise_if_interrupted` and of signal handlers.
    pool : int
        The address of the thread pool.
    """

    def __init__(self, library: SharedObject, version: int) -> None:
        self.library = library
        self._counts = version > 2
        self.run: Callable[[ctypes.c_void_p], int] = ctypes.PYFUNCTYPE(ctypes.c_int64)(("aotc_run", library.library))
        self._memory, self.pool = aligned_bytes(library.library.aotc_pool_bytes(), abi.ALIGNMENT)
        # Workers read this memory until the process ends, after Python has freed its objects.
        keep_alive_forever(self._memory)
        keep_alive_forever(library)
        self.reset_pool()

    def reset_pool(self) -> None:
        """Reset the thread pool to its state without workers; workers are started when a call needs them."""
        self._memory[:] = 0
        for word, name in _HOST.items():
            function = getattr(ctypes.pythonapi, name)
            self[word] = ctypes.cast(function, ctypes.c_void_p).value or 0
        with suppress(CallError):  # an invalid variable is reported by a load without threads=
            self[abi.POOL_CORES] = thread_count(None)
        self.follow_trial(_PROCESS.trial)

    def follow_trial(self, trial: int) -> None:
        """Let all calls follow the trial at address ``trial``; 0 ends the trial."""
        if self._counts:
            self[abi.POOL_TRIAL] = trial

    def stats(self) -> dict[str, Any]:
        """Return counters of this process's workers and callers.

        ``steals``: items that a thread ran beyond an equal share of a command's items; ``idle``: seconds that threads
        waited within graphs; ``wakeups``: number of times that a worker was woken.
        """
        steals, idle, wakeups = (self[word] if self._counts else 0 for word in abi.POOL_COUNTS)
        return {"steals": steals, "idle": idle / 1e9, "wakeups": wakeups}

    def __getitem__(self, word: int) -> int:
        return WORDS[(self.pool >> 3) + word]

    def __setitem__(self, word: int, value: int) -> None:
        WORDS[(self.pool >> 3) + word] = value


_PROCESS = _Process()


def load_library(bundle: OpenedBundle, number: int | None, role: str, own: bool = False) -> SharedObject:
    """Load a segment as a shared object; equal contents are loaded once, unless the caller needs its own copy.

    Raises
    ------
    BundleError
        If the segment does not exist, is damaged, or the system refuses it.
    """
    if number is None:
        raise BundleError(bundle.where, f"the variant has no {role}")
    data = bundle.verified_segment(number)
    digest = bundle.signer, bundle.segment_digest(number)
    if own:
        return _open_library(bundle, data, role)
    with _PROCESS.lock:
        found = _PROCESS.libraries.get(digest)
        if found is None:
            found = _PROCESS.libraries[digest] = _open_library(bundle, data, role)
        return found


def _open_library(bundle: OpenedBundle, data: memoryview, role: str) -> SharedObject:
    """Load a shared object from memory, after a check that it is complete."""
    if problem := elf_problem(data):
        raise BundleError(bundle.where, f"the {role} is cut or damaged", problem, hint="copy the bundle again")
    try:
        return SharedObject(data)
    except OSError as error:
        raise BundleError(bundle.where, f"the system cannot load the {role}", error) from error


def _open_from_file(data: memoryview) -> ctypes.CDLL:
    """Load a shared object on systems without memfd: from a private file, deleted after it has been mapped."""
    from aotc.vmfb.host.files import temporary_folder  # only for systems without memfd

    with temporary_folder() as folder:
        path = folder / "library.so"
        path.write_bytes(data)
        return ctypes.CDLL(str(path))


def load_executor(bundle: OpenedBundle, number: int | None, version: int) -> Executor:
    """Return the process's executor of this version and signer; the first bundle of both supplies it.

    Raises
    ------
    BundleError
        If the bundle's executor lacks a symbol or its version differs from the manifest.
    """
    with _PROCESS.lock:
        found = _PROCESS.executors.get((version, bundle.signer))
        if found is None:
            library = load_library(bundle, number, "executor")
            _check_executor(bundle, library.library, version)
            if number is not None:  # later bundles have the same
                remember_digest(bundle.verified_segment(number), bundle.segment_digest(number))
            _start_shuffle_trial()
            found = _PROCESS.executors[version, bundle.signer] = Executor(library, version)
        return found


def set_trial(trial: int) -> None:
    """Let all calls of this process follow the trial at address ``trial``; 0 ends the trial.

    See :class:`aotc.vmfb.devices.cpu.executor_trials.Trial`.
    """
    with _PROCESS.lock:
        _PROCESS.trial = trial
        for executor in _PROCESS.executors.values():
            executor.follow_trial(trial)


def _start_shuffle_trial() -> None:
    """Start the trial that ``AOTC_SHUFFLE`` requests, if it is set."""
    seed = shuffle_seed()
    if seed is not None and not _PROCESS.trial:
        from aotc.vmfb.devices.cpu.executor_trials import (
            Trial,  # only for tests
        )

        trial = Trial()
        trial.shuffle(seed)
        _PROCESS.trial = trial.address


def _check_executor(bundle: OpenedBundle, library: ctypes.CDLL, expected_version: int) -> None:
    """Refuse an executor that lacks a symbol, or whose version differs from the manifest's."""
    for name, result in _SIGNATURES.items():
        try:
            getattr(library, name).restype = result
        except AttributeError:
            raise BundleError(bundle.where, f"the executor exports no {name!r}") from None
    version = library.aotc_executor_version()
    if version != expected_version:
        what = "the executor has another version than the manifest says"
        raise BundleError(bundle.where, what, version, expected_version, "compile the model again")


def _reset_after_fork() -> None:
    """Reset the pools in a forked child, which has none of its parent's threads."""
    for executor in _PROCESS.executors.values():
        executor.reset_pool()


def _request_checks_of_calls() -> None:
    """Request that all running calls check for cancellation soon.

    A call that misses this request checks when its interval has passed.
    """
    for executor in list(_PROCESS.executors.values()):
        executor[abi.POOL_ASK] += 1


def _stop_all_calls() -> None:
    """Stop the calls of daemon threads at interpreter exit, before their arrays are freed; library calls end first."""
    if not is_module_in_native_call(_CALLERS):
        return
    executors = list(_PROCESS.executors.values())  # a daemon thread may load another
    for executor in executors:
        executor[abi.POOL_HALT] = 1
    end = monotonic() + EXIT_SECONDS
    while is_module_in_native_call(_CALLERS) and monotonic() < end:
        sleep(0.001)
    for executor in executors:
        executor[abi.POOL_HALT] = 0


after_fork(_reset_after_fork)
register_check_request(_request_checks_of_calls)
atexit.register(_stop_all_calls)
