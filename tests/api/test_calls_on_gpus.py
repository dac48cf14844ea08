"""States, own weights and limits on a GPU, simulated and real: results, what stays there, the short way of calls."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import DeadlineExceeded
from aotc.vmfb import vm
from aotc.vmfb.devices.cuda import driver

pytest.importorskip("numba_cuda")

TARGET = "cuda:sm_90"
X = np.linspace(-1, 1, 4 * 8, dtype=np.float32).reshape(4, 8)
W, BIAS = np.linspace(1, 2, 8, dtype=np.float32), np.full(8, -0.5, np.float32)


@pytest.fixture(
    params=[
        pytest.param("simulated", marks=pytest.mark.cudasim),
        pytest.param("real", marks=[pytest.mark.cuda, pytest.mark.skipif(bool(driver.missing()), reason="no GPU")]),
    ]
)
def load(request, monkeypatch):
    """Return ``aotc.load`` of what is compiled for a GPU."""

    def loaded(data, **options):
        if request.param == "simulated":
            from vmfb.simulated_gpu import install

            install(monkeypatch, data)
        return aotc.load(data, **options)

    return loaded


@pytest.fixture
def long_ways(monkeypatch):
    """Return a list that gets an item for each call that goes the long way."""
    found, prepared = [], vm.prepare_arguments

    def noted(*arguments):
        found.append(1)
        return prepared(*arguments)

    monkeypatch.setattr(vm, "prepare_arguments", noted)
    return found


def step(cache, x):
    return {"cache": cache + x, "y": jnp.tanh(x) * 2 + cache}


def layer(params, x):
    return jnp.tanh(x * params["w"] + params["bias"])


def weighted(params):
    return aotc.compile(jax.jit(layer), params, X, target=TARGET, bind=["params"], weights="unpacked")


def want(w=W, bias=BIAS):
    return np.tanh(X * w + bias)


def is_close(found, wanted):
    np.testing.assert_allclose(np.asarray(found), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("donated", [False, True])
def test_each_call_of_a_state_on_a_gpu_continues_from_the_last(load, donated, tmp_path):
    jitted = jax.jit(step, donate_argnums=(0,) if donated else ())
    module = load(aotc.compile(jitted, X, X, target=TARGET, state=["cache"]))
    state, total = module.state("cache"), np.zeros_like(X)
    for n in range(1, 6):
        is_close(state(X * n)["y"], np.tanh(X * n) * 2 + total)
        total += X * n
        assert state.values["cache"].ordinal == 0
    is_close(state["cache"], total)
    state.save(tmp_path / "cache.safetensors")
    other = module.state("cache")
    other.load(tmp_path / "cache.safetensors")
    state.reset()
    assert not state["cache"].any()
    other(X)
    is_close(other["cache"], total + X)


@pytest.mark.parametrize("donated", [False, True])
def test_steps_of_a_state_use_the_fast_path(load, donated, long_ways):
    """Where what they are given is on the GPU too."""
    jitted = jax.jit(step, donate_argnums=(0,) if donated else ())
    module = load(aotc.compile(jitted, X, X, target=TARGET, state=["cache"]))
    state, x = module.state("cache"), module.put(X, "x")
    for n in range(8):
        is_close(state(x)["y"], np.tanh(X) * 2 + n * X)
        if n == 1:
            long_ways.clear()
    assert long_ways == []
    is_close(state["cache"], 8 * X)


def test_bundled_weights_use_the_fast_path(load, long_ways):
    module = load(weighted({"w": W, "bias": BIAS}))
    is_close(module(X), want())
    x, other = module.put(X, "x"), module.put(2 * X, "x")
    module.invoke("main", x, results="device")
    long_ways.clear()
    for _ in range(3):
        (found,) = module.invoke("main", x, results="device")
        is_close(found, want())
        is_close(module.invoke("main", other, results="device")[0], np.tanh(2 * X * W + BIAS))
    assert long_ways == []
    out = module.put(np.zeros_like(X), "x")
    for _ in range(3):
        assert module.invoke("main", x, out=[out])[0] is out
        is_close(out, want())
    assert len(long_ways) == 1
    is_close(module.submit("main", x).result()[0], want())
    is_close(module.bind({"x": X})(), want())


def test_an_update_of_bundled_weights_reaches_the_fast_path(load, long_ways):
    module = load(weighted({"w": W, "bias": BIAS}))
    x = module.put(X, "x")
    for bias in (BIAS, BIAS + 1, BIAS + 2):
        module.update_weights({"params/bias": bias})
        for _ in range(3):
            is_close(module.invoke("main", x, results="device")[0], want(bias=bias))
    before = len(long_ways)
    module.invoke("main", x, results="device")
    assert len(long_ways) == before


def test_updates_during_calls_are_atomic(load):
    """Each call reads the weights of one update, never some of two."""
    module = load(weighted({"w": W, "bias": BIAS}))
    x, wrong = module.put(X, "x"), []
    allowed = [want(W * n, BIAS * n) for n in range(1, 6)]

    def calls():
        for _ in range(30):
            found = np.asarray(module.invoke("main", x, results="device")[0])
            if not any(np.allclose(found, one, atol=1e-5) for one in allowed):
                wrong.append(found)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for n in range(1, 6):
        module.update_weights({"params/w": W * n, "params/bias": BIAS * n})
    for thread in threads:
        thread.join()
    assert wrong == []
    is_close(module.invoke("main", x, results="device")[0], allowed[-1])


def test_a_state_works_with_bundled_weights(load, long_ways):
    def decode(params, cache, x):
        return {"cache": cache * 0.5 + x * params["w"], "y": cache + params["bias"]}

    params = {"w": W, "bias": BIAS}
    data = aotc.compile(
        jax.jit(decode, donate_argnums=(1,)), params, X, X, target=TARGET, bind=["params"], weights="unpacked",
        state=["cache"],
    )  # fmt: skip
    module = load(data)
    state, x, cache = module.state("cache"), module.put(X, "x"), np.zeros_like(X)
    for n in range(6):
        if n == 3:
            module.update_weights({"params/w": W * 2})
        is_close(state(x)["y"], cache + BIAS)
        cache = cache * 0.5 + X * (W * 2 if n >= 3 else W)
        if n == 4:
            long_ways.clear()
    assert long_ways == []
    is_close(state["cache"], cache)


@pytest.mark.parametrize("limits", [{"max_in_flight": 1}, {"max_in_flight": 2, "timeout": 60.0}, {"timeout": 60.0}])
def test_call_limits_hold_on_gpus(load, limits):
    module = load(weighted({"w": W, "bias": BIAS}), **limits)
    x, wrong = module.put(X, "x"), []

    def calls():
        for _ in range(10):
            for found in (module(X), module.invoke("main", x, results="device")[0]):
                if not np.allclose(np.asarray(found), want(), atol=1e-5):
                    wrong.append(found)

    threads = [threading.Thread(target=calls) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_limited_calls_use_the_fast_path_in_order(load, long_ways):
    module = load(weighted({"w": W, "bias": BIAS}), max_in_flight=1)
    x = module.put(X, "x")
    for n in range(6):
        is_close(module.invoke("main", x, results="device")[0], want())
        if n == 1:
            long_ways.clear()
    assert long_ways == []
    module.update_weights({"params/bias": BIAS + 1})
    is_close(module.invoke("main", x, results="device")[0], want(bias=BIAS + 1))
    begun = aotc.Fence()
    fences = [module.submit("main", x, wait=[begun]) for _ in range(3)]
    begun.signal()
    is_close(module.invoke("main", x, results="device")[0], want(bias=BIAS + 1))
    for fence in fences:
        is_close(fence.result()[0], want(bias=BIAS + 1))


def test_a_timeout_ends_a_loop_on_a_gpu(load):
    iterations = lambda x, n: jax.lax.fori_loop(0, n, lambda i, a: jnp.sin(a) + 1, x)
    module = load(aotc.compile(iterations, X, np.int32(3), target=TARGET), timeout=3.0)
    is_close(module(X, np.int32(0)), X)
    with pytest.raises(DeadlineExceeded):
        module(X, np.int32(2**31 - 1))
