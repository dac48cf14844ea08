"""Resources of the system that are released after every finalizer that may still use them."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any


class Release:
    """Call ``function(*arguments)`` when the last reference to this object goes.

    The garbage collector runs the finalizers (``__del__``, callbacks of weak references) of all objects of a cycle in
    any order, then frees the objects. Among them may be an object of the user's whose ``__del__`` calls a module, so
    the module's code and memory must not go before that. The collector does not track this object, so it acts when its
    owner is freed. What it refers to must not refer back to the owner.

    Nothing is released while the interpreter ends: the system does that, and calls of daemon threads may still run.
    """

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self._function, self._arguments = function, arguments
        ctypes.pythonapi.PyObject_GC_UnTrack(ctypes.py_object(self))

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():
            self._function(*self._arguments)


def never_freed(x: Any) -> Any:
    """Return ``x``, which the garbage collector never frees: native code has its address.

    A Python function that the collector has cleared ends the process when it is called.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(x))
    return x


never_freed(Release.__del__)
