"""Division of cores among the submissions of several logical CPU devices.

A device always may run as many submissions as its share of cores, and more while other devices leave cores unused. A
borrowed core is returned when the call on it ends; until then more calls than cores may run.
"""

from __future__ import annotations

from aotc.vmfb.host.locks import after_fork, new_recursive_lock
from aotc.vmfb.host.logical_devices import are_several_devices_in_use, core_share
from aotc.vmfb.host.machine import usable_cores
from aotc.vmfb.limits import MOST_DISPATCHERS
from aotc.vmfb.submit.dispatcher_threads import PROCESS
from aotc.vmfb.submit.stream_queue import Lane

_LANES: dict[int, DeviceLane] = {}
after_fork(_LANES.clear)  # no dispatcher of the parent exists in the child
_LOCK = new_recursive_lock()  # a signal handler may submit while this thread holds it


class DeviceLane(Lane):
    """Queue of ready submissions for a set of logical CPU devices, in the order in which they became ready."""

    def __init__(self, devices: int) -> None:
        super().__init__()
        self._devices, self._cores = devices, usable_cores()
        self._running = 0

    def reserve_dispatcher(self) -> bool:
        """Reserve a core for one more submission.

        Return False if the devices' share is used and no other core is free.
        """
        with _LOCK:
            free = sum(lane._running for lane in list(_LANES.values())) < self._cores
            if not free and self._running >= max(core_share(self._devices, self._cores), 1):
                return False
            self._running += 1
            return True

    def release_dispatcher(self) -> None:
        """Release the core of a submission, and start the next one on the devices with the lowest relative load."""
        with _LOCK:
            self._running -= 1
        for lane in sorted(_LANES.values(), key=DeviceLane._use):
            lane.request_dispatcher()

    def may_continue(self) -> bool:
        """Return True if a dispatcher may run its next submission: no other devices wait for a core that it borrows."""
        with _LOCK:
            lent = self._running > max(core_share(self._devices, self._cores), 1)
            others = any(lane._ready for lane in _LANES.values() if lane is not self)
        return super().may_continue() and not (lent and others)

    def _use(self) -> float:
        return self._running / max(core_share(self._devices, 1), 1e-3)


def lane_of_devices(executable: object) -> DeviceLane | None:
    """Return the queue of the logical devices that an executable uses; None if only one device is in use."""
    if not are_several_devices_in_use():
        return None
    devices = getattr(executable, "device_bits", 0)
    found = _LANES.get(devices)
    if found is None:
        PROCESS.dispatchers.raise_thread_limit(min(2 * usable_cores(), 2 * MOST_DISPATCHERS))
        found = _LANES.setdefault(devices, DeviceLane(devices))
    return found
