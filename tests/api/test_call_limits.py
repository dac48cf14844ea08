"""Coroutines, deadlines of calls with trees, and limits of a module, whoever calls."""

import asyncio
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import aotc
from aotc import CallError, DeadlineExceeded, FenceCancelled
from aotc.vmfb import custom_calls

pytestmark = pytest.mark.cpu

X = np.ones((2, 2), np.float32)
FEW, ENDLESS = np.int32(3), np.int32(2**31 - 1)
SOON = 0.05


def iterations(x, n):
    return {"y": jax.lax.fori_loop(0, n, lambda i, a: jnp.sin(a) + 1, x)}


@pytest.fixture(scope="module")
def bundle():
    return aotc.compile(iterations, X, FEW)


@pytest.fixture(scope="module")
def module(bundle):
    return aotc.load(bundle, threads=1)


def test_concurrent_calls_in_coroutines_match(module):
    want = module(X, FEW)["y"]

    async def main():
        found = await asyncio.gather(*[module.main.async_(X, n=FEW) for _ in range(20)])
        assert all(np.array_equal(one["y"], want) for one in found)
        with pytest.raises(DeadlineExceeded):
            await module.main.options(deadline=SOON).async_(X, ENDLESS)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(module.main.async_(X, ENDLESS), SOON)
        with pytest.raises(CallError, match="argument 'n' is missing"):
            await module.main.async_(X)

    asyncio.run(main())


def test_submissions_accept_pytrees_and_options(module):
    start = aotc.Fence()
    fence = module.main.options(wait=[start]).submit(X, FEW)
    assert not fence.done
    start.signal()
    np.testing.assert_array_equal(fence.result()["y"], module(X, FEW)["y"])
    with pytest.raises(DeadlineExceeded):
        module.main.options(deadline=SOON)(X, ENDLESS)
    assert type(module.main.options(results="device")(X, FEW)["y"]) is aotc.DeviceArray
    with pytest.raises(CallError, match="results is 'disk'"):
        module.main.options(results="disk")
    with pytest.raises(CallError, match="donate is not True or False"):
        module.main.options(donate=2)


def test_a_module_timeout_ends_calls(bundle):
    module = aotc.load(bundle, threads=1, timeout=SOON)
    np.testing.assert_array_equal(module(X, FEW)["y"], aotc.load(bundle)(X, FEW)["y"])
    endless = [
        lambda: module(X, ENDLESS), lambda: module.invoke("main", X, ENDLESS),
        lambda: module.submit("main", X, ENDLESS).result(),
        lambda: module.submit("main", X, ENDLESS, deadline=60).result(),
        lambda: asyncio.run(module.main.async_(X, ENDLESS)),
        lambda: module.bind({"x": X})(ENDLESS),
        lambda: module.main.options(deadline=60)(X, ENDLESS),
    ]  # fmt: skip
    for call in endless:
        start = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            call()
        assert time.monotonic() - start < 30


@pytest.fixture
def counted(monkeypatch):
    """A bundle whose calls count how many of them run, and the most that ever did; and these numbers."""
    numbers, lock = {"now": 0, "most": 0, "calls": 0}, threading.Lock()

    def count(x, out):
        with lock:
            numbers["now"] += 1
            numbers["calls"] += 1
            numbers["most"] = max(numbers["most"], numbers["now"])
        time.sleep(0.01)
        with lock:
            numbers["now"] -= 1
        out[...] = x

    monkeypatch.setattr(custom_calls, "_REGISTRY", {})
    aotc.register_custom_call("count", native=False)
    data = aotc.compile(lambda x: jax.ffi.ffi_call("count", jax.ShapeDtypeStruct(X.shape, X.dtype))(x), X)
    return lambda **limits: aotc.load(data, custom_calls={"count": count}, threads=1, **limits), numbers


@pytest.mark.parametrize("most", [1, 2])
def test_at_most_max_in_flight_calls_run(counted, most):
    load, numbers = counted
    module = load(max_in_flight=most)
    fences = [module.submit("main", X) for _ in range(8)]

    def call():
        for _ in range(4):
            assert module(X).tolist() == X.tolist()
            assert module.invoke("main", X, out=[np.empty_like(X)])[0].tolist() == X.tolist()

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(fence.result(60)[0].tolist() == X.tolist() for fence in fences)
    assert numbers == {"now": 0, "most": most, "calls": 8 + 2 * 4 * 4}


def test_queued_calls_time_out(counted):
    load, numbers = counted
    module = load(max_in_flight=1, timeout=0.03)
    found = [fence.exception(60) for fence in [module.submit("main", X) for _ in range(30)]]
    assert sum(error is None for error in found) == numbers["calls"] - sum(
        isinstance(error, DeadlineExceeded) for error in found[: numbers["calls"]]
    )
    assert isinstance(found[-1], DeadlineExceeded)
    assert numbers["calls"] < 30


def test_a_cancelled_call_releases_its_slot(bundle):
    module = aotc.load(bundle, threads=1, max_in_flight=1)
    first, second = module.submit("main", X, ENDLESS), module.submit("main", X, FEW)
    time.sleep(SOON)
    assert not second.done
    first.cancel()
    assert isinstance(first.exception(60), FenceCancelled)
    assert second.result(60)[0].shape == X.shape
    assert module(X, FEW)["y"].shape == X.shape


def test_states_work_in_coroutines_and_with_limits():
    data = aotc.compile(lambda cache, x: {"cache": cache + x, "y": cache.sum()}, X, X, state=["cache"])
    module = aotc.load(data, max_in_flight=1, timeout=60)
    state = module.state("cache")

    async def main():
        return [float((await state.main.async_(X))["y"]) for _ in range(3)] + [float(state(X)["y"])]

    assert asyncio.run(main()) == [0, 4, 8, 12]

    async def both():
        return await asyncio.gather(state.main.async_(X), state.main.async_(X))

    with pytest.raises(CallError, match="another call with the same state"):
        asyncio.run(both())


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ({"max_in_flight": 0}, "max_in_flight is 0"), ({"max_in_flight": "2"}, "max_in_flight is '2'"),
        ({"max_in_flight": True}, "max_in_flight is True"), ({"timeout": 0}, "timeout is 0"),
        ({"timeout": float("nan")}, "timeout is nan"), ({"timeout": "1"}, "timeout is '1'"),
        ({"threads": 0}, "threads must be an integer from 1 to 1024"),
        ({"threads": 1.5}, "threads must be an integer from 1 to 1024"),
    ],
)  # fmt: skip
def test_invalid_limits_are_refused(bundle, limit, message):
    with pytest.raises(CallError, match=message):
        aotc.load(bundle, **limit)
