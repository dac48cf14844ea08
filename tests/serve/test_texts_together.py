"""Texts of several clients that are decoded in one call: whoever comes and goes, each has its own tokens."""

import asyncio
import random
import threading

import numpy as np
import pytest
from serve import texts
from serve.texts import Stream, expected
from support.served import running, until

import aotc
from aotc.serve.generate import batched_decoder as decoder
from aotc.serve.generate.batched_decoder import Decoder

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model whose texts are independent, and one whose texts are not."""
    path = tmp_path_factory.mktemp("models")
    (path / "texts.vmfb").write_bytes(texts.bundle())
    (path / "mixing.vmfb").write_bytes(texts.bundle(texts.mixing))
    return path


@pytest.fixture(scope="module")
def server(folder):
    """A server of both."""
    with running(folder, max_batch=4) as found:
        yield found


@pytest.fixture
def steps(server):
    """How many texts each step had."""
    decoder, seen = server.engine.repository.models["texts"][1].decoder, []
    before, decoder.observe = decoder.observe, seen.append
    yield seen
    decoder.observe = before
    assert until(lambda: not decoder.batches)


def test_models_with_independent_rows_decode_together(server):
    models = server.engine.repository.models
    assert models["texts"][1].decoder.axes == (1, 0)
    assert models["texts"][1].report()["generates"] == "up to 4 sequences together"
    assert "depend on other rows" in models["mixing"][1].decoder.why_alone
    with Stream(server.port, "mixing", tokens=[5, 6], max_tokens=5) as stream:
        assert stream.tokens() == expected([5, 6], 5)


def test_batched_sequences_generate_their_own_tokens(server, steps):
    wishes = [([n, n + 1], 20 + n) for n in range(7)]
    streams = [Stream(server.port, "texts", tokens=t, max_tokens=n) for t, n in wishes]
    found = [stream.tokens() for stream in streams]
    for stream in streams:
        stream.connection.close()
    assert found == [expected(t, n) for t, n in wishes]
    assert max(steps) > 1
    assert sum(steps) == sum(n - 1 for _, n in wishes)


def test_random_arrivals_and_departures_get_their_own_tokens(server):
    """Some leave in the middle; nobody else sees it."""
    wrong, done = [], []

    def client(seed):
        draw = random.Random(seed)
        for _ in range(15):
            tokens, count = [draw.randrange(97) for _ in range(draw.randrange(1, 9))], draw.randrange(1, 40)
            with Stream(server.port, "texts", tokens=tokens, max_tokens=count) as stream:
                events = stream.events()
                if draw.random() < 0.3:
                    seen = [next(events)["token"]]
                    want = expected(tokens, 1)
                else:
                    seen, want = stream.tokens(), expected(tokens, count)
                done.append(seen)
                if seen != want:
                    wrong.append((tokens, count, seen))

    threads = [threading.Thread(target=client, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert len(done) == 90
    assert until(lambda: not server.engine.in_flight)


class Played:
    """A decoder on a loop of its own."""

    def __init__(self, folder, most=4):
        self.module = aotc.load(folder / "texts.vmfb")
        self.decoder, self.seen = Decoder(self.module, "texts", most), []
        self.decoder.observe = self.seen.append

    async def text(self, tokens, count, pause=None):
        """Return so many tokens."""
        first, text = await self.decoder.begin(np.array(tokens))
        found = [int(np.argmax(first))]
        while len(found) < count:
            if pause is not None:
                await pause(len(found))
            found.append(int(np.argmax(await self.decoder.decode_tokens(text, np.array(found[-1:])))))
        self.decoder.leave(text, False)
        return found


def test_a_slow_client_does_not_delay_others(folder):
    played = Played(folder)

    async def pause(made):
        if made == 5:
            await asyncio.sleep(0.3)

    async def play():
        slow = asyncio.create_task(played.text([1, 2], 20, pause))
        quick = [asyncio.create_task(played.text([3, n], 20)) for n in range(2)]
        found = [await task for task in quick]
        assert not slow.done()
        return [*found, await slow]

    found = asyncio.run(play())
    assert found == [expected(t, 20) for t in ([3, 0], [3, 1], [1, 2])]
    assert max(played.seen) == 3
    assert not played.decoder.batches


def test_a_full_batch_opens_another_batch(folder):
    played = Played(folder, most=2)

    async def play():
        return await asyncio.gather(*[played.text([n], 10) for n in range(5)])

    assert asyncio.run(play()) == [expected([n], 10) for n in range(5)]
    assert max(played.seen) == 2


def test_a_failed_decoding_step_ends_only_its_sequences(folder):
    played = Played(folder, most=2)
    submit, calls = played.module.submit, []

    def fails(name, *arrays, **more):
        calls.append(name)
        if calls.count("decode") == 6:
            raise aotc.CallError("texts", "it fails")
        return submit(name, *arrays, **more)

    played.module.submit = fails

    async def play():
        return await asyncio.gather(*[played.text([n], 10) for n in range(4)], return_exceptions=True)

    found = asyncio.run(play())
    failed = [n for n, tokens in enumerate(found) if isinstance(tokens, aotc.CallError)]
    assert len(failed) == 2
    assert all(found[n] == expected([n], 10) for n in range(4) if n not in failed)
    assert asyncio.run(played.text([3], 4)) == expected([3], 4)


def test_rows_that_cannot_be_copied_end_their_sequences(folder, monkeypatch):
    """As from a GPU that is lost: nobody waits for a step that does not come."""
    played = Played(folder)

    async def pause(made):
        if made == 3:
            await asyncio.sleep(0.05)

    def lost(*arrays):
        raise aotc.CallError("texts", "the GPU is lost")

    async def play():
        slow = asyncio.create_task(played.text([1], 10, pause))
        quick = asyncio.create_task(played.text([2], 2000))
        while max(played.seen, default=0) < 2:
            await asyncio.sleep(0)
        monkeypatch.setattr(decoder, "row_view", lost)
        with pytest.raises(aotc.CallError, match="lost"):
            await asyncio.wait_for(quick, 10)
        slow.cancel()

    asyncio.run(play())


def test_a_decoding_step_without_clients_is_cancelled(folder):
    played = Played(folder)

    class Call:
        cancelled = False

        def cancel(self):
            Call.cancelled = True
            self.future.set_exception(aotc.CallError("", "cancelled"))

        def __await__(self):
            self.future = asyncio.get_running_loop().create_future()
            return self.future.__await__()

    async def play():
        texts_ = [(await played.decoder.begin(np.array([n])))[1] for n in range(2)]
        played.module.submit = lambda *arrays, **more: Call()
        tasks = [asyncio.create_task(played.decoder.decode_tokens(text, np.array([1]))) for text in texts_]
        await asyncio.sleep(0.05)
        for n, text in enumerate(texts_):
            assert not Call.cancelled
            tasks[n].cancel()
            played.decoder.leave(text, False)
        assert Call.cancelled
        await asyncio.sleep(0.01)
        assert not played.decoder.batches

    asyncio.run(play())
