"""Error for calls that finalizers make at interpreter exit, when modules may already be cleared."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from aotc.vmfb.errors import CallError

_CLEARED: tuple[type[BaseException], ...] = (TypeError, AttributeError, NameError, ImportError)
"""Exceptions of code whose module has been cleared."""


def raise_if_interpreter_exiting(
    exc_info: Callable[[], Any] = sys.exc_info,
    is_finalizing: Callable[[], bool] = sys.is_finalizing,
    cleared: tuple[type[BaseException], ...] = _CLEARED,
    is_a: Callable[..., bool] = issubclass,
    make: Callable[..., CallError] = CallError.__new__,
    kind: type[CallError] = CallError,
) -> None:
    """Replace the current exception by a CallError if the interpreter has cleared modules, which caused the exception.

    All names used here are defaults of parameters: this module may have been cleared too.

    Raises
    ------
    CallError
        If the interpreter has cleared modules.
    """
    if is_finalizing() and is_a(exc_info()[0], cleared):
        raise make(
            kind,
            "the interpreter is ending and has cleared the modules that a call needs\n"
            "  try: make the last call earlier, as in a function registered with atexit",
        ) from None
