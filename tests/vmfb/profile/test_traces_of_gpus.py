"""Records and traces of calls on a GPU, simulated and real: each dispatch by its kernel, with times and bytes."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner
from vmfb.profile.test_trace_file import check_trace

import aotc
from aotc.vmfb.devices.cuda import driver
from aotc.vmfb.errors import CallError
from aotc.vmfb.profile.cost_record import read_record, record_problem
from aotc.vmfb.profile.stepped import stepped_dispatches
from aotc_cli.main import app

pytest.importorskip("numba_cuda")

X = np.linspace(-1, 1, 24 * 24, dtype=np.float32).reshape(24, 24)


def function(x):
    return jnp.sort(jax.nn.softmax(jnp.tanh(x) * 2, 1), 1), jax.lax.fori_loop(0, 3, lambda i, y: jnp.sin(y @ x), x)


@pytest.fixture(
    params=[
        pytest.param("simulated", marks=pytest.mark.cudasim),
        pytest.param("real", marks=[pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]),
    ]
)
def bundle(request, monkeypatch, tmp_path):
    path = tmp_path / "m.vmfb"
    path.write_bytes(aotc.compile(jax.jit(function), X, target="cuda:sm_90"))
    if request.param == "simulated":
        from vmfb.simulated_gpu import install

        install(monkeypatch, path.read_bytes())
    return path


def test_each_dispatch_of_a_call(bundle):
    module = aotc.load(bundle)
    found = stepped_dispatches(module.get_function("main"), [X])
    assert len({d.kernel for d in found}) > 2
    assert all(a.start + a.ns <= b.start for a, b in pairwise(found))
    assert all(d.ns > 0 and d.bytes > 0 and d.items > 0 for d in found)
    for a, b in zip(module.invoke("main", X), function(X)):
        np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-3)


def test_a_record_of_kernels_alone(bundle):
    record = aotc.load(bundle).profile("main", X, repeat=2)
    assert record_problem(record) == ""
    assert all(ns > 0 for row in record["kernels"] for ns in row["ns"].values())


def test_calls_are_not_recorded_while_they_run(bundle):
    with pytest.raises(CallError, match="only dispatches of a CPU are timed while calls run"):
        aotc.load(bundle).profile()


def test_a_trace_by_command(bundle, tmp_path):
    path = tmp_path / "trace.json"
    done = CliRunner().invoke(app, ["profile", str(bundle), "-o", str(path), "--repeat=2"])
    assert done.exit_code == 0, done.output
    trace, slices = check_trace(path.read_text())
    assert len(slices) > 2
    assert any(" on cuda:0" in e["args"].get("name", "") for e in trace["traceEvents"] if e["ph"] == "M")
    assert read_record(path.read_text())["kernels"]
