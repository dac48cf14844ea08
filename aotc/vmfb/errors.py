"""What the runtime says when a bundle or a call is at fault.

Both errors fit on one screen: where, what was found, what was expected, and what
to do about it.
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
        return _again, (type(self), str(self), self.__dict__)


def _again(kind: type[_Fault], message: str, more: dict[str, Any]) -> _Fault:
    """Return the error of a pickle: what another process raised has its whole text."""
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
        One sentence.
    found, expected : object, optional
        Printed on lines of their own.
    hint : str, optional
        What the user can do.
    """


class VmError(_Fault):
    """A call is wrong: arguments that do not fit, or an assertion of the program that failed.

    Parameters are those of :class:`BundleError`; ``where`` names the function.
    """


class FenceCancelled(VmError):
    """A submission, or a fence of the user's, was cancelled."""


class DeadlineExceeded(VmError):
    """A submission was not done when its deadline passed."""


@contextmanager
def bundle_errors(source: Any, action: str = "loaded") -> Iterator[None]:
    """Wrap unexpected exceptions of the block in a BundleError that names the bundle ``source``.

    Parameters
    ----------
    source : str, path, bytes or OpenedBundle
    action : str
        What could not be done: ``loaded``, ``checked``, ``shown``.

    Raises
    ------
    BundleError
        In place of any exception but errors of ours, a lack of memory, and a closed pipe that the block writes to.
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
