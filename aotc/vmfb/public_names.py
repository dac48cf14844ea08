"""What ``dir`` and completion show of the objects that users hold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

Kind = TypeVar("Kind", bound=type)


def public_names(*names: str) -> Callable[[Kind], Kind]:
    """Let ``dir`` of an instance show these names, and those of the base classes that this decorates.

    Parts of the runtime in other modules call further methods of these objects, which are not for users.
    """

    def decorate(kind: Kind) -> Kind:
        shown = tuple(sorted({*getattr(kind, "_public", ()), *names}))

        def listed(_: object) -> list[str]:
            return list(shown)

        kind._public = shown  # type: ignore[attr-defined]
        if "__dir__" not in vars(kind):
            kind.__dir__ = listed  # type: ignore[assignment]
        return kind

    return decorate
