"""What Triton adds to the protocol: the configuration of a model, and what became of its requests."""

import jax
import numpy as np
import pytest
from jax import export
from serve import texts
from support import tiny
from support.served import running

import aotc

http = pytest.importorskip("tritonclient.http")
grpc = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.cpu

PHASES = {"success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss"}


def rows():
    """A bundle whose rows are independent."""
    x = jax.ShapeDtypeStruct(export.symbolic_shape("b, 4"), np.float32)
    return aotc.compile(export.export(jax.jit(lambda x: x * 2))(x))


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server of a model of one call, one in batches, and one of tokens."""
    path = tmp_path_factory.mktemp("triton")
    for name, data in (("tiny", tiny.bundle()), ("rows", rows()), ("texts", texts.bundle())):
        (path / f"{name}.vmfb").write_bytes(data)
    with running(path, grpc_port=0, max_batch=8, max_delay=0.002) as found:
        found.x = found.json("/v2/models/rows")[1]["inputs"][0]["name"]
        yield found


@pytest.fixture
def clients(server):
    """A client of each protocol."""
    with (
        http.InferenceServerClient(server.address) as one,
        grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as other,
    ):
        yield one, other


def both(clients, method, *arguments):
    """Return the answers of both protocols, which are equal, as JSON has them."""
    one, other = clients
    found = getattr(one, method)(*arguments)
    again = getattr(other, method)(*arguments, as_json=True)
    return found, again


def test_the_model_configuration_has_inputs_and_outputs(clients):
    found, again = both(clients, "get_model_config", "tiny")
    four = {"data_type": "TYPE_FP32", "dims": [4]}
    assert found == {
        "name": "tiny", "platform": "aotc_vmfb", "backend": "aotc", "max_batch_size": 0,
        "input": [{"name": "x", **four}, {"name": "y", **four}], "output": [{"name": "output0", **four}],
        "model_transaction_policy": {"decoupled": False},
    }  # fmt: skip
    assert again["config"]["input"] == [{"name": n, "data_type": "TYPE_FP32", "dims": ["4"]} for n in "xy"]
    assert both(clients, "get_model_config", "tiny.grow")[0]["input"][0]["dims"] == [-1]


def test_the_configuration_omits_the_batch_dim(server, clients):
    found, again = both(clients, "get_model_config", "rows", "1")
    assert (found["max_batch_size"], found["input"][0]["dims"]) == (8, [4])
    assert found["dynamic_batching"] == {"max_queue_delay_microseconds": 2000}
    assert again["config"]["dynamic_batching"] == {"max_queue_delay_microseconds": "2000"}
    assert clients[0].get_model_metadata("rows")["inputs"][0]["shape"] == [-1, 4]


def test_a_token_model_is_decoupled(clients):
    for found in both(clients, "get_model_config", "texts"):
        config = found.get("config", found)
        assert config["model_transaction_policy"]["decoupled"]
        assert [row["name"] for row in config["input"]] == ["tokens", "stop"]


def infer(client, name, rows):
    kind = http if isinstance(client, http.InferenceServerClient) else grpc
    inputs = [kind.InferInput(n, list(x.shape), "FP32") for n, x in rows.items()]
    for place, x in zip(inputs, rows.values()):
        place.set_data_from_numpy(x)
    return client.infer(name, inputs)


def test_statistics_of_a_model_count_requests(server, clients):
    """Of each function, as both protocols count it."""
    x = np.ones(4, "f4")
    for client in clients:
        infer(client, "tiny", {"x": x, "y": x})
        infer(client, "rows", {server.x: np.ones((3, 4), "f4")})
        with pytest.raises(Exception, match="no input"):
            infer(client, "tiny", {"x": x})
    ((one,), (other,)) = (found["model_stats"] for found in both(clients, "get_inference_statistics", "tiny"))
    assert (one["name"], one["version"], one["inference_count"], one["execution_count"]) == ("tiny", "1", 2, 2)
    assert (other["inference_count"], other["last_inference"]) == ("2", str(one["last_inference"]))
    assert set(one["inference_stats"]) == PHASES
    counts = {phase: one["inference_stats"][phase]["count"] for phase in PHASES}
    assert (counts["success"], counts["fail"], counts["compute_infer"], counts["cache_hit"]) == (2, 2, 2, 0)
    taken = {phase: one["inference_stats"][phase]["ns"] for phase in PHASES}
    assert 0 < taken["compute_infer"] < taken["success"]
    (batched,) = both(clients, "get_inference_statistics", "rows", "1")[0]["model_stats"]
    assert (batched["inference_count"], batched["execution_count"]) == (6, 2)
    assert batched["batch_stats"][0]["batch_size"] == 3
    assert batched["inference_stats"]["queue"]["count"] == 2


def test_statistics_of_all_models_count_requests(server, clients):
    status, _ = server.json("/v2/models/texts/generate", {"tokens": [1], "max_tokens": 3})
    assert status == 200
    for found in both(clients, "get_inference_statistics"):
        there = {row["name"]: row for row in found["model_stats"]}
        assert set(there) == {
            "tiny", "tiny.grow", "tiny.count", "tiny.upto", "tiny.update", "tiny.pick", "rows", "texts",
            "texts.prefill", "texts.decode",
        }  # fmt: skip
        assert int(there["texts"]["inference_count"]) == 1


def test_statistics_of_a_missing_model_are_not_found(server, clients):
    for method in ("get_model_config", "get_inference_statistics"):
        for client in clients:
            with pytest.raises(Exception, match="no such model"):
                getattr(client, method)("other")
    assert server.json("/v2/models/tiny.other/stats")[0] == 404
