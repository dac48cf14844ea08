"""Requests that no well-behaved client sends, over HTTP and gRPC: each is refused with a reason, never with a 500."""

import json
import random
from copy import deepcopy

import numpy as np
import pytest
from support.hostile import assert_no_stall, hostile_server

grpc = pytest.importorskip("grpc")
pytest.importorskip("tritonclient.grpc")

from tritonclient.grpc import service_pb2, service_pb2_grpc  # noqa: E402

pytestmark = pytest.mark.cpu

INFER, GENERATE = "/v2/models/tiny/infer", "/v2/models/texts/generate"
X = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]
HUGE = 10**400  # more than a float holds


@pytest.fixture(scope="module")
def server(two_models, tmp_path_factory):
    """A server of both models in a process of its own; its log has no traceback when it ends."""
    with hostile_server(two_models, tmp_path_factory.mktemp("log"), "--max-body-mb=8") as found:
        yield found


@pytest.fixture(scope="module")
def stub(server):
    """Sends any message."""
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def nested(depth, inner="1"):
    return ("[" * depth + inner + "]" * depth).encode()


def with_x(**changes):
    return {"inputs": [{**X[0], **changes}, X[1]]}


REFUSED = {
    "zero of too many": (INFER, with_x(shape=[0, 1 << 47, 1 << 47], data=[]), "too large"),
    "timeout of 400 digits": (INFER, {"inputs": X, "parameters": {"timeout": HUGE}}, "timeout"),
    "timeout of tokens of 400 digits": (GENERATE, {"tokens": [1], "timeout": HUGE}, "timeout"),
    "temperature of 400 digits": (GENERATE, {"tokens": [1], "temperature": HUGE}, "temperature"),
    "seed of 400 digits": (GENERATE, {"tokens": [1], "seed": HUGE}, "seed"),
    "token of 400 digits": (GENERATE, {"tokens": [HUGE]}, "out of range"),
    "data of 400 digits": (INFER, with_x(data=[HUGE] * 4), "numbers"),
    "shape of 400 digits": (INFER, with_x(shape=[HUGE]), "shape"),
    "deep data": (INFER, b'{"inputs": [{"name": "x", "shape": [4], "datatype": "FP32", "data": %s}]}' % nested(900),
                  "deep"),
    "deep id": (INFER, b'{"inputs": [], "id": %s}' % nested(900), "id"),
    "deep tokens": (GENERATE, b'{"tokens": %s}' % nested(950), "tokens"),
    "deep name": (INFER, b'{"inputs": [{"name": %s}]}' % nested(950), "name"),
    "deep shape": (INFER, b'{"inputs": [{"name": "x", "datatype": "FP32", "shape": %s}]}' % nested(950), "shape"),
    "deep to the index": ("/v2/repository/index", nested(30_000), "JSON"),
    "an object as a number": (INFER, with_x(data=[{}, 1, 2, 3]), "number"),
    "a long string among numbers": (INFER, with_x(data=["a" * 30_000, *[1] * 10_000]), "number"),
    "one output twice": (INFER, {"inputs": X, "outputs": [{"name": "output0"}] * 2}, "twice"),
    "one output often": (INFER, {"inputs": X, "outputs": [{"name": "output0"}] * 1000}, "too many outputs"),
    "one input often": (INFER, {"inputs": [X[0]] * 1000}, "too many inputs"),
    "digits without end": (INFER, b'{"inputs": ' + b"1" * 5000 + b"}", "JSON"),
    "half a surrogate": (INFER, b'{"inputs": [{"name": "\\ud800"}]}', "input"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_hostile_request_is_refused_with_a_reason(server, case):
    path, body, words = REFUSED[case]
    status, document = server.json(path, body)
    assert status == 400, document
    assert words in document["error"]
    assert "Traceback" not in document["error"]


def message(**more):
    made = service_pb2.ModelInferRequest(model_name="tiny", **more)
    for row in X:
        place = made.inputs.add(name=row["name"], shape=row["shape"], datatype="FP32")
        place.contents.fp32_contents.extend(row["data"])
    return made


def repeated(field, count):
    made = message()
    for _ in range(count):
        if field == "parameters":
            made.parameters[str(len(made.parameters))].int64_param = 1
        else:
            getattr(made, field).add(name={"inputs": "x", "outputs": "output0"}[field])
    return made


def large_zero():
    made = message()
    made.inputs[0].shape[:] = [0, 1 << 47, 1 << 47]
    return made


@pytest.mark.parametrize(
    ("made", "words"),
    [
        (large_zero(), "too large"),
        (repeated("outputs", 2), "twice"),
        (repeated("outputs", 1000), "too many outputs"),
        (repeated("inputs", 1000), "too many inputs"),
        (repeated("outputs", 100_000), "too many fields"),
        (repeated("parameters", 1000), "too many parameters"),
    ],
)
def test_a_hostile_message_is_refused_with_a_reason(stub, made, words):
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(made)
    assert failed.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert words in failed.value.details()


def test_an_output_requested_many_times_is_refused_in_time(server, stub):
    """3.8 MB that asked for 130,000 copies of an answer."""
    body = json.dumps({"inputs": X, "outputs": [{"name": "output0"}] * 130_000}).encode()

    def attack():
        assert server.json(INFER, body)[0] == 400
        with pytest.raises(grpc.RpcError):
            stub.ModelInfer(repeated("outputs", 50_000))

    assert_no_stall(server, attack)


VALUES = (
    None, True, -1, 0, 1 << 62, 1 << 65, HUGE, 1e308, float("nan"), "", "x", "NaN", "FP32", "\ud800", [], [[]], {},
    [1, 2, 3, 4], [[1], [2, 3]], {"name": "x"}, [{}],
)  # fmt: skip


def mutated(document, source):
    """Return a copy of a document with a few values replaced, removed or repeated."""
    document = json.loads(json.dumps(document))
    for _ in range(source.randint(1, 3)):
        place = document
        while isinstance(place, dict | list) and place:
            key = source.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if source.random() < 0.4 or not isinstance(place[key], dict | list):
                change = source.random()
                if change < 0.15:
                    place.pop(key) if isinstance(place, list) else place.pop(key, None)
                elif change < 0.3 and isinstance(place, list):
                    place.append(deepcopy(place[key]))
                else:
                    place[key] = deepcopy(source.choice(VALUES))
                break
            place = place[key]
    return document


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_requests_are_answered_or_refused(server, count):
    source = random.Random(7)
    seeds = [
        (INFER, {"inputs": X, "outputs": [{"name": "output0", "parameters": {"binary_data": True}}], "id": "a",
                 "parameters": {"timeout": 10**7, "binary_data_output": True}}),
        (GENERATE, {"tokens": [1, 2], "max_tokens": 2, "stop": [3], "temperature": 0.5, "top_k": 3, "seed": 1,
                    "timeout": 10**7, "sequence_id": "a", "sequence_start": True, "sequence_end": True}),
        ("/v2/repository/index", {"ready": True}),
    ]  # fmt: skip
    for _ in range(count):
        path, seed = source.choice(seeds)
        document = mutated(seed, source)
        status, _, data = server.ask(path, document)
        assert status in (200, 400, 404, 413, 429, 504), (status, data, document)


def code_of(call, data):
    """Return the name of the status that a call ends with."""
    try:
        call(data, timeout=20)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


@pytest.mark.parametrize("count", [150, pytest.param(10_000, marks=pytest.mark.slow)])
def test_mutated_messages_are_answered_or_refused(server, count):
    """Bytes of a message changed at random: some cannot be decoded."""
    source, good = random.Random(7), message(id="a").SerializeToString()
    known = {"OK", "INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "DEADLINE_EXCEEDED"}
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        for _ in range(count):
            data = bytearray(good)
            for _ in range(source.randint(1, 4)):
                data[source.randrange(len(data))] = source.choice((0, 1, 127, 128, 255, source.randrange(256)))
            code = code_of(call, bytes(data))
            assert code in known, bytes(data)


def test_a_valid_request_succeeds_after_hostile_ones(server, stub):
    assert server.json(INFER, {"inputs": X})[1]["outputs"][0]["data"] == [2, 4, 6, 8]
    np.testing.assert_array_equal(stub.ModelInfer(message()).outputs[0].contents.fp32_contents, [2, 4, 6, 8])
