"""What submissions of a function run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.results import DEVICE, on_devices
from aotc.vmfb.submit.limited import NO_LIMITS, Limits

if TYPE_CHECKING:
    from aotc.vmfb.vm import LoadedFunction


class SubmittedCall:
    """What submissions of a function run: made once for each function and kind of results.

    Attributes
    ----------
    where : str
        Module and function, for messages.
    arguments : sequence of Argument
    results : sequence of dict
        Rows of the signature.
    executable : Executable
        What it runs on.
    home : str
        The device of results that are on none of the model's.
    limits : Limits
        Of the module.
    donates : bool
        Does the function take the memory of arguments?
    remote : bool
        Does it run on GPUs?
    has_early_results : bool
        Can results be read while the call goes on?

    Unless ``wrapped``, results on the host stay plain arrays, also of calls that leave them on devices.
    """

    __slots__ = (
        "_function", "_wanted", "_wraps", "arguments", "donates", "executable", "has_early_results", "home", "limits",
        "remote", "results", "where",
    )  # fmt: skip

    def __init__(self, function: LoadedFunction, wanted: str, home: str, wrapped: bool = True) -> None:
        function = function.direct
        self._function, self._wanted, self.home = function, wanted, home
        self._wraps = wrapped and wanted == DEVICE
        self.where, self.arguments, self.results = function.where, function.arguments, function.signature.results
        self.executable: Any = function.executable
        self.limits: Limits = getattr(self.executable, "limits", NO_LIMITS)
        self.donates = any(a.donated for a in self.arguments)
        self.remote = bool(getattr(self.executable, "gpus", ()))

        self.has_early_results: bool = function.has_early_results

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, early: EarlyResults | None = None
    ) -> list[Any]:
        """Make the call."""
        if early is not None:
            made = self._function.run_early(values, out, donate, self._wanted, early)
        elif out is None and not donate and not self._wanted:
            return self._function.call(values)
        else:
            made = self._function.run(values, out, donate, self._wanted)
        return on_devices(made, self.results, out, self.home) if self._wraps else made

    def early_result(self, early: EarlyResults, number: int) -> Any:
        """Return a result that is ready, as the call returns it, but read-only."""
        found = early.result(number)
        wraps = self._wraps and isinstance(found, np.ndarray)
        return DeviceArray(found, self.results[number].get("device", self.home)) if wraps else found
