"""Functions with options of submission, for example a deadline, called with pytrees."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb.errors import ArgumentError, ArgumentValueError
from aotc.vmfb.public_names import public_names
from aotc.vmfb.results import DEVICE, NUMPY
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.fence import Fence
from aotc.vmfb.submit.submission import submit

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import FunctionEntry, RuntimeFunction


@public_names("async_", "submit")
class Submitting:
    """A function with submission options; ``module.main.options(...)`` returns one.

    Parameters
    ----------
    entry : Entry
        Flattens arguments and restores the structure of results.
    function : LoadedFunction
    home : str
        Device of results that are on none of the model's devices.
    options : tuple
        ``deadline``, ``wait``, ``donate`` and ``results``.
    """

    def __init__(
        self, entry: FunctionEntry, function: RuntimeFunction, home: str, options: tuple[Any, Any, Any, Any]
    ) -> None:
        self._entry = entry
        self._deadline, self._wait, self._donate, results = options
        if results not in ("", NUMPY, DEVICE):
            raise ArgumentValueError(function.where, f"results is {results!r}", expected=f"{NUMPY!r} or {DEVICE!r}")
        if not isinstance(self._donate, bool):
            raise ArgumentError(
                function.where, "donate is not True or False", type(self._donate).__name__, "True or False"
            )
        self._call = SubmittedCall(function, results, home)

    def submit(self, *args: Any, **kwargs: Any) -> Fence:
        """Submit a call and return its fence; :meth:`~aotc.Fence.result` returns the pytree that a call returns."""
        values: Sequence[Any] = self._entry.flatten(args, kwargs)
        fence = submit(self._call, values, self._wait, self._deadline, self._donate, None)
        fence.restore = self._entry.rebuild
        return fence

    async def async_(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function without blocking the event loop; cancelling the task cancels the call."""
        return await self.submit(*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Submit a call and wait for its result; an exception of the waiting thread cancels the call."""
        fence = self.submit(*args, **kwargs)
        try:
            return fence.result()
        except BaseException:
            fence.cancel()
            raise
