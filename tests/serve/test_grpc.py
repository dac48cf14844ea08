"""The protocol over gRPC: messages as published, the client that others use, what no client sends."""

import time

import numpy as np
import pytest
from support.served import running

grpc = pytest.importorskip("grpc")
client_of = pytest.importorskip("tritonclient.grpc")

from google.protobuf import descriptor_pb2  # noqa: E402
from tritonclient.grpc import model_config_pb2, service_pb2  # noqa: E402

from aotc.serve.grpc.messages import HEALTH_METHODS, INFER, METHODS, PARTIAL, STREAM, file_descriptor  # noqa: E402

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype="f4"), np.full(4, 10, "f4")


@pytest.fixture(scope="module")
def server(tiny_folder):
    """A server of it."""
    with running(tiny_folder, grpc_port=0, model_control=True, max_message=1 << 16) as found:
        yield found


@pytest.fixture(scope="module")
def client(server):
    """The client that others use."""
    with client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as found:
        yield found


@pytest.fixture(scope="module")
def stub(server):
    """Sends any message."""
    from tritonclient.grpc import service_pb2_grpc

    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield service_pb2_grpc.GRPCInferenceServiceStub(channel)


def flat(message, prefix=""):
    """Yield a row for each field of a message and those within it."""
    name = prefix + message.name
    yield name, message.options.map_entry
    for f in message.field:
        yield name, f.name, f.number, f.label, f.type, f.type_name, f.HasField("oneof_index")
    for inner in message.nested_type:
        yield from flat(inner, name + ".")


def test_message_definitions_equal_the_published_ones():
    theirs, config = descriptor_pb2.FileDescriptorProto(), descriptor_pb2.FileDescriptorProto()
    service_pb2.DESCRIPTOR.CopyToProto(theirs)
    model_config_pb2.DESCRIPTOR.CopyToProto(config)
    published = {row for file in (theirs, config) for message in file.message_type for row in flat(message)}
    ours = {row for message in file_descriptor().message_type for row in flat(message)}
    assert ours <= published
    names = {row[0] for row in ours if row[0] not in PARTIAL}
    assert {row for row in published if row[0] in names} == {row for row in ours if row[0] in names}
    (enum,) = (enum for enum in config.enum_type if enum.name == "DataType")
    assert file_descriptor().enum_type[0] == enum
    assert {*METHODS, *HEALTH_METHODS, INFER, STREAM} <= {method.name for method in theirs.service[0].method}
    assert (theirs.package, theirs.service[0].name) == ("inference", "GRPCInferenceService")


def inputs_of(*arrays):
    found = [client_of.InferInput(name, list(a.shape), "FP32") for name, a in zip("xy", arrays)]
    for place, array in zip(found, arrays):
        place.set_data_from_numpy(array)
    return found


def test_tritonclient_works_over_grpc(client):
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("tiny", "2")
    assert client.get_server_metadata().name == "aotc"
    about = client.get_model_metadata("tiny.grow")
    assert (about.name, list(about.versions), list(about.inputs[0].shape)) == ("tiny.grow", ["1"], [-1])
    for wanted in (None, [client_of.InferRequestedOutput("output0")]):
        result = client.infer("tiny", inputs_of(X, Y), outputs=wanted, request_id="7")
        np.testing.assert_array_equal(result.as_numpy("output0"), X + Y)
        assert result.get_response().id == "7"
    assert [m.state for m in client.get_model_repository_index().models] == ["READY"]
    client.unload_model("tiny")
    assert not client.is_model_ready("tiny")
    client.load_model("tiny")
    assert client.is_model_ready("tiny")


def message(*rows, **more):
    made = service_pb2.ModelInferRequest(model_name="tiny", **more)
    for name, datatype, shape, values in rows:
        row = made.inputs.add(name=name, datatype=datatype, shape=shape)
        if values is not None:
            row.contents.fp32_contents.extend(values)
    return made


GOOD = [("x", "FP32", [4], X.tolist()), ("y", "FP32", [4], Y.tolist())]


def test_typed_contents_are_returned_for_typed_contents(stub):
    answer = stub.ModelInfer(message(*GOOD))
    assert list(answer.outputs[0].contents.fp32_contents) == [10, 11, 12, 13]
    assert not answer.raw_output_contents


@pytest.mark.parametrize(
    ("request_", "code", "words"),
    [
        (message(GOOD[0]), "INVALID_ARGUMENT", "no input y"),
        (message(*GOOD, GOOD[0]), "INVALID_ARGUMENT", "twice"),
        (message(("x", "FP32", [3], [1, 2, 3]), GOOD[1]), "INVALID_ARGUMENT", "does not fit"),
        (message(("x", "FP32", [-4], X), GOOD[1]), "INVALID_ARGUMENT", "shape"),
        (message(("x", "BYTES", [4], None), GOOD[1]), "INVALID_ARGUMENT", "not accept strings"),
        (message(("x", "STRING", [4], None), GOOD[1]), "INVALID_ARGUMENT", "datatype"),
        (message(("x", "FP16", [4], None), GOOD[1]), "INVALID_ARGUMENT", "raw_input_contents"),
        (message(("x", "FP32", [4], None), GOOD[1]), "INVALID_ARGUMENT", "number of elements"),
        (message(*GOOD, raw_input_contents=[b""]), "INVALID_ARGUMENT", "as many"),
        (message(*GOOD, raw_input_contents=[b"", b""]), "INVALID_ARGUMENT", "bytes"),
        (message(*GOOD, model_version="9"), "NOT_FOUND", "version"),
        (service_pb2.ModelInferRequest(model_name="other"), "NOT_FOUND", "no such model"),
    ],
)
def test_an_error_has_its_grpc_status_code(stub, request_, code, words):
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(request_)
    assert failed.value.code() is grpc.StatusCode[code]
    assert words in failed.value.details()


def test_a_too_long_message_is_refused(stub):
    with pytest.raises(grpc.RpcError) as failed:
        stub.ModelInfer(message(*GOOD, raw_input_contents=[b"a" * 70_000]))
    assert failed.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_requests_are_counted_by_protocol(server, client):
    client.infer("tiny", inputs_of(X, Y))
    text = server.ask("/metrics")[2].decode()
    assert 'aotc_requests_total{model="tiny",protocol="grpc",status="200"}' in text


def test_requests_for_unknown_models_are_counted(server, client):
    before = server.engine.metrics.unknown.get("teeny", 0)
    for question in (client.get_model_metadata, client.get_model_config):
        with pytest.raises(client_of.InferenceServerException, match="no such model"):
            question("teeny")
    assert server.engine.metrics.unknown["teeny"] == before + 2


def test_grpc_requires_the_token_and_refuses_unload_without_model_control(tiny_folder):
    shown = {"authorization": "Bearer secret"}
    with (
        running(tiny_folder, grpc_port=0, token="secret") as server,
        client_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client,
    ):
        with pytest.raises(client_of.InferenceServerException, match="token"):
            client.infer("tiny", inputs_of(X, Y))
        result = client.infer("tiny", inputs_of(X, Y), headers=shown)
        np.testing.assert_array_equal(result.as_numpy("output0"), X + Y)
        with pytest.raises(client_of.InferenceServerException, match="--model-control"):
            client.unload_model("tiny", headers=shown)


def test_grpc_health_checks_respond(tiny_folder, tmp_path):
    """Bytes as published: a request's field 1 is a name, an answer's field 1 is 1 if it serves, 2 if not."""

    def ask(server, name, metadata=()):
        with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            return channel.unary_unary("/grpc.health.v1.Health/Check")(name, metadata=metadata, timeout=20)

    tiny, other = b"\n\x04tiny", b"\n\x05other"
    with running(tiny_folder, grpc_port=0, token="secret") as server:
        assert ask(server, b"") == b"\x08\x01"
        assert ask(server, tiny, (("authorization", "Bearer secret"),)) == b"\x08\x01"
        for metadata, code in (((), "UNAUTHENTICATED"), ((("authorization", "Bearer secret"),), "NOT_FOUND")):
            with pytest.raises(grpc.RpcError) as failed:
                ask(server, other, metadata)
            assert failed.value.code() is grpc.StatusCode[code]
    with running(tmp_path, grpc_port=0) as server:
        assert ask(server, b"") == b"\x08\x02"


def test_both_protocols_shut_down_in_time(tiny_folder):
    began = time.monotonic()
    with running(tiny_folder, grpc_port=0) as server:
        assert server.json("/v2/health/live")[0] == 200
    assert time.monotonic() - began < 10
