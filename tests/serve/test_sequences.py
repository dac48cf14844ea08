"""Texts that go on with a later request: their states by name, how many, how long, and what ends them."""

import os

import pytest
from serve import texts
from serve.texts import Stream, expected
from support.served import running, until

pytestmark = pytest.mark.cpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model that generates."""
    path = tmp_path_factory.mktemp("models")
    (path / "texts.vmfb").write_bytes(texts.bundle())
    return path


@pytest.fixture(scope="module", params=[1, 4], ids=["alone", "together"])
def server(folder, request):
    """A server that keeps few texts."""
    with running(folder, max_batch=request.param, sequences=2) as found:
        yield found


def ask(server, status=200, **parameters):
    found, document = server.json("/v2/models/texts/generate", parameters)
    assert found == status, document
    return document["tokens"] if status == 200 else document["error"]


def kept(server):
    return len(server.engine.sequences)


def test_a_sequence_continues_over_requests(server):
    """As if it had been one text from its beginning."""
    first = ask(server, tokens=[5, 6], max_tokens=4, sequence_id="chat", sequence_start=True)
    assert kept(server) == 1
    second = ask(server, tokens=[7], max_tokens=3, sequence_id="chat")
    third = ask(server, max_tokens=5, sequence_id="chat", sequence_end=True)
    whole = [5, 6, *first, 7]
    assert (first, second) == (expected([5, 6], 4), expected(whole, 3))
    assert third == expected([*whole, *second], 5)
    assert kept(server) == 0
    assert "unknown sequence" in ask(server, 404, tokens=[1], sequence_id="chat")


def test_sequence_ids_may_be_numbers_and_0_means_no_sequence(server):
    assert ask(server, tokens=[5], max_tokens=2, sequence_id=7, sequence_start=True) == expected([5], 2)
    assert ask(server, tokens=[1], max_tokens=1, sequence_id=7, sequence_end=True) == expected(
        [5, *expected([5], 2), 1], 1
    )
    assert ask(server, tokens=[5], max_tokens=2, sequence_id=0) == expected([5], 2)
    assert kept(server) == 0


def test_sequence_start_replaces_a_stored_sequence(server):
    ask(server, tokens=[5, 6], max_tokens=4, sequence_id="a", sequence_start=True)
    assert ask(server, tokens=[9], max_tokens=2, sequence_id="a", sequence_start=True) == expected([9], 2)
    ask(server, tokens=[1], max_tokens=1, sequence_id="a", sequence_end=True)


def test_the_number_of_stored_sequences_is_limited(server):
    for name in "ab":
        ask(server, tokens=[1], max_tokens=1, sequence_id=name, sequence_start=True)
    status, headers, body = server.ask(
        "/v2/models/texts/generate", {"tokens": [1], "sequence_id": "c", "sequence_start": True}
    )
    assert (status, b"too many sequences" in body) == (429, True)
    assert int(headers["retry-after"]) > 0
    assert "aotc_sequences 2.0" in server.ask("/metrics")[2].decode()
    ask(server, tokens=[1], max_tokens=1, sequence_id="a", sequence_end=True)
    ask(server, tokens=[1], max_tokens=1, sequence_id="c", sequence_start=True)
    for name in "bc":
        ask(server, tokens=[1], max_tokens=1, sequence_id=name, sequence_end=True)


def test_a_sequence_serves_one_request_and_ends_on_disconnect(server):
    parameters = {"tokens": [1], "max_tokens": 1 << 20, "sequence_id": "a", "sequence_start": True}
    with Stream(server.port, "texts", **parameters) as stream:
        assert next(stream.events())["index"] == 0
        assert "another request" in ask(server, 409, tokens=[1], sequence_id="a")
        assert "another request" in ask(server, 409, tokens=[1], sequence_id="a", sequence_start=True)
        assert kept(server) == 1
    assert until(lambda: kept(server) == 0)
    assert "unknown sequence" in ask(server, 404, tokens=[1], sequence_id="a")


def test_an_error_ends_the_sequence(server):
    ask(server, tokens=[1], max_tokens=1, sequence_id="a", sequence_start=True)
    assert "out of range" in ask(server, 400, tokens=[1 << 40], sequence_id="a")
    assert kept(server) == 0


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": [1], "sequence_id": 1.5}, "sequence_id is not a name"),
        ({"tokens": [1], "sequence_id": "x" * 200}, "sequence_id is not a name"),
        ({"tokens": [1], "sequence_id": True}, "sequence_id is not a name"),
        ({"tokens": [1], "sequence_id": "a", "sequence_start": 1}, "true or false"),
        ({"tokens": [1], "sequence_start": True}, "has no name"),
        ({"sequence_id": "a", "sequence_start": True}, "tokens is not a list"),
    ],
)
def test_invalid_sequence_parameters_are_refused(server, parameters, words):
    assert words in ask(server, 400, **parameters)
    assert kept(server) == 0


def test_an_unused_sequence_expires(folder):
    with running(folder, sequence_timeout=0.2) as server:
        ask(server, tokens=[1], max_tokens=1, sequence_id="a", sequence_start=True)
        assert kept(server) == 1
        assert until(lambda: kept(server) == 0)


def test_a_sequence_continues_on_the_version_that_started_it(tmp_path):
    place = tmp_path / "texts" / "1" / "model.vmfb"
    place.parent.mkdir(parents=True)
    place.write_bytes(texts.bundle())
    with running(tmp_path, poll=0.02) as server:
        first = ask(server, tokens=[5], max_tokens=2, sequence_id="a", sequence_start=True)
        other = tmp_path / "texts" / "2" / "model.vmfb"
        other.parent.mkdir()
        os.link(place, other)
        assert until(lambda: 2 in server.engine.repository.models["texts"])
        status, document = server.json("/v2/models/texts/versions/2/generate", {"tokens": [1], "sequence_id": "a"})
        assert (status, "another version" in document["error"]) == (400, True)
        assert ask(server, max_tokens=2, sequence_id="a") == expected([5, *first], 2)
