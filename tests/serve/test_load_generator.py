"""The calls that Triton's load generator (perf_analyzer) makes: each answer has the fields of Triton's own messages.

It cannot be installed here. The order of its calls is that of its documentation: what the server and the model are,
then windows of requests between two looks at the statistics. Its probes of shared memory have an answer that says no.
The messages are those of ``tritonclient``, which ours are not made from.
"""

import json
import threading

import numpy as np
import pytest
from serve import texts
from support import tiny
from support.served import running

grpc = pytest.importorskip("grpc")
pytest.importorskip("tritonclient.grpc")

from google.protobuf import json_format  # noqa: E402
from tritonclient.grpc import model_config_pb2, service_pb2, service_pb2_grpc  # noqa: E402

pytestmark = pytest.mark.cpu

NAME, X = "tiny", np.arange(4, dtype="f4")
SERVICE = "/inference.GRPCInferenceService"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a model of results and one of tokens."""
    path = tmp_path_factory.mktemp("generator")
    for name, data in ((NAME, tiny.bundle()), ("texts", texts.bundle())):
        (path / f"{name}.vmfb").write_bytes(data)
    with running(path, grpc_port=0) as found:
        yield found


class OverHttp:
    """Calls over HTTP; each answer is read as the message that the protocol has for it, without a field too many."""

    def __init__(self, server):
        self._server = server

    def _message(self, path, kind):
        status, document = self._server.json(path)
        assert status == 200, document
        return json_format.ParseDict(document, kind())

    def is_live(self):
        return [self._server.ask(f"/v2/health/{kind}")[0] for kind in ("live", "ready")] == [200, 200]

    def is_model_ready(self, name):
        return self._server.ask(f"/v2/models/{name}/ready")[0] == 200

    def server_metadata(self):
        return self._message("/v2", service_pb2.ServerMetadataResponse)

    def metadata(self, name):
        return self._message(f"/v2/models/{name}", service_pb2.ModelMetadataResponse)

    def config(self, name):
        return self._message(f"/v2/models/{name}/config", model_config_pb2.ModelConfig)

    def statistics(self, name):
        path = f"/v2/models/{name}/versions/1/stats"
        return self._message(path, service_pb2.ModelStatisticsResponse).model_stats[0]

    def refuses_shared_memory(self):
        found = [
            self._server.ask(f"/v2/{kind}sharedmemory/{change}", body)
            for kind in ("system", "cuda")
            for change, body in (("status", None), ("unregister", b""))
        ]
        return all(status == 404 and json.loads(data)["error"] for status, _, data in found)

    def infer(self, name, number, inputs, outputs):
        rows = [
            {"name": n, "shape": list(x.shape), "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
            for n, x in inputs.items()
        ]
        asked = {"id": f"{number}", "inputs": rows, "parameters": {"priority": 0, "timeout": 10_000_000}}
        asked["outputs"] = [{"name": n, "parameters": {"binary_data": True}} for n in outputs]
        head = json.dumps(asked).encode()
        fields = {"Inference-Header-Content-Length": len(head), "Content-Type": "application/octet-stream"}
        body = head + b"".join(x.tobytes() for x in inputs.values())
        status, headers, data = self._server.ask(f"/v2/models/{name}/infer", body, {**fields, "Accept": "*/*"})
        assert status == 200, data
        size = int(headers["inference-header-content-length"])
        document, rest, results = json.loads(data[:size]), data[size:], {}
        assert headers["content-type"] == "application/octet-stream"
        for row in document["outputs"]:
            count = row["parameters"].pop("binary_data_size")
            results[row["name"]] = np.frombuffer(rest[:count], "f4").reshape(row["shape"])
            rest = rest[count:]
            del row["parameters"]
        assert rest == b""
        answer = json_format.ParseDict(document, service_pb2.ModelInferResponse())
        return answer, results


class OverGrpc:
    """The same calls over gRPC, in which a field that the message does not have is an unknown field."""

    def __init__(self, channel):
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)

    def is_live(self):
        live = self._stub.ServerLive(service_pb2.ServerLiveRequest()).live
        return live and self._stub.ServerReady(service_pb2.ServerReadyRequest()).ready

    def is_model_ready(self, name):
        return self._stub.ModelReady(service_pb2.ModelReadyRequest(name=name)).ready

    def server_metadata(self):
        return known(self._stub.ServerMetadata(service_pb2.ServerMetadataRequest()))

    def metadata(self, name):
        return known(self._stub.ModelMetadata(service_pb2.ModelMetadataRequest(name=name)))

    def config(self, name):
        return known(self._stub.ModelConfig(service_pb2.ModelConfigRequest(name=name))).config

    def statistics(self, name):
        asked = service_pb2.ModelStatisticsRequest(name=name, version="1")
        return known(self._stub.ModelStatistics(asked)).model_stats[0]

    def refuses_shared_memory(self):
        codes = set()
        for kind in ("System", "Cuda"):
            for change in ("Status", "Unregister"):
                request = getattr(service_pb2, f"{kind}SharedMemory{change}Request")()
                with pytest.raises(grpc.RpcError) as failed:
                    getattr(self._stub, f"{kind}SharedMemory{change}")(request)
                codes.add(failed.value.code())
        return codes == {grpc.StatusCode.UNIMPLEMENTED}

    def infer(self, name, number, inputs, outputs):
        request = service_pb2.ModelInferRequest(model_name=name, id=f"{number}")
        for n, x in inputs.items():
            request.inputs.add(name=n, shape=list(x.shape), datatype="FP32")
            request.raw_input_contents.append(x.tobytes())
        for n in outputs:
            request.outputs.add(name=n)
        request.parameters["timeout"].int64_param = 10_000_000
        answer = known(self._stub.ModelInfer(request))
        rows = zip(answer.outputs, answer.raw_output_contents, strict=True)
        return answer, {row.name: np.frombuffer(data, "f4").reshape(row.shape) for row, data in rows}


def known(message):
    """Return a message none of whose fields, at any depth, is unknown."""
    copy = type(message).FromString(message.SerializeToString())
    copy.DiscardUnknownFields()
    assert copy.SerializeToString(deterministic=True) == message.SerializeToString(deterministic=True)
    return message


@pytest.fixture(params=["http", "grpc"])
def client(request, server):
    """Makes the calls."""
    if request.param == "http":
        yield OverHttp(server)
        return
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        yield OverGrpc(channel)


def test_metadata_and_configuration_precede_requests(client):
    """Sizes of tensors, whether they are in batches, whether there is one answer: from metadata and configuration."""
    assert client.is_live()
    assert client.is_model_ready(NAME)
    about = client.server_metadata()
    assert about.name == "aotc"
    assert {"model_configuration", "statistics"} <= set(about.extensions)
    model, config = client.metadata(NAME), client.config(NAME)
    assert (model.name, list(model.versions), config.max_batch_size) == (NAME, ["1"], 0)
    assert not config.model_transaction_policy.decoupled
    assert not config.HasField("sequence_batching")
    assert not config.HasField("ensemble_scheduling")
    for rows, described in ((model.inputs, config.input), (model.outputs, config.output)):
        names = [(row.name, f"TYPE_{row.datatype}", list(row.shape)) for row in rows]
        types = model_config_pb2.DataType
        assert [(row.name, types.Name(row.data_type), list(row.dims)) for row in described] == names
    assert client.config("texts").model_transaction_policy.decoupled


def test_statistics_count_the_requests_of_a_window(client):
    before = client.statistics(NAME)

    def send(start):
        for number in range(start, start + 10):
            answer, results = client.infer(NAME, number, {"x": X, "y": X * number}, ["output0"])
            assert (answer.id, answer.model_name, answer.model_version) == (f"{number}", NAME, "1")
            assert (answer.outputs[0].datatype, list(answer.outputs[0].shape)) == ("FP32", [4])
            np.testing.assert_array_equal(results["output0"], X + X * number)
            done.append(number)

    done = []
    threads = [threading.Thread(target=send, args=(start,)) for start in (1, 101, 201)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == 30
    after = client.statistics(NAME)
    assert (after.name, after.version) == (NAME, "1")
    assert after.inference_count - before.inference_count == 30
    assert after.execution_count - before.execution_count == 30
    assert after.last_inference > before.last_inference
    taken = {}
    for phase in ("success", "compute_input", "compute_infer", "compute_output"):
        more, less = (getattr(found.inference_stats, phase) for found in (after, before))
        assert more.count - less.count == 30
        taken[phase] = more.ns - less.ns
    assert 0 < sum(taken.values()) - taken["success"] <= taken["success"]
    assert after.inference_stats.fail.count == before.inference_stats.fail.count


def test_shared_memory_is_refused(client):
    assert client.refuses_shared_memory()


def test_a_stream_marks_its_final_response(server):
    """How a load generator knows that a model that answers more than once has answered."""
    request = service_pb2.ModelInferRequest(model_name="texts", id="7")
    request.inputs.add(name="tokens", shape=[2], datatype="INT64")
    request.raw_input_contents.append(np.array([1, 2]).tobytes())
    request.parameters["max_tokens"].int64_param = 3
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        answers = [known(answer) for answer in stub.ModelStreamInfer(iter([request]))]
    assert [answer.error_message for answer in answers] == [""] * len(answers)
    assert {answer.infer_response.id for answer in answers} == {"7"}
    last = [answer.infer_response.parameters["triton_final_response"].bool_param for answer in answers]
    assert last == [False] * (len(answers) - 1) + [True]
