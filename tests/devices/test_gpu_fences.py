"""Submissions to GPUs: what ends them early, what is kept until the GPU is done, and calls that follow each other."""

import asyncio
import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, alone
from lowering.test_devices import FIRST, SECOND, T, inputs_of, product, to
from vmfb.simulated_gpu import SimulatedGpu, install
from vmfb.test_interruption import ENDLESS

import aotc
from aotc.vmfb.devices.cuda.loaded_kernels import LoadedGpu
from aotc.vmfb.host.interruption import RUNNING
from aotc.vmfb.limits import STREAMS
from aotc.vmfb.submit.stream_queue import lane_of_executable

pytest.importorskip("cuda.bindings.nvjitlink")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew")]

PATIENCE = 60
SMALL = ENDLESS.replace("200", "20")
X = np.full((20, 20), 0.5, np.float32)
BOTH = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
  %0 = stablehlo.while(%a = %x) : {T} cond {{
    %two = stablehlo.constant dense<2.0> : tensor<f32>
    %c = stablehlo.slice %a [0:1, 0:1] : ({T}) -> tensor<1x1xf32>
    %r = stablehlo.reshape %c : (tensor<1x1xf32>) -> tensor<f32>
    %p = stablehlo.compare LT, %r, %two : (tensor<f32>, tensor<f32>) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }} do {{
    %t = {to("d1", "%a")}
    %d = {product("%t", "%w")}
    %s = stablehlo.sine %d : {T}
    %u = {to("d0", "%s")}
    stablehlo.return %u : {T}
  }}
  return %0 : {T} }}"""


def wait_until(what):
    end = time.monotonic() + PATIENCE
    while not what():
        assert time.monotonic() < end
        time.sleep(0.001)


def under_way(fence):
    wait_until(lambda: fence in RUNNING.values() or fence.done)
    assert not fence.done, fence


def ended(module):
    """Wait until no dispatcher runs anything of a module: a fence may have failed before."""
    lane = lane_of_executable(module._executable)
    wait_until(lambda: len(lane._free) == STREAMS)
    assert not lane._ready
    assert not RUNNING


@pytest.fixture
def endless(monkeypatch, set_costs):
    """Functions with loops that a GPU turns, a few turns of a kernel at a time."""
    set_costs(LOOP_TURNS=1)
    data = aotc.compile(SMALL, target="cuda:sm_90")
    install(monkeypatch, data)
    return aotc.load(data)


class Gate:
    """What GPUs do takes until this is open: whoever waits for them waits for it."""

    def __init__(self):
        self._opened = threading.Event()
        self.waiting = []
        self.open()

    def open(self):
        self._opened.set()

    def close(self):
        self._opened.clear()

    def go_through(self):
        if not self._opened.is_set():
            self.waiting.append(threading.get_ident())
            assert self._opened.wait(PATIENCE)


@pytest.fixture
def gate(monkeypatch):
    made, reach = Gate(), SimulatedGpu._reach

    def late(gpu, mark):
        if gpu.done < mark:
            made.go_through()
        reach(gpu, mark)

    monkeypatch.setattr(SimulatedGpu, "_reach", late)
    yield made
    made.open()


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_loop_under_way_ends(endless, how):
    fence = endless.submit("unfused", X, **({"deadline": 0.05} if how == "deadline" else {}))
    if how == "cancel":
        under_way(fence)
        assert fence.cancel()
        assert fence.done
    error = aotc.DeadlineExceeded if how == "deadline" else aotc.FenceCancelled
    with pytest.raises(error):
        fence.result()
    ended(endless)
    gpu = endless._executable.gpu
    assert gpu.done == gpu.given
    np.testing.assert_array_equal(endless.submit("double", X).result(PATIENCE)[0], 2 * X)


@pytest.mark.parametrize("halves", HALVES)
def test_a_loop_over_several_devices_ends(halves, monkeypatch):
    data = aotc.compile(BOTH, devices=HALVES[halves])
    install(monkeypatch, data, count=2)
    module = aotc.load(data)
    x = np.full((8, 8), 0.5, "f4")
    fence = module.submit("main", x, x)
    under_way(fence)
    fence.cancel()
    with pytest.raises(aotc.FenceCancelled):
        fence.result(PATIENCE)
    ended(module)
    assert all(loaded.gpu.done == loaded.gpu.given for loaded in module._executable.gpus)
    np.testing.assert_array_equal(module.invoke("main", np.full_like(x, 3), x, results="numpy")[0], np.full_like(x, 3))


def test_a_cancelled_task_ends_a_loop(endless):
    async def main():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(endless.invoke, "unfused", X), 0.05)

    asyncio.run(main())


def test_nothing_leaks(endless):
    """Memory of calls that were ended comes back, or is used again."""
    gpu = endless._executable.gpu

    def cancelled():
        fence = endless.submit("unfused", X, results="device")
        under_way(fence)
        fence.cancel()
        assert fence.exception(PATIENCE) is not None
        ended(endless)

    cancelled()
    blocks, events, threads = len(gpu.memory), gpu.events, threading.active_count()
    for _ in range(5):
        cancelled()
    assert (len(gpu.memory), gpu.events) == (blocks, events)
    assert threading.active_count() <= threads + STREAMS


@pytest.mark.parametrize("results", ["device", "numpy"])
def test_the_fence_fails_at_once_and_arrays_stay(results, gate, monkeypatch):
    """A GPU that is busy holds up neither who cancels nor who waits; its arrays go when it is done."""
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    gpu = module._executable.gpu
    freed = []
    monkeypatch.setattr(LoadedGpu, "reclaim_memory", lambda owner, address, *_: freed.append(address))
    (given,) = module.invoke("main", X, results="device")
    gate.close()
    fence = module.submit("main", given, results=results)
    later = module.submit("main", X, results=results, wait=[fence])
    wait_until(lambda: gate.waiting)
    address = given.address
    del given
    assert fence.cancel()
    assert fence.done
    assert isinstance(fence.exception(), aotc.FenceCancelled)
    assert "which failed: FenceCancelled" in str(later.exception(PATIENCE))
    assert gpu.done < gpu.given
    assert address not in freed
    gate.open()
    ended(module)
    assert address in freed
    np.testing.assert_allclose(module.invoke("main", X)[0], np.sin(X), rtol=1e-6)


def test_what_others_can_look_at_is_waited_for(gate, monkeypatch):
    """A buffer of the caller's is not written to after the fence has failed."""
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    out = np.zeros_like(X)
    gate.close()
    fence = module.submit("main", X, out=[out])
    wait_until(lambda: gate.waiting)
    assert fence.cancel()
    assert not fence.done
    gate.open()
    assert isinstance(fence.exception(PATIENCE), aotc.FenceCancelled)


def test_a_donated_array_of_a_cancelled_call(gate, monkeypatch):
    """It was given away, whatever is in it: the fence need not wait."""
    function = jax.jit(lambda c: c.at[0].add(1.0), donate_argnums=0)
    data = aotc.compile(function, X, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    (cache,) = module.invoke("main", X, results="device")
    gate.close()
    fence = module.submit("main", cache, donate=True, results="device")
    wait_until(lambda: gate.waiting)
    fence.cancel()
    assert fence.done
    gate.open()
    ended(module)
    with pytest.raises(aotc.CallError, match=r"donated|given"):
        module.invoke("main", cache)


def test_calls_are_under_way_on_one_bundle(gate, monkeypatch):
    """Others ask their work of the GPU, on streams of their own, while the first waits for its end."""
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    module.invoke("main", X, results="device")
    gate.close()
    before = sum(gpu.given for gpu in SimulatedGpu.every)
    fences = [module.submit("main", n * X, results="device") for n in range(6)]
    wait_until(lambda: len(gate.waiting) == STREAMS)
    assert sum(gpu.given for gpu in SimulatedGpu.every) - before >= STREAMS
    assert len(RUNNING) == STREAMS  # the others take no dispatcher
    gate.open()
    for n, fence in enumerate(fences):
        np.testing.assert_allclose(fence.result(PATIENCE)[0].numpy(), np.sin(n * X), rtol=1e-6)


@pytest.mark.parametrize("halves", HALVES)
def test_calls_at_the_same_time_are_right(halves, monkeypatch):
    """Several threads, plans and results of both kinds; GPUs work by chance."""
    text = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> {T} {{
      %0 = {product("%x", "%x")}
      %1 = {to("d1", "%0")}
      %2 = {product("%1", "%w")}
      return %2 : {T} }}"""
    data = aotc.compile(text, devices=HALVES[halves])
    install(monkeypatch, data, count=2, order=random.Random(3))
    module = aotc.load(data)
    x, w = inputs_of(module)
    want = [alone(text, x + n, w)[0] for n in range(4)]
    fences = [
        (n % 4, module.submit("main", x + n % 4, w, results="numpy" if n % 3 else "device")) for n in range(24)
    ]
    for n, fence in fences:
        np.testing.assert_allclose(np.asarray(fence.result(PATIENCE)[0]), want[n], rtol=1e-4, atol=1e-4)


def test_calls_that_wait_for_a_gpu_leave_dispatchers_to_others(gate, monkeypatch):
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    module, other = aotc.load(data), aotc.load(aotc.compile(jax.jit(jnp.cos), X))
    gate.close()
    fences = [module.submit("main", X) for _ in range(60)]
    np.testing.assert_allclose(other.submit("main", X).result(PATIENCE)[0], np.cos(X), rtol=1e-6)
    for fence in fences[1:]:
        fence.cancel()
    gate.open()
    np.testing.assert_allclose(fences[0].result(PATIENCE)[0], np.sin(X), rtol=1e-6)


def test_two_devices_overlap(gate, monkeypatch):
    """Submissions of two modules on two GPUs do not wait for each other."""
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data, count=2)
    modules = [aotc.load(data, devices=f"cuda:{n}") for n in range(2)]
    gate.close()
    fences = [module.submit("main", X) for module in modules]
    wait_until(lambda: len(set(gate.waiting)) == 2)
    gate.open()
    for fence in fences:
        np.testing.assert_allclose(fence.result(PATIENCE)[0], np.sin(X), rtol=1e-6)


def test_submit_and_result_wake_nobody(endless):
    """Whoever waits runs it himself, and the lane is empty afterwards."""
    for _ in range(50):
        endless.submit("double", X).result()
    ended(endless)
