"""A function that is called later, or in a coroutine, with pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.vmfb.errors import VmError
from aotc.vmfb.results import DEVICE, NUMPY
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.fence import Fence
from aotc.vmfb.submit.submission import submit


class Submitting:
    """A function with options of its submissions; ``module.main.options(...)`` returns one.

    Parameters
    ----------
    entry : Entry
        What takes arguments apart and puts results together.
    function : LoadedFunction
    home : str
        Where results are that are on no device of the model's.
    options : tuple
        ``deadline``, ``wait``, ``donate`` and ``results``.
    """

    def __init__(self, entry: Any, function: Any, home: str, options: tuple[Any, Any, Any, Any]) -> None:
        self._entry = entry
        self._deadline, self._wait, self._donate, results = options
        if results not in ("", NUMPY, DEVICE):
            raise VmError(function.where, f"results is {results!r}", expected=f"{NUMPY!r} or {DEVICE!r}")
        if not isinstance(self._donate, bool):
            raise VmError(function.where, "donate is no truth value", type(self._donate).__name__, "True or False")
        self._call = SubmittedCall(function, results, home)

    def submit(self, *args: Any, **kwargs: Any) -> Fence:
        """Call it later: a fence, whose results are flat arrays."""
        values: Sequence[Any] = self._entry.flatten(args, kwargs)
        return submit(self._call, values, self._wait, self._deadline, self._donate, None)

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call it without holding up the event loop; a task that is cancelled cancels the call."""
        return self._entry.rebuild(await self.submit(*args, **kwargs))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        fence = self.submit(*args, **kwargs)
        try:
            return self._entry.rebuild(fence.result())
        except BaseException:
            fence.cancel()
            raise
