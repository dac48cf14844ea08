"""Results that are read while other devices work, on simulated GPUs."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, ORDERS, alone
from devices.test_gpu_fences import PATIENCE, gate, under_way  # noqa: F401 - a fixture
from lowering.test_devices import inputs_of, random_program
from vmfb import simulated_gpu
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc

pytest.importorskip("cuda.bindings.nvjitlink")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("bundles_anew", "dispatchers_anew")]

T = "tensor<24x24xf32>"
TEXT = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}})
    -> ({T}, {T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = stablehlo.dot_general %y, %y, contracting_dims = [1] x [0] : ({T}, {T}) -> {T}
  %2 = stablehlo.custom_call @aotc.transfer(%1) {{aotc.to = "d0"}} : ({T}) -> {T}
  %3 = stablehlo.add %2, %x : {T}
  return %0, %1, %3 : {T}, {T}, {T} }}"""
X = np.linspace(0, 1, 24 * 24, dtype="float32").reshape(24, 24)


def test_a_result_of_the_cpu_is_read_while_the_gpu_works(monkeypatch, gate):  # noqa: F811
    data = aotc.compile(TEXT, devices={"d0": "cpu", "d1": "cuda:sm_90"})
    install(monkeypatch, data, count=1)
    module = aotc.load(data)
    gate.close()
    fence = module.submit("main", X, X)
    np.testing.assert_allclose(fence[0].result(PATIENCE), np.sin(X), rtol=1e-6)
    assert not fence.done
    assert not fence[1].ready()
    assert not fence[2].ready()
    gate.open()
    want = alone(TEXT, X, X)
    for found, expected in zip(fence.results, want, strict=True):
        np.testing.assert_allclose(np.asarray(found), expected, rtol=2e-3)  # products of TF32


SIDES = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}}) -> ({T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %1 = stablehlo.LATE : {T}
  return %0, %1 : {T}, {T} }}"""
TWO_GPUS = SIDES.replace("LATE", "cosine %y")
SLOW_CPU = SIDES.replace("LATE : ", f"custom_call @slow(%y) : ({T}) -> ")
FORMS = ["numpy", "device"]


@pytest.fixture
def second_gpu(monkeypatch):
    """An event without which the GPU number 1 does nothing."""
    opened, reach = threading.Event(), SimulatedGpu._reach

    def late(gpu, mark):
        if gpu.ordinal == 1 and gpu.done < mark:
            assert opened.wait(PATIENCE)
        reach(gpu, mark)

    monkeypatch.setattr(SimulatedGpu, "_reach", late)
    yield opened
    opened.set()


@pytest.fixture
def two_gpus(monkeypatch):
    data = aotc.compile(TWO_GPUS, devices=HALVES["cuda, cuda"])
    install(monkeypatch, data, count=2)
    return aotc.load(data)


class Slow:
    """A Python function of the CPU that waits for a test, and may fail."""

    def __init__(self):
        self.gate, self.error = threading.Event(), None

    def __call__(self, x, out):
        assert self.gate.wait(PATIENCE)
        if self.error:
            raise self.error
        out[...] = x + 1


@pytest.fixture
def slow():
    made = Slow()
    yield made
    made.gate.set()


@pytest.fixture
def beside_cpu(monkeypatch, slow):
    """A GPU that works at once, and a CPU that is slow."""
    aotc.register_custom_call("slow", native=False)
    data = aotc.compile(SLOW_CPU, devices={"d0": "cuda:sm_90", "d1": "cpu"})
    install(monkeypatch, data, count=2, order=SimulatedGpu.EARLY)
    return aotc.load(data, custom_calls={"slow": slow})


@pytest.mark.parametrize("results", FORMS)
def test_a_result_of_one_gpu_is_read_while_another_works(two_gpus, second_gpu, results):
    fence = two_gpus.submit("main", X, X, results=results)
    early = fence[0].result(PATIENCE)
    assert isinstance(early, np.ndarray) == (results == "numpy")
    np.testing.assert_allclose(np.asarray(early), np.sin(X), rtol=1e-6)
    assert not fence.done
    assert not fence[1].ready()
    second_gpu.set()
    np.testing.assert_allclose(np.asarray(fence[1].result(PATIENCE)), np.cos(X), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(fence.result(PATIENCE)[0]), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("results", FORMS)
def test_a_result_of_a_gpu_is_read_while_the_cpu_works(beside_cpu, slow, results):
    fence = beside_cpu.submit("main", X, X, results=results)
    np.testing.assert_allclose(np.asarray(fence[0].result(PATIENCE)), np.sin(X), rtol=1e-6)
    assert not fence.done
    slow.gate.set()
    for found, want in zip(fence.result(PATIENCE), (np.sin(X), X + 1), strict=True):
        np.testing.assert_allclose(np.asarray(found), want, rtol=1e-6)


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
@pytest.mark.parametrize("results", FORMS)
def test_a_result_of_a_gpu_outlives_its_call(beside_cpu, slow, results, how):
    """Nobody had read it before, and later calls use the memory of the call again."""
    fence = beside_cpu.submit("main", X, X, results=results)
    fence[0].wait(PATIENCE)
    under_way(fence)
    if how == "fails":
        slow.error = ValueError("no slow value")
    else:
        fence.cancel()
    slow.gate.set()
    assert fence.exception(PATIENCE) is not None
    slow.error = None
    np.testing.assert_allclose(np.asarray(beside_cpu.invoke("main", -X, X)[0]), -np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(fence[0]), np.sin(X), rtol=1e-6)
    with pytest.raises(aotc.CallError):
        fence[1].result()


def test_results_of_one_graph_are_marked_one_by_one(monkeypatch):
    """Each mark is a node of the graph behind the last kernel that writes the result."""
    data = aotc.compile(jax.jit(lambda x: (a := jnp.sin(x), a @ a)), X, target="cuda:sm_90")
    install(monkeypatch, data, order=SimulatedGpu.EARLY)
    module, start, seen = aotc.load(data), aotc.Fence(), []
    run = simulated_gpu.run_kernel

    def observed(text, arrays, dims):
        seen.append([result.ready() for result in fence.results])
        run(text, arrays, dims)

    for _ in range(2):
        start, seen = aotc.Fence(), []
        fence = module.submit("main", X, wait=[start], results="device")
        monkeypatch.setattr(simulated_gpu, "run_kernel", observed)
        start.signal()
        fence.wait(PATIENCE)
        assert seen[0] == [False, False]
        assert seen[-1] == [True, False]
        assert all(result.ready() for result in fence.results)


def test_calls_and_single_results_have_no_marks(monkeypatch, two_gpus):
    two_gpus.invoke("main", X, X)
    assert not any("signal" in loaded.gpu.log for loaded in two_gpus._executable.gpus)
    data = aotc.compile(jax.jit(jnp.sin), X, target="cuda:sm_90")
    install(monkeypatch, data)
    module = aotc.load(data)
    module.submit("main", X).result(PATIENCE)
    assert "signal" not in module._executable.gpu.log


def test_a_submission_reads_a_result_of_a_gpu_while_another_works(two_gpus, second_gpu, monkeypatch):
    data = aotc.compile(jax.jit(lambda x: x + x), X, target="cuda:sm_90")
    texts = {**SimulatedGpu.texts}
    install(monkeypatch, data, count=2)
    SimulatedGpu.texts.update(texts)
    other = aotc.load(data, devices="cuda:0")
    for results in FORMS:
        fence = two_gpus.submit("main", X, X, results=results)
        np.testing.assert_allclose(other.submit("main", fence[0]).result(PATIENCE)[0], 2 * np.sin(X), rtol=1e-6)
        assert not fence.done
        second_gpu.set()
        fence.wait(PATIENCE)
        second_gpu.clear()


def test_an_early_array_is_copied_where_it_is_given_away(beside_cpu, slow, monkeypatch):
    """The call may still read it; its result is not changed."""
    step = aotc.compile(jax.jit(lambda x: x + 1, donate_argnums=0), X, target="cuda:sm_90")
    texts = {**SimulatedGpu.texts}
    install(monkeypatch, step, count=2, order=SimulatedGpu.EARLY)
    SimulatedGpu.texts.update(texts)
    step = aotc.load(step)
    fence = beside_cpu.submit("main", X, X, results="device")
    early = fence[0].result(PATIENCE)
    assert early.read_only
    (moved,) = step.invoke("main", early, donate=True, results="device")
    np.testing.assert_allclose(np.asarray(moved), np.sin(X) + 1, rtol=1e-6)
    with pytest.raises(aotc.CallError, match="donated"):
        early.numpy()
    slow.gate.set()
    np.testing.assert_allclose(np.asarray(fence.result(PATIENCE)[0]), np.sin(X), rtol=1e-6)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("seed", [1, 3, 5])
@pytest.mark.parametrize("kinds", [("cpu", "cuda:sm_90"), ("cuda:sm_90", "cpu"), ("cuda:sm_90", "cuda:sm_90")])
def test_random_programs(kinds, seed, order, monkeypatch):
    """Whichever result is waited for first is whole, whatever the GPU has left to do."""
    text = random_program(np.random.default_rng(seed))
    devices = {f"d{n}": kinds[n % 2] for n in range(4) if f'"d{n}"' in text}
    data = aotc.compile(text, devices=devices)
    install(monkeypatch, data, count=2, order=ORDERS[order])
    module = aotc.load(data)
    arrays = inputs_of(module)
    want = alone(text, *arrays)
    for first in range(2):
        fence = module.submit("main", *arrays)
        for n in (first, 1 - first):
            np.testing.assert_allclose(np.array(fence[n].result(PATIENCE)), want[n], rtol=1e-4, atol=1e-4)
