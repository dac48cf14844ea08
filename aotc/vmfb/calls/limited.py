"""Functions of modules with limits: each call is submitted, where :mod:`aotc.vmfb.schedule.limited` holds it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from aotc.vmfb.schedule.call import SubmittedCall
from aotc.vmfb.schedule.submission import submit
from aotc.vmfb.vm import LoadedFunction


class LimitedFunction(LoadedFunction):
    """A function of a module with limits: each call of it is submitted, and waited for."""

    def __init__(self, name: str, entry: dict[str, Any], program: dict[str, Any], executable: Any, where: str) -> None:
        super().__init__(name, entry, program, executable, where)
        self._inner = LoadedFunction(name, entry, program, executable, where)
        self.resident = None  # its short ways are not submitted
        self._calls: dict[str, Any] = {}

    @property
    def direct(self) -> LoadedFunction:
        """Return the function without limits, which submissions run."""
        return self._inner

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Submit a call and wait for it."""
        return self.run(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Submit a call and wait for it; see :meth:`LoadedFunction.run`."""
        call = self._calls.get(results)
        if call is None:
            call = self._calls[results] = SubmittedCall(self._inner, results, "", wrapped=False)
        fence = submit(call, values, (), None, bool(donate), out)
        try:
            return fence.result()
        except BaseException:
            fence.cancel()
            raise

    def prove(self) -> None:
        """Prove what a call would."""
        self._inner.prove()
