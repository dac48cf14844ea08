"""Logical CPU devices, such as ``cpu:0`` and ``cpu:1``: each device in use has an equal share of the process's cores.

A device is in use while a module is loaded on it. It has no threads of its own: the executor divides its workers by
shares (:mod:`aotc.kernels.cpu.executor.concurrent_calls`), and dispatchers start submissions by shares
(:mod:`aotc.vmfb.submit.device_slots`). Other devices use cores that a device leaves unused.
"""

from __future__ import annotations

from collections.abc import Iterable
from weakref import WeakSet

from aotc.vmfb.host.locks import new_lock

# Logical CPU devices of a process that get workers of their own; later devices share the bit of an earlier one. The
# number of usable bits in an executor word.
LOGICAL_DEVICES = 62


_LOCK = new_lock()
_USERS: dict[str, WeakSet[object]] = {}  # executables by device name; the position in the dict is the device's bit


def use_logical_devices(user: object, names: Iterable[str]) -> int:
    """Register ``user`` on the logical devices ``names`` as long as it lives; return the devices as a bit set."""
    found = 0
    with _LOCK:
        for name in names:
            if name not in _USERS:
                _USERS[name] = WeakSet()
            _USERS[name].add(user)
            found |= 1 << (list(_USERS).index(name) % LOGICAL_DEVICES)
    return found


def devices_in_use() -> dict[str, int]:
    """Return the names of the devices with registered users, each with its bit."""
    return {name: 1 << (n % LOGICAL_DEVICES) for n, name in enumerate(list(_USERS)) if _USERS[name]}


def place_on_logical_devices(executable: object, names: Iterable[str]) -> None:
    """Place an executable on the CPU devices among ``names``."""
    if hasattr(executable, "use_devices"):
        executable.use_devices([name for name in dict.fromkeys(names) if name.startswith("cpu")])


def are_several_devices_in_use() -> bool:
    """Return True if more than one logical device has registered users."""
    return len(_USERS) > 1 and len(devices_in_use()) > 1


def core_shares(devices: int, cores: int) -> dict[str, float]:
    """Return the share of ``cores`` threads of each device in the bit set ``devices``, by name; it may be a fraction.

    Devices that no module uses are left out.
    """
    return {name: core_share(bit, cores) for name, bit in devices_in_use().items() if devices & bit}


def core_share(devices: int, cores: int) -> float:
    """Return the share of ``cores`` threads that the devices in the bit set ``devices`` have together."""
    every = set(devices_in_use().values())
    return cores * sum(1 for bit in every if devices & bit) / max(len(every), 1)
