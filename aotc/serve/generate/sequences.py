"""Texts that go on with a later request: their states by name, not too many, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

from aotc.serve.errors import BAD, BUSY, CONFLICT, NOT_FOUND, RequestFault
from aotc.serve.generate.batched_decoder import GrowingText
from aotc.serve.generate.request import Wish
from aotc.serve.model import ServedModel


class Sequence:
    """A text between requests, or in one.

    Attributes
    ----------
    model : ServedModel
        Which began it: it goes on with this one, though another has taken its place.
    text : GrowingText or None
        None before its first token.
    pending : list of int
        The last token, which the state does not know yet.
    whole : bool
        Has the request left the text so that another can go on with it?
    """

    __slots__ = ("model", "pending", "text", "timer", "whole")

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.text: GrowingText | None = None
        self.pending: list[int] = []
        self.whole = False
        self.timer: asyncio.TimerHandle | None = None


class Sequences:
    """All texts that go on.

    Parameters
    ----------
    most : int
        Sequences at a time.
    seconds : float
        How long one is kept that nobody asks for.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._kept: dict[tuple[str, str], Sequence] = {}

    def __len__(self) -> int:
        return len(self._kept)

    @contextmanager
    def taken(self, model: ServedModel, version: str, wish: Wish) -> Iterator[Sequence]:
        """The text of a request: a new one, or the one that it goes on with; kept afterwards if it is to.

        Raises
        ------
        RequestFault
            If there is none of this name, it is in use, or there are too many.
        """
        if not wish.sequence:
            yield Sequence(model)
            return
        key = model.name, wish.sequence
        sequence = self._begun(key, model) if wish.starts else self._continued(key, model.name, version)
        sequence.whole, sequence.timer = False, None
        try:
            yield sequence
        finally:
            if sequence.whole and not wish.ends:
                sequence.timer = asyncio.get_running_loop().call_later(self._seconds, self._kept.pop, key, None)
            else:
                self._kept.pop(key, None)

    def _begun(self, key: tuple[str, str], model: ServedModel) -> Sequence:
        if key in self._kept:
            _release(self._kept[key], key)
        elif len(self._kept) >= self._most:
            what, found = "too many sequences are kept", len(self._kept)
            hint, seconds = "later, or end others by sequence_end", max(1, min(ceil(self._seconds), 60))
            raise RequestFault(BUSY, model.name, what, found, f"fewer than {self._most}", hint, retry=seconds)
        self._kept[key] = Sequence(model)
        return self._kept[key]

    def _continued(self, key: tuple[str, str], name: str, version: str) -> Sequence:
        sequence = self._kept.get(key)
        if sequence is None:
            what, expected = "there is no such sequence", f"one that was asked for within {self._seconds:g} s"
            raise RequestFault(NOT_FOUND, name, what, key[1], expected, '"sequence_start": true, with all its tokens')
        if version and int(version) != sequence.model.version:
            what = "the sequence was begun with another version"
            raise RequestFault(BAD, name, what, version, sequence.model.version)
        _release(sequence, key)
        return sequence


def _release(sequence: Sequence, key: tuple[str, str]) -> None:
    """Take a sequence that waits.

    Raises
    ------
    RequestFault
        If a request has it.
    """
    if sequence.timer is None:
        raise RequestFault(CONFLICT, key[0], "another request has this sequence", key[1], hint="when that one is done")
    sequence.timer.cancel()
