"""libcuda by ctypes, loaded when it is first needed; a machine without it gets a reason from :func:`missing`."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from ctypes import byref, c_char_p, c_int, c_void_p
from typing import Any

from aotc.vmfb.devices.cuda.libcuda.functions import CONDITIONS, SIGNATURES
from aotc.vmfb.errors import VmError
from aotc.vmfb.host.locks import new_lock

_OUT_OF_MEMORY, _NOT_READY = 2, 600


class Driver:
    """libcuda, loaded and started once."""

    def __init__(self) -> None:
        self.lock = new_lock()
        self.library: ctypes.CDLL | None = None
        self.reason = ""

    def load(self) -> str:
        """Start the driver; return why that cannot be, or an empty string."""
        with self.lock:
            if self.library is None and not self.reason:
                self.reason = self._start()
        return self.reason

    def function(self, name: str) -> Any:
        """Return a function, which returns a status, for arguments that are ctypes' own objects: none is converted."""
        library: Any = self.library
        return library[name]

    def _start(self) -> str:
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
            return f"the NVIDIA driver finds no GPU ({_name(library, status)})"
        self.library = library
        return ""


DRIVER = Driver()


def _name(library: Any, status: int) -> str:
    text = c_char_p()
    library.cuGetErrorName(status, byref(text))
    return (text.value or b"error %d" % status).decode()


class OutOfGpuMemory(VmError):
    """A GPU has not so much memory."""


def missing() -> str:
    """Return why this machine cannot use CUDA, or an empty string."""
    return DRIVER.load()


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises
    ------
    VmError
        If it fails; names the function and the driver's error.
    """
    library: Any = DRIVER.library
    status = getattr(library, name)(*arguments)
    if status:
        raise failure(name, status)


def failure(name: str, status: int) -> VmError:
    """Return the error for a function that has failed."""
    what, found = f"{name} failed on the GPU", _name(DRIVER.library, status)
    if status == _OUT_OF_MEMORY:
        return OutOfGpuMemory("", what, found, hint="give the GPU less to do at a time")
    return VmError("", what, found)


def is_done(name: str, handle: c_void_p) -> bool:
    """Ask a function whether something is done."""
    library: Any = DRIVER.library
    status = getattr(library, name)(handle)
    if status not in (0, _NOT_READY):
        raise failure(name, status)
    return status != _NOT_READY


def handle_of(name: str, *arguments: Any) -> c_void_p:
    """Call a function whose first argument is where it puts a handle."""
    found = c_void_p()
    call(name, byref(found), *arguments)
    return found


def attempt(name: str, *arguments: Any) -> None:
    """Call a function that may fail."""
    with suppress(VmError):
        call(name, *arguments)
