"""The part of a mixed variant that runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from aotc.vmfb.abi import Node
from aotc.vmfb.commands import kernel_words, words_of_nodes
from aotc.vmfb.devices.cpu.device import CpuExecutable, _Buffer

if TYPE_CHECKING:
    from ctypes import c_void_p

    from aotc.vmfb.memory.pointers import PointerTable


class HostPart(CpuExecutable):
    """The CPU kernels of a mixed variant; the command buffers belong to the variant."""

    def keep_within(self, limit: int, arenas: int) -> None:
        """Reduce the number of threads so that ``arenas`` bytes and scratch memory fit in ``limit`` bytes.

        0 means no limit.
        """
        self._limit, self._arenas = limit, arenas
        self.threads = self._threads_within(arenas, self._stride)

    def limit_memory(self, limit: int) -> None:
        """Limit the working memory of all concurrent calls together to ``limit`` bytes."""
        super().limit_memory(limit)
        self.keep_within(self._limit, self._arenas)

    def call_of_nodes(
        self, words: np.ndarray, nodes: Sequence[Node], states: int, slots: PointerTable, parameters: Sequence[int],
        scratch: c_void_p,
    ) -> Callable[[], None]:  # fmt: skip
        """Return a call that runs ``nodes``, which are contiguous in the ``words`` of a buffer with ``states``."""
        own = words_of_nodes(words, nodes).astype(np.int64)
        patches = [at - nodes[0].at for at in kernel_words(nodes)]
        if patches:
            own[patches] = self._addresses[own[patches]]
        buffer = _Buffer(own, states, len(parameters), self._stride)
        call = partial(self._run, self._call(buffer, slots, parameters, scratch, self.threads))
        return call if self._callbacks is None else self._callbacks.wrap_native_call(call)

    @property
    def constants_address(self) -> int:
        """Return the address of the constants."""
        return self._constants.address

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of scratch memory that a call of these kernels needs."""
        return self._stride * self.threads
