"""Order by memory: a submission that writes to an array of the caller's, and those that touch the same bytes.

A submission writes to ``out=`` buffers and to arguments that are given away. It begins after all earlier submissions
that touch this memory, and later ones that touch it begin after it; the very array that was given away is not the
caller's any more, and refused. Arrays are found by the first byte of the array that owns their memory; memory that
several owners share from different bytes on is the caller's to order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import count
from typing import Any
from weakref import ref

import numpy as np

from aotc.vmfb.pointers import address_of
from aotc.vmfb.process.locks import after_fork, new_recursive_lock
from aotc.vmfb.schedule.fence import Fence, FenceResult

_LOCK = new_recursive_lock()  # a signal handler may submit while this thread holds it
_NUMBERS = count()
# Submissions that are not done, by owner and number, each with the bytes that it touches.
_Rows = dict[Any, dict[int, list[tuple["ref[Any]", int, int]]]]
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
    """Some memory that a submission touches."""

    __slots__ = ("begin", "end", "key", "writes")

    def __init__(self, value: Any, writes: bool) -> None:
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
        self.writes = writes


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

    def enter(self, fence: Fence, touches: Iterable[Touch]) -> list[Fence]:
        """Note what memory a submission touches; return the earlier ones that it waits for.

        These write what it touches, or touch what it writes.
        """
        found: list[Fence] = []
        with _LOCK:
            while _LOST:
                _forget(*_LOST.pop())
            for t in touches:
                if _WRITERS:
                    found += self._overlapping(_WRITERS, t)
                if t.writes:
                    found += self._overlapping(_READERS, t)
                table = _WRITERS if t.writes else _READERS
                table.setdefault(t.key, {}).setdefault(self.number, []).append((ref(fence), t.begin, t.end))
                self._keys.append(t.key)
        return list(dict.fromkeys(found)) if found else found

    def _overlapping(self, table: _Rows, t: Touch) -> list[Fence]:
        found = []
        for number, rows in list(table.get(t.key, {}).items()):
            for fence, begin, end in rows if number != self.number else ():
                other = fence()
                if other is not None and begin < t.end and t.begin < end:
                    found.append(other)
        return found

    def leave(self) -> None:
        """Forget the submission: it is done."""
        with _LOCK:
            _forget(self.number, self._keys)
            self._keys = []

    def follow(self, key: Any) -> None:
        """Note that some of the memory is found under another key from now on."""
        self._keys.append(key)


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
                            other.follow(t.key)


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


def _identity(value: Any) -> tuple[Any, Any]:
    """Return the object that lives as long as a value, and its key; a result is a new object each time."""
    if isinstance(value, FenceResult):
        return value.fence, (id(value.fence), value.number)
    return value, id(value)
