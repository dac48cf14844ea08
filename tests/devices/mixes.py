"""Models whose devices are of several kinds, run on simulated GPUs beside one CPU device."""

import random

import numpy as np
from lowering.test_devices import inputs_of, on_one_device
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc

HALVES = {
    "cpu, cuda": {"d0": "cpu", "d1": "cuda:sm_90"},
    "cuda, cpu": {"d0": "cuda:sm_90", "d1": "cpu"},
    "cuda, cuda": {"d0": "cuda:sm_90", "d1": "cuda:sm_90"},
}
ORDERS = {"late": SimulatedGpu.LATE, "early": SimulatedGpu.EARLY, "chance": random.Random(0)}


def alone(text, *arrays, **flags):
    """The results on one CPU device."""
    return aotc.load(aotc.compile(on_one_device(text), **flags)).invoke("main", *arrays)


def run_everywhere(monkeypatch, data, arrays, want, count=2, **options):
    """Run a bundle on simulated GPUs that take their time, or none; return the last module."""
    for order in ORDERS.values():
        install(monkeypatch, data, count=count, order=order)
        module = aotc.load(data, **options)
        for _ in range(2):
            for x, y in zip(module.invoke("main", *arrays), want, strict=True):
                np.testing.assert_allclose(np.asarray(x), y, rtol=1e-4, atol=1e-4)
    return module


def simulate(monkeypatch, text, devices, **flags):
    """Compile a model for ``devices``, and compare what it computes with one device."""
    data = aotc.compile(text, devices=devices, **flags)
    install(monkeypatch, data, count=2)
    arrays = inputs_of(aotc.load(data))
    return run_everywhere(monkeypatch, data, arrays, alone(text, *arrays))
