"""Tensors of strings, which the protocol has and no model here takes: one clear error, however they come."""

import numpy as np
import pytest
from support.served import running

http_of = pytest.importorskip("tritonclient.http")
grpc_of = pytest.importorskip("tritonclient.grpc")

pytestmark = pytest.mark.ir

WORDS = np.array([b"a", "ü".encode(), b"", b"long" * 100], dtype=object)


@pytest.fixture(scope="module")
def server(tiny_folder):
    """A server of a model of numbers."""
    with running(tiny_folder, grpc_port=0) as found:
        yield found


def told(client, row):
    with pytest.raises(Exception, match="models do not accept strings") as failed:
        client.infer("tiny", [row])
    text = str(failed.value)
    assert "tiny: input 'x'" in text
    assert "found:    BYTES" in text
    assert "tokenizer" in text
    assert len(text) < 600
    return failed.value.status()


@pytest.mark.parametrize("binary", [True, False], ids=["binary", "json"])
def test_string_inputs_are_refused_over_rest(server, binary):
    row = http_of.InferInput("x", [4], "BYTES")
    row.set_data_from_numpy(WORDS, binary_data=binary)
    with http_of.InferenceServerClient(server.address) as client:
        assert told(client, row) == "400"


def test_string_inputs_are_refused_over_grpc(server):
    row = grpc_of.InferInput("x", [4], "BYTES")
    row.set_data_from_numpy(WORDS)
    with grpc_of.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        assert told(client, row) == "StatusCode.INVALID_ARGUMENT"


def test_outputs_are_never_strings(server):
    """What is asked for as BYTES is an input; outputs have the types of the signature."""
    with http_of.InferenceServerClient(server.address) as client:
        for about in (client.get_model_metadata("tiny"), client.get_model_metadata("tiny.grow")):
            assert "BYTES" not in {row["datatype"] for row in about["inputs"] + about["outputs"]}
