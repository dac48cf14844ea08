"""Order of submissions that access the same memory of the caller, as read-after-write and similar hazards require.

A submission writes to ``out=`` buffers and to donated arguments. It starts after all earlier submissions that access
this memory, and later ones that access it start after it. A donated array object no longer belongs to the caller and is
refused. Arrays are identified by the first byte of the array that owns their memory. The caller must order accesses to
memory that several owners share from different start addresses. A result that does not exist yet may be written to such
memory: a submission that reads it accesses that memory too.

A submission fails with an earlier one if that would have written data that it reads. Otherwise it only waits for the
earlier one to end, with or without an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import count, islice
from typing import Any
from weakref import ref

import numpy as np

from aotc.vmfb.devices.array import DeviceArray
from aotc.vmfb.host.locks import after_fork, new_recursive_lock
from aotc.vmfb.memory.pointers import address_of
from aotc.vmfb.submit.fence import Fence, FenceResult

_LOCK = new_recursive_lock()  # a signal handler may submit while this thread holds it
_NUMBERS = count()
# Unfinished submissions, by owner and number, each with the memory ranges that it accesses.
_Rows = dict[Any, dict[int, list[tuple["ref[Any]", int, int]]]]
_Found = tuple[int, Fence, int, int]
_READERS: _Rows = {}
_WRITERS: _Rows = {}
_LOST: list[tuple[int, list[Any]]] = []  # numbers and keys of submissions that were garbage-collected before they ended
# Donated objects by identity, with the label of the new owner. Weak references, because an id is reused.
_GIVEN: dict[Any, tuple[ref[Any], str]] = {}


@after_fork
def _reset_after_fork() -> None:
    _READERS.clear()
    _WRITERS.clear()


class MemoryAccess:
    """A range of memory that a submission reads, writes or both.

    Attributes
    ----------
    reads, writes : bool
    after : int
        Number of an earlier submission that this one waits for anyway; accesses up to it need no further order. -1
        without one.
    """

    __slots__ = ("after", "begin", "end", "key", "reads", "writes")

    def __init__(self, value: Any, writes: bool, reads: bool = True) -> None:
        if isinstance(value, FenceResult):
            self.key: Any = (id(value.fence), value.number)
            self.begin, self.end = 0, 1
        elif getattr(value, "ordinal", -1) >= 0:  # on a GPU
            self.key = self.begin = value.address
            self.end = self.begin + value.nbytes
        else:
            owner = value = np.asarray(value)
            self.key = self.begin = address_of(value)
            while isinstance(owner.base, np.ndarray):
                owner = owner.base
                self.key = address_of(owner)
            self.end = self.begin + value.nbytes
        self.writes, self.reads, self.after = writes, reads, -1

    def ordered_after(self, number: int, writes: bool) -> MemoryAccess:
        """Return this range as an access of another submission, which waits for submission ``number`` anyway."""
        other = MemoryAccess.__new__(MemoryAccess)
        other.key, other.begin, other.end = self.key, self.begin, self.end
        other.writes, other.reads, other.after = writes, True, number
        return other

    @property
    def key_and_range(self) -> tuple[Any, int, int]:
        """Return the key of the owning array, and the first and last address, for comparisons."""
        return self.key, self.begin, self.end


class OutputRegions:
    """Memory of the caller that a submission's results may be in: ``out=`` buffers and donated arguments."""

    __slots__ = ("_given", "_number", "_out")

    def __init__(self, number: int, donated: Iterable[MemoryAccess], out: Mapping[int, MemoryAccess]) -> None:
        self._number = number
        self._given = tuple({t.key_and_range: t for t in donated}.values())
        self._out = out

    def accesses_of_reader(self, result: int, writes: bool) -> list[MemoryAccess]:
        """Return the caller's memory that a submission accesses if it has result ``result`` as an argument.

        ``writes`` is True if the submission overwrites that argument.
        """
        found = [self._out[result]] if result in self._out else self._given
        return [t.ordered_after(self._number, writes) for t in found]


def accessed_ranges(
    number: int, values: Sequence[Any], donated: Sequence[bool], buffers: Sequence[Any]
) -> tuple[list[MemoryAccess], OutputRegions | None]:
    """Determine the memory that submission ``number`` accesses.

    Parameters
    ----------
    number : int
    values, donated : sequence
        The arguments, and True for each that is donated.
    buffers : sequence
        For each result its ``out=`` array or None.

    Returns
    -------
    accesses : list of MemoryAccess
    regions : OutputRegions or None
        The caller's memory that results may be in; None if there is none.
    """
    touches: list[MemoryAccess] = []
    theirs: list[MemoryAccess] = []
    for value, writes in zip(values, donated):
        touch = MemoryAccess(value, writes)
        touches.append(touch)
        if type(value) is FenceResult:
            fence: Any = value.fence  # a submission, whose module imports this one
            its = fence.output_regions(value.number, writes)
            touches += its
            theirs += its if writes else ()
        elif writes:
            theirs.append(touch)
    if not buffers and not theirs:
        return touches, None
    out = {n: MemoryAccess(x, True, False) for n, x in enumerate(buffers) if x is not None}
    touches += out.values()
    return touches, OutputRegions(number, theirs, out)


class Turn:
    """Position of a submission in the order of all submissions, and the memory accesses that it has registered.

    Attributes
    ----------
    number : int
        Increases with each submission.
    """

    __slots__ = ("_keys", "number")

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self._keys: list[Any] = []

    def __del__(self) -> None:
        if self._keys:  # it will never be settled, because the fence that it waited for is gone
            _LOST.append((self.number, self._keys))

    def register_accesses(self, fence: Fence, touches: Iterable[MemoryAccess]) -> tuple[list[Fence], list[Fence]]:
        """Register the accesses of a submission, and return the earlier submissions that it must wait for.

        Returns
        -------
        needed : list of Fence
            Submissions that write data which this one reads: this one fails if they fail.
        before : list of Fence
            Submissions that only come first: they access memory that this one overwrites, or their writes of its input
            are replaced by later writes.
        """
        needed: list[Fence] = []
        before: list[Fence] = []
        with _LOCK:
            while _LOST:
                _forget_submission(*_LOST.pop())
            for t in touches:
                if _WRITERS and t.key in _WRITERS:
                    writers = self._overlapping(_WRITERS, t)
                    count = _count_final_writers(writers, t) if t.reads else 0
                    needed += [fence for _, fence, _, _ in writers[:count]]
                    before += [fence for _, fence, _, _ in writers[count:]]
                if t.writes:
                    before += [fence for _, fence, _, _ in self._overlapping(_READERS, t)]
                table = _WRITERS if t.writes else _READERS
                table.setdefault(t.key, {}).setdefault(self.number, []).append((ref(fence), t.begin, t.end))
                self._keys.append(t.key)
        return needed, before

    def _overlapping(self, table: _Rows, t: MemoryAccess) -> list[_Found]:
        """Return the earlier submissions in ``table`` that access a part of the range ``t``, the latest first."""
        users = table.get(t.key)
        if users is None or not any(n > t.after for n in islice(reversed(users), 1)):
            return []
        found = []
        for number, rows in list(users.items()):
            for fence, begin, end in rows if number != self.number and number > t.after else ():
                other = fence()
                if other is not None and begin < t.end and t.begin < end:
                    found.append((number, other, begin, end))
        return sorted(found, key=lambda row: row[0], reverse=True)

    def remove(self) -> None:
        """Remove the accesses of the submission: it has ended."""
        with _LOCK:
            _forget_submission(self.number, self._keys)
            self._keys = []

    def add_key(self, key: Any) -> None:
        """Record that an access of this submission is also registered under another key."""
        self._keys.append(key)


def _count_final_writers(writers: Sequence[_Found], t: MemoryAccess) -> int:
    """Return the number of ``writers``, latest first, whose data remains in the range ``t``.

    The first writer that covers the whole range is the last one to count.
    """
    for number, (_, _, begin, end) in enumerate(writers, 1):
        if begin <= t.begin and t.end <= end:
            return number
    return len(writers)


def _forget_submission(number: int, keys: Iterable[Any]) -> None:
    """Remove the accesses of submission ``number`` from the tables of readers and writers."""
    for table in (_READERS, _WRITERS) if _WRITERS else (_READERS,):
        for key in keys:
            users = table.get(key)
            if users is not None:
                users.pop(number, None)
                if not users:
                    del table[key]


def register_results(fence: Fence, results: Sequence[Any]) -> None:
    """Move the registrations of a submission's results from its fence to their memory, before the fence is settled.

    Other submissions that have these results as arguments were registered by fence, because the memory did not exist.
    """
    me = id(fence)
    if not any((me, number) in _READERS or (me, number) in _WRITERS for number in range(len(results))):
        return
    with _LOCK:
        for table in (_READERS, _WRITERS):
            for number, value in enumerate(results):
                users = table.pop((id(fence), number), None)
                if users is None:
                    continue
                t = MemoryAccess(value if getattr(value, "ordinal", -1) >= 0 else np.asarray(value), False)
                for turn, rows in users.items():
                    there = table.setdefault(t.key, {}).setdefault(turn, [])
                    for user, _, _ in rows:
                        there.append((user, t.begin, t.end))
                        other = user()
                        if other is not None:
                            other.register_argument(t.key, fence, number, value)


def record_donation(value: Any, label: str) -> None:
    """Record that an array or a future result was donated to the submission ``label``: the caller must not use it."""
    holder, key = _memory_identity(value)
    with suppress(TypeError):  # a scalar: it was copied
        _GIVEN[key] = ref(holder, lambda _: _GIVEN.pop(key, None)), label


def donation_label(value: Any) -> str:
    """Return the label of the submission to which an array was donated; an empty string if it was not donated."""
    if not _GIVEN:
        return ""
    holder, key = _memory_identity(value)
    row = _GIVEN.get(key)
    return row[1] if row is not None and row[0]() is holder else ""


def as_owned_by_caller(value: Any) -> Any:
    """Return a result that the caller may use: if its array object was donated, a new object of the same memory."""
    found = value.numpy() if isinstance(value, DeviceArray) and value.ordinal < 0 else value
    if not isinstance(found, np.ndarray) or not donation_label(found):
        return value
    view = found.view()
    return view if found is value else DeviceArray(view, value.device)


def _memory_identity(value: Any) -> tuple[Any, Any]:
    """Return a key that identifies a value, and the object that lives as long as the value.

    For a future result that is the fence, because a fence creates a new result object on each access.
    """
    if isinstance(value, FenceResult):
        return value.fence, (id(value.fence), value.number)
    return value, id(value)
