"""The server as ``curl`` asks it: documents, bytes, uploads that wait for a word, events, tokens of access."""

import json
import shutil
import subprocess

import numpy as np
import pytest
from serve.texts import expected
from support.served import running

pytestmark = [pytest.mark.cpu, pytest.mark.skipif(shutil.which("curl") is None, reason="needs curl")]

ROWS = [{"name": n, "shape": [4], "datatype": "FP32", "data": [1, 2, 3, 4]} for n in "xy"]


@pytest.fixture(scope="module")
def server(two_models):
    """A server of both."""
    with running(two_models, max_body=8 << 20) as found:
        yield found


def curl(server, path, *options, data=b""):
    """Return (status, body)."""
    command = ["curl", "-sS", "--max-time", "20", "-w", "\n%{http_code}", *options, f"http://{server.address}{path}"]
    done = subprocess.run(command, input=data, capture_output=True, check=True)
    body, _, status = done.stdout.rpartition(b"\n")
    return int(status), body


def test_curl_infers_with_json(server):
    status, body = curl(server, "/v2/models/tiny/infer", "-d", json.dumps({"inputs": ROWS}))
    assert (status, json.loads(body)["outputs"][0]["data"]) == (200, [2, 4, 6, 8])
    status, body = curl(server, "/v2/models/tiny/infer", "-d", "{}")
    assert (status, "inputs is not a list" in json.loads(body)["error"]) == (400, True)
    assert curl(server, "/v2/health/ready", "-I")[0] == 200


@pytest.mark.parametrize(
    "way", [(), ("--http2",), ("-H", "Transfer-Encoding: chunked")], ids=["plain", "h2c", "chunks"]
)
def test_curl_sends_large_binary_tensors(server, way):
    """More than a megabyte: curl asks whether it may send them."""
    x = np.arange(400_000, dtype="f4")
    row = {"name": "x", "shape": [x.size], "datatype": "FP32", "parameters": {"binary_data_size": x.nbytes}}
    head = json.dumps({"inputs": [row], "parameters": {"binary_data_output": True}}).encode()
    length = ("-H", f"Inference-Header-Content-Length: {len(head)}", "--data-binary", "@-", *way)
    status, body = curl(server, "/v2/models/tiny.grow/infer", *length, data=head + x.tobytes())
    assert status == 200
    np.testing.assert_array_equal(np.frombuffer(body[-x.nbytes :], "f4"), x * 6)


def test_a_body_beyond_the_limit_is_refused_before_it_is_sent(server):
    status, body = curl(server, "/v2/models/tiny/infer", "--data-binary", "@-", data=bytes(9 << 20))
    assert (status, "too long" in json.loads(body)["error"]) == (413, True)


def test_curl_receives_generated_tokens_as_events(server):
    status, body = curl(server, "/v2/models/texts/generate_stream", "-N", "-d", '{"tokens": [5], "max_tokens": 4}')
    events = [json.loads(line[6:]) for line in body.decode().splitlines() if line.startswith("data: ")]
    assert status == 200
    assert [event["token"] for event in events[:-1]] == expected([5], 4)
    assert events[-1] == {"done": "length", "tokens": 4}


def test_curl_authenticates_by_token(two_models):
    with running(two_models, token="secret") as server:
        assert curl(server, "/v2/models/tiny")[0] == 401
        assert curl(server, "/v2/models/tiny", "-H", "Authorization: Bearer secret")[0] == 200
        assert curl(server, "/v2/health/live")[0] == 200
