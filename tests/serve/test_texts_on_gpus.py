"""Texts that are decoded together where their states stay on a GPU: a simulated one, and one that is there."""

import asyncio

import numpy as np
import pytest
from serve import texts
from serve.texts import expected
from vmfb.simulated_gpu import install

import aotc
from aotc.serve.generate.batched_decoder import Decoder
from aotc.vmfb.devices.cuda import driver

LENGTHS = (9, 3, 14, 6)


async def text(decoder, tokens, count):
    first, text_ = await decoder.begin(np.array(tokens))
    found = [int(np.argmax(first))]
    while len(found) < count:
        found.append(int(np.argmax(await decoder.decode_tokens(text_, np.array(found[-1:])))))
    decoder.leave(text_, True)
    return found, text_


async def play(decoder):
    """Texts that come and go, and one that goes on by itself and with others."""
    made = await asyncio.gather(*[text(decoder, [n, 7], count) for n, count in enumerate(LENGTHS)])
    (found, kept), (other, _) = made[0], made[1]
    assert [tokens for tokens, _ in made] == [expected([n, 7], count) for n, count in enumerate(LENGTHS)]
    more, (beside, _) = await asyncio.gather(decoder.decode_tokens(kept, np.array([found[-1]])), text(decoder, [5], 4))
    assert int(np.argmax(more)) == expected([0, 7, *found], 1)[0]
    assert beside == expected([5], 4)
    assert other == expected([1, 7], 3)
    decoder.leave(kept, False)
    assert not decoder.batches


def check(data):
    decoder, seen = Decoder(aotc.load(data), "texts", 3), []
    assert decoder.module.gpus
    assert not decoder.why_alone
    decoder.observe = seen.append
    asyncio.run(play(decoder))
    assert max(seen) == 3


@pytest.mark.cudasim
def test_sequences_decode_together_on_a_simulated_gpu(monkeypatch):
    pytest.importorskip("numba_cuda")
    data = texts.bundle(target="cuda:sm_90")
    install(monkeypatch, data)
    check(data)


@pytest.mark.cuda
@pytest.mark.skipif(bool(driver.missing()), reason="no GPU")
def test_sequences_decode_together_on_a_gpu():
    check(texts.bundle(target="cuda:sm_90"))
