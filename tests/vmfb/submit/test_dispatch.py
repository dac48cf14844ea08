"""Who runs what becomes ready when a call ends: the thread that ends it, unless it may be busy."""

import gc
import threading
import time

import numpy as np
import pytest

import aotc
from aotc.vmfb.submit import device_slots as slots
from aotc.vmfb.submit import dispatcher_threads as dispatch
from aotc.vmfb.submit.dispatcher_threads import PROCESS, Dispatchers
from aotc.vmfb.submit.submission import Submission

pytestmark = pytest.mark.cpu

MODEL = """
func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
  %0 = stablehlo.add %x, %x : tensor<8xf32>
  return %0 : tensor<8xf32>
}
"""
X = np.ones(8, np.float32)
LIMIT = 60


@pytest.fixture(scope="module")
def data():
    return aotc.compile(MODEL)


@pytest.fixture
def runs(monkeypatch):
    """The thread and the module of each call, in the order in which they began."""
    gc.collect()
    found = []
    made = Submission._run

    def recorded(self):
        found.append((threading.get_ident(), self._call.executable))
        return made(self)

    monkeypatch.setattr(Submission, "_run", recorded)
    return found


def test_threads_end_in_silence_whatever_they_wait_for(monkeypatch):
    monkeypatch.setattr(dispatch, "LINGER_SECONDS", 0.2)
    raised, both = [], threading.Barrier(3)
    monkeypatch.setattr(threading, "excepthook", raised.append)

    class Meeting:
        def run(self):
            both.wait(LIMIT)

    mine = Dispatchers()
    mine.enqueue([Meeting()])
    mine.enqueue([Meeting()])
    both.wait(LIMIT)
    until(lambda: len(mine._idle) == 2)
    mine.enqueue([])  # one wakes in vain, and looks again a little later
    until(lambda: mine._pausing)
    mine.end_threads()
    until(lambda: not mine._idents)
    assert raised == mine._coming == []


def until(condition):
    end = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.mark.parametrize("devices", [["cpu:0"], ["cpu:0", "cpu:1"]])
def test_a_chain_stays_with_its_thread(data, runs, devices, monkeypatch):
    """Each stage of a pipeline: it is ready when the stage's last call ends, and the thread of that goes on with it."""
    monkeypatch.setattr(slots, "usable_cores", lambda: 8)
    monkeypatch.setattr(PROCESS.dispatchers, "raise_thread_limit", lambda count: None)  # later tests count threads
    stages = [aotc.load(data, devices=device) for device in devices]
    begin = aotc.Fence()
    last = [begin] * len(stages)
    for _ in range(30):
        x = X
        for n, stage in enumerate(stages):
            last[n] = stage.submit("main", x, wait=[last[n]])
            x = last[n][0]
    begin.signal()
    np.testing.assert_array_equal(last[-1].result(LIMIT)[0], 2 ** len(stages) * X)
    first = [thread for thread, executable in runs if executable is runs[0][1]]
    assert len(first) == 30
    assert len(set(first)) == 1


@pytest.mark.parametrize("several", [False, True])
def test_a_callback_may_wait_for_what_becomes_ready(data, several):
    """The thread that calls it cannot run that submission meanwhile: others are sent for it first."""
    stages = [aotc.load(data, devices=device) for device in (["cpu:0", "cpu:1"] if several else ["cpu:0"])]
    begin, seen = aotc.Fence(), threading.Event()
    first = stages[0].submit("main", X, wait=[begin])
    second = [stage.submit("main", first[0]) for stage in stages]
    first.add_done_callback(lambda _: [fence.result(LIMIT) for fence in second] and seen.set())
    begin.signal()
    assert seen.wait(LIMIT)


def test_all_that_becomes_ready_at_once_runs_side_by_side(data, monkeypatch):
    """The thread that ends what they wait for takes one, and others come for the rest."""
    gate = threading.Barrier(2)
    made = Submission._run

    def met(self):
        if self._values[0] is not X:
            gate.wait(LIMIT)
        return made(self)

    module = aotc.load(data)
    begin = aotc.Fence()
    first = module.submit("main", X, wait=[begin])
    monkeypatch.setattr(Submission, "_run", met)
    both = [module.submit("main", first[0]) for _ in range(2)]
    begin.signal()
    for fence in both:
        np.testing.assert_array_equal(fence.result(LIMIT)[0], 4 * X)
