"""Release of system resources after all finalizers that may still use them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


class Release:
    """Call ``function(*arguments)`` when the last reference to this object is dropped.

    The garbage collector runs the finalizers (``__del__``, weak reference callbacks) of all objects of a cycle in any
    order, then frees the objects. One of these objects may be a user's, whose ``__del__`` calls a module; so the
    module's code and memory must not be released before that. The collector does not track this object, so it releases
    only when its owner is freed. Its arguments must not reference the owner.

    Nothing is released at interpreter exit: the system does that, and calls of daemon threads may still run.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(self))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._function(*self._arguments)


def keep_alive_forever(x: Any) -> Any:
    """Return ``x`` with an additional reference, so that it is never freed: native code has its address.

    Calling a Python function that the collector has cleared would crash the process.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x


keep_alive_forever(Release.__del__)
