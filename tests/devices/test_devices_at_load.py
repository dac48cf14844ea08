"""What ``devices=`` of ``aotc.load`` makes of the devices that a model names."""

import pytest
from lowering.test_devices import stages

import aotc
from aotc.vmfb.errors import BundleError

pytestmark = pytest.mark.cpu


@pytest.mark.parametrize(
    "devices",
    [
        {"d0": "cpu:0"}, {"d0": "cpu:0", "d2": "cpu:1"}, {"d0": "cpu", "d1": "cuda:0"},
        "cpu:1", ["cpu:5"], ["cpu:5", "cpu:6", "cpu:7"], ["cpu:1", "cuda:0"], [],
    ],
)  # fmt: skip
def test_devices_at_load_are_those_of_the_model(devices):
    with pytest.raises(BundleError) as caught:
        aotc.load(aotc.compile(stages()), devices=devices)
    assert "d0: cpu, d1: cpu" in str(caught.value)


def test_devices_at_load_are_kept():
    module = aotc.load(aotc.compile(stages()), devices={"d0": "cpu:1", "d1": "cpu:0"})
    assert module.devices == module.stats()["devices"] == {"d0": "cpu:1", "d1": "cpu:0"}
    assert "on d1" in repr(module)
    data = aotc.compile(stages())
    for devices, bound in ((["cpu:4", "cpu:2"], ["cpu:4", "cpu:2"]), ("cpu", ["cpu:0", "cpu:1"])):
        assert list(aotc.load(data, devices=devices).devices.values()) == bound
    for devices in (("cpu", "cpu:7"), {"d1": "cpu:7", "d0": "cpu"}):
        assert aotc.load(data, devices=devices).devices == {"d0": "cpu:0", "d1": "cpu:7"}
