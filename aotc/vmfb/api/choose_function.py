"""The default function of a command or a report."""

from __future__ import annotations

from collections.abc import Iterable

from aotc.vmfb.errors import ArgumentValueError


def choose_function(names: Iterable[str], function: str, where: str) -> str:
    """Return ``function`` if it is among ``names``; by default the only name, or ``main``.

    Raises
    ------
    ArgumentValueError
        If there is no such function; it lists the others.
    """
    known = list(names)
    name = function or (known[0] if len(known) == 1 else "main")
    if name in known:
        return name
    what = f"no function {name!r}" if function else "no function is called main"
    hint = f"--function={known[0]}" if known else ""
    raise ArgumentValueError(where, what, expected=", ".join(known) or "none", hint=hint)
