"""Implementation of ``module.profile``: a recording of calls, or a record of kernels measured in isolation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb.errors import ArgumentError

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Executable, RuntimeModule
    from aotc.vmfb.profile.recording import CallRecording


def profile(
    module: RuntimeModule, executable: Executable, name: str, arrays: Sequence[Any], repeat: int
) -> CallRecording | dict[str, Any]:
    """Return a recording of subsequent calls, or the record of a call of the function ``name``.

    Raises
    ------
    CallError
        If there is no such function, arguments do not fit, or the bundle has no kernel texts.
    """
    if not isinstance(name, str):
        raise ArgumentError(
            module.name, "profile begins with the name of a function", type(name).__name__, "a name, or none"
        )
    if not name and not arrays:
        from aotc.vmfb.profile.recording import CallRecording

        return CallRecording(executable, module.name)
    from aotc.vmfb.profile.measure import measure

    return measure(module.get_function(name), arrays, repeat)
