"""The CPU's part of a mixed variant."""

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
    """The CPU kernels of a mixed variant, whose command buffers belong to the variant as a whole."""

    def keep_within(self, limit: int, arenas: int) -> None:
        """Reduce the number of threads so that ``arenas`` bytes and all scratch memory fit in ``limit`` bytes.

        0 for no limit.
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
        """Return a function that runs ``nodes`` by one native call.

        The nodes are contiguous in ``words``, the command buffer, which has ``states`` cells.
        """
        own = words_of_nodes(words, nodes).astype(np.int64)
        patches = [at - nodes[0].at for at in kernel_words(nodes)]
        if patches:
            own[patches] = self._addresses[own[patches]]
        buffer = _Buffer(own, states, len(parameters), self._stride)
        call = partial(self._run_native_call, self._native_call(buffer, slots, parameters, scratch, self.threads))
        return call if self._callbacks is None else self._callbacks.wrap_native_call(call)

    @property
    def constants_address(self) -> int:
        """Return the address of the constants in host memory."""
        return self._constants.address

    @property
    def scratch_bytes(self) -> int:
        """Return the bytes of scratch memory that a call of these kernels needs, for all threads."""
        return self._stride * self.threads
