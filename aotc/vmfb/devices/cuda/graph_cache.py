"""Cache of a plan's recorded CUDA graphs, one set for each tuple of addresses of the GPU arrays that the plan accesses.

Addresses that recur get graphs of their own. For other addresses a few graphs are retargeted: nodes that use an array
at a new address are updated. On an NVIDIA H200 an update takes 1 us a node. The alternative, a table of pointers in GPU
memory through which kernels find their arrays, takes 2 us to fill, and another read in each kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotc.vmfb.devices.cuda.libcuda.graphs import Recording
from aotc.vmfb.devices.mixed.program import PlacedProgram

Addresses = tuple[int, ...]
Key = tuple[Any, ...]


class AddressedPrograms:
    """The programs of a plan, recorded as graphs for arrays at certain addresses.

    Attributes
    ----------
    key : tuple
        The cache key: the addresses, or a token for those of bound arrays and the other addresses.
    addresses : tuple of int
        Addresses of arguments and results, 0 for those that are not GPU arrays.
    programs : list of PlacedProgram
        The programs, in the order of the plan's submissions.
    graphs : list of Recording
        The graphs that the programs run, if the programs consist of graphs of one GPU only.
    launches : list of callable
        Calls that launch these graphs, created by :mod:`aotc.vmfb.devices.cuda.resident_calls`.
    used : int
        Time of the last use, in calls.
    fixed : set of int
        Slots whose addresses cannot be changed in the graphs.
    """

    __slots__ = ("addresses", "fixed", "graphs", "key", "launches", "programs", "used")

    def __init__(self, key: Key, addresses: Addresses, programs: list[PlacedProgram]) -> None:
        self.key, self.addresses, self.programs, self.used = key, addresses, programs, 0
        self.fixed = {slot for program in programs for slot in program.fixed}
        found = [program.graphs() for program in programs]
        self.graphs: list[Recording] = [graph for graphs in found for graph in graphs] if all(found) else []
        self.launches: list[Callable[[], int]] = []


# Sets of GPU array addresses for which a plan has CUDA graphs of its own, in addition to the MOVING sets that are
# retargeted. A loop that passes its results back needs two.
RECORDED_ADDRESSES = 8
# Graph sets of a plan that are retargeted to new addresses in turn. With two, one can be updated while the GPU runs the
# other.
MOVING = 2
# Address sets seen once that a plan remembers; graphs are recorded when one recurs. A set is a tuple of integers.
SEEN_ADDRESSES = 64
# Calls of a plan after which an unused graph set may be evicted for other addresses. Recording graphs costs as much as
# ten calls.
STALE_CALLS = 64


class RecordedPrograms:
    """Cache of the graphs of one plan, by the addresses of its arrays.

    Parameters
    ----------
    make : callable
        Returns the program for a command buffer's number, its parameters, and the results that it marks.
    submissions : sequence
        The plan's submissions, each with the results that it marks.
    slots : sequence of int
        The slot of each address in the pointer table.
    """

    def __init__(
        self, make: Callable[..., PlacedProgram], submissions: Sequence[tuple[int, Any, Any]], slots: Sequence[int]
    ) -> None:
        self._make, self._submissions, self._slots = make, submissions, slots
        self._rows: dict[Key, AddressedPrograms] = {}
        self._moving: list[AddressedPrograms] = []  # graph sets to retarget, oldest first
        self._seen: dict[Key, None] = {}  # keys that were served by retargeting
        self._clock = 0

    def clear(self) -> None:
        """Drop all graphs, because the working memory that they use has moved."""
        self._rows.clear()
        self._moving.clear()

    def get(self, key: Key) -> AddressedPrograms | None:
        """Return the cached programs of a key, or None."""
        found = self._rows.get(key)
        if found is not None:
            self._clock += 1
            found.used = self._clock
        return found

    def programs_at(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        """Return programs for arrays at these addresses: cached, retargeted from other addresses, or new.

        The pointer table must contain the addresses.
        """
        return self.get(key) or self._create_programs(key, addresses)

    def _create_programs(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        """Create programs for a key that is not cached; record graphs if the key is likely to recur."""
        if not any(addresses):
            return self._record_programs(key, addresses)
        if len(self._moving) < MOVING:
            self._moving.append(self._record_programs(key, addresses))
            return self._moving[-1]
        if key in self._seen and self._has_room():
            del self._seen[key]
            return self._record_programs(key, addresses)
        oldest = self._moving[0]
        changed = [slot for slot, a, b in zip(self._slots, oldest.addresses, addresses) if a != b]
        if not oldest.fixed.isdisjoint(changed):
            self._count_occurrence(key)
            return AddressedPrograms(key, addresses, self._make_programs(record=False))
        return self._retarget(self._moving.pop(0), key, addresses, changed)

    def _record_programs(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        return self._cache_programs(AddressedPrograms(key, addresses, self._make_programs(record=True)))

    def _make_programs(self, record: bool) -> list[PlacedProgram]:
        rows = self._submissions
        return [self._make(number=n, parameters=values, marked=marked, record=record) for n, values, marked in rows]

    def _count_occurrence(self, key: Key) -> None:
        """Record the occurrence of a key; a key that recurs gets graphs of its own."""
        self._seen[key] = None
        if len(self._seen) > SEEN_ADDRESSES:
            del self._seen[next(iter(self._seen))]

    def _cache_programs(self, found: AddressedPrograms) -> AddressedPrograms:
        self._rows[found.key] = found
        self._clock += 1
        found.used = self._clock
        return found

    def _retarget(
        self, found: AddressedPrograms, key: Key, addresses: Addresses, changed: Sequence[int]
    ) -> AddressedPrograms:
        """Retarget the recorded graphs ``found`` to other addresses; running calls are not affected."""
        del self._rows[found.key]
        for program in found.programs:
            program.retarget_slots(changed)
        self._count_occurrence(found.key)
        found.key, found.addresses = key, addresses
        self._moving.append(found)  # not listed while it is inconsistent
        return self._cache_programs(found)

    def _has_room(self) -> bool:
        """Return True if another set of graphs may be recorded; evict a set that was not used lately if necessary."""
        rows = [row for row in self._rows.values() if any(row.addresses) and row not in self._moving]
        if len(rows) < RECORDED_ADDRESSES:
            return True
        oldest = min(rows, key=lambda row: row.used)
        if self._clock - oldest.used < STALE_CALLS:
            return False
        del self._rows[oldest.key]
        return True
