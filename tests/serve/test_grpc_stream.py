"""Streams of gRPC: results in the order of requests, an answer for each token, errors that end nothing else."""

import queue
import re
import threading
import time

import numpy as np
import pytest
from serve.texts import expected
from support.served import ROOT, running, until

grpc = pytest.importorskip("grpc")
client_of = pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

pytestmark = pytest.mark.cpu

X, Y = np.arange(4, dtype="f4"), np.full(4, 10, "f4")


@pytest.fixture(scope="module")
def server(two_models):
    """A server of both."""
    with running(two_models, grpc_port=0, max_batch=4, sequences=4) as found:
        yield found


class Answers:
    """What a stream's client has been told, in order."""

    def __init__(self, client):
        self._queue = queue.Queue()
        self.client = client
        client.start_stream(lambda result, error: self._queue.put((result, error)))

    def next(self):
        """Return (result, error)."""
        return self._queue.get(timeout=20)

    def tokens(self, request=""):
        """Return the tokens of one request, if no other is under way."""
        found = []
        while True:
            result, error = self.next()
            assert error is None, error
            answer = result.get_response()
            assert answer.id == request
            assert int(result.as_numpy("index")[0]) == len(found)
            found.append(int(result.as_numpy("token")[0]))
            if answer.parameters["triton_final_response"].bool_param:
                return found, answer.parameters["done"].string_param


@pytest.fixture
def answers(server):
    """A stream of the client that others use."""
    with client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        found = Answers(client)
        yield found
        client.stop_stream()
    assert until(lambda: server.engine.in_flight == 0)


def vectors(x):
    found = [client_of.InferInput(name, [4], "FP32") for name in "xy"]
    for place, array in zip(found, (x, Y)):
        place.set_data_from_numpy(array)
    return found


def prompt(*tokens, name="tokens"):
    found = client_of.InferInput(name, [len(tokens)], "INT64")
    found.set_data_from_numpy(np.array(tokens, np.int64))
    return found


def test_results_are_in_the_order_of_requests(answers):
    for n in range(100):
        answers.client.async_stream_infer("tiny", vectors(X + n), request_id=str(n))
    for n in range(100):
        result, error = answers.next()
        assert error is None
        assert result.get_response().id == str(n)
        assert result.get_response().parameters["triton_final_response"].bool_param
        np.testing.assert_array_equal(result.as_numpy("output0"), X + n + Y)


def test_a_stream_has_a_response_for_each_token(answers):
    about = answers.client.get_model_metadata("texts")
    assert [row.name for row in about.inputs] == ["tokens", "stop"]
    assert [row.name for row in about.outputs] == ["token", "index"]
    assert answers.client.is_model_ready("texts")
    parameters = {"request_id": "7", "parameters": {"max_tokens": 5, "seed": 3}, "enable_empty_final_response": True}
    answers.client.async_stream_infer("texts", [prompt(5, 6)], **parameters)
    assert answers.tokens("7") == (expected([5, 6], 5), "length")
    stop = expected([5, 6], 3)[-1]
    answers.client.async_stream_infer("texts", [prompt(5, 6), prompt(stop, name="stop")])
    assert answers.tokens() == (expected([5, 6], 3), "stop")


def test_generations_of_one_stream_are_concurrent_and_do_not_block_results(answers):
    for n in range(3):
        answers.client.async_stream_infer("texts", [prompt(n)], request_id=str(n), parameters={"max_tokens": 5000})
    answers.client.async_stream_infer("tiny", vectors(X), request_id="x")
    seen = []
    while {"0", "1", "2", "x"} - set(seen):
        result, error = answers.next()
        assert error is None
        seen.append(result.get_response().id)
    assert len(seen) < 15_000
    answers.client.stop_stream(cancel_requests=True)


def test_a_sequence_continues_over_requests(answers):
    parameters = {"sequence_id": 9, "parameters": {"max_tokens": 3}}
    answers.client.async_stream_infer("texts", [prompt(5)], sequence_start=True, **parameters)
    first, _ = answers.tokens()
    answers.client.async_stream_infer("texts", [prompt(8)], sequence_end=True, **parameters)
    assert answers.tokens()[0] == expected([5, *first, 8], 3)


@pytest.mark.parametrize(
    ("model", "inputs", "more", "words"),
    [
        ("other", [prompt(1)], {}, "no such model"),
        ("tiny", [prompt(1)], {}, "no input"),
        ("tiny", vectors(X), {"sequence_id": 3}, "are not stored"),
        ("texts", [], {}, "tokens is not a list"),
        ("texts", [prompt(1, name="prompt")], {}, "no 'prompt'"),
        ("texts", [prompt(1)], {"parameters": {"max_tokens": 0}}, "max_tokens"),
        ("texts", [prompt(1)], {"sequence_id": 3}, "unknown sequence"),
        ("texts", [prompt(1 << 40)], {}, "out of range"),
        ("texts", vectors(X), {}, "tokens are integers"),
    ],
)
def test_an_error_is_a_response_and_the_stream_continues(answers, model, inputs, more, words):
    answers.client.async_stream_infer(model, inputs, **more)
    result, error = answers.next()
    assert result is None
    assert words in str(error)
    answers.client.async_stream_infer("texts", [prompt(5)], parameters={"max_tokens": 2})
    assert answers.tokens()[0] == expected([5], 2)


def test_generation_outside_of_a_stream_is_refused(server):
    with (
        client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
        pytest.raises(client_of.InferenceServerException, match="ModelStreamInfer"),
    ):
        client.infer("texts", [prompt(1)])


def test_calls_end_when_the_client_disconnects(server):
    with client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        answers = Answers(client)
        for n in range(3):
            client.async_stream_infer("texts", [prompt(n)], parameters={"max_tokens": 1 << 20})
        answers.next()
        client.stop_stream(cancel_requests=True)
    assert until(lambda: server.engine.in_flight == 0)
    decoder = server.engine.repository.models["texts"][1].decoder
    assert until(lambda: not decoder.batches)
    assert 'protocol="grpc",status="499"' in server.ask("/metrics")[2].decode()


def message(id_):
    made = service_pb2.ModelInferRequest(model_name="tiny", id=id_)
    for name, values in (("x", X), ("y", Y)):
        made.inputs.add(name=name, datatype="FP32", shape=[4]).contents.fp32_contents.extend(values.tolist())
    return made


def test_the_queue_limit_applies_to_streams(two_models):
    """A stream that sends as fast as it can is read as it is answered; the bytes that wait are the client's."""
    with (
        running(two_models, grpc_port=0, queue=4) as server,
        grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as c,
    ):
        stub = service_pb2_grpc.GRPCInferenceServiceStub(c)
        found = list(stub.ModelStreamInfer(message(str(n)) for n in range(500)))
        assert [row.infer_response.id for row in found] == [str(n) for n in range(500)]
        assert not any(row.error_message for row in found)
        assert found[-1].infer_response.outputs[0].contents.fp32_contents[:] == (X + Y).tolist()


def test_shutdown_finishes_a_stream(two_models):
    """What was asked is answered; a stream that waits does not keep the server."""
    found, ended = [], threading.Event()
    with running(two_models, grpc_port=0) as server:
        channel = grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}")
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

        def requests():
            yield message("1")
            ended.wait(30)

        def read():
            found.extend(stub.ModelStreamInfer(requests()))
            ended.set()

        thread = threading.Thread(target=read)
        thread.start()
        assert until(lambda: server.engine.metrics.latencies)
        began = time.monotonic()
    assert time.monotonic() - began < 4
    thread.join(20)
    assert ended.is_set()
    assert [row.infer_response.id for row in found] == ["1"]
    channel.close()


def test_the_streaming_example_of_the_docs_runs(server, capsys):
    """As it stands in docs/serve.md."""
    programs = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "serve.md").read_text(), re.DOTALL)
    (program,) = (text for text in programs if "start_stream" in text)
    here = program.replace("127.0.0.1:8742", f"127.0.0.1:{server.grpc_port}").replace('"llm"', '"texts"')
    exec(compile(here, "serve.md", "exec"), {})
    assert [int(line) for line in capsys.readouterr().out.split()] == expected([1, 15043], 5)


def test_a_stream_requires_the_token(two_models):
    with (
        running(two_models, grpc_port=0, token="secret") as server,
        client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        assert client.is_server_live()
        answers = Answers(client)
        assert "token" in str(answers.next()[1])
        client.stop_stream()
        found = queue.Queue()
        client.start_stream(
            lambda result, error: found.put((result, error)), headers={"authorization": "Bearer secret"}
        )
        client.async_stream_infer("tiny", vectors(X))
        assert found.get(timeout=20)[1] is None
        client.stop_stream()
