"""Tokens of a sharded language model: prefill and decode on a gang, whose ranks have the parts of the KV cache."""

import os
import signal

import jax
import pytest
from jax.sharding import PartitionSpec as P
from serve.sharded_text import CACHE, by_jax, compiled, save_checkpoint, sharded
from serve.texts import Stream
from support.served import running, until

pytestmark = pytest.mark.cpu

@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("llm")
    save_checkpoint(path / "checkpoint.safetensors")
    sharded().save(path / "llm.vmfb")
    return path


def served(folder, name="llm.vmfb", **settings):
    return running(folder / name, weights=folder / "checkpoint.safetensors", **settings)


def gang_of(server):
    return server.engine.repository.models["llm"][1].module


def asked(tokens, count, **more):
    return {"tokens": tokens, "max_tokens": count, **more}


def test_sharded_generation_matches_one_device(folder):
    compiled().save(folder / "one.vmfb")
    prompts = [[3, 1, 4], [1, 5, 9], [2, 6, 5]]
    with served(folder, "one.vmfb") as server:
        one = [server.json("/v2/models/one/generate", asked(p, 12))[1]["tokens"] for p in prompts]
    assert one == [by_jax(p, 12) for p in prompts]
    assert len({tuple(tokens) for tokens in one}) == 3
    with served(folder, ranks=2) as server:
        for prompt, tokens in zip(prompts, one, strict=True):
            status, document = server.json("/v2/models/llm/generate", asked(prompt, 12))
            assert (status, document["tokens"]) == (200, tokens)
        with Stream(server.port, "llm", **asked(prompts[0], 12)) as stream:
            assert stream.tokens() == one[0]
        drawn = [
            server.json("/v2/models/llm/generate", asked(prompts[0], 12, temperature=1.5, seed=seed))[1]["tokens"]
            for seed in (1, 1, 2)
        ]
        assert drawn[0] == drawn[1] != drawn[2]


def test_sharded_sequences_have_their_own_states(folder):
    """Streams take turns, and one continues in a later request."""
    with served(folder) as server:
        streams = [Stream(server.port, "llm", **asked([n, 1, 4], 8)) for n in range(3)]
        events = [stream.events() for stream in streams]
        found = [[next(one)["token"] for one in events] for _ in range(8)]
        assert [list(tokens) for tokens in zip(*found, strict=True)] == [by_jax([n, 1, 4], 8) for n in range(3)]
        named = {"sequence_id": 7}
        first = server.json("/v2/models/llm/generate", asked([3, 1, 4], 4, sequence_start=True, **named))[1]["tokens"]
        other = server.json("/v2/models/llm/generate", asked([9, 9, 9], 4))[1]["tokens"]
        more = server.json("/v2/models/llm/generate", asked([], 4, sequence_end=True, **named))[1]["tokens"]
        assert first + more == by_jax([3, 1, 4], 8)
        assert other == by_jax([9, 9, 9], 4)


def test_longer_prompts_continue_by_decode_and_shorter_ones_are_refused(folder):
    """The sizes of a sharded program are fixed: decode takes the tokens that prefill does not."""
    with served(folder) as server:
        prompt = [3, 1, 4, 1, 5, 9]
        assert server.json("/v2/models/llm/generate", asked(prompt, 5))[1]["tokens"] == by_jax(prompt, 5)
        status, document = server.json("/v2/models/llm/generate", asked([3, 1], 5))
        assert (status, "its number of tokens differs" in document["error"]) == (400, True)
        assert server.json("/v2/models/llm/generate", asked(prompt, 5))[0] == 200


def test_prompts_use_the_largest_bucket_that_fits(folder):
    symbolic = jax.export.symbolic_shape("1, n", constraints=["n <= 40", "n >= 2"])
    sharded(prompt=symbolic, specialize={"n": (2, 4)}).save(folder / "llm_sizes.vmfb")
    with served(folder, "llm_sizes.vmfb") as server:
        for prompt in ([3, 1], [3, 1, 4], [3, 1, 4, 1], [3, 1, 4, 1, 5]):
            status, document = server.json("/v2/models/llm_sizes/generate", asked(prompt, 5))
            assert (status, document.get("tokens")) == (200, by_jax(prompt, 5)), document
        status, document = server.json("/v2/models/llm_sizes/generate", asked([3], 5))
        assert (status, "size without a bucket" in document["error"]) == (400, True)


def test_states_are_freed_with_their_sequences(folder):
    with served(folder) as server:
        gang = gang_of(server)._gang
        for _ in range(3):
            assert server.json("/v2/models/llm/generate", asked([3, 1, 4], 2))[0] == 200
        sent = []
        ask = gang._processes.ask

        def spied(messages, during):
            sent.append(messages[0])
            return ask(messages, during)

        gang._processes.ask = spied
        assert server.json("/v2/models/llm/generate", asked([3, 1, 4], 2))[0] == 200
        assert [number for row in sent for number in row["dropped"]] == [2]  # a thread may free it after the response
        assert [row["state"] for row in sent] == [3, 3]


def test_a_lost_rank_invalidates_the_states(folder):
    with served(folder) as server:
        module = gang_of(server)
        start = asked([3, 1, 4], 4, sequence_id=7, sequence_start=True)
        assert server.json("/v2/models/llm/generate", start)[0] == 200
        with Stream(server.port, "llm", **asked([3, 1, 4], 30)) as stream:
            events = stream.events()
            assert [next(events)["token"] for _ in range(2)] == by_jax([3, 1, 4], 2)
            os.kill(module._gang.processes[1], signal.SIGKILL)
            *_, last = events
        assert "rank 1 " in last["error"]
        assert "state of a sequence of requests is lost" in last["error"]
        assert until(lambda: module.is_ready)
        status, document = server.json("/v2/models/llm/generate", asked([], 4, sequence_id=7))
        assert status == 503
        assert "the state of the sequence is lost: a rank has ended" in document["error"]
        assert server.json("/v2/models/llm/generate", start)[1]["tokens"] == by_jax([3, 1, 4], 4)
        assert module.stats()["starts"] == 2


def test_a_rank_that_ends_between_requests_responds_503(folder):
    with served(folder) as server:
        module = gang_of(server)
        assert server.json("/v2/models/llm/generate", asked([3, 1, 4], 2))[0] == 200
        os.kill(module._gang.processes[0], signal.SIGKILL)
        status, headers, body = server.ask("/v2/models/llm/generate", asked([3, 1, 4], 2))
        assert (status, b"started again" in body) == (503, True)
        assert int(headers["retry-after"]) >= 1
        assert until(lambda: module.is_ready)
        assert server.json("/v2/models/llm/generate", asked([3, 1, 4], 4))[1]["tokens"] == by_jax([3, 1, 4], 4)


def test_a_state_with_two_shardings_is_refused(folder, tmp_path):
    sharded({**CACHE, "k": P("model")}).save(folder / "two.vmfb")
    with served(folder, "two.vmfb") as server:
        status, document = server.json("/v2/models/two/generate", asked([3, 1, 4], 4))
        assert status == 400
        text = " ".join(document["error"].split())
        assert "two.prefill: error: its results are cut in another way" in text
        assert "found: model, -, -; whole; -, model, - expected: -, model, -; whole;" in text
