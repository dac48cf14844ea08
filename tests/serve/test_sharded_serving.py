"""Sharded bundles behind a server: whole arrays in and out, one gang of ranks, started again after a loss."""

import os
import signal

import jax
import numpy as np
import pytest
from support.served import running, until
from support.small_sharded import arguments, bundle, expected

from aotc.serve import gang_module
from aotc.vmfb.errors import CallError

pytestmark = pytest.mark.cpu


@pytest.fixture
def path(tmp_path):
    bundle(2).save(tmp_path / "layer.vmfb")
    return tmp_path / "layer.vmfb"


def request():
    (weights, x, scale), names = arguments(), ("params['w1']", "params['w2']", "x", "scale")
    arrays = [weights["w1"], weights["w2"], x, scale]
    rows = zip(names, map(np.asarray, arrays), strict=True)
    return {
        "inputs": [
            {"name": name, "datatype": "FP32", "shape": [*a.shape], "data": a.reshape(-1).tolist()} for name, a in rows
        ]
    }


def ask(server):
    return server.json("/v2/models/layer/infer", request())


def check_answer(document):
    found = {row["name"]: np.reshape(row["data"], row["shape"]) for row in document["outputs"]}
    wanted = jax.tree.leaves(expected(*arguments()))
    assert len(found) == len(wanted)
    for x, y in zip(found.values(), wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def gang_of(server):
    return server.engine.repository.models["layer"][1].module


def test_sharded_bundles_are_served_with_whole_arrays(path):
    with running(path, ranks=2) as server:
        status, about = server.json("/v2/models/layer")
        assert status == 200
        assert [row["shape"] for row in about["inputs"]] == [[16, 32], [32, 16], [8, 16], []]
        for _ in range(2):
            status, document = ask(server)
            assert status == 200, document
            check_answer(document)
        status, page = server.json("/v2/models/layer/versions/1/ready")
        assert (status, page["ready"]) == (200, True)
        status, document = server.json("/v2/models/layer/infer", {"inputs": request()["inputs"][:3]})
        assert (status, "no input scale" in document["error"]) == (400, True)
        ranks = gang_of(server)._gang.processes
    assert until(lambda: not any(map(is_alive, ranks)))


def is_alive(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_restart_after_a_loss(path):
    with running(path) as server:
        check_answer(ask(server)[1])
        module = gang_of(server)
        os.kill(module._gang.processes[1], signal.SIGKILL)
        status, headers, body = server.ask("/v2/models/layer/infer", request())
        assert status == 503
        assert int(headers["retry-after"]) >= 1
        assert b"rank 1 " in body
        assert b"started again" in body
        if not module.is_ready:
            assert server.json("/v2/health/ready") == (503, {"ready": False})
            assert server.json("/v2/models/layer/ready")[0] == 503
        assert until(lambda: module.is_ready)
        status, document = ask(server)
        assert status == 200, document
        check_answer(document)
        assert module.stats()["starts"] == 2


def test_another_number_of_ranks_is_refused(path):
    with pytest.raises(CallError, match="the bundle is for 2 ranks"), running(path, ranks=3):
        pass


def test_values_that_end_the_ranks_fail_only_their_request(path, monkeypatch):
    """Ranks that end by an error of their own start again, and that request has the error."""
    with running(path) as server:
        module = gang_of(server)
        ask = module._gang._processes.ask

        def failing(requests, what):
            if "call" in requests[0]:
                monkeypatch.setattr(module._gang._processes, "ask", ask)
                raise CallError("layer", "made to fail")
            return ask(requests, what)

        monkeypatch.setattr(module._gang._processes, "ask", failing)
        status, document = server.json("/v2/models/layer/infer", request())
        assert (status, "made to fail" in document["error"]) == (400, True)
        assert until(lambda: module.is_ready)
        assert server.json("/v2/models/layer/infer", request())[0] == 200
        assert module.stats()["starts"] == 2


def test_ranks_that_do_not_start_are_retried(path, monkeypatch, caplog):
    monkeypatch.setattr(gang_module, "_FIRST_PAUSE", 0.05)
    with running(path) as server:
        module = gang_of(server)
        start, failures = module._start, [OSError("no file descriptors"), CallError("", "a rank cannot load it")]

        def failing():
            if failures:
                raise failures.pop()
            return start()

        monkeypatch.setattr(module, "_start", failing)
        os.kill(module._gang.processes[0], signal.SIGKILL)
        assert server.json("/v2/models/layer/infer", request())[0] == 503
        assert until(lambda: module.is_ready)
        assert failures == []
        check_answer(server.json("/v2/models/layer/infer", request())[1])
