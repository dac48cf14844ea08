"""A function of a rank's module: one call at a time, on parts of arrays."""

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
    """A function of a rank's module: one call at a time."""

    has_early_results = False

    def __init__(self, whole: RuntimeFunction, member: Member) -> None:
        super().__init__(whole)
        self._member = member

    @property
    def direct(self) -> RankFunction:
        """The function that submissions run."""
        return self

    def call(self, values: Sequence[Any]) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.call`."""
        return self.run(values)

    def run(
        self, values: Sequence[Any], out: Sequence[Any] | None = None, donate: bool = False, results: str = ""
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run`."""
        self._refuse_whole_arrays(values)
        with self._member.calling():
            return self._whole.run(values, out, donate, results)

    def run_early(
        self, values: Sequence[Any], out: Sequence[Any] | None, donate: bool, results: str, early: EarlyResults
    ) -> list[Any]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.run_early`."""
        self._refuse_whole_arrays(values)
        with self._member.calling():
            return self._whole.run_early(values, out, donate, results, early)

    def trace(self, values: Sequence[Any], folder: str) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.trace`."""
        with self._member.calling():
            return self._whole.trace(values, folder)

    def step(self, values: Sequence[Any], make: Callable[..., Stepper]) -> list[np.ndarray]:
        """See :meth:`aotc.vmfb.vm.LoadedFunction.step`."""
        with self._member.calling():
            return self._whole.step(values, make)

    def _refuse_whole_arrays(self, values: Sequence[Any]) -> None:
        for argument, row, value in zip(self.arguments, self.signature.arguments, values):
            refuse_whole_array(row, argument.label, value, self.where)
