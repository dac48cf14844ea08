"""Decorator that restricts ``dir`` and completion to the public names of an object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def public_names(*names: str) -> Callable[[Kind], Kind]:
    """Return a class decorator: ``dir`` of an instance shows ``names``, and the public names of base classes.

    The runtime calls further methods of these objects; users should not.
    """

    def decorate(kind: Kind) -> Kind:
        """Set the ``__dir__`` of the class, unless it has one."""
        shown = tuple(sorted({*getattr(kind, "_public", ()), *names}))

        def listed(_: object) -> list[str]:
            return list(shown)

        kind._public = shown  # type: ignore[attr-defined]
        if "__dir__" not in vars(kind):
            kind.__dir__ = listed  # type: ignore[assignment]
        return kind

    return decorate
