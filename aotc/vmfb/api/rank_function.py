"""A function of a module of several ranks: it takes a rank's parts of arrays, and refuses concurrent calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from aotc.vmfb.api.partial import WrappedFunction
from aotc.vmfb.arguments import refuse_whole_array

if TYPE_CHECKING:
    from aotc.vmfb.devices.early import EarlyResults
    from aotc.vmfb.interfaces import RuntimeFunction
    from aotc.vmfb.profile.trace import Stepper
    from aotc.vmfb.ranks.member import Member


class RankFunction(WrappedFunction):
    """A function of a module of several ranks; a call fails while another thread is in a call.

    Ranks must run their calls in the same order, because collectives of one call wait for each other.
    """

    has_early_results = False

    def __init__(self, whole: RuntimeFunction, member: Member) -> None:
        super().__init__(whole)
        self._member = member

    @property
    def direct(self) -> RankFunction:
        """The function that submissions run."""
        return self

    def call(self, values: Sequence[Any]) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.call` does, on this rank's parts."""
        return self.run(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.run` does, on this rank's parts."""
        self._refuse_whole_arrays(values)
        with self._member.calling():
            return self._whole.run(values, out, donate, results)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.run_early` does, on this rank's parts."""
        self._refuse_whole_arrays(values)
        with self._member.calling():
            return self._whole.run_early(values, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.trace` does, on this rank's parts."""
        with self._member.calling():
            return self._whole.trace(values, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """Run the function as :meth:`aotc.vmfb.vm.LoadedFunction.step` does, on this rank's parts."""
        with self._member.calling():
            return self._whole.step(values, make)

    def _refuse_whole_arrays(self, values: Sequence[Any]) -> None:
        for argument, row, value in zip(self.arguments, self.signature.arguments, values):
            refuse_whole_array(row, argument.label, value, self.where)
