"""Loops that a GPU turns by itself: what decides about them there, and how they end when somebody wants a call to end.

While a stream has such a loop the host waits for it a little at a time, and looks meanwhile who may end the call. To
end it, a word in the GPU's memory is set by another stream: each loop looks at it in each turn.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, c_uint
from time import perf_counter_ns, sleep
from typing import Any

from aotc.vmfb.devices.driver_graphs import CHOSEN, DECISIONS, GOES_ON
from aotc.vmfb.devices.driver_library import call
from aotc.vmfb.limits import LOOP_SLEEP_SECONDS, LOOP_SPIN_NANOSECONDS
from aotc.vmfb.process.interruption import Watch

_WORD = 4  # bytes


class Loops:
    """What the loops of a stream need on its GPU.

    Attributes
    ----------
    kernels : dict of str to c_void_p
        What decides, by name.
    stop_word : int
        The address of the word that ends loops; it is 0 but while they are to end.
    """

    def __init__(self, gpu: Any, kernels: Mapping[str, Any], aside: Any) -> None:
        self.kernels = kernels
        self.stop_word = gpu.allocate(_WORD)
        self._gpu, self._aside = gpu, aside
        self._set(aside, 0)

    def _set(self, stream: Any, value: int) -> None:
        word = c_uint(value)
        call("cuMemcpyHtoDAsync_v2", self.stop_word, addressof(word), _WORD, stream)
        call("cuStreamSynchronize", stream)

    def end(self) -> None:
        """Let the loops of the stream end with this turn, and wait for it."""
        self._set(self._aside, 1)
        call("cuStreamSynchronize", self._gpu.stream)
        self._set(self._aside, 0)


def load_decisions(gpu: Any) -> dict[str, Any]:
    """Return the kernels that decide, by name."""
    module = gpu.load(DECISIONS)
    return {name: gpu.function(module, name) for name in (GOES_ON, CHOSEN)}


def watch(is_done: Callable[[], bool]) -> None:
    """Wait until something is done; raise what is to end the call, if anything is."""
    watching, begin = Watch(), perf_counter_ns()
    while not is_done():
        watching.look()
        if perf_counter_ns() - begin > LOOP_SPIN_NANOSECONDS:
            sleep(LOOP_SLEEP_SECONDS)
