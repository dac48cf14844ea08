"""Ranks as threads of one process, for tests and for checking a sharded model on one machine."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from aotc.vmfb.errors import ArgumentValueError, CallError, RankLost
from aotc.vmfb.host.interruption import Watch
from aotc.vmfb.host.locks import new_condition, new_lock
from aotc.vmfb.ranks.loss import CLOSED, POLL_SECONDS, LeftRanks, Loss, OneThread

# Ranks that are threads of one process, at most. An exchange of all with all has a letter for each pair: a call with
# four of them took 4 to 5 s with 128 ranks and 12 s with 256, on two cores under other load.
MOST_THREADS = 256


@dataclass(slots=True, eq=False)
class _PostedArray:
    """An array that a sending thread has posted; the sender waits until the receiver has copied it."""

    array: np.ndarray
    what: str
    is_read: bool = False


class _Mailbox:
    """Shared mailbox of all ranks, with a condition variable for each rank that is notified of changes."""

    def __init__(self, size: int) -> None:
        lock = new_lock()
        self.size = size
        self.changed = [new_condition(lock) for _ in range(size)]
        self.letters: defaultdict[tuple[int, int], deque[_PostedArray]] = defaultdict(deque)  # by sender and receiver
        self.closed: dict[int, str] = {}
        self.lost: Loss | None = None

    def notify_all(self) -> None:
        """Wake all ranks; the lock must be held."""
        for condition in self.changed:
            condition.notify_all()

    def lose(self, rank: int) -> None:
        """Declare ``rank``, which has closed its link, lost for all ranks; the lock must be held."""
        if self.lost is None:
            self.lost = Loss(rank, self.closed[rank])
            self.notify_all()


class ThreadLink:
    """One rank among threads; see :class:`aotc.vmfb.ranks.link.Link`."""

    def __init__(self, rank: int, board: _Mailbox) -> None:
        self.rank, self.size = rank, board.size
        self._board, self._changed = board, board.changed[rank]
        self._turn = OneThread()
        self._left = LeftRanks()
        self._failure: tuple[int, str] | None = None

    def exchange(self, sends: Mapping[int, np.ndarray], receives: Mapping[int, np.ndarray], what: str) -> None:
        """Send and receive arrays, keyed by rank; see :meth:`.Link.exchange`."""
        with self._turn:
            if self._failure is not None:
                raise RankLost(*self._failure)
            if self._board.lost is not None:
                raise self._lost(what)
            if self.rank in self._board.closed:
                raise CallError("", f"this rank {CLOSED} before {what}")
            posted = {rank: _PostedArray(array, what) for rank, array in sends.items()}
            try:
                self._move(posted, dict(receives), what)
            except RankLost:
                self._withdraw(posted)
                raise
            except BaseException as error:
                self._withdraw(posted)
                self.close(f"failed ({type(error).__name__})")
                raise

    def lost(self, what: str) -> RankLost | None:
        """Return the error for a lost rank, or None."""
        if self._failure is not None:
            return RankLost(*self._failure)
        board = self._board
        with self._changed:
            left = self._left.overdue(rank for rank in board.closed if rank != self.rank)
            if left is not None:
                board.lose(left)
        return self._lost(what) if board.lost is not None else None

    def close(self, why: str = CLOSED) -> None:
        """Close the link; ranks that wait for this one raise an error with the reason ``why``."""
        with self._changed:
            if self.rank not in self._board.closed:
                self._board.closed[self.rank] = why
                self._board.notify_all()

    def _move(self, posted: Mapping[int, _PostedArray], waiting: dict[int, np.ndarray], what: str) -> None:
        """Post arrays for other ranks, copy the arrays posted for this rank, and wait until all are copied."""
        letters, changed, me = self._board.letters, self._board.changed, self.rank
        with self._changed:
            for rank, letter in posted.items():
                letters[me, rank].append(letter)
                changed[rank].notify()
        interruption = Watch()
        while waiting:
            with self._changed:
                ready = [rank for rank in waiting if letters[rank, me]]
                if not ready:
                    self._wait(waiting, interruption, what)
                    continue
                found = [(rank, letters[rank, me].popleft()) for rank in ready]
            try:
                for rank, letter in found:
                    _copy_posted_array(letter, waiting.pop(rank), rank, what)
            finally:
                with self._changed:
                    for rank, letter in found:
                        letter.is_read = True
                        changed[rank].notify()
        with self._changed:
            while unread := [rank for rank, letter in posted.items() if not letter.is_read]:
                self._wait(unread, interruption, what)

    def _withdraw(self, posted: Mapping[int, _PostedArray]) -> None:
        """Remove posted arrays that were not copied, and wait for those being copied; the caller may then free them."""
        with self._changed:
            for rank, letter in posted.items():
                queue = self._board.letters[self.rank, rank]
                if letter in queue:
                    queue.remove(letter)
                    letter.is_read = True
            while not all(letter.is_read for letter in posted.values()):
                self._changed.wait(POLL_SECONDS)

    def _wait(self, ranks: Mapping[int, object] | list[int], interruption: Watch, what: str) -> None:
        """Wait for a change of the mailbox, for at most a few milliseconds; raise if one of ``ranks`` is lost."""
        board = self._board
        for rank in ranks:
            if rank in board.closed:
                board.lose(rank)
        if board.lost is not None:
            raise self._lost(what)
        self._changed.wait(POLL_SECONDS)
        interruption.raise_pending_exception()

    def _lost(self, what: str) -> RankLost:
        loss = self._board.lost
        assert loss is not None
        self._failure = loss.rank, loss.text(f"rank {loss.rank}", what, waiting=False)
        return RankLost(*self._failure)


def _copy_posted_array(letter: _PostedArray, target: np.ndarray, sender: int, what: str) -> None:
    if letter.what != what or letter.array.nbytes != target.nbytes:
        raise CallError(
            "", f"rank {sender} is in another collective", f"{letter.what}, {letter.array.nbytes} bytes",
            f"{what}, {target.nbytes} bytes", hint="all ranks must make the same calls in the same order",
        )  # fmt: skip
    target.reshape(-1).view(np.uint8)[...] = letter.array.reshape(-1).view(np.uint8)


def thread_links(size: int) -> list[ThreadLink]:
    """Return the links of ``size`` ranks that are threads of this process.

    A thread that ends early must close its link, so that the others raise instead of waiting.

    Raises
    ------
    ArgumentValueError
        If ``size`` exceeds 256, the limit for one process.
    """
    if size > MOST_THREADS:
        raise ArgumentValueError("", "too many ranks for one process", size, f"at most {MOST_THREADS}: aotc.gang(...)")
    board = _Mailbox(size)
    return [ThreadLink(rank, board) for rank in range(size)]
