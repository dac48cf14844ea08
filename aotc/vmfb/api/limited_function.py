"""Functions of modules with limits on calls: each call is a submission.

The queues are those of :mod:`aotc.vmfb.submit.concurrency_limit`. A GPU call takes the fast path on the caller's
thread if no other call waits and there is no time limit. The call then ends only when the GPU is done, so that the
limit of concurrent calls holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb.api.partial import WrappedFunction
from aotc.vmfb.call_limits import Limits
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.concurrency_limit import counting_lane
from aotc.vmfb.submit.submission import submit

if TYPE_CHECKING:
    import numpy as np

    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.profile.trace import Stepper


class LimitedFunction(WrappedFunction):
    """A function of a module with limits: each call is submitted to a queue, and the caller waits for the result."""

    has_early_results = False  # a call returns at its end

    def __init__(self, whole: RuntimeFunction, limits: Limits) -> None:
        super().__init__(whole)
        self._limits = limits
        self._calls: dict[str, SubmittedCall] = {}

    @property
    def direct(self) -> RuntimeFunction:
        """Return the function without limits; submissions run it when the queue allows."""
        return self._whole

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Submit a call and wait for it."""
        return self.run(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Submit a call and wait for it; see :meth:`LoadedFunction.run`."""
        found = self._run_on_fast_path(values, out, donate, results)
        if found is not None:
            return found
        call = self._calls.get(results)
        if call is None:
            call = self._calls[results] = SubmittedCall(self._whole, results, "", wrapped=False)
        fence = submit(call, values, (), None, bool(donate), out)
        try:
            return fence.result()
        except BaseException:
            fence.cancel()
            raise

    def _run_on_fast_path(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str
    ) -> list[Any] | None:
        """Run a call on the GPU's fast path and wait for the GPU.

        Return None if there is no fast path, or if the limit of concurrent calls is reached.
        """
        resident = self._whole.resident
        lane = None if resident is None else counting_lane(self.executable, self._limits)
        if resident is None or lane is None or not lane.try_begin_call():
            return None
        try:
            found = resident.run_fast_path(values, out, donate, results)
            for x in found or ():
                x.wait()
            return found
        finally:
            lane.release_dispatcher()

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """Run the function without limits and with early results, as submissions do."""
        return self._whole.run_early(values, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """Run the function and write inputs and outputs of each dispatch to ``folder``."""
        return self._whole.trace(values, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """Run the function with a stepper that runs its commands one by one."""
        return self._whole.step(values, make)
