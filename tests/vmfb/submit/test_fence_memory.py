"""Submissions and the memory of their arguments: what was given away, what is written, what is freed."""

import gc
import tracemalloc
import weakref

import numpy as np
import pytest
from support import tiny

import aotc
from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.module import load
from aotc.vmfb.submit.dispatcher_threads import PROCESS
from aotc.vmfb.submit.memory_order import _GIVEN, _READERS, _WRITERS, Turn

pytestmark = pytest.mark.ir

X, Y = np.arange(4, dtype=np.float32), np.full(4, 10, np.float32)
PATIENCE = 60


@pytest.fixture(scope="module")
def module():
    return load(tiny.bundle(), threads=1)


def test_donated_arguments_are_refused(module):
    start, x = aotc.Fence(), X.copy()
    fence = module.submit("update", x, Y, donate=True, wait=[start])
    with pytest.raises(aotc.CallError, match=r"argument 0 .x. was given to tiny: update with donate=True"):
        module.submit("main", x, Y)
    chained = module.submit("update", fence, Y, donate=True)
    with pytest.raises(aotc.CallError, match="was given to"):
        module.submit("main", fence, Y)
    start.signal()
    assert chained.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    with pytest.raises(aotc.CallError, match="was given to"):
        module.submit("main", x, Y)
    assert module.submit("update", chained.result()[0], Y, donate=True).result()[0].tolist() == (X + 3 * Y).tolist()
    kept = DeviceArray(X.copy(), "d0")
    module.submit("update", kept, Y, donate=True).wait()
    with pytest.raises(aotc.CallError, match="was given to"):
        module.submit("main", kept, Y)


def test_without_donate_it_is_copied(module):
    x = X.copy()
    assert module.submit("update", x, Y).result()[0].tolist() == (X + Y).tolist()
    assert x.tolist() == X.tolist()
    module.submit("main", x, Y).wait()


def test_earlier_readers_come_before_a_writer(module):
    x, out, start = X.copy(), np.zeros(8, np.float32), aotc.Fence()
    reader = module.submit("main", x[:], Y, wait=[start])
    writer = module.submit("update", x, Y, donate=True)
    assert not writer.done
    into = module.submit("main", X, Y, out=[out[2:6]], wait=[start])
    after = module.submit("main", out[4:], Y)
    beside = module.submit("main", out[:4].copy(), Y)
    assert beside.result(PATIENCE)[0].tolist() == Y.tolist()
    assert not any(fence.done for fence in (reader, writer, into, after))
    start.signal()
    assert reader.result(PATIENCE)[0].tolist() == (X + Y).tolist()
    assert writer.result(PATIENCE)[0].tolist() == (X + Y).tolist()
    assert after.result(PATIENCE)[0].tolist() == [22, 23, 10, 10]


def test_readers_of_a_result_come_before_its_writer(module):
    start, value = aotc.Fence(), module.submit("main", X, Y)
    reader = module.submit("main", value, Y, wait=[start])
    value.wait()
    writer = module.submit("update", value.result()[0], Y, donate=True)
    assert not writer.done
    start.signal()
    assert reader.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    assert writer.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()


@pytest.mark.parametrize("how", ["out", "donate"])
def test_a_result_that_does_not_exist_lies_in_memory_of_the_callers(module, how):
    start, held, memory = aotc.Fence(), aotc.Fence(), np.zeros(8, np.float32)
    if how == "out":
        value = module.submit("main", X, Y, out=[memory[:4]], wait=[start])
    else:
        memory[:4] = X
        given = module.submit("update", memory[:4], np.zeros(4, "f4"), donate=True, wait=[start])
        value = module.submit("update", given, Y, donate=True)
    reader = module.submit("main", value, Y, wait=[held])
    writer = module.submit("main", X, X, out=[memory[2:6]])
    beside = module.submit("main", X, X, out=[memory[4:]], wait=[held])
    start.signal()
    assert value.result(PATIENCE)[0].tolist() == (X + Y).tolist()
    with pytest.raises(TimeoutError):
        writer.result(0.05)
    held.signal()
    assert reader.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    writer.wait(PATIENCE), beside.wait(PATIENCE)
    assert memory[2:4].tolist() == [0, 2]
    assert {**_READERS, **_WRITERS} == {}


def test_a_submission_that_only_writes_runs_after_failed_ones(module):
    start, x, out = aotc.Fence(), X.copy(), np.zeros(4, np.float32)
    reader, writer = module.submit("main", x, Y, wait=[start]), module.submit("main", X, Y, out=[out], wait=[start])
    taking = module.submit("update", x, Y, donate=True)
    again = module.submit("main", Y, Y, out=[out])
    reading = module.submit("main", out, Y)
    both = np.zeros(8, np.float32)
    writer_of_nothing = module.submit("main", X, Y, out=[both[:4]], wait=[start])
    module.submit("main", X, Y, out=[both[2:6]])
    reading_nothing = module.submit("main", both[1:5], Y)
    assert all(fence.cancel() for fence in (reader, writer, writer_of_nothing))
    assert taking.result(PATIENCE)[0].tolist() == (X + Y).tolist()
    assert again.result(PATIENCE)[0].tolist() == (2 * Y).tolist()
    assert reading.result(PATIENCE)[0].tolist() == (3 * Y).tolist()  # what the second wrote
    with pytest.raises(aotc.CallError, match="which failed: FenceCancelled"):
        reading_nothing.result(PATIENCE)
    assert {**_READERS, **_WRITERS} == {}


@pytest.mark.parametrize("when", ["there", "done", "to come"])
def test_earlier_readers_of_a_device_array_come_before_who_is_given_it(module, when):
    start, held = aotc.Fence(), aotc.Fence()
    value = DeviceArray(X + Y, "d0")
    if when != "there":
        value = module.submit("main", X, Y, results="device", wait=[start])
    if when == "done":
        start.signal(), value.wait()
    reader = module.submit("main", value, Y, wait=[held])
    start.signal()
    if when == "to come":
        value.wait()
    taking = module.submit("update", value, Y, donate=True, results="device")
    assert (value if when == "there" else value.result()[0]).donated
    with pytest.raises(aotc.CallError, match="was given to"):
        module.submit("main", value, Y)
    held.signal()
    assert reader.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    assert taking.result(PATIENCE)[0].numpy().tolist() == (X + 2 * Y).tolist()


@pytest.mark.parametrize("kind", ["numpy", "device"])
def test_a_result_that_is_made_while_its_reader_is_submitted(module, monkeypatch, kind):
    start, held = aotc.Fence(), aotc.Fence()
    value = module.submit("main", X, Y, results=kind, wait=[start])
    enter = Turn.register_accesses

    def late(iteration, *rest):
        start.signal(), value.wait(PATIENCE)
        return enter(iteration, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(Turn, "register_accesses", late)
        reader = module.submit("main", value, Y, wait=[held])
    writer = module.submit("update", value, Y, donate=True)
    with pytest.raises(TimeoutError):
        writer.result(0.05)
    held.signal()
    assert reader.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()
    assert writer.result(PATIENCE)[0].tolist() == (X + 2 * Y).tolist()


def test_a_call_that_is_given_a_device_array_waits_for_no_readers(module):
    start, value = aotc.Fence(), DeviceArray(X.copy(), "d0")
    reader = module.submit("main", value, Y, wait=[start])
    module.invoke("update", value, Y, donate=True)
    start.signal()
    with pytest.raises(aotc.CallError, match="was donated to a call"):
        reader.result(PATIENCE)


def test_donated_arguments_are_refused_as_out_buffers(module):
    start, x, kept = aotc.Fence(), X.copy(), DeviceArray(X.copy(), "d0")
    for given in (x, kept):
        module.submit("update", given, Y, donate=True, wait=[start])
        with pytest.raises(aotc.CallError, match=r"out.0. was given to tiny: update with donate=True"):
            module.submit("main", X, Y, out=[given])
    start.signal()


def test_an_error_holds_no_arguments(module):
    x = X[:2].copy()
    gone, fence = weakref.ref(x), module.submit("grow", x)
    del x
    assert "expected at least 4" in str(fence.exception())
    with pytest.raises(aotc.CallError):
        fence.result()
    assert gone() is None


def test_waiting_submissions_take_little_memory(module):
    start = aotc.Fence()
    module.submit("grow", X).wait()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        fences = [module.submit("grow", X, wait=[start]) for _ in range(1000)]
        size = (tracemalloc.get_traced_memory()[0] - before) / len(fences)
    finally:
        tracemalloc.stop()
        start.signal()
    assert size < 4000
    for fence in fences:
        fence.wait(PATIENCE)


def test_completed_submissions_are_freed(module):
    for _ in range(20):
        start, x = aotc.Fence(), X.copy()
        kept = module.submit("main", module.submit("update", x, Y, donate=True, wait=[start]), Y)
        gone = weakref.ref(module.submit("main", kept, Y))
        start.signal()
        kept.result(PATIENCE)
    PROCESS.dispatchers.ready.clear()
    del x, kept, start
    gc.collect()
    assert gone() is None
    assert not _READERS
    assert not _WRITERS
    assert not _GIVEN


def test_a_fence_that_nobody_will_signal_is_collected(module):
    fence = module.submit("main", X, Y, wait=[aotc.Fence()])
    gone = weakref.ref(fence)
    del fence
    gc.collect()
    assert gone() is None
