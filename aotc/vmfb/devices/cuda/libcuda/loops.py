"""Loops that run on the GPU without the host: decision kernels, stop flag, and the host's wait for their end.

While such a loop runs on a stream, the host polls for its end and for cancellation of the call. To stop it, the host
writes a word in its own memory, which each loop reads about every millisecond.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from ctypes import addressof, c_uint32, c_uint64, c_void_p
from time import perf_counter_ns, sleep

from aotc.vmfb.devices.cuda.libcuda.graphs import CHOSEN, DECISIONS, GOES_ON, GraphGpu
from aotc.vmfb.devices.cuda.libcuda.library import call
from aotc.vmfb.host.interruption import Watch

WORD_BYTES = 4
_State = c_uint64 * 2  # time and result of the last poll


class Loops:
    """State on a GPU for the loops of one stream.

    Attributes
    ----------
    kernels : dict of str to c_void_p
        The decision kernels, by name.
    word : int
        Address of the stop flag in host memory; it is 0 except while loops are being stopped.
    state : int
        Address of the GPU's poll state.
    """

    def __init__(self, gpu: GraphGpu, kernels: Mapping[str, c_void_p], word: int) -> None:
        self.kernels, self.word = kernels, word
        self._word = c_uint32.from_address(word)
        self.state = gpu.allocate(16)
        self._stream = gpu.stream  # not the GPU object, which references this one
        self._clear_poll_state()

    def _clear_poll_state(self) -> None:
        self._word.value = 0
        nothing = _State()
        call("cuMemcpyHtoDAsync_v2", self.state, addressof(nothing), 16, self._stream)
        call("cuStreamSynchronize", self._stream)

    def stop_loops(self) -> None:
        """Stop the loops of the stream after their current iteration, and wait."""
        self._word.value = 1
        call("cuStreamSynchronize", self._stream)
        self._clear_poll_state()


def load_decisions(gpu: GraphGpu) -> dict[str, c_void_p]:
    """Compile and load the decision kernels, which set the numbers of conditional nodes; return them by name."""
    module = gpu.load_module(DECISIONS)
    return {name: gpu.kernel_handle(module, name) for name in (GOES_ON, CHOSEN)}


# Nanoseconds that the host polls a GPU's loop without sleeping; afterwards it sleeps between polls. A sleep takes 60
# us, 3 % of this.
LOOP_SPIN_NANOSECONDS = 2_000_000
# Seconds that the host sleeps between two polls of a long GPU loop.
LOOP_SLEEP_SECONDS = 50e-6


def do_nothing() -> None:
    """Do nothing: the default ``check`` of :func:`watch`."""


def watch(is_done: Callable[[], bool], check: Callable[[], None] = do_nothing) -> None:
    """Poll until ``is_done`` returns True.

    Raise if the call is cancelled, or if a signal handler or ``check`` raises.
    """
    watching, begin = Watch(), perf_counter_ns()
    while not is_done():
        watching.raise_pending_exception()
        check()
        if perf_counter_ns() - begin > LOOP_SPIN_NANOSECONDS:
            sleep(LOOP_SLEEP_SECONDS)
