"""Logical CPU devices are shares of the cores: who begins, who runs what, and what is lent."""

import gc
import os
import threading
import time

import numpy as np
import pytest

import aotc
from aotc.vmfb.devices.cpu import native
from aotc.vmfb.devices.cpu.executor_trials import Trial
from aotc.vmfb.host import logical_devices
from aotc.vmfb.host.logical_devices import LOGICAL_DEVICES
from aotc.vmfb.submit import device_slots as slots
from aotc.vmfb.submit.dispatcher_threads import PROCESS

pytestmark = pytest.mark.cpu

MODEL = """
func.func public @main(%x: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [0]
     : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.tanh %0 : tensor<64x64xf32>
  return %1 : tensor<64x64xf32>
}
"""
STAGES = """
func.func public @main(%x: tensor<8xf32> {aotc.affinity = "d0"}) -> (tensor<8xf32> {aotc.affinity = "d1"}) {
  %0 = stablehlo.add %x, %x {aotc.affinity = "d0"} : tensor<8xf32>
  %1 = stablehlo.custom_call @aotc.transfer(%0) {aotc.to = "d1"} : (tensor<8xf32>) -> tensor<8xf32>
  %2 = stablehlo.multiply %1, %1 {aotc.affinity = "d1"} : tensor<8xf32>
  return %2 : tensor<8xf32>
}
"""
X = np.full((64, 64), 0.01, np.float32)


@pytest.fixture(scope="module")
def data():
    return aotc.compile(MODEL)


@pytest.fixture(autouse=True)
def alone():
    """No other test's modules are on devices, and no lane counts their calls."""
    gc.collect()
    yield
    gc.collect()


class Busy:
    """What a lane runs, until it is let go."""

    def __init__(self, lane, begun, name):
        self.gate = threading.Event()
        self.begun, self.name = begun, name
        self.box = [self]
        lane.enqueue(self.box)

    def run(self):
        self.begun.append(self.name)
        self.gate.wait(60)


def soon(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


class Placed:
    """An executable, as far as lanes know one."""

    def __init__(self, *names):
        self.device_bits = logical_devices.use_logical_devices(self, names)


@pytest.fixture
def lanes(monkeypatch):
    """Two devices of a machine with four cores, and a lane for each."""
    monkeypatch.setattr(slots, "_LANES", {})
    monkeypatch.setattr(slots, "usable_cores", lambda: 4)
    monkeypatch.setattr(logical_devices, "_USERS", {})
    users = Placed("cpu:0"), Placed("cpu:1")
    PROCESS.dispatchers.raise_thread_limit(8)
    yield [slots.lane_of_devices(user) for user in users]
    del users


class TestSubmissions:
    def test_a_device_begins_as_many_as_it_has_cores_whatever_the_others_do(self, lanes):
        begun = []
        first = [Busy(lanes[0], begun, f"a{n}") for n in range(6)]
        soon(lambda: len(begun) == 4)  # two cores are lent
        second = [Busy(lanes[1], begun, f"b{n}") for n in range(4)]
        soon(lambda: len(begun) == 6)
        time.sleep(0.02)
        assert sorted(begun) == ["a0", "a1", "a2", "a3", "b0", "b1"]
        for n in (0, 1):  # what was lent comes back: none of the first device's begins
            first[n].gate.set()
        soon(lambda: lanes[0]._running == 2)
        time.sleep(0.02)
        assert len(begun) == 6
        second[0].gate.set()
        soon(lambda: len(begun) == 7)
        assert begun[6] == "b2"
        for busy in first + second:
            busy.gate.set()
        soon(lambda: len(begun) == 10)
        soon(lambda: lanes[0]._running == lanes[1]._running == 0)
        assert [name for name in begun if name[0] == "a"] == [f"a{n}" for n in range(6)]

    def test_a_device_alone_may_use_all_cores(self, lanes):
        begun = []
        calls = [Busy(lanes[1], begun, n) for n in range(5)]
        soon(lambda: len(begun) == 4)
        time.sleep(0.02)
        assert len(begun) == 4
        calls[0].gate.set()
        soon(lambda: len(begun) == 5)
        for call in calls:
            call.gate.set()
        soon(lambda: lanes[1]._running == 0)

    def test_a_withdrawn_call_returns_its_core(self, lanes):
        begun = []
        calls = [Busy(lanes[0], begun, n) for n in range(4)]
        soon(lambda: len(begun) == 4)
        waiting = Busy(lanes[0], begun, "waiting")
        assert waiting.box.pop() is waiting
        lanes[0].remove_box(waiting.box)
        for call in calls:
            call.gate.set()
        soon(lambda: lanes[0]._running == 0)
        assert "waiting" not in begun

    def test_one_device_has_no_lane(self, data):
        module = aotc.load(data)
        fence = module.submit("main", X)
        if list(logical_devices.devices_in_use()) == ["cpu:0"]:
            assert fence._lane is None
        fence.result()

    def test_two_modules(self, data):
        first, second = (aotc.load(data, devices=f"cpu:{n}") for n in (0, 1))
        fences = []
        for _ in range(50):
            half = first.submit("main", X)
            fences.append(second.submit("main", half))
        assert isinstance(fences[0]._lane, slots.DeviceLane)
        assert fences[0]._lane is not half._lane
        expected = first.invoke("main", first.invoke("main", X)[0])[0]
        assert all(np.array_equal(fence.result(60)[0], expected) for fence in fences)
        soon(lambda: all(lane._running == 0 for lane in slots._LANES.values()))

    def test_errors_and_cancelled_calls_give_their_cores_back(self, data):
        first, second = (aotc.load(data, devices=f"cpu:{n}") for n in (0, 1))
        gate = aotc.Fence()
        doomed = [module.submit("main", X, wait=[gate]) for module in (first, second) for _ in range(5)]
        doomed[0].cancel()
        gate.fail(ValueError("no"))
        for fence in doomed:
            with pytest.raises(aotc.CallError):
                fence.result(60)
        late = [module.submit("main", X) for module in (first, second) for _ in range(20)]
        late[-1].cancel()
        for fence in late[:-1]:
            fence.result(60)
        soon(lambda: all(lane._running == 0 for lane in slots._LANES.values()))

    @pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::RuntimeWarning")
    def test_forks(self, data):
        first, second = (aotc.load(data, devices=f"cpu:{n}") for n in (0, 1))
        expected = second.submit("main", first.submit("main", X)).result(60)[0]
        child = os.fork()
        if child == 0:
            code = 1
            try:
                made = second.submit("main", first.submit("main", X)).result(60)[0]
                code = 0 if np.array_equal(made, expected) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


class TestShares:
    def test_stats_name_devices_and_their_cores(self, data, monkeypatch):
        monkeypatch.setattr(logical_devices, "_USERS", {})
        alone = aotc.load(data)
        cores = alone.stats()["slots"]["cpu:0"]
        assert cores == native.thread_count(None)
        second = aotc.load(data, devices="cpu:1")
        assert alone.stats()["slots"] == {"cpu:0": cores / 2}
        assert second.stats()["slots"] == {"cpu:1": cores / 2}
        both = aotc.load(aotc.compile(STAGES), devices={"d0": "cpu:1", "d1": "cpu:2"})
        assert both.stats()["slots"] == {"cpu:1": cores / 3, "cpu:2": cores / 3}
        del second, both
        gc.collect()
        assert alone.stats()["slots"] == {"cpu:0": cores}

    def test_more_devices_than_bits(self, monkeypatch):
        monkeypatch.setattr(logical_devices, "_USERS", {})
        users = [Placed(f"cpu:{n}") for n in range(LOGICAL_DEVICES + 3)]
        assert users[-1].device_bits == users[2].device_bits
        assert logical_devices.core_share(users[0].device_bits, LOGICAL_DEVICES) == 1

    def test_the_trace_says_for_which_device(self, data):
        modules = [aotc.load(data, devices=f"cpu:{n}", threads=2) for n in (0, 1)]
        modules.append(aotc.load(data, devices="cpu:0", threads=2))
        trial = Trial(1 << 12)
        trial.shuffle(1)
        native.set_trial(trial.address)
        seen = []
        try:
            for module in modules:
                module.invoke("main", X)
                seen.append({claim.devices for claim in trial.claims()})
        finally:
            native.set_trial(0)
        assert [len(devices) for devices in seen] == [1, 1, 1]
        assert seen[0] == seen[2] != seen[1]
        assert [module._executable.device_bits for module in modules[:2]] == [*seen[0], *seen[1]]

    def test_both_devices_of_one_model(self):
        data = aotc.compile(STAGES)
        module = aotc.load(data, devices={"d0": "cpu:0", "d1": "cpu:1"}, threads=2)
        (found,) = module.invoke("main", np.ones(8, np.float32))
        assert (found == 4).all()
        assert module._executable.device_bits.bit_count() == 2
