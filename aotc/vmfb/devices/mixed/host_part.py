"""The part of a mix that is for the CPU: a call runs some nodes of a command buffer at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from aotc.vmfb.abi import Node
from aotc.vmfb.commands import kernel_words, words_of
from aotc.vmfb.devices.cpu.device import CpuExecutable, _Buffer


class HostPart(CpuExecutable):
    """The CPU's kernels of a variant, which has no command buffers of its own."""

    def keep_within(self, limit: int, arenas: int) -> None:
        """Let so many threads take part in calls as have room beside ``arenas``, within ``limit`` bytes, 0 if any."""
        self._limit, self._beside = limit, arenas
        self.threads = self._threads_within(arenas, self._stride)

    def limit_memory(self, limit: int) -> None:
        """Let calls take ``limit`` bytes of working memory at most, all that run at a time together."""
        super().limit_memory(limit)
        self.keep_within(self._limit, self._beside)

    def call_of_nodes(
        self, words: np.ndarray, nodes: Sequence[Node], states: int, slots: Any, parameters: Sequence[int], scratch: Any
    ) -> Callable[[], None]:
        """Return the call that runs ``nodes``, which follow each other in the ``words`` of a buffer with ``states``."""
        own = words_of(words, nodes).astype(np.int64)
        patches = [at - nodes[0].at for at in kernel_words(nodes)]
        if patches:
            own[patches] = self._addresses[own[patches]]
        buffer = _Buffer(own, states, len(parameters), self._stride)
        call = partial(self._run, self._call(buffer, slots, parameters, scratch, self.threads))
        return call if self._callbacks is None else self._callbacks.around(call)

    @property
    def constants_address(self) -> int:
        """Return where the constants are."""
        return self._constants.address

    @property
    def scratch_bytes(self) -> int:
        """Return how much scratch memory a call of these kernels needs."""
        return self._stride * self.threads
