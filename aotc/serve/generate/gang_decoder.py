"""Generation with a sharded model: the state of each sequence (KV cache) stays on the ranks.

``prefill`` and ``decode`` run on all ranks of a gang. A step sends tokens to the ranks and gets logits from them.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import numpy as np

from aotc.serve.errors import BAD, RequestFault
from aotc.serve.gang_module import GangModule
from aotc.serve.generate.batched_decoder import Decoder, GeneratedSequence
from aotc.serve.generate.capabilities import DECODE, PREFILL, check_functions
from aotc.vmfb.module import LoadedModule
from aotc.vmfb.ranks.layout import Layout, layout_text


class GangDecoder(Decoder):
    """Decoder of a gang: calls ``prefill`` and ``decode`` for one sequence at a time.

    Parameters
    ----------
    module : GangModule
        The model, whose functions have been checked by :func:`check_gang_functions`.
    name : str
        The model's name, for errors.
    """

    def __init__(self, module: GangModule, name: str) -> None:
        super().__init__(cast("LoadedModule", module), name, 1)
        self._gang = module
        self.why_alone = "the sizes of a sharded model are fixed"
        every = [signature.arguments[0]["dims"] for signature in module.fixed_signatures(PREFILL)]
        self._prompts = sorted(dims[-1] if dims else 1 for dims in every)

    async def begin(self, tokens: np.ndarray) -> tuple[np.ndarray, GeneratedSequence]:
        """Run ``prefill`` on the first tokens, as many as its largest fitting size, and ``decode`` on the others."""
        size = max([n for n in self._prompts if n <= len(tokens)], default=len(tokens))
        first, sequence = await super().begin(tokens[:size])
        if len(tokens) > size:
            first = await self.decode_tokens(sequence, tokens[size:])
        return first, sequence

    async def _prefill(self, asked: np.ndarray, sequence: GeneratedSequence) -> np.ndarray:
        sequence.state = [self._gang.new_state()]
        return await self._gang.step(PREFILL, asked, sequence.state[0])

    async def _decode(self, asked: np.ndarray, sequence: GeneratedSequence) -> np.ndarray:
        return await self._gang.step(DECODE, asked, sequence.state[0])


def check_gang_functions(module: GangModule, where: str) -> None:
    """Refuse a sharded model that cannot generate.

    Raises
    ------
    RequestFault
        As :func:`check_functions`; also if the state is cut in another way where it is a result than where it is an
        argument: a rank would not have its part.
    """
    check_functions(cast("LoadedModule", module), where)
    expected = module.layouts(DECODE)[0][0][1:]
    for name in (PREFILL, DECODE):
        for _, results in module.layouts(name):
            if results[1:] != expected:
                what = "its results are cut in another way than the state arguments of decode"
                raise RequestFault(BAD, f"{where}.{name}", what, _layouts_text(results[1:]), _layouts_text(expected))


def _layouts_text(layouts: Iterable[Layout]) -> str:
    return "; ".join(layout_text(layout) or "whole" for layout in layouts)
