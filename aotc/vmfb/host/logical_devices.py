"""Logical CPU devices of this process: each in use is an equal share of the cores.

A device is in use while a module is loaded on it. Its share is no set of threads of its own: the executor divides its
workers by it (:mod:`aotc.kernels.cpu.executor.concurrent_calls`), dispatchers begin submissions by it
(:mod:`aotc.vmfb.submit.device_slots`), and what a device does not use the others have.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakSet

from aotc.vmfb.host.locks import new_lock

# Logical CPU devices of a process that get workers of their own; later devices share the bit of an earlier one. The
# number of usable bits in an executor word.
LOGICAL_DEVICES = 62


_LOCK = new_lock()
_USERS: dict[str, WeakSet[Any]] = {}  # executables by device name; the position in the dict is the device's bit


def use(user: Any, names: Iterable[str]) -> int:
    """Note that ``user`` is loaded on these devices until it is gone; return them, a bit for each."""
    found = 0
    with _LOCK:
        for name in names:
            if name not in _USERS:
                _USERS[name] = WeakSet()
            _USERS[name].add(user)
            found |= 1 << (list(_USERS).index(name) % LOGICAL_DEVICES)
    return found


def in_use() -> dict[str, int]:
    """Return the devices in use, with their bits."""
    return {name: 1 << (n % LOGICAL_DEVICES) for n, name in enumerate(list(_USERS)) if _USERS[name]}


def place(executable: Any, names: Iterable[str]) -> None:
    """Let an executable have the cores of the CPU devices among these, if it runs on the CPU."""
    if hasattr(executable, "use_devices"):
        executable.use_devices([name for name in dict.fromkeys(names) if name.startswith("cpu")])


def are_several() -> bool:
    """Is more than one device in use?"""
    return len(_USERS) > 1 and len(in_use()) > 1


def slots(devices: int, cores: int) -> dict[str, float]:
    """Return how many of so many threads each of these devices has, by name."""
    return {name: share_of(bit, cores) for name, bit in in_use().items() if devices & bit}


def share_of(devices: int, cores: int) -> float:
    """Return how many of so many threads these devices have, given by their bits."""
    every = set(in_use().values())
    return cores * sum(1 for bit in every if devices & bit) / max(len(every), 1)
