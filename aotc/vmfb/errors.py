"""Exceptions of the runtime for faulty bundles and calls, and the base class of all of aotc's.

Their messages fit on one screen: location, problem, found and expected values, and a remedy.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar


def _render(where: str, what: str, found: object, expected: object, hint: str) -> str:
    """Format an error: location and problem, then found and expected values and the hint, each on a line of its own."""
    lines = [f"{where}: error: {what}" if where else what]
    if found is not None:
        lines.append(f"    found:    {found}")
    if expected is not None:
        lines.append(f"    expected: {expected}")
    if hint:
        lines.append(f"  try: {hint}")
    return "\n".join(lines)


class Error(Exception):
    """Base class of all errors that aotc raises on purpose."""


class _Fault(Error):
    """Base class of errors with a location, a problem, found and expected values, and a hint."""


    def __init__(
        self, where: str, what: str, found: object = None, expected: object = None, hint: str = ""
    ) -> None:
        super().__init__(_render(where, what, found, expected, hint))

    def __str__(self) -> str:  # an OSError would print its number and file
        return str(self.args[0]) if self.args else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return error_of_message, (type(self), str(self), self.__dict__)


Fault = TypeVar("Fault", bound=_Fault)


def error_of_message(kind: type[Fault], message: str, more: Mapping[str, Any]) -> Fault:
    """Recreate an error that another process raised, from its complete text and further attributes ``more``."""
    error = kind.__new__(kind, message)
    error.args = (message,)
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


class BundleNotFoundError(BundleError, FileNotFoundError):
    """There is no such bundle; also a ``FileNotFoundError``.

    The parameters are those of :class:`BundleError`.
    """

    errno = errno.ENOENT

    @property
    def filename(self) -> str:
        """Return the path, as other errors of missing files do."""
        return str(self).partition(": error: ")[0]


class CallError(_Fault):
    """A call failed: its arguments do not fit, an assertion of the program failed, or the machine cannot run it.

    The parameters are those of :class:`BundleError`; ``where`` is the function.
    """


class ArgumentError(CallError, TypeError):
    """Arguments of the wrong number, name, structure or type; also a ``TypeError``.

    The parameters are those of :class:`CallError`.
    """


class ArgumentValueError(CallError, ValueError):
    """An argument or an option of the right type, but the wrong shape or value; also a ``ValueError``.

    The parameters are those of :class:`CallError`.
    """


class MissingFunctionError(ArgumentValueError, KeyError):
    """A module has no function of this name; also a ``KeyError``.

    The parameters are those of :class:`CallError`.
    """


class FenceCancelled(CallError):
    """A submission, or a fence of the user, was cancelled."""


class DeadlineExceeded(CallError, TimeoutError):
    """A submission was not complete when its deadline passed; also a ``TimeoutError``."""

    errno = errno.ETIMEDOUT


class RankLost(CallError):
    """A rank of a sharded model ended, or closed its module, while this rank needed it.

    Every surviving rank names the same rank. The parameters are those of :class:`CallError`; ``rank`` is the lost rank.
    """

    def __init__(self, rank: int, what: str) -> None:
        super().__init__("", what, hint="start all ranks again; values of donated arguments and of state are lost")
        self.rank = rank


VmError = CallError


def misspelling_hint(name: str, known: Sequence[str]) -> str:
    """Return a hint for the unknown keyword ``name``: the nearest known keyword, or all known ones."""
    from difflib import get_close_matches  # only for an error

    near = get_close_matches(name, known, n=1)
    return f"{near[0]}=..." if near else f"one of {', '.join(known)}"


def check_keywords(where: str, keywords: Iterable[str], known: Sequence[str]) -> None:
    """Refuse keyword arguments that the function ``where`` does not have.

    Raises
    ------
    ArgumentError
        It suggests the nearest keyword.
    """
    for name in keywords:
        if name not in known:
            raise ArgumentError("", f"{where} has no keyword {name!r}", hint=misspelling_hint(name, known))


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
    except (Error, MemoryError, BrokenPipeError):
        raise
    except Exception as error:
        where = getattr(source, "where", None) or (source if isinstance(source, str | os.PathLike) else "<bytes>")
        what = f"the bundle cannot be {action}: {type(error).__name__}: {error}"
        hint = "compile the model again; if that does not help, this is a bug in aotc"
        raise BundleError(os.fspath(where), what, hint=hint) from error
