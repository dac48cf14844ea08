"""Tokens as server-sent events: which models generate, what is drawn, clients that leave, errors on the way."""

import asyncio
import json
import logging
import socket
import time
from dataclasses import replace

import numpy as np
import pytest
from support.served import answer, running

import aotc
from aotc.serve.engine import Engine
from aotc.serve.errors import RequestFault
from aotc.serve.generate.request import parse_request
from aotc.serve.generate.sampling import Sampling, next_token
from aotc.serve.generate.sse import EventStreamAnswer, GenerateRoute

pytestmark = pytest.mark.cpu

# The next token is the sum of all so far, modulo 97; the state is that sum. "slow" counts up to a number first.
MODEL = """
func.func public @prefill(%tokens: tensor<1x?xi32>) -> (tensor<97xf32>, tensor<i32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %sum = stablehlo.reduce(%tokens init: %zero) applies stablehlo.add across dimensions = [0, 1]
    : (tensor<1x?xi32>, tensor<i32>) -> tensor<i32>
  %logits = func.call @logits(%sum) : (tensor<i32>) -> tensor<97xf32>
  return %logits, %sum : tensor<97xf32>, tensor<i32>
}
func.func public @decode(%token: tensor<1xi32>, %state: tensor<i32>) -> (tensor<97xf32>, tensor<i32>) {
  %t = stablehlo.reshape %token : (tensor<1xi32>) -> tensor<i32>
  %sum = stablehlo.add %t, %state : tensor<i32>
  %logits = func.call @logits(%sum) : (tensor<i32>) -> tensor<97xf32>
  return %logits, %sum : tensor<97xf32>, tensor<i32>
}
func.func private @logits(%sum: tensor<i32>) -> tensor<97xf32> {
  %n = stablehlo.constant dense<97> : tensor<i32>
  %next = stablehlo.remainder %sum, %n : tensor<i32>
  %all = stablehlo.broadcast_in_dim %next, dims = [] : (tensor<i32>) -> tensor<97xi32>
  %iota = stablehlo.iota dim = 0 : tensor<97xi32>
  %is = stablehlo.compare EQ, %all, %iota : (tensor<97xi32>, tensor<97xi32>) -> tensor<97xi1>
  %logits = stablehlo.convert %is : (tensor<97xi1>) -> tensor<97xf32>
  return %logits : tensor<97xf32>
}
"""
OTHER = """
func.func public @prefill(%tokens: tensor<4xi32>) -> (tensor<97xf32>, tensor<2xi32>) {
  %l = stablehlo.constant dense<0.0> : tensor<97xf32>
  %s = stablehlo.constant dense<0> : tensor<2xi32>
  return %l, %s : tensor<97xf32>, tensor<2xi32>
}
func.func public @decode(%token: tensor<1xi32>, %state: tensor<3xi32>) -> (tensor<97xf32>, tensor<3xi32>) {
  %l = stablehlo.constant dense<0.0> : tensor<97xf32>
  return %l, %state : tensor<97xf32>, tensor<3xi32>
}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of both."""
    path = tmp_path_factory.mktemp("models")
    (path / "sums.vmfb").write_bytes(aotc.compile(MODEL))
    (path / "other.vmfb").write_bytes(aotc.compile(OTHER))
    with running(path) as found:
        yield found


def sums(tokens, count):
    tokens = list(tokens)
    for _ in range(count):
        tokens.append(sum(tokens) % 97)
    return tokens[-count:]


def ask(server, name="sums", **parameters):
    status, headers, body = server.ask(f"/v2/models/{name}/generate_stream", parameters)
    if status != 200:
        return status, json.loads(body)["error"]
    assert headers["content-type"] == "text/event-stream"
    chunks = body.split(b"\r\n")  # of the transfer: a length, then so many bytes
    text = b"".join(chunks[1::2]).decode() if headers.get("transfer-encoding") == "chunked" else body.decode()
    return status, [json.loads(event.removeprefix("data: ")) for event in text.strip().split("\n\n")]


def test_tokens_are_streamed_one_by_one(server):
    status, events = ask(server, tokens=[5, 6], max_tokens=5)
    assert status == 200
    assert [e["token"] for e in events[:-1]] == sums([5, 6], 5)
    assert [e["index"] for e in events[:-1]] == list(range(5))
    assert events[-1] == {"done": "length", "tokens": 5}
    stop = sums([5, 6], 3)[-1]
    _, events = ask(server, tokens=[5, 6], max_tokens=5, stop=[stop])
    assert events[-2:] == [{"index": 2, "token": stop}, {"done": "stop", "tokens": 3}]
    _, events = ask(server, tokens=[3], max_tokens=1)
    assert events == [{"index": 0, "token": 3}, {"done": "length", "tokens": 1}]


def test_equal_seeds_generate_equal_tokens(server):
    drawn = [ask(server, tokens=[5], max_tokens=8, temperature=5.0, seed=s)[1] for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]
    _, events = ask(server, tokens=[5], max_tokens=4, temperature=9.0, top_k=1)
    assert [e["token"] for e in events[:-1]] == sums([5], 4)


@pytest.mark.parametrize(
    ("name", "parameters", "words"),
    [
        ("sums", {}, "tokens is not a list"),
        ("sums", {"tokens": []}, "tokens is empty"),
        ("sums", {"tokens": [1.5]}, "tokens is not a list"),
        ("sums", {"tokens": [True]}, "tokens is not a list"),
        ("sums", {"tokens": [1 << 40]}, "out of range"),
        ("sums", {"tokens": [1], "max_tokens": 0}, "max_tokens"),
        ("sums", {"tokens": [1], "temperature": -1}, "temperature"),
        ("sums", {"tokens": [1], "top_k": "x"}, "top_k"),
        ("sums", {"tokens": [1], "seed": -5}, "seed"),
        ("sums", {"tokens": [1], "prompt": "x"}, "no 'prompt'"),
        ("sums", {"tokens": [1], "timeout": -1}, "timeout is not a time"),
        ("other", {"tokens": [1]}, "not the state arguments of decode"),
    ],
)
def test_invalid_generation_parameters_are_refused(server, name, parameters, words):
    status, text = ask(server, name, **parameters)
    assert status == 400
    assert words in text


def test_generation_with_another_model_is_refused(tmp_path):
    (tmp_path / "m.vmfb").write_bytes(aotc.compile(lambda x: x + 1, np.zeros(3, "f4")))
    with running(tmp_path) as server:
        status, text = ask(server, "m", tokens=[1])
        assert (status, "functions prefill and decode" in text) == (400, True)
        assert ask(server, "n", tokens=[1])[0] == 404


def test_generation_stops_when_the_client_disconnects(server):
    data = json.dumps({"tokens": [1], "max_tokens": 1 << 20}).encode()
    head = f"POST /v2/models/sums/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(head.encode() + data)
        seen = b""
        while seen.count(b"data:") < 20:
            seen += connection.recv(1 << 16)
    end = time.monotonic() + 10
    while server.engine.in_flight and time.monotonic() < end:
        time.sleep(0.01)
    assert server.engine.in_flight == 0
    text = server.ask("/metrics")[2].decode()
    assert 'aotc_requests_total{model="sums",protocol="generate",status="499"} 1.0' in text
    assert float(text.partition('aotc_tokens_total{model="sums"} ')[2].partition("\n")[0]) < 1 << 20


def test_a_client_that_reads_nothing_is_disconnected(server):
    """The stream waits for it no longer than a request may take."""
    settings = replace(server.engine.settings, timeout=0.2)
    engine = Engine(settings, logging.getLogger("test"))
    engine.repository.models = server.engine.repository.models
    sent = []

    async def receive():
        if not sent:
            return {"type": "http.request", "body": b'{"tokens": [1]}', "more_body": False}
        await asyncio.Event().wait()

    async def send(event):
        sent.append(event)
        if len(sent) > 4:
            await asyncio.Event().wait()

    scope = {"headers": [], "path_params": {"model": "sums"}}
    asyncio.run(asyncio.wait_for(GenerateRoute(engine, EventStreamAnswer)(scope, receive, send), 10))
    assert b"its time" in sent[-1]["body"]
    assert engine.in_flight == 0
    assert 'protocol="generate",status="504"' in engine.metrics.text().decode()


def test_an_error_during_generation_is_an_event(server):
    model = server.engine.repository.models["sums"][1]
    submit, calls = model.module.submit, []

    def fails(name, *arrays, **more):
        calls.append(name)
        if len(calls) == 3:
            raise aotc.CallError("sums", "it fails")
        return submit(name, *arrays, **more)

    model.module.submit = fails
    try:
        _, events = ask(server, tokens=[1], max_tokens=9)
    finally:
        del model.module.submit
    assert [sorted(e) for e in events] == [["index", "token"], ["index", "token"], ["error"]]
    assert calls == ["prefill", "decode", "decode"]


def test_a_timeout_covers_all_tokens(server):
    """It ends the stream with an error, and an answer of all tokens with the status of one."""
    _, events = ask(server, tokens=[1], max_tokens=1 << 20, timeout=200_000)
    assert len(events) > 2
    assert "in their time" in events[-1]["error"]
    status, document = server.json("/v2/models/sums/generate", {"tokens": [1], "max_tokens": 1 << 20, "timeout": 1e5})
    assert (status, "0.1 s" in document["error"]) == (504, True)


def test_generate_returns_all_tokens_at_once(server):
    status, document = server.json("/v2/models/sums/generate", {"tokens": [5, 6], "max_tokens": 5})
    assert (status, document) == (200, {"tokens": sums([5, 6], 5), "done": "length"})
    assert server.json("/v2/models/sums") == (
        200,
        {
            "name": "sums", "versions": ["1"], "platform": "aotc_vmfb",
            "inputs": [{"name": n, "datatype": "INT64", "shape": [-1]} for n in ("tokens", "stop")],
            "outputs": [{"name": n, "datatype": "INT64", "shape": [1]} for n in ("token", "index")],
        },
    )  # fmt: skip
    assert server.json("/v2/models/sums/ready")[0] == 200
    status, document = server.json("/v2/models/sums/infer", {"inputs": []})
    assert (status, "generate_stream" in document["error"]) == (404, True)


def test_next_token_is_greedy_or_sampled():
    greedy = Sampling()
    assert next_token(np.array([[3, 9]], "i4"), greedy) == 9
    assert next_token(np.array([[[0, 5, 1], [7, 0, 0]]], "f4"), greedy) == 0
    assert next_token(np.array([np.nan, 1, 2], "f4"), greedy) == 2
    with pytest.raises(RequestFault, match="all logits that the model computed are NaN"):
        next_token(np.array([np.nan], "f4"), greedy)
    with pytest.raises(RequestFault, match="no logits"):
        next_token(np.empty((1, 0), "f4"), greedy)
    warm = Sampling(temperature=1.0, top_k=2, random=np.random.default_rng(0))
    drawn = [next_token(np.log(np.array([0.7, 0.2, 0.1], "f4")), warm) for _ in range(2000)]
    assert set(drawn) == {0, 1}
    assert abs(drawn.count(0) / 2000 - 7 / 9) < 0.04
    seeded = parse_request({"tokens": [1], "seed": 3}, "m")
    assert seeded.sampling.random.random() == np.random.default_rng(3).random()


def test_two_streams_generate_concurrently(server):
    """Each has a state of its own."""
    data = [json.dumps({"tokens": [n], "max_tokens": 30}).encode() for n in (3, 4)]
    connections = []
    for body in data:
        connection = socket.create_connection(("127.0.0.1", server.port))
        lines = f"Host: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n"
        connection.sendall(f"POST /v2/models/sums/generate_stream HTTP/1.1\r\n{lines}\r\n".encode() + body)
        connections.append(connection)
    for n, connection in zip((3, 4), connections):
        with connection:
            text = answer(connection)[2].decode()
        tokens = [json.loads(line[6:]).get("token") for line in text.splitlines() if line.startswith("data: ")]
        assert tokens[:-1] == sums([n], 30)
