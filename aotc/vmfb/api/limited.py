"""Functions of modules with limits: each call is a submission, queued by :mod:`aotc.vmfb.submit.limited`.

A GPU call takes the fast path on the caller's thread if no other call waits and there is no time limit. It then ends
when the GPU is done, so that the limit of concurrent calls holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aotc.vmfb.call_limits import NO_LIMITS
from aotc.vmfb.submit.call import SubmittedCall
from aotc.vmfb.submit.limited import turns_of
from aotc.vmfb.submit.submission import submit
from aotc.vmfb.vm import LoadedFunction

if TYPE_CHECKING:
    from aotc.vmfb.interfaces import Executable


class LimitedFunction(LoadedFunction):
    """A function of a module with limits: each call is submitted and awaited."""

    def __init__(
        self, name: str, entry: dict[str, Any], program: dict[str, Any], executable: Executable, where: str
    ) -> None:
        super().__init__(name, entry, program, executable, where)
        self._inner = LoadedFunction(name, entry, program, executable, where)
        self._limits = executable.limits or NO_LIMITS
        self.resident = None  # its fast paths are not submitted
        self._calls: dict[str, SubmittedCall] = {}

    @property
    def direct(self) -> LoadedFunction:
        """The function without limits, which submissions run."""
        return self._inner

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Submit a call and wait for it."""
        return self.run(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Submit a call and wait for it; see :meth:`LoadedFunction.run`."""
        found = self._shortly(values, out, donate, results)
        if found is not None:
            return found
        call = self._calls.get(results)
        if call is None:
            call = self._calls[results] = SubmittedCall(self._inner, results, "", wrapped=False)
        fence = submit(call, values, (), None, bool(donate), out)
        try:
            return fence.result()
        except BaseException:
            fence.cancel()
            raise

    def _shortly(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str
    ) -> list[Any] | None:
        """Run a call on the fast path and wait for the GPU; return None if there is none, or the limit is reached."""
        resident = self._inner.resident
        turns = None if resident is None else turns_of(self.executable, self._limits)
        if resident is None or turns is None or not turns.begin():
            return None
        try:
            found = resident.call(values, out, donate, results)
            for x in found or ():
                x.wait()
            return found
        finally:
            turns.leave()

    def prove(self) -> None:
        """Make the checks of a first call in advance."""
        self._inner.prove()
