"""The states of sequences on one rank: arrays, as the parts of a KV cache, that stay there between calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aotc.vmfb.module import LoadedModule
from aotc.vmfb.results import DEVICE


class RankStates:
    """The states on one rank, by their numbers.

    Parameters
    ----------
    module : LoadedModule
        The model on this rank.
    """

    def __init__(self, module: LoadedModule) -> None:
        self._module = module
        self._results = DEVICE if module.gpus else ""
        self._states: dict[int, list[Any]] = {}

    def step(self, name: str, value: np.ndarray, number: int, dropped: Sequence[int]) -> Any:
        """Free the states ``dropped``, and run a function on an array and a state; return the first result.

        The function may overwrite the arrays of the state. Its other results replace them.
        """
        for other in dropped:
            self._states.pop(other, None)
        state = self._states.pop(number, [])
        first, *new = self._module.invoke(name, value, *state, donate=True, results=self._results)
        self._states[number] = new
        return first
