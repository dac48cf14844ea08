"""States on a simulated GPU: values stay there, in the memory that they were given."""

import gc
from collections import Counter

import jax
import numpy as np
import pytest
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim


def copies():
    gc.collect()  # GPUs of modules that are gone
    logs = {id(gpu.log): gpu.log for gpu in SimulatedGpu.every}  # streams of one GPU have one
    return Counter(what for log in logs.values() for what in log if what in ("upload", "copy", "download"))


def test_a_state_stays_on_its_gpu(monkeypatch):
    x = np.ones((4, 8), np.float32)

    def step(cache, x):
        return {"cache": cache + x, "y": x * 2}

    data = aotc.compile(jax.jit(step), x, x, target="cuda:sm_90", state=["cache"])
    install(monkeypatch, data)
    state = aotc.load(data).state("cache")
    assert state(x)["y"].tolist() == (2 * x).tolist()
    held = state.values["cache"]
    assert held.ordinal == 0
    found = []
    for _ in range(4):
        before = copies()
        assert isinstance(state(x)["y"], np.ndarray)
        found.append(copies() - before)
        assert state.values["cache"].ordinal == 0
    assert found[-1] == {"upload": 1, "download": 1}  # x, and y
    assert held.donated
    assert state["cache"].tolist() == (5 * x).tolist()
    state.reset()
    assert state["cache"].tolist() == (0 * x).tolist()
