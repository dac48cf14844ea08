"""Arrays of devices whose memory is the host's: where they are, how they are read, and that a donated one is gone."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.module import load

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)


@pytest.fixture(scope="module")
def module():
    return load(tiny.bundle(), threads=1)


def made(module):
    return module.invoke("main", X, Y, results="device")[0]


def refuses(array, module):
    for use in (array.numpy, array.copy, array.__dlpack__, array.give_away, lambda: np.asarray(array)):
        with pytest.raises(aotc.CallError, match="donated"):
            use()
    for call in (module.invoke, module.submit):
        with pytest.raises(aotc.CallError, match=r"argument 0 .x. .*(donated|was given to)"):
            call("main", array, Y)
    assert repr(array) == "DeviceArray(<donated>, device='cpu:0')"
    assert (array.shape, array.dtype, array.donated) == ((4,), np.float32, True)


def test_a_donated_array_cannot_be_used_again(module):
    array = made(module)
    (after,) = module.invoke("update", array, Y, donate=True, results="device")
    assert after.numpy().tolist() == (X + 2 * Y).tolist()
    refuses(array, module)
    (last,) = module.invoke("update", after, Y, donate=True)
    assert last.tolist() == (X + 3 * Y).tolist()
    refuses(after, module)


def test_a_submission_takes_it_at_once(module):
    array, start = made(module), aotc.Fence()
    fence = module.submit("update", array, Y, donate=True, results="device", wait=[start])
    refuses(array, module)
    start.signal()
    assert fence.result(60)[0].numpy().tolist() == (X + 2 * Y).tolist()


def test_a_result_of_a_fence_is_taken(module):
    """Before it exists, and after."""
    for exists in (False, True):
        start = aotc.Fence()
        first = module.submit("main", X, Y, results="device", wait=[start])
        if exists:
            start.signal()
            first.wait(60)
        second = module.submit("update", first, Y, donate=True)
        start.signal()
        assert second.result(60)[0].tolist() == (X + 2 * Y).tolist()
        refuses(first.result()[0], module)


@pytest.mark.parametrize("exists", [False, True])
def test_a_numpy_result_that_was_given_away_is_refused(module, exists):
    start = aotc.Fence()
    first = module.submit("main", X, Y, wait=[start])
    if exists:
        start.signal()
        first.wait(60)
    second = module.submit("update", first, Y, donate=True)
    start.signal()
    second.wait(60)
    with pytest.raises(aotc.CallError, match="was given to"):
        module.submit("main", first.result()[0], Y)


def test_what_is_refused_takes_nothing(module):
    array = made(module)
    with pytest.raises(aotc.CallError, match="argument 1"):
        module.invoke("update", array, Y[:3], donate=True)
    with pytest.raises(aotc.CallError, match="out is not a sequence"):
        module.invoke("update", array, Y, donate=True, out=3)
    with pytest.raises(aotc.CallError, match="argument 1"):
        module.submit("update", array, Y[:3], donate=True)
    with pytest.raises(aotc.CallError, match="deadline"):
        module.submit("update", array, Y, donate=True, deadline=-1)
    module.invoke("update", array, Y)
    module.submit("update", array, Y).wait()
    assert array.numpy().tolist() == (X + Y).tolist()


def test_an_array_given_twice(module):
    array = made(module)
    assert module.invoke("update", array, array, donate=True)[0].tolist() == (2 * (X + Y)).tolist()
    refuses(array, module)


def test_elements_without_a_copy(module):
    array = made(module)
    assert array.__array__(copy=False) is array.numpy()
    assert not np.shares_memory(array.__array__(copy=True), array.numpy())
    assert array.__array__("f8").dtype == np.float64
    pending = module.submit("main", X, Y)[0]
    for value in (array, pending):
        with pytest.raises(ValueError, match="without a copy"):
            value.__array__("f8", copy=False)


def test_other_libraries_take_every_type():
    for dtype in (np.float32, np.bool_, ml_dtypes.bfloat16):
        array = DeviceArray(np.ones((2, 3), dtype), "cpu:0")
        found = jnp.from_dlpack(array)
        assert found.dtype == dtype
        assert (np.asarray(found) == array.numpy()).all()
    with pytest.raises(BufferError, match="no type for f8E5M2"):
        DeviceArray(np.ones(3, ml_dtypes.float8_e5m2), "cpu:0").__dlpack__()


def test_where_results_are(module):
    assert made(module).device == "cpu:0"
    (there,) = load(tiny.bundle(), threads=1, devices="cpu:3").invoke("main", X, Y, results="device")
    assert there.device == "cpu:3"
    buffer = np.empty(4, np.float32)
    assert module.invoke("main", X, Y, results="device", out=[buffer])[0] is buffer


def test_a_result_that_does_not_exist_yet(module):
    start = aotc.Fence()
    fence = module.submit("main", X, Y, wait=[start])
    sized = module.submit("upto", np.int64(7), wait=[start])
    assert (fence[0].device, fence[0].shape, sized[0].shape) == ("cpu:0", (4,), ("?",))
    start.signal()
    sized.wait(60)
    assert sized[0].shape == (7,)


def test_a_fence_says_what_is_wrong(module):
    fence = module.submit("main", X, Y)
    for timeout in ("x", True, float("nan")):
        for wait in (fence.result, fence.exception, fence.wait):
            with pytest.raises(aotc.CallError, match="the timeout is not a duration"):
                wait(timeout)
    with pytest.raises(IndexError, match="a submission of tiny: main has 1 result: there is no result 3"):
        fence[3]
    with pytest.raises(aotc.CallError, match="named by its number"):
        fence["x"]
    assert [result.number for result in fence] == [0]
