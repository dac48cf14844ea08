"""Sequences that continue over several requests: stored by name, with limits on their number and age."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil

import numpy as np

from aotc.serve.errors import BAD, BUSY, CONFLICT, NOT_FOUND, RequestFault
from aotc.serve.generate.batched_decoder import GeneratedSequence
from aotc.serve.generate.request import GenerationRequest
from aotc.serve.model import ServedModel


class Sequence:
    """A sequence that several requests may continue.

    Attributes
    ----------
    model : ServedModel
        The model that started it: the sequence continues on it even if a new version has replaced the model.
    text : GeneratedSequence or None
        None before its first token.
    pending : ndarray
        int64: the last token, which the model has not processed yet.
    whole : bool
        True if the last request left the sequence in a state that another request can continue.
    """

    __slots__ = ("model", "pending", "text", "timer", "whole")

    def __init__(self, model: ServedModel) -> None:
        self.model = model
        self.text: GeneratedSequence | None = None
        self.pending = np.empty(0, np.int64)
        self.whole = False
        self.timer: asyncio.TimerHandle | None = None


class Sequences:
    """Store of the sequences between requests.

    Parameters
    ----------
    most : int
        Maximum number of sequences.
    seconds : float
        Seconds after which an unused sequence is dropped.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most, self._seconds = most, seconds
        self._stored: dict[tuple[str, str], Sequence] = {}

    def __len__(self) -> int:
        return len(self._stored)

    @contextmanager
    def sequence_of(self, model: ServedModel, version: str, parameters: GenerationRequest) -> Iterator[Sequence]:
        """Yield the sequence of a request: a new one, or one that an earlier request stored.

        The sequence is stored after the block, unless the request ends it.

        Raises
        ------
        RequestFault
            If there is no sequence of this name, it is in use, or there are too many sequences.
        """
        if not parameters.sequence:
            yield Sequence(model)
            return
        key = model.name, parameters.sequence
        if parameters.starts:
            sequence = self._new_sequence(key, model)
        else:
            sequence = self._stored_sequence(key, model.name, version)
        sequence.whole, sequence.timer = False, None
        try:
            yield sequence
        finally:
            if sequence.whole and not parameters.ends:
                sequence.timer = asyncio.get_running_loop().call_later(self._seconds, self._stored.pop, key, None)
            else:
                self._stored.pop(key, None)

    def _new_sequence(self, key: tuple[str, str], model: ServedModel) -> Sequence:
        """Store and return a new sequence under ``key``; refuse it if too many are stored."""
        if key in self._stored:
            _reserve_stored_sequence(self._stored[key], key)
        elif len(self._stored) >= self._most:
            what, found = "too many sequences are stored", len(self._stored)
            hint, seconds = "later, or end others by sequence_end", max(1, min(ceil(self._seconds), 60))
            raise RequestFault(BUSY, model.name, what, found, f"fewer than {self._most}", hint, retry=seconds)
        self._stored[key] = Sequence(model)
        return self._stored[key]

    def _stored_sequence(self, key: tuple[str, str], name: str, version: str) -> Sequence:
        """Return the sequence of an earlier request; refuse an unknown name or another version."""
        sequence = self._stored.get(key)
        if sequence is None:
            what, expected = "unknown sequence", f"a sequence used within the last {self._seconds:g} s"
            raise RequestFault(NOT_FOUND, name, what, key[1], expected, '"sequence_start": true, with all its tokens')
        if version and int(version) != sequence.model.version:
            what = "the sequence was begun with another version"
            raise RequestFault(BAD, name, what, version, sequence.model.version)
        _reserve_stored_sequence(sequence, key)
        return sequence


def _reserve_stored_sequence(sequence: Sequence, key: tuple[str, str]) -> None:
    """Reserve a stored sequence for a request; until the request ends, the sequence does not expire.

    Raises
    ------
    RequestFault
        If another request uses it.
    """
    if sequence.timer is None:
        raise RequestFault(CONFLICT, key[0], "another request has this sequence", key[1], hint="when that one is done")
    sequence.timer.cancel()
