"""Calls that return before the GPU is done: who waits for whom, memory that is used again, new addresses."""

import functools
import gc
import random
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from devices.mixes import HALVES, ORDERS, alone
from devices.test_foreign_arrays import ByDlpack, ByInterface
from lowering.test_devices import FIRST, SECOND, T, product, to
from support.small_models import array
from vmfb.simulated_gpu import SimulatedGpu, install

import aotc
from aotc.vmfb.errors import CallError

pytest.importorskip("numba_cuda")
pytestmark = [pytest.mark.cudasim, pytest.mark.usefixtures("dispatchers_anew")]

PATIENCE = 60
close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
TWO = f"""func.func public @main(%x: {T} {FIRST}, %w: {T} {SECOND}) -> ({T}, {T}) {{
  %0 = {product("%x", "%x")}
  %1 = {to("d1", "%0")}
  %2 = {product("%1", "%w")}
  return %0, %2 : {T}, {T} }}"""


def step(h, w):
    return jnp.tanh(h @ w)


def want(h, w, times=1):
    for _ in range(times):
        h = np.tanh(h @ w)
    return h


def loaded(monkeypatch, function, *arrays, order=SimulatedGpu.LATE, **jit):
    data = aotc.compile(jax.jit(function, **jit), *arrays, target="cuda:sm_90")
    install(monkeypatch, data, order=order)
    return aotc.load(data)


@pytest.fixture
def module(monkeypatch):
    return loaded(monkeypatch, step, array(4, 4), array(4, 4))


def under_way():
    """How many things streams were given that they have not done."""
    return sum(gpu.given - gpu.done for gpu in list(SimulatedGpu.every))


def test_a_call_returns_before_the_gpu_is_done(module):
    h, w = module.put(array(4, 4)), module.put(array(4, 4, seed=1))
    for iteration in range(4):
        (made,) = module.invoke("main", h, w, results="device")
        assert under_way()
        if iteration % 2:
            assert made.wait() is made
            assert not under_way()
        close(made.numpy(), want(h.numpy(), w.numpy()))
    module.invoke("main", h, w)
    assert not under_way()  # NumPy arrays are whole


def test_repeated_addresses_ask_for_nothing_but_the_graph(module):
    """Neither is memory taken, nor anything waited for, while results go and come back."""
    h, w = module.put(array(4, 4)), module.put(array(4, 4, seed=1))
    bound, out = module.bind({1: w}), module.put(array(4, 4))
    log = module._executable.gpu.log
    for call in (
        lambda: module.invoke("main", h, w, results="device"),
        lambda: bound.invoke(h, results="device"),
        lambda: bound.invoke(h, out=[out]),
        lambda: module.invoke("main", h, w, out=[out]),
    ):
        for _ in range(3):
            call()
        log.clear()
        (made,) = call()
        assert log == ["graph"]
        close(made.numpy(), want(h.numpy(), w.numpy()))


def test_a_chain_of_calls_waits_for_nobody(module):
    h, w = array(4, 4), array(4, 4, seed=1)
    state, weight = module.put(h), module.put(w)
    for _ in range(6):
        (state,) = module.invoke("main", state, weight, results="device")
    assert not {"follow", "finish", "record"} & set(module._executable.gpu.log)
    assert under_way() >= 6
    close(state.numpy(), want(h, w, 6))


@pytest.mark.parametrize("order", ORDERS)
def test_another_module_reads_what_is_not_there_yet(order, monkeypatch):
    x = array(4, 4)
    first = aotc.compile(jax.jit(lambda x: jnp.sin(x) + 1), x, target="cuda:sm_90")
    second = aotc.compile(jax.jit(lambda x: x * x), x, target="cuda:sm_90")
    install(monkeypatch, first, order=ORDERS[order])
    texts = SimulatedGpu.texts
    install(monkeypatch, second, order=ORDERS[order])
    SimulatedGpu.texts.update(texts)
    one, other = aotc.load(first), aotc.load(second)
    y = one.put(x)
    for _ in range(5):
        (y,) = one.invoke("main", y, results="device")
        (y,) = other.invoke("main", y, results="device")
        x = (np.sin(x) + 1) ** 2
    close(y.numpy(), x)


def test_what_is_dropped_is_read_to_the_end(monkeypatch):
    """Memory of arrays that are gone is used again by other streams when those that read it are done."""
    module = loaded(monkeypatch, step, array(4, 4), array(4, 4))
    w, pool = module.put(array(4, 4, seed=1)), module._executable.pool
    streams = [pool.take_streams() for _ in range(2)]
    found = []
    for iteration in range(12):
        h = module.put(array(4, 4, seed=iteration))
        pool.return_streams(streams[iteration % 2])  # each call is on another stream
        pool._idle[-1].busy = False
        found.append(module.invoke("main", h, w, results="device")[0])
        del h
        streams[iteration % 2] = pool.take_streams()
        if iteration % 3 == 2:
            del found[-2]
    late = [n for n in range(12) if n % 3 != 1]
    for n, y in zip(late, found, strict=True):
        close(y.numpy(), want(array(4, 4, seed=n), w.numpy()))


@pytest.mark.parametrize("order", ORDERS)
def test_a_numpy_argument_is_the_callers_again(order, monkeypatch):
    module = loaded(monkeypatch, step, array(4, 4), array(4, 4), order=ORDERS[order])
    w, made = module.put(array(4, 4, seed=1)), []
    x = np.empty((4, 4), "f4")
    for n in range(4):
        x[...] = array(4, 4, seed=n)
        made += module.invoke("main", x, w, results="device")
        x[...] = 7
    for n, y in enumerate(made):
        close(y.numpy(), want(array(4, 4, seed=n), w.numpy()))


def update(cache, x):
    return jax.lax.dynamic_update_slice(cache, x, (1, 0)), x * 2


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("given", [True, False])
def test_donated_arrays(order, given, monkeypatch):
    """Given away call by call, without waiting; else the caller's stays as it was."""
    rows, x = array(4, 4), array(1, 4, seed=1)
    module = loaded(monkeypatch, update, rows, x, order=ORDERS[order], donate_argnums=0)
    state, row = module.put(rows), module.put(x)
    expected = rows.copy()
    for _ in range(5):
        after, twice = module.invoke("main", state, row, results="device", donate=given)
        expected[1] = x
        if given:
            assert after.nbytes == 64
            with pytest.raises(CallError, match="donated"):
                module.invoke("main", state, row, results="device")
        else:
            np.testing.assert_array_equal(state.numpy(), rows)
        state, row = (after, twice) if given else (state, row)
        np.testing.assert_array_equal(twice.numpy(), 2 * x)
        np.testing.assert_array_equal(after.numpy(), expected)
        x = 2 * x if given else x


def test_a_donated_array_of_a_bound_function(monkeypatch):
    rows, x = array(4, 4), array(1, 4, seed=1)
    module = loaded(monkeypatch, update, rows, x, donate_argnums=0)
    bound, state, expected = module.bind({1: x}), module.put(rows), rows.copy()
    expected[1] = x
    log = module._executable.gpu.log
    for _ in range(5):
        log.clear()
        (state, _) = bound.invoke(state, results="device", donate=True)
    assert log == ["graph"]
    np.testing.assert_array_equal(state.numpy(), expected)


def test_buffers_of_the_caller_are_apart_from_the_rest(module):
    """Also at addresses that come for the first time, on the short way."""
    h, w, out = (module.put(array(4, 4, seed=n)) for n in range(3))
    for _ in range(3):
        module.invoke("main", h, w, out=[out])
    with pytest.raises(CallError, match="shares memory"):
        module.invoke("main", h, out, out=[out])
    bound = module.bind({1: w})
    for _ in range(2):
        bound.invoke(h, out=[out])
    with pytest.raises(CallError, match="shares memory"):
        bound.invoke(h, out=[w])


def test_bound_arrays_that_change(module):
    """What is written to them later is read; what was given away is missed; streams of other calls are waited for."""
    h, w, other = array(4, 4), array(4, 4, seed=1), module.put(array(4, 4, seed=2))
    weight, x = module.put(w), module.put(h)
    bound = module.bind({1: weight})
    for _ in range(3):
        bound.invoke(x, results="device")
    module.invoke("main", other, other, out=[weight])
    w = want(array(4, 4, seed=2), array(4, 4, seed=2))
    close(bound.invoke(x, results="device")[0].numpy(), want(h, w))
    weight.give_away()
    with pytest.raises(CallError, match="donated"):
        bound.invoke(x, results="device")


def test_bound_arrays_go_with_the_bound_function(module):
    weight, x = module.put(array(4, 4)), module.put(array(4, 4))
    bound = module.bind({1: weight})
    for _ in range(3):
        bound.invoke(x, results="device")
    idle = module._executable.gpus[0]._idle
    before = sum(map(len, idle.values()))
    del bound, weight
    gc.collect()
    assert sum(map(len, idle.values())) == before + 1


def test_a_consumer_is_ordered_behind_the_call(module):
    """By DLPack its stream waits, or the host where it names none; by the interface the host does."""
    h, w = module.put(array(4, 4)), module.put(array(4, 4, seed=1))

    def made():
        for _ in range(3):
            (y,) = module.invoke("main", h, w, results="device")
        assert under_way()
        return y

    consumer = SimulatedGpu(0)
    y = made()
    capsule = y.__dlpack__(stream=consumer.handle, max_version=(1, 0))
    assert under_way()
    assert consumer.log == ["follow"]
    del capsule
    for ask in (lambda y: y.__dlpack__(), lambda y: y.__dlpack__(stream=1), lambda y: y.__cuda_array_interface__):
        y = made()
        kept = ask(y)
        assert not module._executable.gpu.queue
        module.invoke("main", y, w, results="device")
        assert not under_way()  # the consumer may write to it
        del kept


@pytest.mark.parametrize("kind", [ByDlpack, ByInterface])
def test_calls_on_arrays_of_others_end_with_a_wait(kind, module):
    """Their producer may write to them, and knows nothing of our streams."""
    h, w = kind(array(4, 4)), module.put(array(4, 4, seed=1))
    for _ in range(3):
        (made,) = module.invoke("main", h, w, results="device")
        assert not under_way()
    close(made.numpy(), want(h.read(), w.numpy()))


@pytest.mark.parametrize("halves", HALVES)
def test_calls_on_several_devices(halves, monkeypatch):
    """What stays on GPUs is not waited for; the process's memory is."""
    data = aotc.compile(TWO, devices=HALVES[halves])
    for order in ORDERS.values():
        install(monkeypatch, data, count=2, order=order)
        module = aotc.load(data)
        x, w = array(8, 8), array(8, 8, seed=1)
        expected = alone(TWO, x, w)
        for _ in range(3):
            found = module.invoke("main", x, w)
            if order == SimulatedGpu.LATE and halves != "cuda, cpu":
                assert under_way()
            for y, z in zip(found, expected, strict=True):
                close(np.asarray(y), z)


def test_threads_have_streams_of_their_own(monkeypatch):
    """And reuse each other's memory; GPUs work by chance."""
    module = loaded(monkeypatch, step, array(4, 4), array(4, 4), order=random.Random(5))
    w, wrong = module.put(array(4, 4, seed=1)), []
    shared = module.bind({1: w})

    def run(seed):
        chance, state, h = random.Random(seed), module.put(array(4, 4, seed=seed)), array(4, 4, seed=seed)
        kept = []
        for n in range(12):
            (state,) = shared.invoke(state, results="device")
            h = want(h, w_host)
            kept.append((state, h))
            if chance.random() < 0.4:
                kept.pop(chance.randrange(len(kept)))
            if n % 4 == 3:
                state = module.put(h)
        wrong.extend(1 for y, z in kept if not np.allclose(y.numpy(), z, rtol=1e-3))

    w_host = w.numpy()
    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert not wrong
