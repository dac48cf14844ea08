"""The function that a command or a report is about, by its name or by default."""

from __future__ import annotations

from collections.abc import Iterable

from aotc.vmfb.errors import BundleError, CallError


def choose_function(
    names: Iterable[str], function: str, where: str, error: type[CallError | BundleError] = CallError
) -> str:
    """Return ``function``, or by default the only one of ``names``, or ``main``.

    Raises
    ------
    CallError, or ``error``
        If there is no such function; it lists the others.
    """
    known = list(names)
    name = function or (known[0] if len(known) == 1 else "main")
    if name in known:
        return name
    what = f"no function {name!r}" if function else "no function is called main"
    hint = f"--function={known[0]}" if known else ""
    raise error(where, what, expected=", ".join(known) or "none", hint=hint)
