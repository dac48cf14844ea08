"""Order by memory: a submission that writes to an array of the caller's, and those that touch the same bytes.

A submission writes to ``out=`` buffers and to arguments that are given away. It begins after all earlier submissions
that touch this memory, and later ones that touch it begin after it; the very array that was given away is not the
caller's any more, and refused. Arrays are found by the first byte of the array that owns their memory; memory that
several owners share from different bytes on is the caller's to order. A result that does not exist yet may be going to
lie in such memory: whoever reads it touches that too.

A submission fails with an earlier one if that would have written what it reads. Else it comes behind it, however that
ends.
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
_LOST: list[tuple[int, list[Any]]] = []  # numbers and keys of submissions that were collected before they were done
# Objects that were given away, by identity, with who has them: weakly, for an id comes again.
_GIVEN: dict[Any, tuple[ref[Any], str]] = {}


@after_fork
def _begin_again() -> None:
    _READERS.clear()
    _WRITERS.clear()


class Touch:
    """Some memory that a submission touches.

    Attributes
    ----------
    reads, writes : bool
    after : int
        Number of a submission that it waits for anyway, and so for all that that one waits for; -1 without one.
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

    def behind(self, number: int, writes: bool) -> Touch:
        """Return the same memory, for who waits for submission ``number``."""
        other = Touch.__new__(Touch)
        other.key, other.begin, other.end = self.key, self.begin, self.end
        other.writes, other.reads, other.after = writes, True, number
        return other

    @property
    def place(self) -> tuple[Any, int, int]:
        """Return where it is, to compare."""
        return self.key, self.begin, self.end


class Lies:
    """Where the results of a submission lie that writes to memory of the caller's."""

    __slots__ = ("_given", "_number", "_out")

    def __init__(self, number: int, given: Iterable[Touch], out: Mapping[int, Touch]) -> None:
        self._number = number
        self._given = tuple({t.place: t for t in given}.values())
        self._out = out

    def touches(self, result: int, writes: bool) -> list[Touch]:
        """Return what who is given this result touches, apart from the result."""
        found = [self._out[result]] if result in self._out else self._given
        return [t.behind(self._number, writes) for t in found]


def touched(
    number: int, values: Sequence[Any], given: Sequence[bool], buffers: Sequence[Any]
) -> tuple[list[Touch], Lies | None]:
    """Return what submission ``number`` touches, and where its results lie if that is the caller's memory.

    Parameters
    ----------
    number : int
    values, given : sequence
        The arguments, and whether each is given away.
    buffers : sequence
        For each result None or the array that it is to be written to.
    """
    touches: list[Touch] = []
    theirs: list[Touch] = []
    for value, writes in zip(values, given):
        touch = Touch(value, writes)
        touches.append(touch)
        if type(value) is FenceResult:
            fence: Any = value.fence
            its = fence.lies_of(value.number, writes)
            touches += its
            theirs += its if writes else ()
        elif writes:
            theirs.append(touch)
    if not buffers and not theirs:
        return touches, None
    out = {n: Touch(x, True, False) for n, x in enumerate(buffers) if x is not None}
    touches += out.values()
    return touches, Lies(number, theirs, out)


class Turn:
    """A submission's place in the order.

    Attributes
    ----------
    number : int
        Later submissions have larger ones.
    """

    __slots__ = ("_keys", "number")

    def __init__(self) -> None:
        self.number = next(_NUMBERS)
        self._keys: list[Any] = []

    def __del__(self) -> None:
        if self._keys:  # nobody will ever settle it: what it waited for is gone
            _LOST.append((self.number, self._keys))

    def enter(self, fence: Fence, touches: Iterable[Touch]) -> tuple[list[Fence], list[Fence]]:
        """Note what memory a submission touches; return the earlier ones that it waits for.

        First those that write what it reads, with which it fails; then those that read or write what it writes, or
        write what another writes again before it is read.
        """
        needed: list[Fence] = []
        before: list[Fence] = []
        with _LOCK:
            while _LOST:
                _forget(*_LOST.pop())
            for t in touches:
                if _WRITERS and t.key in _WRITERS:
                    writers = self._overlapping(_WRITERS, t)
                    count = _last_that_covers(writers, t) if t.reads else 0
                    needed += [fence for _, fence, _, _ in writers[:count]]
                    before += [fence for _, fence, _, _ in writers[count:]]
                if t.writes:
                    before += [fence for _, fence, _, _ in self._overlapping(_READERS, t)]
                table = _WRITERS if t.writes else _READERS
                table.setdefault(t.key, {}).setdefault(self.number, []).append((ref(fence), t.begin, t.end))
                self._keys.append(t.key)
        return needed, before

    def _overlapping(self, table: _Rows, t: Touch) -> list[_Found]:
        """Return the earlier ones that touch some of it, the latest first."""
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

    def leave(self) -> None:
        """Forget the submission: it is done."""
        with _LOCK:
            _forget(self.number, self._keys)
            self._keys = []

    def follow(self, key: Any) -> None:
        """Note that some of the memory is found under another key from now on."""
        self._keys.append(key)


def _last_that_covers(writers: Sequence[_Found], t: Touch) -> int:
    """Return how many of these, the latest first, write what is there in the end: before one that writes all, none."""
    for number, (_, _, begin, end) in enumerate(writers, 1):
        if begin <= t.begin and t.end <= end:
            return number
    return len(writers)


def _forget(number: int, keys: Iterable[Any]) -> None:
    for table in (_READERS, _WRITERS) if _WRITERS else (_READERS,):
        for key in keys:
            users = table.get(key)
            if users is not None:
                users.pop(number, None)
                if not users:
                    del table[key]


def place(fence: Fence, results: Sequence[Any]) -> None:
    """Say where results are that did not exist, before anybody else can know: submissions may have been given them."""
    me = id(fence)
    if not any((me, number) in _READERS or (me, number) in _WRITERS for number in range(len(results))):
        return
    with _LOCK:
        for table in (_READERS, _WRITERS):
            for number, value in enumerate(results):
                users = table.pop((id(fence), number), None)
                if users is None:
                    continue
                t = Touch(value if getattr(value, "ordinal", -1) >= 0 else np.asarray(value), False)
                for turn, rows in users.items():
                    there = table.setdefault(t.key, {}).setdefault(turn, [])
                    for user, _, _ in rows:
                        there.append((user, t.begin, t.end))
                        other = user()
                        if other is not None:
                            other.follow(t.key, fence, number, value)


def give_away(value: Any, label: str) -> None:
    """Note that an array or a result was given to a submission, and is not the caller's any more."""
    holder, key = _identity(value)
    with suppress(TypeError):  # a scalar: it was copied
        _GIVEN[key] = ref(holder, lambda _: _GIVEN.pop(key, None)), label


def taker(value: Any) -> str:
    """Return to whom an array was given, or an empty string."""
    if not _GIVEN:
        return ""
    holder, key = _identity(value)
    row = _GIVEN.get(key)
    return row[1] if row is not None and row[0]() is holder else ""


def still_owned(value: Any) -> Any:
    """Return a result; one whose object was given away, as an argument, is another object of the same memory."""
    found = value.numpy() if isinstance(value, DeviceArray) and value.ordinal < 0 else value
    if not isinstance(found, np.ndarray) or not taker(found):
        return value
    view = found.view()
    return view if found is value else DeviceArray(view, value.device)


def _identity(value: Any) -> tuple[Any, Any]:
    """Return the object that lives as long as a value, and its key; a result is a new object each time."""
    if isinstance(value, FenceResult):
        return value.fence, (id(value.fence), value.number)
    return value, id(value)
