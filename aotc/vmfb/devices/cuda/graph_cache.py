"""What was recorded of a plan on some streams, by the addresses of the arrays on GPUs that it reads and writes.

Addresses that come again have graphs of their own. A few sets of graphs are there for those that do not: the nodes that
name an array that lies elsewhere are told where. On an NVIDIA H200 that takes 1 us a node; a table of pointers in the
GPU's memory, through which kernels would find their arrays, takes 2 us to fill, and each kernel another read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from aotc.vmfb.devices.mixed.program import PlacedProgram

Addresses = tuple[int, ...]
Key = tuple[Any, ...]


class AddressedPrograms:
    """Programs over arrays at some addresses.

    Attributes
    ----------
    key : tuple
        What it is found by: the addresses, or what stands for those of bound arrays and the rest.
    addresses : tuple of int
        Of arguments and results, 0 for those that are not arrays on GPUs.
    programs : list of PlacedProgram
        In the order of the plan's submissions.
    graphs : list of Recording
        All that they run, if that is nothing but graphs of one GPU.
    launches : list of callable
        What runs these; for :mod:`aotc.vmfb.devices.cuda.resident_calls`, which makes them.
    used : int
        When it was used last.
    fixed : set of int
        The slots whose addresses cannot be put into its graphs.
    """

    __slots__ = ("addresses", "fixed", "graphs", "key", "launches", "programs", "used")

    def __init__(self, key: Key, addresses: Addresses, programs: list[PlacedProgram]) -> None:
        self.key, self.addresses, self.programs, self.used = key, addresses, programs, 0
        self.fixed = {slot for program in programs for slot in program.fixed}
        found = [program.graphs() for program in programs]
        self.graphs: list[Any] = [graph for graphs in found for graph in graphs] if all(found) else []
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
    """What was recorded of a plan.

    Parameters
    ----------
    make : callable
        Returns the program for the number of a command buffer and its parameters, recorded.
    submissions : sequence
        Of the plan.
    slots : sequence of int
        Where in the pointer table each of the addresses is.
    """

    def __init__(
        self, make: Callable[..., PlacedProgram], submissions: Sequence[tuple[int, Any]], slots: Sequence[int]
    ) -> None:
        self._make, self._submissions, self._slots = make, submissions, slots
        self._rows: dict[Key, AddressedPrograms] = {}
        self._moving: list[AddressedPrograms] = []  # those that new addresses are put into, in turn
        self._seen: dict[Key, None] = {}  # what came, and was put there
        self._turn = 0

    def clear(self) -> None:
        """Drop everything: working memory is elsewhere."""
        self._rows.clear()
        self._moving.clear()

    def get(self, key: Key) -> AddressedPrograms | None:
        """Return what is there, if anything is."""
        found = self._rows.get(key)
        if found is not None:
            self._turn += 1
            found.used = self._turn
        return found

    def of(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        """Return what runs at addresses, which the pointer table has."""
        return self.get(key) or self._new(key, addresses)

    def _new(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        if not any(addresses):
            return self._record(key, addresses)
        if len(self._moving) < MOVING:
            self._moving.append(self._record(key, addresses))
            return self._moving[-1]
        if key in self._seen and self._has_room():
            del self._seen[key]
            return self._record(key, addresses)
        oldest = self._moving[0]
        changed = [slot for slot, a, b in zip(self._slots, oldest.addresses, addresses) if a != b]
        if not oldest.fixed.isdisjoint(changed):
            self._note(key)
            return AddressedPrograms(key, addresses, self._programs(record=False))
        return self._moved(self._moving.pop(0), key, addresses, changed)

    def _record(self, key: Key, addresses: Addresses) -> AddressedPrograms:
        return self._add(AddressedPrograms(key, addresses, self._programs(record=True)))

    def _programs(self, record: bool) -> list[PlacedProgram]:
        return [self._make(number=n, parameters=values, record=record) for n, values in self._submissions]

    def _note(self, key: Key) -> None:
        """Note that what this stands for came, and has no graphs of its own."""
        self._seen[key] = None
        if len(self._seen) > SEEN_ADDRESSES:
            del self._seen[next(iter(self._seen))]

    def _add(self, found: AddressedPrograms) -> AddressedPrograms:
        self._rows[found.key] = found
        self._turn += 1
        found.used = self._turn
        return found

    def _moved(
        self, found: AddressedPrograms, key: Key, addresses: Addresses, changed: Sequence[int]
    ) -> AddressedPrograms:
        """Put other addresses into graphs; runs of them that are under way are not touched."""
        del self._rows[found.key]
        for program in found.programs:
            program.move(changed)
        self._note(found.key)
        found.key, found.addresses = key, addresses
        self._moving.append(found)  # it was in no list until it was whole again
        return self._add(found)

    def _has_room(self) -> bool:
        """May there be one more set of graphs? One that was not used for long goes for it."""
        rows = [row for row in self._rows.values() if any(row.addresses) and row not in self._moving]
        if len(rows) < RECORDED_ADDRESSES:
            return True
        oldest = min(rows, key=lambda row: row.used)
        if self._turn - oldest.used < STALE_CALLS:
            return False
        del self._rows[oldest.key]
        return True
