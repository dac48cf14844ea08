"""Calls at the same time on one bundle: streams and memory of their own, and what is kept for how long."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.test_gpu_fences import PATIENCE, Gate, wait_until
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.devices.cuda import streams
from aotc.vmfb.devices.cuda.libcuda.library import OutOfGpuMemory
from aotc.vmfb.devices.cuda.streams import RECORDED_PLANS
from aotc.vmfb.devices.mixed import out_of_memory
from aotc.vmfb.errors import CallError
from aotc.vmfb.limits import STREAMS

pytest.importorskip("numba_cuda")
pytestmark = pytest.mark.cudasim

X = np.full((8, 8), 0.5, np.float32)


@pytest.fixture
def module(monkeypatch):
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


@pytest.fixture
def sized(monkeypatch):
    n = jax.export.symbolic_shape("n")[0]
    exported = jax.export.export(jax.jit(jax.nn.softmax))(jax.ShapeDtypeStruct((n, 16), "float32"))
    data = aotc.compile(exported, target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


def softmax(x):
    """NumPy's, for XLA compiles one for each size."""
    weights = np.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def in_threads(count, run):
    threads = [threading.Thread(target=run, args=(n,)) for n in range(count)]
    for thread in threads:
        thread.start()
    return threads


def test_calls_overlap(module, monkeypatch):
    """A second call asks all of its work before the first one's is done, on a stream and in memory of its own."""
    gate, reach, found = Gate(), SimulatedGpu._reach, {}

    def late(gpu, mark):
        if gpu.done < mark:
            gate.go_through()
        reach(gpu, mark)

    monkeypatch.setattr(SimulatedGpu, "_reach", late)
    gate.close()
    threads = in_threads(STREAMS + 2, lambda n: found.setdefault(n, module.invoke("main", n * X)[0]))
    wait_until(lambda: len(gate.waiting) == STREAMS)
    busy = [gpu for gpu in SimulatedGpu.every if gpu.given > gpu.done and "graph" in gpu.log]
    assert len(busy) == STREAMS
    gate.open()
    for thread in threads:
        thread.join(PATIENCE)
    for n in range(STREAMS + 2):
        np.testing.assert_allclose(found[n], np.sin(n * X), rtol=1e-6)


def test_one_caller_uses_one_stream(module):
    for n in range(4):
        module.invoke("main", n * X)
    assert len(module._executable.pool._idle) == 1


def test_a_call_within_a_call_does_not_wait_for_it(module):
    """As of a signal handler: however many streams are taken, there is one for it."""
    pool = module._executable.pool
    taken = [pool.take_streams() for _ in range(STREAMS)]
    np.testing.assert_allclose(module.invoke("main", X)[0], np.sin(X), rtol=1e-6)
    for found in taken:
        pool.return_streams(found)


def test_many_shapes_hold_the_memory_of_the_largest(sized):
    """Not that of all: plans of one stream work in the same memory, one after the other."""
    for size in (400, *range(1, 60)):
        x = array(size, 16)
        np.testing.assert_allclose(sized.invoke("main", x)[0], softmax(x), rtol=1e-5)
        if size == 400:
            used = sized.stats()["device_bytes"]
    assert sized.stats()["device_bytes"] == used


def test_graphs_of_few_plans_are_kept(sized, monkeypatch):
    """Those of the last ones used; one that comes again records anew."""
    monkeypatch.setattr(streams, "RECORDED_PLANS", 3)
    assert RECORDED_PLANS > 3
    log = sized._executable.gpu.log
    for size in (9, 1, 2, 3, 4):
        sized.invoke("main", array(size, 16))

    def launches(size):
        before = log.count("launch")
        np.testing.assert_allclose(sized.invoke("main", array(size, 16))[0], softmax(array(size, 16)), rtol=1e-5)
        return log.count("launch") - before

    assert (launches(4), launches(2)) == (0, 0)
    assert launches(1) > 0
    assert (launches(2), launches(4)) == (0, 0)
    assert launches(3) > 0


def test_larger_memory_forgets_what_was_recorded_over_less(sized):
    for size in (3, 50, 3, 2, 200, 50, 3):
        x = array(size, 16, seed=size)
        for _ in range(2):
            np.testing.assert_allclose(sized.invoke("main", x)[0], softmax(x), rtol=1e-5)


def test_a_plan_that_takes_the_place_of_a_dead_one(sized):
    """Whoever is at the address of an object that is gone is told as well that memory moves."""

    class Plan:
        told = 0

        def drop_graphs(self):
            self.told += 1

    taken = sized._executable.pool.take_streams()
    for _ in range(20):
        taken.mark_recently_used(Plan())
    last = Plan()
    taken.mark_recently_used(last)
    taken.drop_graphs()
    assert last.told == 1


def test_out_of_memory_says_what_is_wanted(module, monkeypatch):
    """After what is kept for later was freed, in vain."""
    monkeypatch.setattr(out_of_memory, "memory_info", lambda: (1000, 2000))
    monkeypatch.setattr(SimulatedGpu, "allocate", lambda gpu, size: full())
    with pytest.raises(CallError) as error:
        module.invoke("main", X)
    largest = "256 of result 0, float32[8, 8]; 256 of argument 0, float32[8, 8]"
    for part in ("planned peak of 512 bytes", "1,000 bytes free of 2,000", largest):
        assert part in str(error.value)


def test_out_of_memory_names_the_lines_of_buffers(monkeypatch):
    """Not those of the host's memory in a mix."""
    text = """func.func public @main(%x: tensor<8x8xf32>) -> tensor<8xf32> {
      %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %1 = stablehlo.dot_general %0, %0, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %z = stablehlo.constant dense<0.0> : tensor<f32>
      %2 = stablehlo.reduce(%1 init: %z) applies stablehlo.add across dimensions = [1]
        : (tensor<8x8xf32>, tensor<f32>) -> tensor<8xf32>
      return %2 : tensor<8xf32>
    }"""
    data = aotc.compile(text, target="cuda:sm_90", opt_level=0)
    install(monkeypatch, data)
    module = aotc.load(data)
    monkeypatch.setattr(out_of_memory, "memory_info", lambda: (1000, 2000))
    monkeypatch.setattr(SimulatedGpu, "allocate", lambda gpu, size: full())
    with pytest.raises(CallError, match=r"256 of what k\d+\w* makes \(<model>:2:12\)"):
        module.invoke("main", X)


def full():
    raise OutOfGpuMemory("", "cuMemAlloc_v2 failed on the GPU", "CUDA_ERROR_OUT_OF_MEMORY")


def test_what_is_kept_makes_room(sized, monkeypatch):
    """Memory of arrays that are gone, and of idle streams, goes before a call fails."""
    (made,) = sized.invoke("main", array(20, 16), results="device")
    del made
    allocate, blocks = SimulatedGpu.allocate, len(sized._executable.gpu.memory)

    def small(gpu, size):
        return allocate(gpu, size) if len(gpu.memory) < blocks else full()

    monkeypatch.setattr(SimulatedGpu, "allocate", small)
    x = array(300, 16)
    np.testing.assert_allclose(sized.invoke("main", x)[0], softmax(x), rtol=1e-5)
