"""Sessions of all devices have the methods, and their parameters, that interpreted calls use."""

import inspect

import pytest
from support.emulated import EmulatedSession
from support.numpy_device import NumpySession

from aotc.vmfb.devices.cpu.session import CpuSession
from aotc.vmfb.devices.mixed.session import PlacedSession
from aotc.vmfb.interfaces import DeviceSession

pytestmark = pytest.mark.ir

DEBUGGED = (CpuSession, PlacedSession)  # traces and profiles run their calls command by command
METHODS = [name for name, _ in inspect.getmembers(DeviceSession, inspect.isfunction) if not name.startswith("_")]


@pytest.mark.parametrize("kind", [CpuSession, PlacedSession, NumpySession, EmulatedSession])
def test_sessions_have_the_methods_of_the_interface(kind):
    for name in METHODS:
        if name == "stepper" and kind not in DEBUGGED:
            continue
        wanted = inspect.signature(getattr(DeviceSession, name)).parameters
        assert list(inspect.signature(getattr(kind, name)).parameters) == list(wanted), name
