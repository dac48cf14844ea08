"""Exceptions of the runtime for faulty bundles and calls.

Their messages fit on one screen: location, problem, found and expected values, and a remedy.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def _render(where: str, what: str, found: object, expected: object, hint: str) -> str:
    lines = [f"{where}: error: {what}" if where else what]
    if found is not None:
        lines.append(f"    found:    {found}")
    if expected is not None:
        lines.append(f"    expected: {expected}")
    if hint:
        lines.append(f"  try: {hint}")
    return "\n".join(lines)


class _Fault(Exception):
    def __init__(
        self, where: str, what: str, found: object = None, expected: object = None, hint: str = ""
    ) -> None:
        super().__init__(_render(where, what, found, expected, hint))

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickle, (type(self), str(self), self.__dict__)


def _unpickle(kind: type[_Fault], message: str, more: dict[str, Any]) -> _Fault:
    """Unpickle an error of another process, whose message is already complete."""
    error = kind.__new__(kind, message)
    error.__dict__.update(more)
    return error


class BundleError(_Fault):
    """A bundle cannot be written, read, or run on this machine.

    Parameters
    ----------
    where : str
        Path of the bundle, or ``<bytes>``.
    what : str
        The problem, in one sentence.
    found, expected : object, optional
        Each is printed on a line of its own.
    hint : str, optional
        A remedy.
    """


class VmError(_Fault):
    """A faulty call: arguments that do not fit, or a failed assertion of the program.

    The parameters are those of :class:`BundleError`; ``where`` is the function.
    """


class FenceCancelled(VmError):
    """A submission, or a fence of the user, was cancelled."""


class DeadlineExceeded(VmError):
    """A submission was not complete when its deadline passed."""


@contextmanager
def bundle_errors(source: Any, action: str = "loaded") -> Iterator[None]:
    """Wrap unexpected exceptions of the block in a BundleError that names the bundle ``source``.

    Parameters
    ----------
    source : str, path, bytes or OpenedBundle
    action : str
        The action that failed: ``loaded``, ``checked``, ``shown``.

    Raises
    ------
    BundleError
        Instead of any exception except aotc's own errors, MemoryError, and BrokenPipeError from output of the block.
    """
    try:
        yield
    except (BundleError, VmError, MemoryError, BrokenPipeError):
        raise
    except Exception as error:
        where = getattr(source, "where", None) or (source if isinstance(source, str | os.PathLike) else "<bytes>")
        what = f"the bundle cannot be {action}: {type(error).__name__}: {error}"
        hint = "compile the model again; if that does not help, this is a bug in aotc"
        raise BundleError(os.fspath(where), what, hint=hint) from error
