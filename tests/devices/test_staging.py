"""Large arrays go to and from a GPU in blocks, by several threads, through page-locked memory."""

from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.cuda import staging

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

X = np.arange(5000, dtype=np.float32)


@pytest.fixture
def module(monkeypatch):
    monkeypatch.setattr(staging, "STAGED_BYTES", 512)
    monkeypatch.setattr(staging, "STAGED_BLOCK", 768)
    monkeypatch.setattr(staging, "usable_cores", lambda: 4)
    monkeypatch.setattr(staging, "_STAGE", staging._StagingPool())  # whose buffers are of this size
    data = aotc.compile(jax.jit(jnp.negative), X, target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


@pytest.mark.parametrize("order", [SimulatedGpu.LATE, SimulatedGpu.EARLY, Random(1)])
def test_every_byte_arrives(module, order, monkeypatch):
    monkeypatch.setattr(SimulatedGpu, "order", order)
    for n in range(3):
        given = n * X
        np.testing.assert_array_equal(module.invoke("main", given)[0], -given)
        np.testing.assert_array_equal(module.put(given).numpy(), given)
        (made,) = module.invoke("main", module.put(given), results="device")
        np.testing.assert_array_equal(made.numpy(), -given)
    log = [what for gpu in SimulatedGpu.every for what in gpu.log]
    assert log.count("upload") >= 9 * (X.nbytes // 768)


def test_a_wait_that_is_missing_is_seen(module, monkeypatch):
    """A buffer that the GPU has not read yet is not written to."""
    monkeypatch.setattr(SimulatedGpu, "synchronize_event", lambda self, event: None)
    assert not np.array_equal(module.invoke("main", X)[0], -X)


def test_buffers_and_events_are_used_again(module):
    module.invoke("main", X)
    held, events = len(staging._STAGE.idle), module._executable.gpu.events
    for _ in range(5):
        module.invoke("main", X)
    assert len(staging._STAGE.idle) <= max(held, 2 * 4)
    assert module._executable.gpu.events == events


def test_an_error_of_a_thread_is_the_callers(module, monkeypatch):
    upload, seen = SimulatedGpu.upload, []

    def fails(gpu, *copy):
        seen.append(copy)
        if len(seen) == 4:
            raise aotc.CallError("", "planted")
        upload(gpu, *copy)

    monkeypatch.setattr(SimulatedGpu, "upload", fails)
    with pytest.raises(aotc.CallError, match="planted"):
        module.invoke("main", X)
    np.testing.assert_array_equal(module.invoke("main", X)[0], -X)
