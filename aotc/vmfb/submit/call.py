"""Execution of the function call that a submission stands for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.call_limits import NO_LIMITS, Limits
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.devices.early import EarlyResults
from aotc.vmfb.results import DEVICE, wrap_host_results

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Executable, RuntimeFunction


class SubmittedCall:
    """Runs calls of one function for submissions, with one kind of results.

    Attributes
    ----------
    where : str
        Module and function, for messages.
    arguments : sequence of Argument
    results : sequence of dict
        Rows of the signature.
    executable : Executable
        Executable of the function.
    home : str
        Default device of results, if the model places them on none.
    limits : Limits
        Limits of the module.
    donates : bool
        True if the function takes over the memory of arguments.
    remote : bool
        True if the function runs on GPUs.
    has_early_results : bool
        True if results can be read before the call ends.

    Unless ``wrapped``, results in host memory are returned as plain arrays, even by calls that leave results on
    devices.
    """

    __slots__ = (
        "_function", "_wanted", "_wraps", "arguments", "donates", "executable", "has_early_results", "home", "limits",
        "remote", "results", "where",
    )  # fmt: skip

    def __init__(self, function: RuntimeFunction, results_option: str, home: str, wrapped: bool = True) -> None:
        function = function.direct
        self._function, self._wanted, self.home = function, results_option, home
        self._wraps = wrapped and results_option == DEVICE
        self.where, self.arguments, self.results = function.where, function.arguments, function.signature.results
        self.executable: Executable = function.executable
        self.limits: Limits = getattr(self.executable, "limits", None) or NO_LIMITS
        self.donates = any(a.donated for a in self.arguments)
        self.remote = bool(getattr(self.executable, "gpus", ()))

        self.has_early_results: bool = function.has_early_results

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, early: EarlyResults | None = None
    ) -> list[Any]:
        """Run the call and return its results; ``early`` receives results that can be read before the call ends."""
        if early is not None:
            made = self._function.run_early(values, out, donate, self._wanted, early)
        elif out is None and not donate and not self._wanted:
            return self._function.call(values)
        else:
            made = self._function.run(values, out, donate, self._wanted)
        return wrap_host_results(made, self.results, out, self.home) if self._wraps else made

    def early_result(self, early: EarlyResults, number: int) -> Any:
        """Return result ``number`` of a running call, which is complete; read-only, otherwise like the final result."""
        found = early.result(number)
        wraps = self._wraps and isinstance(found, np.ndarray)
        return DeviceArray(found, self.results[number].get("device", self.home)) if wraps else found
