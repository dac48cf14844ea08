"""Loops that a GPU turns by itself: what decides about them there, and how they end when somebody wants a call to end.

While a stream has such a loop the host waits for it a little at a time, and looks meanwhile who may end the call. To
end it, it writes a word of its own memory, at which each loop looks every millisecond or so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, c_uint32, c_uint64
from time import perf_counter_ns, sleep
from typing import Any

from aotc.vmfb.devices.cuda.libcuda.graphs import CHOSEN, DECISIONS, GOES_ON
from aotc.vmfb.devices.cuda.libcuda.library import call
from aotc.vmfb.host.interruption import Watch

WORD_BYTES = 4
_State = c_uint64 * 2  # when somebody looked at the word last, and what was found


class Loops:
    """What the loops of a stream need on its GPU.

    Attributes
    ----------
    kernels : dict of str to c_void_p
        What decides, by name.
    word : int
        The address, in the host's memory, of the word that ends loops; it is 0 but while they are to end.
    state : int
        Where the GPU keeps what it knows of it.
    """

    def __init__(self, gpu: Any, kernels: Mapping[str, Any], word: int) -> None:
        self.kernels, self.word = kernels, word
        self._word = c_uint32.from_address(word)
        self.state = gpu.allocate(16)
        self._stream = gpu.stream  # not the GPU, which has this
        self._clear()

    def _clear(self) -> None:
        self._word.value = 0
        nothing = _State()
        call("cuMemcpyHtoDAsync_v2", self.state, addressof(nothing), 16, self._stream)
        call("cuStreamSynchronize", self._stream)

    def end(self) -> None:
        """Let the loops of the stream end with this turn, and wait for it."""
        self._word.value = 1
        call("cuStreamSynchronize", self._stream)
        self._clear()


def load_decisions(gpu: Any) -> dict[str, Any]:
    """Return the kernels that decide, by name."""
    module = gpu.load(DECISIONS)
    return {name: gpu.function(module, name) for name in (GOES_ON, CHOSEN)}


# Nanoseconds that the host polls a GPU's loop without sleeping; afterwards it sleeps between polls. A sleep takes 60
# us, 3 % of this.
LOOP_SPIN_NANOSECONDS = 2_000_000
# Seconds that the host sleeps between two polls of a long GPU loop.
LOOP_SLEEP_SECONDS = 50e-6


def watch(is_done: Callable[[], bool]) -> None:
    """Wait until something is done; raise what is to end the call, if anything is."""
    watching, begin = Watch(), perf_counter_ns()
    while not is_done():
        watching.look()
        if perf_counter_ns() - begin > LOOP_SPIN_NANOSECONDS:
            sleep(LOOP_SLEEP_SECONDS)
