"""Results that are read while GPUs work on others, on the hardware."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, alone
from devices.test_gpu_fences import ended
from lowering.test_devices import inputs_of, random_program
from support.small_models import array

import aotc
from aotc.vmfb.devices.cuda import driver

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]

GPUS = 0 if driver.missing() else driver.device_count()
several = pytest.mark.skipif(GPUS < 2, reason="one GPU")
FORMS = ["numpy", "device"]
PATIENCE = 60
T, N = "tensor<64x64xf32>", "tensor<i32>"
X = np.linspace(0, 1, 64 * 64, dtype="float32").reshape(64, 64)
LONG = np.int32(1_000_000)  # iterations of a kernel of about a second
# The first result is there at once, the second takes as many iterations as the argument says.
TEXT = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}},
    %n: {N} {{aotc.affinity = "d1"}}) -> ({T}, {T}) {{
  %0 = stablehlo.sine %x : {T}
  %z = stablehlo.constant dense<0> : {N}
  %1:3 = stablehlo.while(%i = %z, %a = %y, %m = %n) : {N}, {T}, {N} cond {{
    %p = stablehlo.compare LT, %i, %m : ({N}, {N}) -> tensor<i1>
    stablehlo.return %p : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : {N}
    %j = stablehlo.add %i, %one : {N}
    %s = stablehlo.sine %a : {T}
    %b = stablehlo.add %s, %y : {T}
    stablehlo.return %j, %b, %m : {N}, {T}, {N}
  }}
  return %0, %1#1 : {T}, {T} }}"""


def check(found, want):
    np.testing.assert_allclose(np.asarray(found), want, rtol=1e-4, atol=1e-5)


def iterated(iterations):
    """Return the second result, whose iteration converges."""
    y = X
    for _ in range(min(iterations, 2000)):
        y = np.sin(y) + X
    return y


def load(**devices):
    module = aotc.load(aotc.compile(TEXT, devices=devices) if devices else aotc.compile(plain(), target="cuda:sm_90"))
    module.submit("main", X, X, np.int32(3)).result(PATIENCE)
    return module


def plain():
    return TEXT.replace(' {aotc.affinity = "d0"}', "").replace(' {aotc.affinity = "d1"}', "")


@pytest.mark.parametrize("results", FORMS)
@pytest.mark.parametrize(
    "devices", [{}, {"d0": "cuda:sm_90", "d1": "cuda:sm_90"}, {"d0": "cpu", "d1": "cuda:sm_90"}],
    ids=["one graph", "two devices", "cpu and gpu"],
)  # fmt: skip
def test_a_result_is_read_while_a_kernel_works(devices, results):
    module = load(**devices)
    for _ in range(2):
        fence = module.submit("main", X, X, LONG, results=results)
        early = fence[0].result(PATIENCE)
        check(early, np.sin(X))
        assert not fence.done
        assert not fence[1].ready()
        with pytest.raises(TimeoutError):
            fence[1].wait(0.01)
        check(fence[1].result(PATIENCE), iterated(LONG))
        check(fence.result(PATIENCE)[0], np.sin(X))
    ended(module)


@several
@pytest.mark.parametrize("results", FORMS)
def test_a_result_of_one_gpu_is_given_to_a_submission_while_another_works(results):
    module = load(d0="cuda:sm_90", d1="cuda:sm_90")
    assert len({loaded.ordinal for loaded in module._executable.gpus}) == 2
    other = aotc.load(aotc.compile(jax.jit(lambda x: x + x), X, target="cuda:sm_90"), devices="cuda:0")
    other.submit("main", X).result(PATIENCE)
    for _ in range(3):
        fence = module.submit("main", X, X, LONG, results=results)
        check(other.submit("main", fence[0]).result(PATIENCE)[0], 2 * np.sin(X))
        check(other.submit("main", other.submit("main", fence[0], results=results)).result(PATIENCE)[0], 4 * np.sin(X))
        assert not fence.done
        check(fence[1].result(PATIENCE), iterated(LONG))


@pytest.mark.parametrize("results", FORMS)
def test_a_result_of_a_gpu_is_read_while_the_cpu_works(results):
    opened = threading.Event()

    def slow(x, out):
        assert opened.wait(PATIENCE)
        out[...] = x + 1

    aotc.register_custom_call("slow", native=False)
    text = f"""func.func public @main(%x: {T} {{aotc.affinity = "d0"}}, %y: {T} {{aotc.affinity = "d1"}})
        -> ({T}, {T}) {{
      %0 = stablehlo.sine %x : {T}
      %1 = stablehlo.custom_call @slow(%y) : ({T}) -> {T}
      return %0, %1 : {T}, {T} }}"""
    data = aotc.compile(text, devices={"d0": "cuda:sm_90", "d1": "cpu"})
    module = aotc.load(data, custom_calls={"slow": slow})
    fence = module.submit("main", X, X, results=results)
    check(fence[0].result(PATIENCE), np.sin(X))
    assert not fence.done
    opened.set()
    check(fence.result(PATIENCE)[1], X + 1)


@pytest.mark.parametrize("results", FORMS)
def test_a_complete_result_outlives_a_cancelled_call(results):
    module = load()
    fence = module.submit("main", X, X, LONG, results=results)
    fence[0].wait(PATIENCE)
    fence.cancel()
    assert isinstance(fence.exception(PATIENCE), aotc.FenceCancelled)
    check(module.submit("main", -X, X, np.int32(1)).result(PATIENCE)[0], -np.sin(X))
    check(fence[0].result(PATIENCE), np.sin(X))
    ended(module)


@pytest.mark.parametrize("results", FORMS)
def test_many_results_of_one_graph_in_any_order(results):
    """Large ones go through staging buffers."""

    def chain(x):
        found = []
        for n in range(12):
            x = jnp.tanh(x @ x) + n
            found.append(x)
        return found

    x = 0.01 * array(1024, 1024)
    want = [np.asarray(y) for y in jax.jit(chain)(jax.device_put(x, jax.devices("cpu")[0]))]
    module = aotc.load(aotc.compile(jax.jit(chain), x, target="cuda:sm_90", matmul_precision="highest"))
    for first in range(6):
        fence = module.submit("main", x, results=results)
        for n in range(12):
            at = (first + 5 * n) % 12
            np.testing.assert_allclose(np.asarray(fence[at].result(PATIENCE)), want[at], rtol=2e-3, atol=2e-3)
        fence.result(PATIENCE)


@pytest.mark.parametrize("halves", HALVES)
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed, halves):
    text = random_program(np.random.default_rng(seed))
    kinds = [*HALVES[halves].values()]
    module = aotc.load(aotc.compile(text, devices={f"d{n}": kinds[n % 2] for n in range(4) if f'"d{n}"' in text}))
    arrays = inputs_of(module)
    want = alone(text, *arrays)
    for iteration in range(10):
        fence = module.submit("main", *arrays, results=FORMS[iteration % 2])
        for n in (iteration % 2, 1 - iteration % 2):
            found = np.array(fence[n].result(PATIENCE))
            np.testing.assert_allclose(found, want[n], rtol=1e-4, atol=1e-4 * max(np.abs(want[n]).max(), 1))
