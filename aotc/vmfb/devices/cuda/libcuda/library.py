"""libcuda through ctypes, loaded on first use.

:func:`missing` describes the reason if this machine cannot load it.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

from aotc.vmfb.devices.cuda.libcuda.functions import CONDITIONS, SIGNATURES
from aotc.vmfb.errors import CallError
from aotc.vmfb.host.locks import new_lock

_OUT_OF_MEMORY, _NOT_READY = 2, 600


class Driver:
    """The library libcuda, which is loaded and initialised once."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.library: ctypes.CDLL | None = None
        self.reason = ""

    def load_library(self) -> str:
        """Load and initialise libcuda; return the reason if that fails, else an empty string."""
        with self.lock:
            if self.library is None and not self.reason:
                self.reason = self._load_and_initialize()
        return self.reason

    def driver_function(self, name: str) -> Any:
        """Return a driver function; its arguments must be ctypes objects, and it returns a status code."""
        library: Any = self.library
        return library[name]

    def _load_and_initialize(self) -> str:
        """Load libcuda and call ``cuInit``; return the reason if that fails, else an empty string."""
        try:
            library = ctypes.CDLL("libcuda.so.1")
            for name, arguments in SIGNATURES.items():
                getattr(library, name).argtypes = arguments
        except (OSError, AttributeError) as error:
            return f"no NVIDIA driver ({error})"
        for name, arguments in CONDITIONS.items():
            with suppress(AttributeError):
                getattr(library, name).argtypes = arguments
        status = library.cuInit(0)
        count = c_int()
        if status or library.cuDeviceGetCount(byref(count)) or not count.value:
            return f"the NVIDIA driver finds no GPU ({_driver_error_name(library, status)})"
        self.library = library
        return ""


DRIVER = Driver()


def _driver_error_name(library: ctypes.CDLL | None, status: int) -> str:
    text = c_char_p()
    assert library is not None
    library.cuGetErrorName(status, byref(text))
    return (text.value or b"error %d" % status).decode()


class OutOfGpuMemory(CallError):
    """A GPU does not have enough free memory for an allocation."""


def missing() -> str:
    """Return the reason why this machine cannot use CUDA; an empty string if it can."""
    return DRIVER.load_library()


def call(name: str, *arguments: Any) -> None:
    """Call the CUDA driver function ``name``, and raise an error if it fails.

    Raises
    ------
    CallError
        If the function fails; the message has its name and the driver's error.
    """
    library: Any = DRIVER.library
    status = getattr(library, name)(*arguments)
    if status:
        raise driver_failure(name, status)


def driver_failure(name: str, status: int) -> CallError:
    """Return the error for the driver function ``name`` that returned ``status``."""
    what, found = f"{name} failed on the GPU", _driver_error_name(DRIVER.library, status)
    if status == _OUT_OF_MEMORY:
        return OutOfGpuMemory("", what, found, hint="run fewer calls at the same time, or pass smaller arrays")
    return CallError("", what, found)


def is_done(name: str, handle: c_void_p) -> bool:
    """Return True if an event or a stream is complete; ``name`` is the driver function that queries it."""
    library: Any = DRIVER.library
    status = getattr(library, name)(handle)
    if status not in (0, _NOT_READY):
        raise driver_failure(name, status)
    return status != _NOT_READY


def handle_of(name: str, *arguments: Any) -> c_void_p:
    """Call the driver function ``name``, which creates an object, and return the object's handle."""
    found = c_void_p()
    call(name, byref(found), *arguments)
    return found


def try_driver(name: str, *arguments: Any) -> None:
    """Call the driver function ``name``, and ignore its failure; for finalizers."""
    with suppress(CallError):
        call(name, *arguments)
